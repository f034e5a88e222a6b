"""Compile every Triton kernel ahead of time, without a GPU, and show what the compilers made of it.

    python -m rspo_kernels.compile_check [--target sm_90 ...] [--compare FILE | --write FILE]

For each kernel, variant and target: registers of a thread (vector registers on AMD), spills, static shared memory in
bytes, the widest load and store of global memory in bits, the matrix instruction, if any, and the instructions that a
thread issues for each element in each pass over them (machine_code.passes; the widths are those of the passes, where a
kernel has any). A spill, a kernel that stores nothing (a compiler took its work for dead) or a failed compile is named
at the end and makes the exit status 1. On AMD, scalar registers that overflow into vector registers cost no memory
traffic and are not counted as spills.

`--write` records the results, and Triton's version, as the table that later results are compared with; the one of
this repository is bench/results/ahead-of-time/compile.json, where `python -m bench compile` writes them beside those
of other libraries. `--compare` fails where registers grew by more than MORE_REGISTERS or a pass's instructions by more
than MORE_INSTRUCTIONS, where loads or stores became narrower or the matrix instruction another one, and where the table
lacks a kernel or has one too many. With another version of Triton than the table's such differences are shown and do
not fail.

The Triton interpreter and its compiler cannot live in one process: with TRITON_INTERPRET set, the check starts itself
again without it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from . import machine_code
from .machine_code import Instruction

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Backend, architecture and warp size, as Triton names them."""

MORE_REGISTERS = 8
"""Registers are given to a thread by eights; one such step is a compiler's mood."""

MORE_INSTRUCTIONS = 0.1
"""Of those for an element: less is the order in which a compiler happened to do things."""

PROVIDER = "rspo_kernels"

MATRIX_INSTRUCTIONS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "v_mfma")


@dataclass(frozen=True)
class Result:
    """What one compile gave; `error` is set where it gave nothing. `spills` and `shared` are bytes.

    `passes` are the instructions for an element in each pass; those that follow are by class, all passes together:
    accesses of global memory, exchange between threads, exponentials and their like, floating point, and the rest.
    """

    kernel: str
    variant: str
    target: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    load_bits: int = 0
    store_bits: int = 0
    matrix: str = ""
    passes: tuple[float, ...] = ()
    memory: float = 0.0
    threads: float = 0.0
    special: float = 0.0
    arithmetic: float = 0.0
    other: float = 0.0
    error: str | None = None
    provider: str = PROVIDER

    @property
    def name(self) -> str:
        return f"{self.kernel} [{self.variant}] for {self.target}"

    @classmethod
    def read(cls, row: dict[str, Any]) -> Result:
        """From a row of a table, which may say more."""
        known = {field.name: row[field.name] for field in fields(cls) if field.name in row}
        return cls(**known | {"passes": tuple(row.get("passes", ()))})

    @property
    def fault(self) -> str | None:
        """Why this result fails the check by itself, if it does."""
        if self.error:
            return f"{self.name}: {self.error}"
        if self.spills:
            return f"{self.name}: spills {self.spills} bytes"
        return None if self.store_bits else f"{self.name}: stores nothing"

    def changes(self, before: Result) -> list[str]:
        """What got worse since an earlier result."""
        found = []
        if self.registers > before.registers + MORE_REGISTERS:
            found.append(f"{self.name}: {self.registers} registers, {before.registers} in the table")
        for what in ("load_bits", "store_bits"):
            if getattr(self, what) < getattr(before, what):
                found.append(f"{self.name}: {what} {getattr(self, what)}, {getattr(before, what)} in the table")
        if self.matrix != before.matrix:
            found.append(f"{self.name}: multiplies by {self.matrix!r}, by {before.matrix!r} in the table")
        if len(self.passes) != len(before.passes):
            found.append(f"{self.name}: makes {len(self.passes)} passes, {len(before.passes)} in the table")
        for i, (now, then) in enumerate(zip(self.passes, before.passes, strict=False), 1):
            if now > then * (1 + MORE_INSTRUCTIONS):
                found.append(f"{self.name}: pass {i} has {now:.1f} instructions an element, {then:.1f} in the table")
        return found


