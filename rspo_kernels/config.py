"""PolicyLossConfig: which loss, as one frozen, validated value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from .choices import one_of

CLIPPED_LOSSES = ("grpo", "ppo", "dapo", "dr_grpo", "gspo")
LOSSES = (*CLIPPED_LOSSES, "cispo", "sapo")
CLIP_CENTERS = ("shift", "none", "relative")
KL_ESTIMATORS = ("k1", "k2", "k3")
RATIO_LEVELS = ("token", "turn", "sequence", "set")
RATIO_REDUCTIONS = ("mean", "sum")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

DEFAULTS = {"clip_low": 0.2, "clip_high": 0.2, "ratio_level": "token", "aggregation": "token-mean"}
DEFAULTS_BY_LOSS: dict[str, dict[str, Any]] = {
    "dapo": {"clip_high": 0.28},
    "dr_grpo": {"aggregation": "seq-mean-token-sum-norm"},
    "gspo": {
        "clip_low": 3e-4, "clip_high": 4e-4, "ratio_level": "sequence", "aggregation": "seq-mean-token-mean",
    },
    "sapo": {"aggregation": "seq-mean-token-mean"},
}  # fmt: skip
"""What the papers of these losses use; a field that is given is never changed."""


def _own(value: Any) -> Any:
    """An equal object that nobody else has: literals of equal text are one object."""
    return str(value.encode(), "utf-8") if isinstance(value, str) else float(repr(value))


_DEFAULTS_OF = {
    loss: {name: _own(value) for name, value in (DEFAULTS | DEFAULTS_BY_LOSS.get(loss, {})).items()} for loss in LOSSES
}

_BY_LOSS: Any = None
"""Default of the fields that depend on the loss."""

STATS = (
    "num_tokens", "clip_frac_low", "clip_frac_high", "clip_frac_dual", "approx_kl_k1", "approx_kl_k3", "kl_ref",
    "entropy", "ratio_mean", "ratio_max", "center_mean", "center_max", "ess",
)  # fmt: skip
"""Statistics that the loss makes in the same pass, in the order in which the operators return them.

