"""Who computes an op: rspo_kernels, plain and compiled PyTorch, and the libraries of the field.

A provider is a function from Inputs to named outputs, the same names as the reference's. Its loader imports what it
needs: where that is missing, the provider is a row that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

from ..workloads import Inputs

Function = Callable[[Inputs], dict[str, Tensor]]

OURS = "rspo_kernels"
EAGER = "eager"
COMPILE = "compile"
MODULES = ("ours", "eager", "liger", "trl", "verl", "others")
ANYWHERE = ("cpu", "cuda")


@dataclass(frozen=True)
class Provider:
    """One way to compute `op`.

    name: as the table has it. library: what --peers names. load: import and build. devices: where it runs.
    compiled: the first calls compile. prepare: its own layout of the inputs, made once and not measured.
    note: what a reader has to know, e.g. work that the others do not do.
    """

    op: str
    name: str
    library: str
    load: Callable[[], Function]
    devices: Sequence[str] = ANYWHERE
    compiled: bool = False
    prepare: Callable[[Inputs], Inputs] | None = None
    note: str = ""


_REGISTRY: list[Provider] = []


def provider(
    op: str,
    name: str,
    library: str,
    *,
    devices: Sequence[str] = ANYWHERE,
    compiled: bool = False,
    prepare: Callable[[Inputs], Inputs] | None = None,
    note: str = "",
) -> Callable[[Callable[[], Function]], Callable[[], Function]]:
    """Register a loader."""

    def register(load: Callable[[], Function]) -> Callable[[], Function]:
        _REGISTRY.append(Provider(op, name, library, load, devices, compiled, prepare, note))
        return load

    return register


def providers(op: str, peers: Sequence[str] | None = None) -> list[Provider]:
    """All that compute `op`, ours first; with `peers` only those libraries beside ours."""
    for module in MODULES:
        import_module(f".{module}", __name__)
    found = [p for p in _REGISTRY if p.op == op]
    return [p for p in found if peers is None or p.library == OURS or p.library in peers]


def libraries() -> list[str]:
    """Names for --peers."""
    for module in MODULES:
        import_module(f".{module}", __name__)
    return sorted({p.library for p in _REGISTRY if p.library != OURS})