def variants() -> list[Any]:
    """Every way in which the kernels are to be compiled, `triton_impl.common.Variant`s, from all files there."""
    from .backends import triton_impl

    names = sorted(module.name for module in iter_modules(triton_impl.__path__, f"{triton_impl.__name__}."))
    modules = [import_module(name) for name in names]
    return [variant for module in modules if hasattr(module, "variants") for variant in module.variants()]


def compile_variant(given: Callable[[], list[Any]], index: int, target: str) -> Result:
    """Compile given()[index] for one target; runs in a worker process."""
    variant = given()[index]
    name = variant.kernel.__name__
    try:
        compiled = _compile(variant, target)
        if TARGETS[target][0] == "hip":
            code = machine_code.parse_amd(compiled.asm["amdgcn"])
            usage = _amd_usage(compiled)
        else:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(compiled.asm["cubin"])
                file.flush()
                code = machine_code.parse_sass(_nvidia_tool("nvdisasm", "--print-code", file.name))
                usage = _nvidia_usage(_nvidia_tool("cuobjdump", "--dump-resource-usage", file.name))
    except Exception as error:  # whatever the compilers raise is this check's finding
        return Result(name, variant.name, target, error=f"{type(error).__name__}: {error}")
    assembly = "".join(text for kind, text in compiled.asm.items() if kind in ("ptx", "amdgcn"))
    matrix = next((name for name in MATRIX_INSTRUCTIONS if name in assembly), "")
    shared = compiled.metadata.shared
    return Result(name, variant.name, target, *usage, shared, matrix=matrix, **_code_facts(variant, code))


def _code_facts(variant: Any, code: Sequence[Instruction]) -> dict[str, Any]:
    """What the machine code tells: widths and instructions."""
    found = machine_code.passes(code, variant.reads, variant.elements, variant.threads)
    streams = found if variant.reads else ()
    loads, stores = [one.load for one in streams], [one.store for one in streams if one.store]
    sums = {kind: round(sum(one.counts.get(kind, 0.0) for one in found), 2) for kind in machine_code.KINDS}
    memory = round(sums.pop("load") + sums.pop("store"), 2)
    return {
        "load_bits": 8 * min(loads, default=machine_code.width(code, "load")),
        "store_bits": 8 * min(stores, default=machine_code.width(code, "store")),
        "passes": tuple(round(one.total, 2) for one in found),
        "memory": memory,
        **{kind: sums[kind] for kind in ("threads", "special", "arithmetic", "other")},
    }


