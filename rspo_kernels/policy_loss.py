"""The policy loss from log-probabilities."""

from __future__ import annotations

from torch import Tensor

from . import checks
from .backends.common import compute_dtype
from .backends.operators import ops
from .config import STATS, PolicyLossConfig
from .loss_inputs import LossInputs, TokenGrid, check_normalizer, per_token
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
    tokens = TokenGrid(tuple(logp.shape), logp.device, compute_dtype(logp.dtype), "logp")
    if config.entropy_coef != 0 and entropy is None:
        raise ValueError(f"entropy must be given with config.entropy_coef = {config.entropy_coef}, got None")
    if entropy is not None:
        per_token("entropy", entropy, tokens)
        entropy = entropy.reshape(-1)
    inputs = LossInputs.check(
        tokens,
        advantages,
        mask=mask,
        weights=weights,
        old_logp=old_logp,
        behavior_logp=behavior_logp,
        ref_logp=ref_logp,
        segments=segments,
        advantage_level=advantage_level,
        config=config,
        backend=backend,
    )
    loss_sum, _, _, stats = ops.policy_loss(
        logp.reshape(-1), *inputs.operands(), entropy, **inputs.settings(), backend=backend
    )
    named = dict(zip(STATS, stats.unbind(), strict=True))
    if normalizer is None:
        normalizer = (named["num_tokens"] if inputs.count is None else inputs.count).clamp(min=1)
    return loss_sum / check_normalizer(normalizer), named
