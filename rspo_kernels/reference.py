"""Every op again as the shortest plain PyTorch that is obviously right.

These functions define the ops: the PyTorch path and the Triton kernels are tested against them. They run in the
dtype of their inputs (float64 in the tests), keep whatever autograd keeps, and care for nothing but the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import KL_CLAMP, PolicyLossConfig

LOWEST = -1e30
"""Stands for -inf in differences of log-probabilities, where (-inf) - (-inf) must be 0."""


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(transform(logits)), both [...] for logits [..., V]; 0 where masked."""
    keep = targets != ignore_index
    if mask is not None:
        keep = keep & (mask != 0)
    scores = logits[..., :valid_vocab] * logit_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores / temperature

    # A row without a finite score has no distribution: log-prob -inf, entropy 0, gradient 0.
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    logp = torch.log_softmax(torch.where(empty, 0.0, scores), -1)
    chosen = logp.gather(-1, torch.where(keep, targets, 0).long().unsqueeze(-1))
    impossible = empty | (chosen == -torch.inf)
    chosen = torch.where(impossible, -torch.inf, torch.where(impossible, 0.0, chosen)).squeeze(-1)

    # 0·log 0 = 0, in value and in gradient. Only a score of -inf gives that.
    possible = (logp > -torch.inf) & ~empty
    safe = torch.where(possible, logp, 0.0)
    entropy = -(torch.where(possible, safe.exp(), 0.0) * safe).sum(-1)
    return torch.where(keep, chosen, 0.0), torch.where(keep, entropy, 0.0)


