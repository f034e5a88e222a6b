"""What the three policy losses share: checking their arguments and bringing them into the operators' form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import checks
from .backends import BACKENDS
from .backends.operators import config_arguments
from .config import RATIO_LEVELS, PolicyLossConfig
from .segments import Segments


@dataclass(frozen=True)
class TokenGrid:
    """The tokens that a loss is over: [N] packed or [B, L] padded, called by the argument that gave the shape."""

    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    name: str

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2):
            raise ValueError(f"{self.name} must be [N] or [B, L], got {list(self.shape)}")

    @property
    def is_padded(self) -> bool:
        """[B, L] rather than [N]."""
        return len(self.shape) == 2

    @property
    def num_tokens(self) -> int:
        """N, or B·L."""
        return self.shape[0] * self.shape[1] if self.is_padded else self.shape[0]

    def ones(self) -> Tensor:
        """[N] of the dtype that the loss is computed in."""
        return torch.ones(self.num_tokens, dtype=self.dtype, device=self.device)

    def row(self) -> Tensor:
        """Row of each token of [B, L], int64 [B·L]."""
        rows = torch.arange(self.shape[0], device=self.device)
        return rows.unsqueeze(1).expand(self.shape).reshape(-1)


@dataclass(frozen=True)
class LossInputs:
    """The arguments of a policy loss, checked and flat.

    weights: [N] with the aggregation in them, or None for all 1.
    count: default normalizer where it is not the number of tokens (then None).
    kept: 1 for unmasked tokens and 0 for masked ones, [N].
    """

    advantages: Tensor
    advantage_index: Tensor | None
    mask: Tensor | None
    weights: Tensor | None
    old_logp: Tensor | None
    behavior_logp: Tensor | None
    ref_logp: Tensor | None
    segment_index: Tensor | None
    segment_share: Tensor | None
    segment_count: int
    kept: Tensor
    count: Tensor | None
    config: PolicyLossConfig

    @classmethod
    def check(
        cls,
        tokens: TokenGrid,
        advantages: Tensor,
        *,
        mask: Tensor | None,
        weights: Tensor | None,
        old_logp: Tensor | None,
        behavior_logp: Tensor | None,
        ref_logp: Tensor | None,
        segments: Segments | None,
        advantage_level: str | None,
        config: PolicyLossConfig,
        backend: str,
        ignored: Tensor | None = None,
    ) -> LossInputs:
        """Check everything once. `ignored` bool, of the tokens' shape: tokens that are masked besides `mask`.

        Raises TypeError or ValueError that names the argument.
        """
        checks.one_of("backend", backend, BACKENDS)
        check_config(config)
        if segments is not None and not isinstance(segments, Segments):
            raise TypeError(f"segments must be Segments, got {type(segments).__name__}")
        if segments is not None and tokens.is_padded:
            raise ValueError(f"segments describe packed tokens: {tokens.name} must be [N], got [B, L]")
        if segments is not None:
            if segments.num_tokens != tokens.num_tokens:
                raise ValueError(
                    f"segments must cover the N = {tokens.num_tokens} tokens of {tokens.name}, "
                    f"got {segments.num_tokens}"
                )
            checks.same_device("segments", segments.cu_turns, tokens.device, tokens.name)
        if config.kl_coef > 0 and ref_logp is None:
            raise ValueError(f"ref_logp must be given with config.kl_coef = {config.kl_coef}, got None")
        if mask is not None:
            mask = checks.as_mask("mask", mask, tokens.shape, tokens.device, tokens.name)
        if ignored is not None:
            mask = ~ignored if mask is None else mask & ~ignored
        flat_mask = None if mask is None else mask.reshape(-1)
        kept = tokens.ones() if flat_mask is None else flat_mask.to(tokens.dtype)
        flat, index = _advantages(advantages, tokens, segments, advantage_level)
        scale, count = _aggregate(per_token("weights", weights, tokens), kept, tokens, segments, config)
        return cls(
            flat,
            index,
            flat_mask,
            scale,
            per_token("old_logp", old_logp, tokens),
            per_token("behavior_logp", behavior_logp, tokens),
            per_token("ref_logp", ref_logp, tokens),
            *_ratio_segments(kept, tokens, segments, config),
            kept,
            count,
            config,
        )

    def operands(self) -> tuple[Tensor | int | None, ...]:
        """What the operators take between the log-probs and the settings, without the entropy."""
        return (
            self.advantages, self.advantage_index, self.mask, self.weights, self.old_logp, self.behavior_logp,
            self.ref_logp, self.segment_index, self.segment_share, self.segment_count,
        )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """The fields of the config that the operators take."""
        return config_arguments(self.config)

    def denominator(self, normalizer: Tensor | float | None, num_tokens: Tensor | None = None) -> Tensor | float:
        """What all losses divide by: the normalizer, or the default, and 1 where no token is left to divide.

        num_tokens: the number of unmasked tokens, if it has been counted.

        A tensor that is not > 0 and finite is a ValueError on the CPU. Elsewhere, and under torch.compile, looking at
        it would cost a synchronisation: there it makes the loss NaN if any token is unmasked.
        """
        if normalizer is None:
            if self.count is not None:
                return self.count.clamp(min=1)
            return (self.kept.sum() if num_tokens is None else num_tokens).clamp(min=1)
        limits = torch.finfo(self.kept.dtype)  # below tiny the inverse would be infinite
        if not isinstance(normalizer, Tensor):
            number = checks.positive("normalizer", normalizer)
            if not limits.tiny <= number <= limits.max:
                raise ValueError(f"normalizer must lie in {limits.tiny:.3g} .. {limits.max:.3g}, got {number}")
            return number
        checks.plain_tensor("normalizer", normalizer)
        if normalizer.dim() != 0:
            raise ValueError(f"normalizer must be a number or a 0-d tensor, got {list(normalizer.shape)}")
        if normalizer.is_complex() or normalizer.dtype == torch.bool:
            raise TypeError(f"normalizer must be a real number, got {normalizer.dtype}")
        if normalizer.device.type != "cpu":
            checks.same_device("normalizer", normalizer, self.kept.device, "the tokens")
        normalizer = normalizer.detach().to(self.kept.dtype)
        empty = ~self.kept.any() if num_tokens is None else num_tokens == 0
        valid = (normalizer >= limits.tiny) & (normalizer <= limits.max)
        # With nothing left to divide a count of 0 is what an honest caller has.
        seen = type(normalizer) is Tensor and normalizer.device.type == "cpu" and not torch.compiler.is_compiling()
        if seen and not valid and not (normalizer == 0 and empty):
            raise ValueError(
                f"normalizer must be finite and > 0 (or 0 where all tokens are masked), got {float(normalizer)}"
            )
        return torch.where(empty, 1.0, torch.where(valid, normalizer, torch.nan))


def check_config(config: Any) -> None:
    """A PolicyLossConfig."""
    if not isinstance(config, PolicyLossConfig):
        raise TypeError(f"config must be a PolicyLossConfig, got {type(config).__name__}")


def per_token(name: str, x: Tensor | None, tokens: TokenGrid) -> Tensor | None:
    """An optional floating-point partner of the tokens, flat and without a graph."""
    if x is None:
        return None
    checks.floating(name, x)
    checks.same_shape(name, x, tokens.shape, tokens.name)
    checks.same_device(name, x, tokens.device, tokens.name)
    return x.detach().reshape(-1)


def _advantages(
    advantages: Tensor, tokens: TokenGrid, segments: Segments | None, level: str | None
) -> tuple[Tensor, Tensor | None]:
    """Flat advantages and, where they are not one for each token, the entry of each token."""
    checks.floating("advantages", advantages)
    checks.same_device("advantages", advantages, tokens.device, tokens.name)
    checks.one_of("advantage_level", level, (None, *RATIO_LEVELS))
    advantages = advantages.detach()
    allowed = {"token": tuple(tokens.shape)}
    if tokens.is_padded:
        allowed["sequence"] = (tokens.shape[0],)
    elif segments is not None:
        allowed |= {"turn": (segments.num_turns,), "sequence": (segments.num_sequences,), "set": (segments.num_sets,)}
    fitting = [name for name, shape in allowed.items() if tuple(advantages.shape) == shape and level in (None, name)]
    if not fitting:
        shapes = [f"{list(shape)} ({name})" for name, shape in allowed.items() if level in (None, name)]
        wanted = " or ".join(shapes) or f"given by {level} only together with segments"
        raise ValueError(f"advantages must be {wanted}, got {list(advantages.shape)}")
    if fitting[0] == "token":
        return advantages.reshape(-1), None
    if segments is None:
        return advantages, tokens.row()
    return advantages, segments.level(fitting[-1])[0]


def _ratio_segments(
    kept: Tensor, tokens: TokenGrid, segments: Segments | None, config: PolicyLossConfig
) -> tuple[Tensor | None, Tensor | None, int]:
    """Segment of each token [N], its share of that segment's log-ratio [N], and the number of segments."""
    if config.ratio_level == "token":
        return None, None, 0
    if segments is not None:
        member, num_members = segments.level("turn" if config.ratio_level == "turn" else "sequence")
    elif tokens.is_padded and config.ratio_level == "sequence":
        member, num_members = tokens.row(), tokens.shape[0]
    else:
        raise ValueError(f"segments must be given with config.ratio_level = {config.ratio_level!r}, got None")
    sizes = kept.new_zeros(num_members).index_add(0, member, kept)
    share = kept / sizes.clamp(min=1)[member] if config.ratio_reduction == "mean" else kept
    if segments is None or config.ratio_level != "set" or segments.sequence_set is None:
        return member, share, num_members
    present = (sizes > 0).to(kept.dtype)
    members = kept.new_zeros(segments.num_sets).index_add(0, segments.sequence_set.long(), present)
    return segments.token_set, share / members.clamp(min=1)[segments.token_set], segments.num_sets


