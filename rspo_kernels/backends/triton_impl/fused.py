"""The policy loss from logits: one program per row makes log-prob, ratio, clip decision and the row's gradient at once.

    logp, entropy = statistics of the row (row_softmax.py)
    g = d loss/d logp by token_loss (policy_loss.py), h = -w·entropy_coef
    d loss/d logits = gradient of the row for g and h

and then one launch of the loss kernel over the vectors [N] adds up loss and statistics. For ratios of single tokens: a
ratio that many rows share is known only when all rows have been read (compose.py).

Memory: an active row is read twice and written once; the second read follows the first closely and can be served by
the L2 cache. A row without gradient (clipped, A = 0, weight 0) is read once and cleared, a masked one only cleared.
The gradient may overwrite the logits: all threads have finished the first pass before any of them writes.

Numerics: those of the separate kernels, whose functions these are; a row without gradient is exactly 0.

Compiled by Triton 3.7.1 (not yet timed on a GPU): at most 128 registers on NVIDIA and 137 on gfx942 with entropy, no
spills, wide accesses of 128 bits (bench/results/ahead-of-time/compile.md). Two blocks to a multiprocessor then are
about 80 MB of bf16 rows of 152,000 on 132 of them: what the L2 cache can save of the second read has to be measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import PolicyLossConfig
from .. import compose
from ..common import LogitsTransform
from . import policy_loss
from .common import Variant, f32, launch_options, on_device
from .logprobs import UNALIGNED, UNSPECIALIZED
from .policy_loss import policy_loss_forward, token_loss
from .row_softmax import row_gradient, row_statistics
from .rows import RowTile, scalars, unit_stride


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=(*UNALIGNED, *policy_loss.INPUTS))
def loss_rows_kernel(
    p_logits, stride_xb, stride_xl,
    p_targets, stride_tb, stride_tl,
    p_advantages, p_index, p_mask, p_weights, p_old, p_behavior, p_ref,
    p_logp, p_entropy, p_moved,
    p_out, stride_ob, stride_ol,
    n_tokens, n_valid, n_cols, ignore_index,
    pre, cap, k, factor,
    clip_low, clip_high, center_cap, log_weight_cap, dual_clip, tau_positive, tau_negative,
    kl_coef, entropy_coef, clamp,
    LOSS_FORM: tl.constexpr, CLIP_CENTER: tl.constexpr, CENTER_CAP: tl.constexpr, WEIGHT_CAP: tl.constexpr,
    DUAL_CLIP: tl.constexpr, DUAL_CLIP_REPLAY: tl.constexpr, KL_ESTIMATOR: tl.constexpr, KL_WEIGHTED: tl.constexpr,
    ENTROPY: tl.constexpr, ENTROPY_TERM: tl.constexpr, SOFTCAP: tl.constexpr, SAME_PHASE: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    pre, cap, k, factor = f32(pre), f32(cap), f32(k), f32(factor)
    i_row = tl.program_id(0)
    i_b = (i_row // n_tokens).to(tl.int64)
    i_l = (i_row % n_tokens).to(tl.int64)
    o_row, o_out = i_b * stride_xb + i_l * stride_xl, i_b * stride_ob + i_l * stride_ol
    target = tl.load(p_targets + i_b * stride_tb + i_l * stride_tl).to(tl.int64)
    keep = (target != ignore_index) & (tl.load(p_mask + i_row) != 0)
    logp, entropy, row_max, log_sum = 0.0, 0.0, 0.0, 0.0
    if keep:
        logp, entropy, row_max, log_sum = row_statistics(
            p_logits, o_row, target, n_valid, pre, cap, k, ENTROPY, SOFTCAP, VEC, ROWS, LANES
        )
    tl.store(p_logp + i_row, logp)
    if ENTROPY:
        tl.store(p_entropy + i_row, entropy)
    weight, _, _, g, _, _, _, _, _, _, _ = token_loss(
        logp, i_row, keep,
        p_advantages, p_index, p_weights, p_old, p_behavior, p_ref, None, None, None,
        clip_low, clip_high, center_cap, log_weight_cap, dual_clip, tau_positive, tau_negative, kl_coef, clamp,
        LOSS_FORM, CLIP_CENTER, CENTER_CAP, WEIGHT_CAP, DUAL_CLIP, DUAL_CLIP_REPLAY, KL_ESTIMATOR, KL_WEIGHTED,
    )  # fmt: skip
    # Every thread is done with the logits, also with the target's, before the first is overwritten.
    tl.debug_barrier()
    moved = row_gradient(
        p_logits, o_row, p_out, o_out, keep, target, n_valid, n_cols,
        g, -entropy_coef * weight, logp, entropy, row_max, log_sum,
        pre, cap, k, factor, True, ENTROPY_TERM, SOFTCAP, SAME_PHASE, VEC, ROWS, LANES,
    )  # fmt: skip
    if p_moved is not None:
        tl.store(p_moved + i_row, moved)


def logits_policy_loss(
    logits: Tensor,
    targets: Tensor,
    partners: tuple[Tensor | None, ...],
    transform: LogitsTransform,
    config: PolicyLossConfig,
    with_entropy: bool,
    out: Tensor | None,
    *,
    tile: RowTile | None = None,
) -> tuple[Tensor, Tensor]:
    """compose.logits_policy_loss for ratios of single tokens in two launches: loss (0-d), statistics."""
    if out is None:
        from .. import triton_impl

        return compose.logits_policy_loss(
            triton_impl, logits, targets, partners, None, transform, config, with_entropy, None
        )
    logp, entropy, _ = _loss_rows(logits, targets, partners, transform, config, with_entropy, out, False, tile)
    given = entropy if with_entropy else None
    loss, _, _, stats = policy_loss_forward(logp, *partners, given, None, config)
    return loss, stats


def loss_rows_(
    logits: Tensor,
    targets: Tensor,
    partners: tuple[Tensor | None, ...],
    transform: LogitsTransform,
    config: PolicyLossConfig,
    with_entropy: bool,
    *,
    tile: RowTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """compose.loss_rows_ in one launch: logp, entropy (or empty) and whether a row has a gradient, [B·L] each."""
    return _loss_rows(logits, targets, partners, transform, config, with_entropy, logits, True, tile)


def _loss_rows(
    logits: Tensor,
    targets: Tensor,
    partners: tuple[Tensor | None, ...],
    transform: LogitsTransform,
    config: PolicyLossConfig,
    with_entropy: bool,
    out: Tensor,
    with_moved: bool,
    tile: RowTile | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if unit_stride(out) is not out:
        buffer = torch.empty_like(out, memory_format=torch.contiguous_format)
        results = _loss_rows(logits, targets, partners, transform, config, with_entropy, buffer, with_moved, tile)
        out.copy_(buffer)
        return results
    n_tokens = targets.numel()
    logp = logits.new_empty(n_tokens, dtype=torch.float32)
    entropy = logits.new_empty(n_tokens if with_entropy else 0, dtype=torch.float32)
    moved = logits.new_empty(n_tokens if with_moved else 0, dtype=torch.bool)
    if n_tokens == 0:
        return logp, entropy, moved
    logits = unit_stride(logits)
    tile = tile or RowTile.choose(transform.valid_vocab, logits.element_size(), transform.softcap is not None)
    inputs = [None if x is None else x.contiguous() for x in partners]
    with on_device(logits):
        loss_rows_kernel[(n_tokens,)](
            logits, *logits.stride()[:2], targets, *targets.stride(), *inputs,
            logp, entropy, moved if with_moved else None, out, *out.stride()[:2],
            targets.shape[1], transform.valid_vocab, logits.shape[2], transform.ignore_index,
            *scalars(transform), *policy_loss.scalars(config).values(),
            **policy_loss.options(config), ENTROPY=with_entropy, ENTROPY_TERM=config.entropy_coef != 0,
            SOFTCAP=transform.softcap is not None, SAME_PHASE=tile.same_phase(logits, out),
            **tile.constants(), **launch_options(tile.threads),
        )  # fmt: skip
    return logp, entropy, moved


def variants() -> Iterator[Variant]:
    """For compile_check: the least and the most a row can ask for, each form of the loss, and the other phase."""
    rspo = PolicyLossConfig(center_cap=1.0, kl_coef=0.01)
    most: dict[str, Any] = {
        "clip_center": "relative", "center_cap": 1.0, "weight_cap": 2.0, "kl_weighted": True, "entropy_coef": 0.1,
    }  # fmt: skip
    everything = {"ENTROPY": True, "ENTROPY_TERM": True}
    bf16, fp32 = torch.bfloat16, torch.float32
    yield _variant("bf16 minimal", bf16, PolicyLossConfig(), ("p_index", "p_weights", "p_behavior", "p_ref"), {})
    yield _variant("bf16 RSPO", bf16, rspo, (), {})
    yield _variant("bf16 RSPO entropy", bf16, rspo, (), {"ENTROPY": True})
    yield _variant("fp32 RSPO entropy", fp32, rspo, (), {"ENTROPY": True})
    yield _variant("bf16 RSPO same_phase=0", bf16, rspo, (), {"SAME_PHASE": False})
    yield _variant(
        "bf16 full softcap", bf16, PolicyLossConfig(**most, dual_clip=3.0), (), everything | {"SOFTCAP": True}
    )
    yield _variant("bf16 cispo", bf16, PolicyLossConfig("cispo", **most), (), everything)
    yield _variant("bf16 sapo", bf16, PolicyLossConfig("sapo", **most), (), everything)


def _variant(
    name: str, dtype: torch.dtype, config: PolicyLossConfig, absent: tuple[str, ...], option: dict[str, bool]
) -> Variant:
    flags = {"ENTROPY": False, "ENTROPY_TERM": False, "SOFTCAP": False, "SAME_PHASE": True} | option
    tile = RowTile.choose(1 << 17, dtype.itemsize, flags["SOFTCAP"])
    logits = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    types = dict.fromkeys(loss_rows_kernel.arg_names, "*fp32") | dict.fromkeys(UNSPECIALIZED, "i32")
    types |= dict.fromkeys(("pre", "cap", "k", "factor", *policy_loss.scalars(config)), "fp32")
    types |= {"p_logits": logits, "p_out": logits, "p_targets": "*i64", "p_index": "*i64"}
    types |= {"p_mask": "*i1", "p_moved": "*i1"}
    constants = flags | policy_loss.options(config) | tile.constants() | dict.fromkeys(absent)
    aligned, reads = ("p_logits", "p_out"), (dtype.itemsize,)
    return Variant(loss_rows_kernel, name, types, constants, tile.threads, aligned, reads=reads)