def policy_loss_terms(
    logp: Tensor,
    advantages: Tensor,
    config: PolicyLossConfig,
    *,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    behavior_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    member_ids: Tensor | None = None,
    set_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Loss and statistics of each token, all [N]; every entry is 0 where masked, `loss` carries the graph.

    member_ids [N] (turn or sequence of each token) and set_ids [N] say which tokens share a ratio.
    """
    keep = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask != 0

    def clean(x: Tensor) -> Tensor:
        # Masked positions may hold anything, NaN included.
        return torch.where(keep, x, 0.0).clamp(min=LOWEST)

    old = clean(logp if old_logp is None else old_logp).detach()
    behavior = old if behavior_logp is None else clean(behavior_logp).detach()
    # A target of probability 0 has log-prob -inf: a value, but (through the clamp) no direction to move in.
    logp = clean(logp)
    adv = torch.where(keep, advantages, 0.0)

    clamp = config.log_ratio_clamp
    log_r, log_c = logp - behavior, old - behavior
    if config.ratio_level != "token":
        assert member_ids is not None
        log_r = shared_log_ratio(log_r, keep, member_ids, set_ids, config.ratio_reduction)
        log_c = shared_log_ratio(log_c, keep, member_ids, set_ids, config.ratio_reduction)
    on_policy = log_c == 0
    log_r, log_c = log_r.clamp(-clamp, clamp), log_c.clamp(-clamp, clamp)
    ratio, center = log_r.exp(), log_c.exp()

    bounded = center if config.center_cap is None else center.clamp(max=config.center_cap)
    if config.clip_center == "shift":
        lower, upper, pivot = bounded - config.clip_low, bounded + config.clip_high, bounded
    elif config.clip_center == "relative":
        lower, upper, pivot = bounded * (1 - config.clip_low), bounded * (1 + config.clip_high), bounded
    else:
        pivot = torch.ones_like(bounded)
        lower, upper = pivot - config.clip_low, pivot + config.clip_high

    dual = torch.zeros_like(keep)
    if config.loss == "sapo":
        taus = adv.new_tensor([config.sapo_tau_negative, config.sapo_tau_positive])
        tau = taus[(adv > 0).long()]
        clip_low = clip_high = dual
        objective = 4 / tau * torch.sigmoid(tau * (ratio - pivot)) * adv
    elif config.loss == "cispo":
        clip_low, clip_high = ratio < lower, ratio > upper
        weight = torch.maximum(torch.minimum(ratio, upper), lower).detach()
        objective = torch.where(logp > LOWEST, weight * adv * logp, 0.0)
    else:
        # min(ratio·A, clip(ratio, lower, upper)·A), written so that the gradient at the bounds is plain too.
        clip_low = (adv < 0) & (ratio < lower)
        clip_high = (adv > 0) & (ratio > upper)
        objective = torch.where(clip_low, lower, torch.where(clip_high, upper, ratio)) * adv
        if config.dual_clip is not None:
            dual = (adv < 0) & (ratio > config.dual_clip * pivot)
            if not config.dual_clip_replay:
                dual = dual & on_policy
            objective = torch.where(dual, config.dual_clip * pivot * adv, objective)
    if config.weight_cap is not None:
        objective = objective * (center.clamp(max=config.weight_cap) / center).detach()
    loss = -objective

    kl_ref = torch.zeros_like(loss)
    if ref_logp is not None:
        d = (clean(ref_logp).detach() - logp).clamp(-KL_CLAMP, KL_CLAMP)
        kl_ref = {"k1": -d, "k2": d * d / 2, "k3": torch.expm1(d) - d}[config.kl_estimator]
        if config.kl_weighted:
            kl_ref = kl_ref * ratio
        loss = loss + config.kl_coef * kl_ref
    ent = torch.zeros_like(loss) if entropy is None else torch.where(keep, entropy, 0.0)
    loss = loss - config.entropy_coef * ent

    log_new = (logp - old).clamp(-clamp, clamp)
    terms = {
        "loss": loss,
        "clip_frac_low": clip_low.to(logp.dtype),
        "clip_frac_high": clip_high.to(logp.dtype),
        "clip_frac_dual": dual.to(logp.dtype),
        "approx_kl_k1": -log_new,
        "approx_kl_k3": torch.expm1(log_new) - log_new,
        "kl_ref": kl_ref,
        "entropy": ent,
        "ratio": ratio,
        "center": center,
    }
    return {name: torch.where(keep, x, 0.0) for name, x in terms.items()}


def shared_log_ratio(gap: Tensor, keep: Tensor, member_ids: Tensor, set_ids: Tensor | None, reduction: str) -> Tensor:
    """Log-ratio of each token's segment: mean or sum over a member's kept tokens, mean over the members of a set."""
    out = 0 * gap
    top = member_ids if set_ids is None else set_ids
    for segment in top[keep].unique():
        inside = keep & (top == segment)
        members = [gap[inside & (member_ids == m)] for m in member_ids[inside].unique()]
        values = torch.stack([x.mean() if reduction == "mean" else x.sum() for x in members])
        out = torch.where(top == segment, values.mean(), out)
    return out


def policy_loss(
    logp: Tensor,
    advantages: Tensor,
    config: PolicyLossConfig,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    sequence_ids: Tensor | None = None,
    **partners: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss = Σ mask·weights·loss_t / normalizer and its statistics, for packed tokens [N] with `sequence_ids` [N]."""
    terms = policy_loss_terms(logp, advantages, config, mask=mask, **partners)
    keep = (torch.ones_like(logp) if mask is None else (mask != 0)).to(logp.dtype)
    scale = keep if weights is None else keep * weights

    if config.aggregation == "token-mean":
        count = keep.sum()
    else:
        assert sequence_ids is not None, "aggregation over sequences needs sequence_ids"
        sequence_ids = sequence_ids.unique(return_inverse=True)[1]
        lengths = torch.zeros_like(keep).index_add(0, sequence_ids, keep)  # no more sequences than tokens
        count = (lengths > 0).sum()
        if config.aggregation == "seq-mean-token-mean":
            scale = scale / lengths.clamp(min=1)[sequence_ids]
        if config.aggregation == "seq-mean-token-sum-norm":
            assert config.horizon is not None
            scale = scale / config.horizon
    if normalizer is None:
        normalizer = count.clamp(min=1)
    # where, not a product: a weight of 0 must silence a token whatever its loss is.
    loss = torch.where(scale == 0, 0.0, scale * terms["loss"]).sum() / normalizer

    n = keep.sum().clamp(min=1)
    ratio, center = terms["ratio"].detach(), terms["center"]
    stats = {
        name: terms[name].detach().sum() / n
        for name in (
            "clip_frac_low", "clip_frac_high", "clip_frac_dual", "approx_kl_k1", "approx_kl_k3", "kl_ref", "entropy"
        )
    }  # fmt: skip
    stats |= {
        "num_tokens": keep.sum(),
        "ratio_mean": ratio.sum() / n,
        "ratio_max": ratio.max() if ratio.numel() else n * 0,
        "center_mean": center.sum() / n,
        "center_max": center.max() if center.numel() else n * 0,
        "ess": ratio.sum() ** 2 / (n * (ratio**2).sum()).clamp(min=torch.finfo(n.dtype).tiny),
    }
    return loss, stats


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    baseline: str = "mean",
    scale: str | None = "std",
    singleton: str = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """A_i = (R_i - baseline of its group)/(std of its group + eps), [n] for rewards [n] and group ids [n]."""
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        members = groups == group
        r = rewards[members]
        n = r.numel()
        if n == 1:
            advantages[members] = r if singleton == "raw" else torch.zeros_like(r)
            continue
        centered = (r - r[0]) - (r - r[0]).mean()  # exactly 0 for identical rewards
        a = centered * n / (n - 1) if baseline == "leave_one_out" else centered
        if scale == "std":
            a = a / ((centered**2).sum().div(n - 1).sqrt() + eps)
        advantages[members] = a
    return advantages


def gae(
    rewards: Tensor,
    values: Tensor,
    segment_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A_t = (r_t - V_t) + gamma·V_next + gamma·lam·A_next over a segment's unmasked tokens, and A + V; all [N].

    segment_ids [N] are the indices into `bootstrap`, the value after the last token; a segment's tokens stand in order.
    """
    keep = torch.ones_like(segment_ids, dtype=torch.bool) if mask is None else mask != 0
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for segment in segment_ids.unique().tolist():
        next_value = values.new_zeros(()) if bootstrap is None else bootstrap[segment]
        next_advantage = values.new_zeros(())
        for t in reversed((keep & (segment_ids == segment)).nonzero().flatten().tolist()):
            advantages[t] = (rewards[t] - values[t]) + gamma * next_value + gamma * lam * next_advantage
            returns[t] = advantages[t] + values[t]
            next_value, next_advantage = values[t], advantages[t]
    return advantages, returns


def discounted_returns(
    rewards: Tensor, segment_ids: Tensor, *, gamma: float = 0.95, mask: Tensor | None = None
) -> Tensor:
    """G_t = r_t + gamma·G_next over a segment's unmasked entries, 0 where masked; all [N]."""
    keep = torch.ones_like(segment_ids, dtype=torch.bool) if mask is None else mask != 0
    returns = torch.zeros_like(rewards)
    for segment in segment_ids.unique():
        following = rewards.new_zeros(())
        for t in reversed((keep & (segment_ids == segment)).nonzero().flatten().tolist()):
            returns[t] = following = rewards[t] + gamma * following
    return returns


def masked_whiten(x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x - mean)/sqrt(var + eps) over the unmasked entries, plus mean without shift_mean; 0 where masked."""
    keep = torch.ones_like(x, dtype=torch.bool) if mask is None else mask != 0
    out = torch.zeros_like(x)
    kept = x[keep]
    if kept.numel():
        centered = (kept - kept[0]) - (kept - kept[0]).mean()  # exactly 0 for identical entries
        variance = (centered**2).sum() / max(kept.numel() - 1, 1)
        out[keep] = centered / (variance + eps).sqrt() + (0.0 if shift_mean else kept.mean())
    return out


def step_advantages(
    step_rewards: Tensor,
    groups: Tensor,
    trajectories: Tensor,
    anchors: Tensor,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    mode: str = "mean_std_norm",
    rows: bool = False,
    singleton: str = "zero",
    valid: Tensor | None = None,
    penalties: Tensor | None = None,
    episode_rewards: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """GiGPO: episode + step_weight·step, episode advantages, step advantages, discounted returns, all [T]."""
    keep = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid != 0
    penalty = torch.zeros_like(step_rewards) if penalties is None else torch.where(keep, penalties, 0.0)
    total, returns, episode, step = (torch.zeros_like(step_rewards) for _ in range(4))
    scale = "std" if mode == "mean_std_norm" else None
    for group in groups[keep].unique():
        in_group = keep & (groups == group)
        first = []
        for trajectory in trajectories[in_group].unique():
            turns = (in_group & (trajectories == trajectory)).nonzero().flatten()
            first.append(turns[0])
            total[turns] = step_rewards[turns].sum() if episode_rewards is None else episode_rewards[turns[0]]
            returns[turns] = discounted_returns(step_rewards[turns], torch.zeros_like(turns), gamma=gamma)

        def normalize(scores: Tensor, alone: str) -> Tensor:
            return group_advantages(scores, torch.zeros(scores.numel()), scale=scale, singleton=alone, eps=eps)

        if rows:
            episode[in_group] = normalize((total - penalty)[in_group], singleton)
        else:
            for turn, advantage in zip(first, normalize(total[torch.stack(first)], singleton), strict=True):
                same = in_group & (trajectories == trajectories[turn])
                episode[same] = advantage - penalty[same]
        for anchor in anchors[in_group].unique():
            same = in_group & (anchors == anchor)
            step[same] = normalize((returns - penalty)[same], "zero")
    returns = torch.where(keep, returns - penalty, 0.0)
    return torch.where(keep, episode + step_weight * step, 0.0), episode, step, returns