def _aggregate(
    weights: Tensor | None, kept: Tensor, tokens: TokenGrid, segments: Segments | None, config: PolicyLossConfig
) -> tuple[Tensor | None, Tensor | None]:
    """Token weights [N] with the aggregation in them, and the default normalizer (None: the number of tokens)."""
    if config.aggregation == "token-mean":
        return weights, None
    if tokens.is_padded:
        num_sequences, sequence = tokens.shape[0], tokens.row()
    elif segments is not None:
        sequence, num_sequences = segments.level("sequence")
    else:
        raise ValueError(f"segments must be given for packed tokens with aggregation {config.aggregation!r}, got None")
    lengths = kept.new_zeros(num_sequences).index_add(0, sequence, kept)
    scale = torch.ones_like(kept) if weights is None else weights.to(kept.dtype)
    if config.aggregation == "seq-mean-token-mean":
        scale = scale / lengths.clamp(min=1)[sequence]
    elif config.aggregation == "seq-mean-token-sum-norm":
        horizon = config.horizon or (tokens.shape[1] if tokens.is_padded else None)
        if horizon is None:
            raise ValueError("config.horizon must be given for packed tokens with 'seq-mean-token-sum-norm', got None")
        scale = scale / horizon
    return scale, (lengths > 0).sum()
