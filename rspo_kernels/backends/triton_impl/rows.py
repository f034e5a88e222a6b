"""A row of logits on the GPU: how it is cut into tiles, read as scores and cleared.

A row is a sequence of tiles [ROWS, LANES], with one 16-byte vector per thread in each tile row. It may start at any
address (odd vocabularies): what lies before the first and after the last whole vector are its `edges`, less than a
vector each, so that all accesses of the body between them are aligned and wide.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..common import LogitsTransform
from .common import tanh


class RowTile(NamedTuple):
    """How a row is cut up: `threads` hold `rows` vectors of `vector` elements each."""

    vector: int
    rows: int
    threads: int

    @classmethod
    def choose(cls, n_cols: int, itemsize: int, softcap: bool) -> RowTile:
        """16-byte vectors, four to a thread (two where tanh needs the registers); fewer threads for short rows."""
        threads = min(256, max(64, triton.next_power_of_2(n_cols) // 32))
        return cls(16 // itemsize, 2 if softcap else 4, threads)

    def same_phase(self, x: Tensor, out: Tensor) -> bool:
        """Whether the whole vectors of a row of `out` [B, L, V] are those of the row of x, for every row."""
        return all((a - b) % self.vector == 0 for a, b in zip(x.stride()[:2], out.stride()[:2], strict=True))

    def constants(self) -> dict[str, int]:
        return {"VEC": self.vector, "ROWS": self.rows, "LANES": self.vector * self.threads}


@triton.jit
def edge_columns(o_lane, o_row, n_cols, VEC: tl.constexpr):
    """Cut [0, n_cols) at offset o_row into a head up to an aligned address, whole vectors, and the rest.

    Returns the head's length, the vectors' length, and for each of `o_lane` its column and whether it is an edge's:
    lanes 0 .. VEC - 1 hold the head, the next VEC the rest.
    """
    head = tl.minimum((VEC - (o_row % VEC).to(tl.int32)) % VEC, n_cols)
    n_body = (n_cols - head) // VEC * VEC
    is_head = o_lane < VEC
    o_col = tl.where(is_head, o_lane, head + n_body - VEC + o_lane)
    is_edge = tl.where(is_head, o_lane < head, (o_lane < 2 * VEC) & (o_col < n_cols))
    return head, n_body, o_col, is_edge


@triton.jit
def load_scores(p_x, b_inside, pre, cap, SOFTCAP: tl.constexpr):
    """Scores before temperature, -inf where not inside: masked after softcap, which would turn -inf into -cap."""
    b_x = tl.load(p_x, mask=b_inside, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        b_x = tl.where(b_inside, cap * tanh(b_x * pre), float("-inf"))
    return b_x


@triton.jit
def fill_zeros(p_out, o_row, begin, end, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to columns [begin, end) of the row at offset o_row."""
    o_row += begin
    head, n_body, o_col, is_edge = edge_columns(tl.arange(0, 2 * VEC), o_row, end - begin, VEC)
    tl.store(p_out + o_row + o_col, tl.zeros([2 * VEC], p_out.dtype.element_ty), mask=is_edge)
    p_body = p_out + tl.multiple_of(o_row + head, VEC)
    o_block = tl.arange(0, BLOCK)
    b_zero = tl.zeros([BLOCK], p_out.dtype.element_ty)
    for start in range(0, n_body, BLOCK):
        tl.store(p_body + start + o_block, b_zero, mask=start + o_block < n_body)


def unit_stride(x: Tensor) -> Tensor:
    """x with elements of a row side by side; copied only if they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def scalars(transform: LogitsTransform) -> tuple[float, float, float, float]:
    """What the kernels multiply by: logit -> tanh's argument, softcap, score -> log2 w, and d(score/T)/d(logit)."""
    factor = transform.scale / transform.temperature
    if transform.softcap is None:
        return 1.0, 1.0, factor * math.log2(math.e), factor
    return transform.scale / transform.softcap, transform.softcap, math.log2(math.e) / transform.temperature, factor
