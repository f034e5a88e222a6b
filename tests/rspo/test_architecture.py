"""The rules of the house, held against the imports: nothing on a lower floor knows of a higher one, and no circles."""

from __future__ import annotations

import ast
from pathlib import Path

from places import ROOT

FLOORS = (
    ("config",), ("envs",), ("data",), ("models",), ("engines",), ("algorithm",), ("runs",), ("trainer",), ("start",),
    ("api",), ("cli", "integrations"), ("__main__", "__init__"),
)  # fmt: skip
"""Rooms of rspo/, folders and single files, from the ground floor up. Rooms on one floor do not know of each other."""
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def modules(package: str) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules among the known that a module imports, at its top or inside its functions."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            inner = {f"{source}.{alias.name}" for alias in node.names}
            found |= (inner & known.keys()) or {source}
    return (found & known.keys()) - {name}


def room(name: str) -> str:
    """The folder or file right below rspo/ that a module belongs to."""
    return name.split(".")[1] if "." in name else "__init__"


def test_every_room_has_a_floor() -> None:
    rooms = {path.stem for path in (ROOT / "rspo").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms == LEVEL.keys()
    assert len(rooms) <= 14
    assert len(FLOORS) <= 12


def test_nothing_imports_from_a_higher_floor() -> None:
    known = modules("rspo")
    for name, path in known.items():
        for other in imports(name, path, known):
            here, there = room(name), room(other)
            assert here == there or LEVEL[there] < LEVEL[here], f"{name} imports {other}, which is on a higher floor"


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, by taking away what imports nothing that is left."""
    left = dict(graph)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    while used := left.keys() - {target for targets in left.values() for target in targets}:
        for name in used:
            del left[name]
    return [sorted(left)] if left else []


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules("rspo")
    assert not circles({name: imports(name, path, known) for name, path in known.items()})


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}) == [["b", "c"]]


def test_files_are_short_enough_to_be_read() -> None:
    long = {str(path): n for path in modules("rspo").values() if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_kernels_and_trainer_know_nothing_of_bench_and_kernels_nothing_of_rspo() -> None:
    for package, forbidden in (("rspo", {"bench", "tests"}), ("rspo_kernels", {"bench", "tests", "rspo"})):
        for name, path in modules(package).items():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    sources = {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    sources = {(node.module or "").split(".")[0]}
                else:
                    continue
                assert not sources & forbidden, name


def test_no_test_imports_another() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("test_"), path
