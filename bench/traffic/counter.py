"""Bytes that Triton kernels and PyTorch operators move, counted while the kernels run in Triton's interpreter.

Triton: every load, store and atomic of the interpreter, also one through a descriptor or a block pointer, ends in the
same four functions, which get the address and the mask of each lane. A lane that is not masked off counts with its
element's size; a masked one requests nothing. An atomic reads and writes. An address is looked up among the storages
of the launch's arguments; an unmasked lane outside of all of them is an error.

PyTorch: an operator reads each tensor it is given and writes each that it makes or overwrites, once (a matmul too,
which is the least it can do); views and allocations move nothing, indexing reads what it picks. Operators of a library
are looked into.

These are requests. A second read of a row may be served by a cache, and then costs less than one that memory serves.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READ, WRITE = "read", "write"
TRITON, TORCH = "triton", "torch"
LOGITS, WEIGHT, OTHER = "logits", "weight", "other"


class Access(NamedTuple):
    """Who moves bytes, which way, and of what kind of tensor."""

    source: str
    direction: str
    kind: str


@dataclass
class Traffic:
    """What was counted. Shapes tell logits [..., V] and weight [V, H] from other tensors.

    vocab: every V that occurs, the whole vocabulary and parts that a kernel takes one after the other. width: H.
    """

    vocab: frozenset[int] = frozenset()
    width: int = -1
    moved: Counter[Access] = field(default_factory=Counter)
    matmul_operations: int = 0

    def kind(self, shape: Sequence[int]) -> str:
        if len(shape) < 2 or not self.vocab.intersection(shape):
            return OTHER
        return WEIGHT if len(shape) == 2 and self.width in shape else LOGITS

    def bytes(self, direction: str | None = None, kind: str | None = None, source: str | None = None) -> int:
        """Sum over everything that is not given."""
        wanted = Access(source or "", direction or "", kind or "")
        return sum(
            number
            for access, number in self.moved.items()
            if all(not want or want == is_ for want, is_ in zip(wanted, access, strict=True))
        )


@contextmanager
def counting(vocab: Iterable[int] = (), width: int = -1) -> Iterator[Traffic]:
    """Count what runs inside the block. Needs TRITON_INTERPRET=1 since before triton was imported; does not nest."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "traffic is counted in Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported"
        )
    from triton.runtime import interpreter

    traffic = Traffic(frozenset(vocab), width)
    launches = _Launches(traffic)
    executor = interpreter.GridExecutor
    memory, call, to_host = interpreter._interpreter, executor.__call__, executor._init_args_hst

    def counted_call(self: Any, *arguments: Any, **keywords: Any) -> None:
        # The interpreter's own copies from and to the host are no traffic of the kernel.
        launches.running = True
        try:
            call(self, *arguments, **keywords)
        finally:
            launches.running = False

    def remembered(self: Any, arguments: Any, keywords: Any) -> Any:
        # The kernel sees the addresses of these copies, not those of its caller's tensors.
        on_host = to_host(self, arguments, keywords)
        launches.arguments([*on_host[0], *on_host[1].values()])
        return on_host

    interpreter._interpreter = _Memory(memory, launches)
    executor.__call__, executor._init_args_hst = counted_call, remembered
    try:
        with _TorchTraffic(launches):
            yield traffic
    finally:
        interpreter._interpreter = memory
        executor.__call__, executor._init_args_hst = call, to_host