def _compile(variant: Any, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .backends.triton_impl.common import compile_options

    backend, architecture, warp_size = TARGETS[target]
    names = variant.kernel.arg_names
    constants = {name: value for name, value in variant.constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else variant.types[name] for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned if name in names}
    options = compile_options(variant.threads, backend, warp_size)
    if variant.stages is not None:
        options["num_stages"] = variant.stages
    return triton.compile(
        ASTSource(variant.kernel, signature, constants, divisible),
        target=GPUTarget(backend, architecture, warp_size),
        options=options,
    )


def _nvidia_tool(name: str, *arguments: str) -> str:
    """The output of one of the programs that come with Triton."""
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout


def _nvidia_usage(dump: str) -> tuple[int, int]:
    """Registers and bytes spilled."""
    # No kernel here has local arrays: what is on the stack was spilled.
    registers, stack, local = (_number(dump, rf"\b{field}:(\d+)") for field in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def _amd_usage(compiled: Any) -> tuple[int, int]:
    """Vector registers and bytes of them spilled."""
    text = compiled.asm["amdgcn"]
    return _number(text, r"\.vgpr_count:\s+(\d+)"), 4 * _number(text, r"\.vgpr_spill_count:\s+(\d+)")


def _number(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's report has no {pattern!r}")
    return int(match[1])


def check(targets: Sequence[str], given: Callable[[], list[Any]] = variants) -> list[Result]:
    """Compile everything for these targets, in one process per core; `given` lists the variants, also in those."""
    every = list(enumerate(given()))
    jobs = [(given, i, target) for target in targets for i, v in every if target in (v.targets or TARGETS)]
    if not jobs:
        return []
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_variant, *zip(*jobs, strict=True)))


def table(results: Sequence[Result]) -> str:
    """The results as text, a line each."""
    header: tuple[str, ...] = (
        "kernel",
        "variant",
        "target",
        "registers",
        "spills",
        "shared",
        "load",
        "store",
        "an element",
        "matrix",
    )
    rows = [header]
    for r in results:
        numbers = (*map(str, (r.registers, r.spills, r.shared, r.load_bits, r.store_bits)), passes(r))
        rows.append((r.kernel, r.variant, r.target, *(("failed",) * 6 if r.error else numbers), r.matrix))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = (str.ljust,) * 3 + (str.rjust,) * 6 + (str.ljust,)
    lines = ("  ".join(map(lambda cell, width, pad: pad(cell, width), row, widths, sides)) for row in rows)
    return "\n".join(map(str.rstrip, lines))


def passes(result: Result) -> str:
    """Instructions for an element, a number for each pass."""
    return " + ".join(f"{number:.1f}" for number in result.passes) or "-"


def write(results: Sequence[Result], path: Path) -> None:
    """Record results and Triton's version, a result a line."""
    rows = sorted((r.target, r.kernel, r.variant, json.dumps(asdict(r))) for r in results)
    lines = ",\n  ".join(row[-1] for row in rows)
    head = json.dumps({"versions": {"triton": version("triton")}})
    path.write_text(f'{{"environment": {head}, "rows": [\n  {lines}\n]}}\n', encoding="utf-8")


def compare(results: Sequence[Result], path: Path, targets: Sequence[str]) -> tuple[list[str], bool]:
    """What got worse, is new or is gone since the table was written, and whether by the same version of Triton."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    before = [Result.read(row) for row in recorded["rows"] if row["target"] in targets]
    return differences(results, before), recorded["environment"]["versions"].get("triton") == version("triton")


def differences(results: Sequence[Result], before: Sequence[Result]) -> list[str]:
    """What got worse, is new or is gone between earlier results and these, of our own kernels."""
    then = {r.name: r for r in before if r.provider == PROVIDER}
    now = {r.name: r for r in results if r.provider == PROVIDER}
    found = []
    for name, r in now.items():
        if name in then:
            found += [] if r.error else r.changes(then[name])
        else:
            found.append(f"{name}: not in the table")
    return found + [f"{name}: only in the table" for name in sorted(then.keys() - now.keys())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rspo_kernels.compile_check", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="default: all")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--compare", type=Path, metavar="FILE", help="fail where results are worse than this table's")
    tables.add_argument("--write", type=Path, metavar="FILE", help="write the results as such a table")
    options = parser.parse_args(arguments)
    if find_spec("triton") is None:
        print("compile_check needs triton, which is not installed (pip install triton; Linux only)", file=sys.stderr)
        return 2
    if os.environ.pop("TRITON_INTERPRET", None):
        passed_on = sys.argv[1:] if arguments is None else arguments
        return subprocess.run([sys.executable, "-m", "rspo_kernels.compile_check", *passed_on]).returncode

    results = check(options.target)
    print(table(results))
    faults = [fault for r in results if (fault := r.fault)]
    if options.write:
        write(results, options.write)
    if options.compare:
        changes, same_version = compare(results, options.compare, options.target)
        if same_version:
            faults += changes
        else:
            print(f"\nwith another version of Triton than the table's, {len(changes)} differences that do not fail:")
            print("\n".join(changes))
    print(f"\n{len(results)} compiles, {len(faults)} faults")
    for fault in faults:
        print(fault)
    if options.compare and faults:
        print(
            "where this is as it should be, record it: python -m bench compile (which also compiles other libraries' "
            f"kernels) or python -m rspo_kernels.compile_check --write {options.compare}"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
