"""Log-probs and entropy from hidden states without logits: a tiled matmul whose tiles go into an online softmax.

    x = hidden·weightᵀ + bias, a tile [BLOCK_M, BLOCK_N] at a time in registers        then as in logprobs.py

A program takes BLOCK_M rows and one of `splits` parts of the vocabulary, so that few rows keep the whole GPU busy, too;
it leaves five numbers for each row, relative to the maximum of what it saw: the maximum, the number of elements at it,
Σ w of the others, Σ w·log2 w, and the target's score. A second kernel merges the parts in a fixed order.

Memory: programs that run at the same time share a part of the weight, which each reads once for its rows; nothing of
size [N, V] is written. Masked rows are left out beforehand. Cost: 2·N·V·H operations.

Numerics: float32 sums; fp32 inputs are multiplied by three tf32 products each (on AMD in fp32), good to about 1e-6.
With half-precision inputs on a GPU the logits are rounded to their dtype, as they are where a matmul writes them: the
ratio of a policy to itself must not depend on which of the two paths made the log-probs. The number at the maximum is
counted apart from the rest, so that log_sum keeps its digits in peaked rows (row_softmax.py).

Compiled by Triton 3.7.1 (not yet timed on a GPU), bf16 with all options, without spills: sm_90 181 registers and wgmma,
sm_100 182 and tcgen05, sm_80 255, gfx942 237 (bench/results/ahead-of-time/compile.md). Beside the multiplications a
logit costs 18 instructions on sm_90, 20 with entropy and 42 with all options; a warp that does them multiplies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import _allocation

from ..common import LogitsTransform
from .common import LOWEST, Variant, current_architecture, f32, launch_options, on_device, tanh
from .row_softmax import MIN_EXPONENT, finish
from .rows import scalars

MERGE_BLOCK = 128
MERGE_THREADS = 128

PARTS = tl.constexpr(5)
"""Numbers for each row and part: maximum, tops, rest, spread, target's score."""

MAX_SPLITS = 64


class MatmulTile(NamedTuple):
    """Rows, columns and depth of a tile; threads and stages of its pipeline."""

    rows: int
    cols: int
    depth: int
    threads: int
    stages: int

    @classmethod
    def choose(cls, dtype: torch.dtype, architecture: str) -> MatmulTile:
        """The widest that compiles without a spill; few rows wait for the weight, not for the multiplications."""
        if dtype == torch.float32:
            return cls(64, 64, 32, 256, 2)
        # wgmma keeps its operands in shared memory: there are registers for twice the columns.
        return cls(128, 256, 64, 256, 3) if architecture == "sm_90" else cls(128, 128, 64, 256, 3)

    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.cols, "BLOCK_K": self.depth}


@triton.jit
def rescale(b_max, b_new, b_tops, b_rest, b_spread, k, ENTROPY: tl.constexpr):
    """Sums relative to b_max as sums relative to b_new >= b_max, where what was at the top need no longer be."""
    b_shift = (b_max - b_new) * k
    b_scale = tl.exp2(b_shift)
    b_stays = b_scale >= 1.0
    if ENTROPY:
        b_spread = b_scale * (b_spread + tl.maximum(b_shift, MIN_EXPONENT) * (b_tops + b_rest))
    b_rest = b_scale * b_rest + tl.where(b_stays, 0.0, b_scale * b_tops)
    return tl.where(b_stays, b_tops, 0.0), b_rest, b_spread