class _Launches:
    """The kernel that runs, with its tensors: sorted bounds [n, 2] of their storages and the kind of each."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.running = False
        self.bounds = np.zeros((0, 2), np.uint64)
        self.kinds: list[str] = []

    def arguments(self, values: Sequence[Any]) -> None:
        found: dict[tuple[int, int], str] = {}
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            place, kind = (storage.data_ptr(), storage.data_ptr() + storage.nbytes()), self.traffic.kind(tensor.shape)
            # Where several arguments lie in one storage, the matrix names it.
            if found.get(place, OTHER) == OTHER:
                found[place] = kind
        places = sorted(place for place in found if place[0] < place[1])
        self.bounds = np.array(places, np.uint64).reshape(-1, 2)
        self.kinds = [found[place] for place in places]

    def access(self, directions: Sequence[str], pointers: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        active = pointers.ravel() if mask is None else pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        if active.size == 0:
            return
        i = int(np.searchsorted(self.bounds[:, 0], active.min(), "right")) - 1
        if i < 0 or int(active.max()) + size > int(self.bounds[i, 1]):
            raise IndexError("an unmasked lane lies outside of the kernel's tensors")
        for direction in directions:
            self.traffic.moved[Access(TRITON, direction, self.kinds[i])] += active.size * size


class _Memory:
    """The interpreter's memory functions, counted; everything else of that module as it is."""

    def __init__(self, memory: Any, launches: _Launches) -> None:
        self._memory, self._access = memory, launches.access

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        self._access([READ], pointers, mask, dtype.itemsize)
        return self._memory.load(pointers, mask, other, dtype)

    def store(self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        self._access([WRITE], pointers, mask, value.itemsize)
        self._memory.store(pointers, value, mask)

    def atomic_rmw(self, op: Any, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray, order: Any) -> np.ndarray:
        self._access([READ, WRITE], pointers, mask, value.itemsize)
        return self._memory.atomic_rmw(op, pointers, value, mask, order)

    def atomic_cas(self, pointers: np.ndarray, expected: np.ndarray, value: np.ndarray, order: Any) -> np.ndarray:
        self._access([READ, WRITE], pointers, None, value.itemsize)
        return self._memory.atomic_cas(pointers, expected, value, order)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Tensors among a launch's arguments, also in tuples, wrappers and descriptors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif hasattr(value, "base"):
            yield from _tensors([value.base])


FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "_local_scalar_dense",
}  # fmt: skip
"""Operators that move no element (or a single one, to the host)."""

OVERWRITE = {"copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
"""Operators that do not read the tensor that they overwrite, or that they only take the shape of."""

PICK = {"index", "index_select", "gather"}
"""Operators that read as many elements of their first tensor as they give."""

PUT = {"index_put_", "_index_put_impl_"}
"""Operators that write as many elements as their values have."""

MATMUL: dict[str, Callable[[list[Tensor]], int]] = {
    "mm": lambda x: 2 * x[0].shape[0] * x[0].shape[1] * x[1].shape[1],
    "addmm": lambda x: 2 * x[1].shape[0] * x[1].shape[1] * x[2].shape[1],
    "addmm_": lambda x: 2 * x[1].shape[0] * x[1].shape[1] * x[2].shape[1],
}


class _TorchTraffic(TorchDispatchMode):
    def __init__(self, launches: _Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prim", "prims"):
            device = next(_tensors(args)).device.type.upper()
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
            with torch._C._AutoDispatchBelowAutograd(), self:
                return func.redispatch(keys, *args, **kwargs)
        with self:
            # matmul and its like arrive whole where autograd has not taken them apart.
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        if not self.launches.running:
            self.count(func, args, kwargs, out)
        return out

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func._schema.name.split("::")[1]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name in FREE or view:
            return
        read: list[Tensor] = []
        written: list[Tensor] = []
        for argument, value in _given(func, args, kwargs):
            overwritten = argument.alias_info is not None and argument.alias_info.is_write
            tensors = list(_tensors([value]))
            written += tensors if overwritten else []
            # out= is written only.
            read += [] if argument.is_out or (name in OVERWRITE and argument.name == "self") else tensors
        if not any(r.alias_info is not None for r in func._schema.returns):
            written += list(_tensors([out]))
        if name in MATMUL:
            self.launches.traffic.matmul_operations += MATMUL[name](read)
        if name in PICK:
            read = [out, *read[1:]]
        if name in PUT:
            values = list(_tensors(args))[-1]
            read, written = read[1:], [values]
        for direction, tensors in ((READ, read), (WRITE, written)):
            for x in tensors:
                self.launches.traffic.moved[Access(TORCH, direction, self.launches.traffic.kind(x.shape))] += _size(x)


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The operator's arguments that were given, each with its declaration."""
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _size(x: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension counts once."""
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)
