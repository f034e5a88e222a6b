"""The policy loss in verl: by name for any of its trainers, and as the whole loss of an actor worker."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from rspo_kernels import PolicyLossConfig, policy_loss

SMALLEST_CENTER = math.exp(-20.0)
"""Where a centre of 0 or below stands: the loss bounds |log c| by 20 all the same."""
DUAL_CLIP = 3.0
"""verl's own default of `clip_ratio_c`."""


def rspo_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped loss with generalized clip centre (RSPO paper, eq. 2 and 4), `loss_mode=rspo`.

    J = min(r·A, clip(r, c - ε_low, c + ε_high)·A) with r = π/π_B. The centre c = π_old/π_B comes in the place of
    verl's importance weights, which are the same quotient. Where verl multiplies its loss by them, so that the
    interval becomes c·(1 ± ε), this one is c ± ε. Without them, or where they are 1, this is verl's "vanilla".

    Args:
        old_log_prob, log_prob, advantages: [B, L].
        response_mask: [B, L], bool or numbers.
        loss_agg_mode: any of verl's.
        config: verl's ActorConfig; `clip_ratio*`, `clip_ratio_c` and `global_batch_info` are read.
        rollout_is_weights: [B, L], c; None: 1.

    Returns:
        loss: 0-d. metrics: "vanilla"'s, and mean and maximum of the centre.
    """
    settings = PolicyLossConfig(**_clipping(config), aggregation=_aggregation(loss_agg_mode))
    behavior = None
    if rollout_is_weights is not None:
        behavior = old_log_prob - rollout_is_weights.clamp(min=SMALLEST_CENTER).log()
    loss, stats = policy_loss(
        log_prob,
        advantages,
        mask=response_mask,
        normalizer=_normalizer(response_mask, loss_agg_mode, **config.global_batch_info),
        old_logp=old_log_prob,
        behavior_logp=behavior,
        config=settings,
    )
    return loss, {
        "actor/pg_clipfrac": float(stats["clip_frac_low"] + stats["clip_frac_high"]),
        "actor/ppo_kl": float(stats["approx_kl_k1"]),
        "actor/pg_clipfrac_lower": float(stats["clip_frac_dual"]),
        "actor/center_mean": float(stats["center_mean"]),
        "actor/center_max": float(stats["center_max"]),
    }


def actor_loss(
    config: PolicyLossConfig, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Metric]]:
    """The whole loss of an actor worker, eq. 1 of the paper with its KL and entropy terms; for `set_loss_fn`.

    The weights in the data hold the mixture, the aggregation and all divisors, so that the sum over all processes and
    micro-batches is the loss of the mini-batch, however verl deals its rows.

    Args:
        config: the loss of one token; its aggregation must be "token-mean", which leaves the weights as they are.
        model_output: verl's, log_probs and where asked for entropy, packed.
        data: a micro-batch with response_mask, old_log_probs, behavior_log_probs, advantages, loss_weights and, with
            a KL term, ref_log_prob, all [B, L]; and dp_size.
    """
    fields = ["response_mask", "old_log_probs", "behavior_log_probs", "advantages", "loss_weights"]
    if config.kl_coef > 0:
        fields.append("ref_log_prob")
    batch = data.select(*fields).to_padded_tensor()
    entropy = model_output.get("entropy")
    loss, stats = policy_loss(
        no_padding_2_padding(model_output["log_probs"], data),
        batch["advantages"],
        mask=batch["response_mask"],
        weights=batch["loss_weights"],
        # FSDP averages gradients over processes; the weights ask for their sum.
        normalizer=1.0 / data["dp_size"],
        old_logp=batch["old_log_probs"],
        behavior_logp=batch["behavior_log_probs"],
        ref_logp=batch["ref_log_prob"] if config.kl_coef > 0 else None,
        entropy=None if entropy is None else no_padding_2_padding(entropy, data),
        config=config,
    )
    # verl means these over micro-batches and processes; of a number of tokens that would be no number of tokens.
    return loss, {name: Metric(_how(name), value) for name, value in stats.items() if name != "num_tokens"}


def _clipping(config: Any) -> dict[str, Any]:
    """What verl's ActorConfig says of clipping, by the names of PolicyLossConfig."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return {
        "clip_low": config.clip_ratio if low is None else low,
        "clip_high": config.clip_ratio if high is None else high,
        "dual_clip": config.get("clip_ratio_c", DUAL_CLIP),
    }


def _how(name: str) -> AggregationType:
    """How a statistic of micro-batches becomes one."""
    return AggregationType.MAX if name.endswith("_max") else AggregationType.MEAN


def _aggregation(loss_agg_mode: str) -> str:
    """What is left to the loss when the normalizer has done its part."""
    return "token-mean" if loss_agg_mode.startswith("token-") else loss_agg_mode.removesuffix("-norm")


def _normalizer(
    mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor | float:
    """What verl divides the sum by: counts of the whole batch where it knows them, else those of this one."""
    if loss_agg_mode == "token-sum":
        count: Any = 1.0
    elif loss_agg_mode == "token-mean":
        count = mask.sum() if batch_num_tokens is None else batch_num_tokens
    else:
        count = (mask.sum(-1) > 0).sum() if global_batch_size is None else global_batch_size
        if loss_agg_mode == "seq-mean-token-sum-norm":
            count = count * (mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    if isinstance(count, torch.Tensor):
        count = count.clamp(min=1)
    return count / dp_size