@triton.jit(do_not_specialize=["n_rows", "n_valid", "n_parts"], do_not_specialize_on_alignment=["p_targets", "p_bias"])
def linear_logprobs_kernel(
    p_hidden, stride_h, p_weight, stride_w, p_bias, p_targets, p_parts,
    n_rows, n_valid, width, n_parts,
    pre, cap, k,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, ROUND: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pre, cap, k = f32(pre), f32(cap), f32(k)
    # Neighbours take the same part of the weight.
    n_tiles = tl.cdiv(n_rows, BLOCK_M)
    i_part = tl.program_id(0) // n_tiles
    row = tl.program_id(0) % n_tiles * BLOCK_M
    hidden = tl.make_tensor_descriptor(p_hidden, [n_rows, width], [stride_h, 1], [BLOCK_M, BLOCK_K])
    weight = tl.make_tensor_descriptor(p_weight, [n_valid, width], [stride_w, 1], [BLOCK_N, BLOCK_K])
    o_row = row + tl.arange(0, BLOCK_M)
    b_in_rows = o_row < n_rows
    b_target = tl.load(p_targets + o_row, mask=b_in_rows, other=-1).to(tl.int64)
    # Compared with every logit: in 32 bits that is one instruction, not two.
    b_target = tl.where((b_target >= 0) & (b_target < n_valid), b_target, -1).to(tl.int32)

    b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    b_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_tops = tl.zeros([BLOCK_M], tl.float32)
    b_rest = tl.zeros([BLOCK_M], tl.float32)
    b_spread = tl.zeros([BLOCK_M], tl.float32)
    n_cols = tl.cdiv(tl.cdiv(n_valid, BLOCK_N), n_parts) * BLOCK_N
    for col in range(i_part * n_cols, tl.minimum(i_part * n_cols + n_cols, n_valid), BLOCK_N):
        b_x = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for depth in range(0, width, BLOCK_K):
            b_h = hidden.load([row, depth])
            b_w = weight.load([col, depth])
            if UPCAST:
                b_h, b_w = b_h.to(tl.float32), b_w.to(tl.float32)
            b_x = tl.dot(b_h, b_w.T, b_x, input_precision=PRECISION)
        o_col = col + tl.arange(0, BLOCK_N)
        b_in = o_col < n_valid
        if ROUND:
            b_x = b_x.to(p_hidden.dtype.element_ty).to(tl.float32)
        if p_bias is not None:
            b_x += tl.load(p_bias + o_col, mask=b_in, other=0.0).to(tl.float32)[None, :]
            if ROUND:
                b_x = b_x.to(p_hidden.dtype.element_ty).to(tl.float32)
        if SOFTCAP:
            b_x = cap * tanh(b_x * pre)
        b_x = tl.where(b_in[None, :], b_x, float("-inf"))

        b_new = tl.maximum(b_max, tl.max(b_x, 1))
        b_tops, b_rest, b_spread = rescale(b_max, b_new, b_tops, b_rest, b_spread, k, ENTROPY)
        b_max = b_new
        b_score = tl.maximum(b_score, tl.max(tl.where(o_col[None, :] == b_target[:, None], b_x, float("-inf")), 1))
        b_x = (b_x - b_max[:, None]) * k
        b_p = tl.exp2(b_x)
        if ENTROPY:
            b_spread += tl.sum(b_p * tl.maximum(b_x, MIN_EXPONENT), 1)
        b_is_top = b_p >= 1.0
        b_tops += tl.sum(tl.where(b_is_top, 1.0, 0.0), 1)
        b_rest += tl.sum(tl.where(b_is_top, 0.0, b_p), 1)

    p_part = p_parts + i_part.to(tl.int64) * PARTS * n_rows + o_row
    stride = n_rows.to(tl.int64)
    tl.store(p_part, b_max, mask=b_in_rows)
    tl.store(p_part + stride, b_tops, mask=b_in_rows)
    tl.store(p_part + 2 * stride, b_rest, mask=b_in_rows)
    tl.store(p_part + 3 * stride, b_spread, mask=b_in_rows)
    tl.store(p_part + 4 * stride, b_score, mask=b_in_rows)


@triton.jit(do_not_specialize=["n_rows", "n_valid", "n_parts"], do_not_specialize_on_alignment=["p_targets", "p_rows"])
def merge_parts_kernel(
    p_parts, p_targets, p_rows, p_logp, p_entropy, p_row_max, p_log_sum,
    n_rows, n_valid, n_parts, k,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = f32(k)
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_in = o_row < n_rows
    stride = n_rows.to(tl.int64)
    b_max = tl.full([BLOCK], LOWEST, tl.float32)
    b_score = tl.full([BLOCK], float("-inf"), tl.float32)
    b_tops = tl.zeros([BLOCK], tl.float32)
    b_rest = tl.zeros([BLOCK], tl.float32)
    b_spread = tl.zeros([BLOCK], tl.float32)
    for i_part in range(0, n_parts):
        p_part = p_parts + i_part * PARTS * stride + o_row
        b_other = tl.load(p_part, mask=b_in, other=0.0)
        b_tops_2 = tl.load(p_part + stride, mask=b_in, other=0.0)
        b_rest_2 = tl.load(p_part + 2 * stride, mask=b_in, other=0.0)
        b_spread_2 = tl.load(p_part + 3 * stride, mask=b_in, other=0.0)
        b_new = tl.maximum(b_max, b_other)
        b_tops, b_rest, b_spread = rescale(b_max, b_new, b_tops, b_rest, b_spread, k, ENTROPY)
        b_tops_2, b_rest_2, b_spread_2 = rescale(b_other, b_new, b_tops_2, b_rest_2, b_spread_2, k, ENTROPY)
        b_tops, b_rest, b_spread = b_tops + b_tops_2, b_rest + b_rest_2, b_spread + b_spread_2
        b_score = tl.maximum(b_score, tl.load(p_part + 4 * stride, mask=b_in, other=0.0))
        b_max = b_new

    b_target = tl.load(p_targets + o_row, mask=b_in, other=-1).to(tl.int64)
    b_known = (b_target >= 0) & (b_target < n_valid)
    b_logp, b_entropy, b_max, b_log_sum = finish(b_tops, b_rest, b_spread, b_max, b_score, b_known, k)
    o_out = o_row
    if p_rows is not None:
        o_out = tl.load(p_rows + o_row, mask=b_in, other=0)
    tl.store(p_logp + o_out, b_logp, mask=b_in)
    tl.store(p_row_max + o_out, b_max, mask=b_in)
    tl.store(p_log_sum + o_out, b_log_sum, mask=b_in)
    if ENTROPY:
        tl.store(p_entropy + o_out, b_entropy, mask=b_in)


def fits_descriptors(hidden: Tensor, weight: Tensor) -> bool:
    """Whether tensor descriptors can read the weight, and hidden once it is contiguous: 16-byte addresses and rows."""
    size = weight.element_size()
    return (
        hidden.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.stride(1) == 1
        and weight.stride(0) * size % 16 == 0
        and weight.data_ptr() % 16 == 0
        and hidden.shape[1] * size % 16 == 0
        and hidden.shape[1] > 0
    )


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    keep: Tensor,
    transform: LogitsTransform,
    with_entropy: bool,
    *,
    tile: MatmulTile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [N, H], weight [V, H] (valid rows), targets [N], keep bool [N], for which fits_descriptors holds.

    Returns logp, entropy (or empty), row_max, log_sum; 0 where not kept.
    """
    n = targets.numel()
    logp, row_max, log_sum = (hidden.new_zeros(n, dtype=torch.float32) for _ in range(3))
    entropy = hidden.new_zeros(n if with_entropy else 0, dtype=torch.float32)
    rows = keep.nonzero().squeeze(-1)
    n_rows = rows.numel()
    if n_rows == 0:
        return logp, entropy, row_max, log_sum
    if n_rows == n:
        rows, hidden = None, aligned(hidden)
    else:
        hidden, targets = hidden[rows], targets[rows]
    targets = targets.contiguous()
    n_valid, width = weight.shape
    architecture = current_architecture()
    tile = tile or MatmulTile.choose(hidden.dtype, architecture)
    n_tiles, n_blocks = triton.cdiv(n_rows, tile.rows), triton.cdiv(n_valid, tile.cols)
    splits = splits or choose_splits(n_tiles, n_blocks, processors(hidden.device))
    parts = hidden.new_empty(splits, PARTS.value, n_rows, dtype=torch.float32)
    pre, cap, k, _ = scalars(transform)
    provide_scratch()
    with on_device(hidden):
        linear_logprobs_kernel[(n_tiles * splits,)](
            hidden, hidden.stride(0), weight, weight.stride(0), None if bias is None else bias.contiguous(),
            targets, parts, n_rows, n_valid, width, splits, pre, cap, k,
            ENTROPY=with_entropy, SOFTCAP=transform.softcap is not None,
            **dtype_options(hidden.dtype, architecture), **tile.constants(),
            num_stages=tile.stages, **launch_options(tile.threads),
        )  # fmt: skip
        merge_parts_kernel[(triton.cdiv(n_rows, MERGE_BLOCK),)](
            parts, targets, rows, logp, entropy, row_max, log_sum, n_rows, n_valid, splits, k,
            ENTROPY=with_entropy, BLOCK=MERGE_BLOCK, **launch_options(MERGE_THREADS),
        )  # fmt: skip
    return logp, entropy, row_max, log_sum


def dtype_options(dtype: torch.dtype, architecture: str) -> dict[str, bool | str]:
    """How to multiply, and whether to round as a matmul that writes the dtype does.

    The interpreter multiplies the bit patterns of bf16; on the CPU logits are not rounded (linear.py).
    """
    interpreted, half = architecture == "interpreter", dtype != torch.float32
    precision = "tf32x3" if architecture.startswith("sm_") and not half else "ieee"
    return {"ROUND": half and not interpreted, "UPCAST": half and interpreted, "PRECISION": precision}


def choose_splits(n_tiles: int, n_blocks: int, n_processors: int) -> int:
    """The fewest parts of the vocabulary that take no more than 1/20 longer than the best number of parts."""
    candidates = range(1, min(n_blocks, MAX_SPLITS) + 1)
    # In blocks of columns that one processor takes one after the other.
    times = [triton.cdiv(n_tiles * splits, n_processors) * triton.cdiv(n_blocks, splits) for splits in candidates]
    return next(splits for splits, time in zip(candidates, times, strict=True) if time <= 1.05 * min(times))


def processors(device: torch.device) -> int:
    """Programs that run at once, one on each multiprocessor."""
    if device.type == "cpu":
        return 1
    return torch.get_device_module(device).get_device_properties(device).multi_processor_count


def aligned(hidden: Tensor) -> Tensor:
    """hidden as a descriptor can read it, copied only where it must be."""
    size = hidden.element_size()
    fits = hidden.stride(1) == 1 and hidden.stride(0) * size % 16 == 0 and hidden.data_ptr() % 16 == 0
    return (
        hidden if fits and hidden.stride(0) >= hidden.shape[1] else hidden.clone(memory_format=torch.contiguous_format)
    )


def provide_scratch() -> None:
    """Descriptors made on the device need scratch memory: PyTorch's, unless the user has set an allocator."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device=torch.device(torch.accelerator.current_accelerator().type))


def variants() -> Iterator[Variant]:
    """For compile_check: the tile of each target and dtype with all options, the fastest also with fewer."""
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        yield _variant(torch.bfloat16, target, "full")
        yield _variant(torch.float32, target, "full")
    yield _variant(torch.bfloat16, "sm_90", "plain")
    yield _variant(torch.bfloat16, "sm_90", "entropy")
    types = dict.fromkeys(merge_parts_kernel.arg_names, "*fp32") | dict.fromkeys(
        ("n_rows", "n_valid", "n_parts"), "i32"
    )
    types |= {"p_targets": "*i64", "p_rows": "*i64", "k": "fp32"}
    constants = {"ENTROPY": True, "BLOCK": MERGE_BLOCK}
    yield Variant(merge_parts_kernel, "entropy", types, constants, MERGE_THREADS, reads=(4 * PARTS.value,))


def _variant(dtype: torch.dtype, target: str, options: str) -> Variant:
    tile = MatmulTile.choose(dtype, target)
    pointer = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    types = dict.fromkeys(linear_logprobs_kernel.arg_names, "i32") | dict.fromkeys(("pre", "cap", "k"), "fp32")
    types |= dict.fromkeys(("p_hidden", "p_weight", "p_bias"), pointer) | {"p_targets": "*i64", "p_parts": "*fp32"}
    flags = {"ENTROPY": options != "plain", "SOFTCAP": options == "full"}
    constants = flags | dtype_options(dtype, target) | tile.constants()
    if options != "full":
        constants["p_bias"] = None
    divisible = ("p_hidden", "p_weight", "p_parts", "stride_h", "stride_w", "width")
    name = f"{pointer[1:]} {options}"
    return Variant(
        linear_logprobs_kernel, name, types, constants, tile.threads, divisible,
        stages=tile.stages, targets=(target,), elements=tile.rows * tile.cols,
    )  # fmt: skip
