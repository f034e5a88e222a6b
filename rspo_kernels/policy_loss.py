"""The policy loss from log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .backends import BACKENDS
from .backends.common import compute_dtype
from .backends.operators import config_arguments, ops
from .config import RATIO_LEVELS, STATS, PolicyLossConfig
from .segments import Segments

DEFAULT_CONFIG = PolicyLossConfig()


def policy_loss(
    logp: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    old_logp: Tensor | None = None,
    behavior_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    segments: Segments | None = None,
    advantage_level: str | None = None,
    config: PolicyLossConfig = DEFAULT_CONFIG,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss with generalized clip centre (RSPO paper, eq. 1, 2 and 4), its gradient and statistics.

        loss = Σ mask·weights·loss_t / normalizer      with loss_t as in PolicyLossConfig

    On-policy and replayed tokens go into one call: an on-policy token has behavior_logp = old_logp, so its clip
    centre is 1; a replayed token has the log-prob under the policy that generated it. Gradients flow to logp and
    entropy only.

    Args:
        logp: [N] packed or [B, L] padded, log-probs under the current policy.
        advantages: of the shape of logp; or [B] for padded inputs; or one for each turn, sequence or set of `segments`.
        mask: of the shape of logp, bool or numbers (non-zero keeps). Masked tokens contribute exactly nothing and may
            hold anything.
        weights: of the shape of logp, factor of each token's loss, e.g. the mixture weights (1 - α)/n_on and α/n_off.
        normalizer: what the sum is divided by, a number > 0 or a 0-d tensor. None: the number of unmasked tokens
            ("token-mean") or of sequences with an unmasked token (the other aggregations), at least 1. Pass the
            global count when accumulating over micro-batches.
        old_logp: of the shape of logp, log-probs before this update. None: equal to logp.detach().
        behavior_logp: of the shape of logp, log-probs under the generating policy. None: equal to old_logp.
        ref_logp: of the shape of logp, log-probs under the reference policy; required when config.kl_coef > 0.
        entropy: of the shape of logp, differentiable; required when config.entropy_coef is not 0.
        segments: turns, sequences and sets of packed tokens; [B, L] inputs have one sequence for each row.
        advantage_level: "token", "turn", "sequence" or "set", what there is one advantage for. None: read off the
            number of advantages, where several levels have it the coarsest.
        config: what loss.
        backend: "auto", "torch" or "triton".

    Returns:
        loss: 0-d float32 (float64 for float64 logp), with a graph even where every token is masked (then 0).
        stats: detached 0-d tensors by the names of `STATS`; no host synchronisation.

    Raises:
        TypeError, ValueError: an argument of a wrong type, shape, device or range, named.
        RuntimeError: a backend that was asked for and cannot run here.
    """
    checks.floating("logp", logp)
    if logp.dim() not in (1, 2):
        raise ValueError(f"logp must be [N] or [B, L], got {list(logp.shape)}")
    if segments is not None and logp.dim() == 2:
        raise ValueError("segments describe packed tokens: logp must be [N], got [B, L]")
    checks.one_of("backend", backend, BACKENDS)
    if config.kl_coef > 0 and ref_logp is None:
        raise ValueError(f"ref_logp must be given with config.kl_coef = {config.kl_coef}, got None")
    if config.entropy_coef != 0 and entropy is None:
        raise ValueError(f"entropy must be given with config.entropy_coef = {config.entropy_coef}, got None")
    partners = {"old_logp": old_logp, "behavior_logp": behavior_logp, "ref_logp": ref_logp, "entropy": entropy}
    flat = {name: _per_token(name, x, logp) for name, x in partners.items()}
    if mask is not None:
        mask = checks.as_mask("mask", mask, logp.shape, logp.device, "logp").reshape(-1)
    weights = _per_token("weights", weights, logp)
    advantages, index = _advantages(advantages, logp, segments, advantage_level)
    ratio_index, share, ratio_count = _ratio_segments(logp, mask, segments, config)

    weights, count = _aggregate(logp, mask, weights, segments, config)
    loss_sum, _, _, stats = ops.policy_loss(
        logp.reshape(-1),
        advantages,
        index,
        mask,
        weights,
        *flat.values(),
        ratio_index,
        share,
        ratio_count,
        **config_arguments(config),
        backend=backend,
    )
    named = dict(zip(STATS, stats.unbind(), strict=True))
    if normalizer is None:
        normalizer = (named["num_tokens"] if count is None else count).clamp(min=1)
    elif not isinstance(normalizer, Tensor):
        normalizer = checks.positive("normalizer", normalizer)
    elif normalizer.dim() != 0:
        raise ValueError(f"normalizer must be a number or a 0-d tensor, got {list(normalizer.shape)}")
    return loss_sum / normalizer, named


def _per_token(name: str, x: Tensor | None, logp: Tensor) -> Tensor | None:
    if x is None:
        return None
    checks.floating(name, x)
    checks.same_shape(name, x, logp.shape, "logp")
    checks.same_device(name, x, logp.device, "logp")
    x = x.reshape(-1)
    return x if name == "entropy" else x.detach()