Fractions and means are over unmasked tokens (0 where there are none). clip_frac_*: tokens whose gradient the lower,
upper or dual bound removed ("cispo": whose weight it bounded); approx_kl_k1 = mean(old - logp) and approx_kl_k3:
KL(old, policy); kl_ref: the configured estimator; ratio_*, center_*: those of each token's segment; ess: effective
sample size of the ratios as a share of the tokens, (Σr)²/(n·Σr²)."""

KL_CLAMP = 10.0
"""Bound on |ref_logp - logp| before it enters any KL estimator."""

MAX_LOG_RATIO_CLAMP = 40.0
"""exp(40)^2 still fits float32; the effective sample size squares the ratio."""


@dataclass(frozen=True)
class PolicyLossConfig:
    """The policy loss of one token (RSPO paper, eq. 1, 2 and 4), with ratio r and clip centre c:

        r = exp(logp - behavior_logp),  c = exp(old_logp - behavior_logp)
        J = min(r·A, clip(r, lower, upper)·A)          "grpo", "ppo", "dapo", "dr_grpo", "gspo"
        J = stop_gradient(clip(r, lower, upper))·A·logp         "cispo"
        J = 4/τ·sigmoid(τ·(r - centre))·A                       "sapo", with τ by the sign of A
        loss = -J + kl_coef·KL - entropy_coef·entropy

    Args:
        loss: the form of J. The five names of the clipped surrogate differ in the defaults of the fields below:
            dapo clips higher (0.28), dr_grpo aggregates by "seq-mean-token-sum-norm", gspo takes one ratio for a
            sequence (ε 3e-4 and 4e-4, "seq-mean-token-mean", as sapo does too). dataclasses.replace with another loss
            brings that loss's defaults, except where a field was given.
        clip_low, clip_high: ε below and above the centre, >= 0; 0.2 unless the loss says otherwise.
        clip_center: the interval. "shift" (the paper): c - clip_low .. c + clip_high; "none": around 1;
            "relative": c·(1 - clip_low) .. c·(1 + clip_high).
        center_cap: replace c by min(c, center_cap) in the interval, > 0. None: no cap.
        weight_cap: multiply J by min(c, weight_cap)/c (truncated importance weight), > 0. None: off.
        dual_clip: for A < 0 bound J from below by dual_clip·centre·A, > 1. None: off.
        dual_clip_replay: apply dual_clip also to tokens whose old_logp differs from their behavior_logp.
        kl_coef: weight of KL(policy, reference), >= 0; needs ref_logp when positive.
        kl_estimator: with d = ref_logp - logp clamped to ±10: "k1" = -d, "k2" = d²/2, "k3" = exp(d) - d - 1.
        kl_weighted: multiply the KL estimate by r (unbiased gradient for off-policy tokens); r is differentiated too.
        entropy_coef: weight of the entropy bonus; needs `entropy` when not 0.
        ratio_level: what shares one ratio and one clip decision: each "token", the tokens of a "turn", of a
            "sequence" (GSPO), or of a "set" of sequences (SRPO).
        ratio_reduction: log-ratio of a turn or sequence as the "mean" over its tokens or as their "sum"; that of a
            set is the mean over its sequences.
        sapo_tau_positive, sapo_tau_negative: temperatures of "sapo" for A > 0 and A <= 0, > 0.
        aggregation: "token-mean", or over sequences "seq-mean-token-sum", "seq-mean-token-mean",
            "seq-mean-token-sum-norm" (Dr. GRPO: the sum divided by `horizon`).
        horizon: tokens that a sequence's sum is divided by under "seq-mean-token-sum-norm"; defaults to the
            padded length L for inputs [B, L] and is required for packed inputs.
        log_ratio_clamp: bound on |log r| and |log c| before exp, in (0, 40]; beyond it the gradient is 0.

    Raises:
        ValueError: a value outside the ranges above, named with what is allowed.
    """

    loss: str = "grpo"
    clip_low: float = _BY_LOSS
    clip_high: float = _BY_LOSS
    clip_center: str = "shift"
    center_cap: float | None = None
    weight_cap: float | None = None
    dual_clip: float | None = None
    dual_clip_replay: bool = False
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    ratio_level: str = _BY_LOSS
    ratio_reduction: str = "mean"
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    aggregation: str = _BY_LOSS
    horizon: int | None = None
    log_ratio_clamp: float = 20.0

    def __post_init__(self) -> None:
        one_of("loss", self.loss, LOSSES)
        for name, value in _DEFAULTS_OF[self.loss].items():
            given = getattr(self, name)
            # dataclasses.replace hands the defaults of the loss before over as if given: those very objects.
            if given is None or any(given is defaults[name] for defaults in _DEFAULTS_OF.values()):
                object.__setattr__(self, name, value)
        one_of("clip_center", self.clip_center, CLIP_CENTERS)
        one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        one_of("ratio_level", self.ratio_level, RATIO_LEVELS)
        one_of("ratio_reduction", self.ratio_reduction, RATIO_REDUCTIONS)
        if self.loss == "gspo" and self.ratio_level == "token":
            raise ValueError("ratio_level must be 'turn', 'sequence' or 'set' with loss 'gspo', got 'token'")
        one_of("aggregation", self.aggregation, AGGREGATIONS)
        _number("clip_low", self.clip_low, lambda x: x >= 0, "a finite number >= 0")
        _number("clip_high", self.clip_high, lambda x: x >= 0, "a finite number >= 0")
        _number("kl_coef", self.kl_coef, lambda x: x >= 0, "a finite number >= 0")
        _number("entropy_coef", self.entropy_coef, lambda x: True, "a finite number")
        top = MAX_LOG_RATIO_CLAMP
        _number("log_ratio_clamp", self.log_ratio_clamp, lambda x: 0 < x <= top, f"in (0, {top:g}]")
        _number("sapo_tau_positive", self.sapo_tau_positive, lambda x: x > 0, "a finite number > 0")
        _number("sapo_tau_negative", self.sapo_tau_negative, lambda x: x > 0, "a finite number > 0")
        if self.dual_clip is not None and self.loss not in CLIPPED_LOSSES:
            raise ValueError(
                f"dual_clip must be None with loss {self.loss!r}, which clips nothing, got {self.dual_clip}"
            )
        if self.center_cap is not None:
            _number("center_cap", self.center_cap, lambda x: x > 0, "> 0 or None")
        if self.weight_cap is not None:
            _number("weight_cap", self.weight_cap, lambda x: x > 0, "> 0 or None")
        if self.dual_clip is not None:
            _number("dual_clip", self.dual_clip, lambda x: x > 1, "> 1 or None")
        for name in ("dual_clip_replay", "kl_weighted"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        whole = isinstance(self.horizon, int) and not isinstance(self.horizon, bool)
        if self.horizon is not None and (not whole or self.horizon < 1):
            raise ValueError(f"horizon must be a positive int or None, got {self.horizon!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what was given, so that the copy knows its loss's defaults, which are no longer those objects."""
        own = _DEFAULTS_OF[self.loss]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return partial(type(self), **{name: x for name, x in values.items() if x is not own.get(name, _BY_LOSS)}), ()


def _number(name: str, value: Any, allowed: Callable[[float], bool], wanted: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not allowed(value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
