"""Import single modules of large packages.

A trainer's package imports everything a training run may need: Ray, datasets, pandas. The functions that are measured
need none of it. `load` imports their module from the installed package, unmodified, with stand-ins for what is not
installed and never called; the stand-ins are gone afterwards, so that nobody takes them for the real thing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """A module any name can be imported from; each is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load(module: str, without: Sequence[str] = ()) -> ModuleType:
    """Import `module`; those of `without` that are not installed are stood in for.

    Raises: ModuleNotFoundError, naming the package, where it is not installed.
    """
    package = module.partition(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    with _standing_in(without):
        return import_module(module)


def load_verl(module: str) -> ModuleType:
    """A module of verl without its `__init__`, which imports Ray, and without its workers' configuration classes.

    (Annotations of the functions used here name those classes, and nothing else does.)
    """
    if "verl" not in sys.modules:
        spec = find_spec("verl")
        if spec is None:
            raise ModuleNotFoundError("No module named 'verl'", name="verl")
        package = ModuleType("verl")
        package.__path__ = list(spec.submodule_search_locations or ())
        package.__spec__ = spec
        sys.modules["verl"] = package
    return load(module, without=("verl.workers", "verl.workers.config"))


@contextmanager
def _standing_in(names: Sequence[str]) -> Iterator[None]:
    absent = [name for name in names if name not in sys.modules and ("." in name or find_spec(name) is None)]
    for name in absent:
        sys.modules[name] = StandIn(name)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