def _advantages(
    advantages: Tensor, logp: Tensor, segments: Segments | None, level: str | None
) -> tuple[Tensor, Tensor | None]:
    """Flat advantages and, where they are not one for each token, the entry of each token."""
    checks.floating("advantages", advantages)
    checks.same_device("advantages", advantages, logp.device, "logp")
    checks.one_of("advantage_level", level, (None, *RATIO_LEVELS))
    advantages = advantages.detach()
    allowed = {"token": tuple(logp.shape)}
    if logp.dim() == 2:
        allowed["sequence"] = (logp.shape[0],)
    elif segments is not None:
        _check_segments(segments, logp)
        allowed |= {"turn": (segments.num_turns,), "sequence": (segments.num_sequences,), "set": (segments.num_sets,)}
    fitting = [name for name, shape in allowed.items() if tuple(advantages.shape) == shape and level in (None, name)]
    if not fitting:
        shapes = ", ".join(f"{list(shape)} ({name})" for name, shape in allowed.items() if level in (None, name))
        raise ValueError(
            f"advantages must be {shapes or f'given by {level} of segments'}, got {list(advantages.shape)}"
        )
    if fitting[0] == "token":
        return advantages.reshape(-1), None
    if segments is None:
        return advantages, _row_of_token(logp)
    return advantages, segments.level(fitting[-1])[0]


def _ratio_segments(
    logp: Tensor, mask: Tensor | None, segments: Segments | None, config: PolicyLossConfig
) -> tuple[Tensor | None, Tensor | None, int]:
    """Segment of each token [N], its share of that segment's log-ratio [N], and the number of segments."""
    if config.ratio_level == "token":
        return None, None, 0
    members = "turn" if config.ratio_level == "turn" else "sequence"
    if segments is not None:
        _check_segments(segments, logp)
        member, num_members = segments.level(members)
    elif logp.dim() == 2 and config.ratio_level == "sequence":
        member, num_members = _row_of_token(logp), logp.shape[0]
    else:
        raise ValueError(f"segments must be given with config.ratio_level = {config.ratio_level!r}, got None")
    kept = _kept(logp, mask)
    sizes = kept.new_zeros(num_members).index_add(0, member, kept)
    share = kept / sizes.clamp(min=1)[member] if config.ratio_reduction == "mean" else kept
    if config.ratio_level != "set":
        return member, share, num_members
    assert segments is not None
    sets = (
        segments.sequence_set.long()
        if segments.sequence_set is not None
        else torch.arange(num_members, device=logp.device)
    )
    present = kept.new_zeros(segments.num_sets).index_add(0, sets, (sizes > 0).to(kept.dtype))
    return segments.token_set, share / present.clamp(min=1)[segments.token_set], segments.num_sets


def _kept(logp: Tensor, mask: Tensor | None) -> Tensor:
    """1 for unmasked tokens and 0 for masked ones, float [N]."""
    dtype = compute_dtype(logp.dtype)
    return torch.ones(logp.numel(), dtype=dtype, device=logp.device) if mask is None else mask.to(dtype)


def _aggregate(
    logp: Tensor, mask: Tensor | None, weights: Tensor | None, segments: Segments | None, config: PolicyLossConfig
) -> tuple[Tensor | None, Tensor | None]:
    """Token weights [N] with the aggregation in them, and the default normalizer (None: the number of tokens)."""
    if config.aggregation == "token-mean":
        return weights, None
    if logp.dim() == 2:
        num_sequences, sequence = logp.shape[0], _row_of_token(logp)
    elif segments is not None:
        _check_segments(segments, logp)
        num_sequences, sequence = segments.num_sequences, segments.token_sequence
    else:
        raise ValueError(f"segments must be given for packed tokens with aggregation {config.aggregation!r}, got None")

    kept = _kept(logp, mask)
    lengths = kept.new_zeros(num_sequences).index_add(0, sequence, kept)
    scale = torch.ones_like(kept) if weights is None else weights.to(kept.dtype)
    if config.aggregation == "seq-mean-token-mean":
        scale = scale / lengths.clamp(min=1)[sequence]
    elif config.aggregation == "seq-mean-token-sum-norm":
        horizon = config.horizon if config.horizon is not None or logp.dim() == 1 else logp.shape[1]
        if horizon is None:
            raise ValueError("config.horizon must be given for packed tokens with 'seq-mean-token-sum-norm', got None")
        scale = scale / horizon
    return scale, (lengths > 0).sum()


def _row_of_token(logp: Tensor) -> Tensor:
    """Row of each token of [B, L], int64 [B·L]."""
    rows, length = logp.shape
    return torch.arange(rows, device=logp.device).unsqueeze(1).expand(rows, length).reshape(-1)


def _check_segments(segments: Segments, logp: Tensor) -> None:
    if segments.num_tokens != logp.numel():
        raise ValueError(f"segments must cover the N = {logp.numel()} tokens of logp, got {segments.num_tokens}")
    checks.same_device("segments", segments.cu_turns, logp.device, "logp")
