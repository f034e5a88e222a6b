"""A gradient that was made ahead of its upstream gradient, scaled in place: where that is 1, nothing is touched.

The fused losses make their gradients in the forward pass; autograd then brings d(loss)/d(loss), which is 1 unless the
loss was scaled afterwards. Only the device knows its value: every program reads it, and most often ends there. A
multiplication by PyTorch would read and write the whole [N, V] once more.

Memory: 4 bytes a program, or one read and one write. Numerics: float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from .common import Variant, launch_options, on_device

BLOCK = 2048
THREADS = 128
CHUNK = 32 * BLOCK
"""Elements of a program: so many that those that find nothing to do are few."""


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["p_factor"])
def scale_kernel(p_x, p_factor, n, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(p_factor).to(tl.float32)
    if factor != 1.0:
        o_chunk = tl.program_id(0).to(tl.int64) * CHUNK
        o_lane = tl.arange(0, BLOCK)
        # Without a mask accesses are wide.
        if o_chunk + CHUNK <= n:
            for start in range(0, CHUNK, BLOCK):
                p_block = p_x + o_chunk + start + o_lane
                tl.store(p_block, (tl.load(p_block).to(tl.float32) * factor).to(p_x.dtype.element_ty))
        else:
            for start in range(0, CHUNK, BLOCK):
                p_block = p_x + o_chunk + start + o_lane
                b_in = o_chunk + start + o_lane < n
                b_x = tl.load(p_block, mask=b_in, other=0.0).to(tl.float32)
                tl.store(p_block, (b_x * factor).to(p_x.dtype.element_ty), mask=b_in)


def scale_(x: Tensor, factor: Tensor, *, chunk: int = CHUNK, block: int = BLOCK) -> None:
    """x [...] times a 0-d factor, in place; contiguous, or made of parts along its first dimension that are."""
    for part in [x] if x.is_contiguous() else x.unbind():
        if not part.is_contiguous():
            part.mul_(factor)
        elif part.numel():
            with on_device(x):
                scale_kernel[(triton.cdiv(part.numel(), chunk),)](
                    part, factor, part.numel(), CHUNK=chunk, BLOCK=block, **launch_options(THREADS)
                )


def variants() -> Iterator[Variant]:
    """For compile_check: both sizes of an element."""
    constants = {"CHUNK": CHUNK, "BLOCK": BLOCK}
    for pointer, size in (("*bf16", 2.0), ("*fp32", 4.0)):
        types = {"p_x": pointer, "p_factor": "*fp32", "n": "i64"}
        yield Variant(scale_kernel, pointer[1:], types, constants, THREADS, ("p_x",), reads=(size,))
