"""Advantages from rewards: against a group (GRPO, RLOO, BPO, GiGPO) or against a critic's values (GAE).

Advantages are constants of the loss: no gradient flows back through any of these ops.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .backends import BACKENDS
from .backends.operators import ops
from .segments import Segments

BASELINES = ("mean", "leave_one_out")
SCALES = ("std", None)
SINGLETONS = ("zero", "raw")
STEP_MODES = ("mean_std_norm", "mean_norm")
LEVELS = ("token", "turn", "sequence", "trajectory")
"""Where a scan ends: with the turn ("token", "turn") or with the sequence of turns ("sequence", "trajectory")."""


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    baseline: str = "mean",
    scale: str | None = "std",
    singleton: str = "zero",
    eps: float = 1e-6,
    validate: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Advantages of trajectories over their group: GRPO (mean, std), Dr. GRPO (mean, None), RLOO (leave_one_out, None).

        mean:          R_i - mean(R of the group)
        leave_one_out: R_i - mean(R of the others) = n/(n - 1)·(R_i - mean)
        std:           divided by the group's standard deviation (Bessel-corrected) + eps

    BPO's advantage over sibling nodes, A_k = G_k - mean(G_j of its siblings j), is (leave_one_out, None) with the
    branch node as the group: `rewards` are the returns of the continuations, `groups` the node that each left.

    Args:
        rewards: [n] float, one for each trajectory (or row).
        groups: [n] int32 or int64, any ids in any order; groups may differ in size.
        singleton: a group of one gets 0 ("zero") or its reward ("raw", as verl does).
        validate: check that rewards are finite (a host synchronisation on accelerators).

    Returns:
        [n] float32 (float64 for float64 rewards). Identical rewards in a group give exactly 0.

    Raises:
        TypeError, ValueError: a wrong argument, named; a reward that is not finite, with its position.
    """
    checks.floating("rewards", rewards)
    checks.integer("groups", groups)
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be [n], got {list(rewards.shape)}")
    checks.same_shape("groups", groups, rewards.shape, "rewards")
    checks.same_device("groups", groups, rewards.device, "rewards")
    checks.one_of("baseline", baseline, BASELINES)
    checks.one_of("scale", scale, SCALES)
    checks.one_of("singleton", singleton, SINGLETONS)
    checks.one_of("backend", backend, BACKENDS)
    eps = checks.positive("eps", eps)
    return ops.group_advantages(rewards.detach(), groups, baseline, scale, singleton, eps, validate, backend)


class StepAdvantages(NamedTuple):
    """What `step_advantages` returns, each [T], 0 for turns that are not valid.

    advantages: episode + step_weight·step, what the loss takes.
    episode, step: the two levels.
    returns: discounted returns of the step rewards, less the turn's penalty.
    """

    advantages: Tensor
    episode: Tensor
    step: Tensor
    returns: Tensor


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
    validate: bool = True,
    backend: str = "auto",
) -> StepAdvantages:
    """GiGPO's advantages of turns (Feng et al. 2025): their trajectory's against its group, plus their step's.

        advantage = episode + step_weight·step
        episode:  R of the trajectory, normalized over the trajectories of its group
        step:     G_t = r_t + gamma·G_{t+1}, normalized over the turns of the group with the same anchor

    Args:
        step_rewards: [T] float, r_t. The turns of a trajectory stand in order, anywhere in the batch.
        groups: [T] int32 or int64, the task of each turn.
        trajectories: [T] int32 or int64; need not differ between groups.
        anchors: [T] int32 or int64, equal where the turns began in the same state (`anchor_ids` makes them from
            observations); compared within a group only.
        gamma: discount of the step returns, in [0, 1].
        step_weight: weight of the step level.
        mode: "mean_std_norm" divides both levels by their standard deviation (Bessel-corrected) + eps, "mean_norm"
            neither.
        rows: take the statistics of the episode level over the group's turns, as verl-agent does, instead of over its
            trajectories: a long trajectory then weighs more.
        singleton: the episode level of a group of one (trajectory; with rows: turn) is 0 ("zero") or its reward
            ("raw", as in verl-agent). A turn whose anchor nobody shares always has a step level of 0.
        valid: [T] bool or numbers; turns that are padding take no part and may hold anything.
        penalties: [T] float, what a turn pays for itself, e.g. 0.1 for an invalid action. Taken off its step return
            before that is normalized, but off no other turn's; and off its episode level: with rows before
            normalization, otherwise after, where a group without variance cannot blow it up.
        episode_rewards: [T] float, R of the turn's trajectory, read at its first turn. None: Σ step_rewards.
        validate: check that rewards and penalties are finite (a host synchronisation on accelerators).

    Returns:
        StepAdvantages of float32 (float64 for float64 step_rewards). Identical rewards give exactly 0.

    Raises:
        TypeError, ValueError: a wrong argument, named; a number that is not finite, with its group and trajectory.
    """
    checks.floating("step_rewards", step_rewards)
    if step_rewards.dim() != 1:
        raise ValueError(f"step_rewards must be [T], got {list(step_rewards.shape)}")
    for name, ids in (("groups", groups), ("trajectories", trajectories), ("anchors", anchors)):
        checks.integer(name, ids)
        _like(name, ids, step_rewards, "step_rewards")
    for name, numbers in (("penalties", penalties), ("episode_rewards", episode_rewards)):
        if numbers is not None:
            checks.floating(name, numbers)
            _like(name, numbers, step_rewards, "step_rewards")
    if valid is not None:
        valid = checks.as_mask("valid", valid, step_rewards.shape, step_rewards.device, "step_rewards")
    gamma, step_weight = checks.fraction("gamma", gamma), checks.finite("step_weight", step_weight)
    checks.one_of("mode", mode, STEP_MODES)
    checks.one_of("singleton", singleton, SINGLETONS)
    checks.one_of("backend", backend, BACKENDS)
    penalties, episode_rewards = _detached(penalties), _detached(episode_rewards)
    return StepAdvantages(
        *ops.step_advantages(
            step_rewards.detach(), groups, trajectories, anchors, valid, penalties, episode_rewards,
            gamma, step_weight, mode, bool(rows), singleton, checks.positive("eps", eps), validate, backend,
        )
    )  # fmt: skip


def anchor_ids(
    anchors: Sequence[Hashable], groups: Sequence[Hashable] | Tensor, similarity: float | None = None
) -> Tensor:
    """Ids of the states that turns began in, int64 [T] on the CPU: equal within a group where the anchors agree.

    Args:
        anchors: [T] raw observations (with `similarity`: strings).
        groups: [T] task of each turn.
        similarity: None: anchors agree when they are equal. In (0, 1]: an anchor joins the first cluster of its
            group whose first member it resembles that much (difflib.SequenceMatcher.ratio), or starts its own.
    """
    if isinstance(groups, Tensor):
        groups = groups.tolist()
    if len(anchors) != len(groups):
        raise ValueError(f"groups must have an entry for each of the {len(anchors)} anchors, got {len(groups)}")
    if similarity is not None and not 0 < similarity <= 1:
        raise ValueError(f"similarity must lie in (0, 1] or be None, got {similarity!r}")
    ids: dict[tuple[Hashable, Hashable], int] = {}
    clusters: dict[Hashable, list[tuple[Hashable, int]]] = {}
    count = 0
    for group, anchor in zip(groups, anchors, strict=True):
        if (group, anchor) in ids:
            continue
        known = clusters.setdefault(group, [])
        cluster = None if similarity is None else _similar(anchor, known, similarity)
        if cluster is None:
            cluster, count = count, count + 1
            if similarity is not None:
                known.append((anchor, cluster))
        ids[group, anchor] = cluster
    return torch.tensor([ids[pair] for pair in zip(groups, anchors, strict=True)], dtype=torch.int64)


def _similar(anchor: Hashable, clusters: list[tuple[Hashable, int]], similarity: float) -> int | None:
    """The first of the (first member, id) clusters that the anchor resembles."""
    if not isinstance(anchor, str):
        raise TypeError(f"anchors must be strings with similarity, got {type(anchor).__name__}")
    for member, cluster in clusters:
        matcher = SequenceMatcher(None, anchor, str(member))
        # The first two are cheap upper bounds of the third.
        if all(r() >= similarity for r in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
            return cluster
    return None


def discounted_returns(
    rewards: Tensor,
    *,
    gamma: float = 0.95,
    mask: Tensor | None = None,
    segments: Segments | None = None,
    level: str = "sequence",
    backend: str = "auto",
) -> Tensor:
    """Discounted sums of what follows, G_t = r_t + gamma·G_{t+1}, within each segment.

    Args:
        rewards: [N] packed or [B, L] padded, float. Padded rows are segments, packed entries without `segments` one.
        gamma: discount, in [0, 1].
        mask: of the shape of rewards, bool or numbers. Masked entries are skipped: no discount for them, no matter
            what they hold, and their result is 0.
        segments: structure of packed entries. Where an entry is a turn: `Segments.from_lengths(torch.ones(T,
            dtype=torch.int64), turn_sequence=trajectories)`.
        level: what ends a scan: "sequence" (or "trajectory"): the last of a sequence's turns, which may stand anywhere
            but in order; "turn" (or "token"): the end of each turn.

    Returns:
        float32 (float64 for float64 rewards) of the shape of rewards. A reward that is not finite spoils what comes
        before it in its segment and nothing else.

    Raises:
        TypeError, ValueError: a wrong argument, named.
    """
    mask, order, cu, length = _scan("rewards", rewards, mask, segments, level, backend)
    gamma = checks.fraction("gamma", gamma)
    flat = rewards.detach().reshape(-1)
    return ops.discounted_returns(flat, mask, order, cu, length, gamma, backend).view(rewards.shape)


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    mask: Tensor | None = None,
    segments: Segments | None = None,
    level: str = "trajectory",
    bootstrap: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016) over the unmasked tokens of each segment.

        A_t = (r_t - V_t) + gamma·V_next + gamma·lam·A_next      returns = A + V

    `next` is the next unmasked token of the segment: masked tokens (prompts, observations, padding) are skipped, not
    stepped through. After the last one V is the segment's bootstrap value and A is 0. Nothing is whitened; see
    `masked_whiten`.

    Args:
        rewards: [N] packed or [B, L] padded, float. Padded rows are segments, packed tokens without `segments` one.
        values: of the shape of rewards, the critic's.
        gamma, lam: in [0, 1].
        mask: of the shape of rewards, bool or numbers. Masked tokens may hold anything.
        segments: structure of packed tokens.
        level: what ends a scan: "trajectory" (or "sequence"): the last of a sequence's turns, which may stand anywhere
            but in order, so that a turn's last token bootstraps from the next turn's first value; "token" (or
            "turn"): the end of each turn, as in verl-agent.
        bootstrap: [segments] float, the value after the last token: 0 for segments that ended, the critic's value of
            the state in which a truncated one was cut off. One for each turn, sequence or row, as `level` says.
            None: all 0.

    Returns:
        advantages, returns: float32 (float64 where rewards or values are) of the shape of rewards, 0 where masked. A
        reward or value that is not finite spoils what comes before it in its segment and nothing else.

    Raises:
        TypeError, ValueError: a wrong argument, named.
    """
    mask, order, cu, length = _scan("rewards", rewards, mask, segments, level, backend)
    checks.floating("values", values)
    _like("values", values, rewards, "rewards")
    gamma, lam = checks.fraction("gamma", gamma), checks.fraction("lam", lam)
    if bootstrap is not None:
        checks.floating("bootstrap", bootstrap)
        count = cu.numel() - 1 if cu is not None else rewards.shape[0] if rewards.dim() == 2 else 1
        if tuple(bootstrap.shape) != (count,):
            raise ValueError(f"bootstrap must be [segments] = [{count}], got {list(bootstrap.shape)}")
        checks.same_device("bootstrap", bootstrap, rewards.device, "rewards")
    advantages, returns = ops.gae(
        rewards.detach().reshape(-1), values.detach().reshape(-1), mask, _detached(bootstrap),
        order, cu, length, gamma, lam, backend,
    )  # fmt: skip
    return advantages.view(rewards.shape), returns.view(rewards.shape)


def masked_whiten(
    x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, eps: float = 1e-8, backend: str = "auto"
) -> Tensor:
    """(x - mean)/sqrt(var + eps) over the unmasked entries; var is Bessel-corrected and two-pass.

    Args:
        x: [...] float.
        mask: of the shape of x, bool or numbers; masked entries may hold anything and become 0.
        shift_mean: False adds the mean again.
        eps: added to the variance, > 0.

    Returns:
        float32 (float64 for float64 x) of the shape of x. Identical entries, a single one among them, become exactly
        0 (without shift_mean: keep their value); no unmasked entry gives zeros.

    Raises:
        TypeError, ValueError: a wrong argument, named.
    """
    checks.floating("x", x)
    if mask is not None:
        mask = checks.as_mask("mask", mask, x.shape, x.device, "x").reshape(-1)
    eps = checks.positive("eps", eps)
    checks.one_of("backend", backend, BACKENDS)
    return ops.masked_whiten(x.detach().reshape(-1), mask, bool(shift_mean), eps, backend).view(x.shape)


def _scan(
    name: str, x: Tensor, mask: Tensor | None, segments: Segments | None, level: str, backend: str
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Flat mask, and the order, offsets and length of backends.common.ScanLayout."""
    checks.floating(name, x)
    if x.dim() not in (1, 2):
        raise ValueError(f"{name} must be [N] or [B, L], got {list(x.shape)}")
    checks.one_of("level", level, LEVELS)
    checks.one_of("backend", backend, BACKENDS)
    if mask is not None:
        mask = checks.as_mask("mask", mask, x.shape, x.device, name).reshape(-1)
    if segments is None:
        return mask, None, None, x.shape[-1]
    if x.dim() == 2:
        raise ValueError(f"segments describe packed tokens: {name} must be [N], got {list(x.shape)}")
    if segments.num_tokens != x.numel():
        raise ValueError(f"segments must cover the N = {x.numel()} entries of {name}, got {segments.num_tokens}")
    checks.same_device("segments", segments.cu_turns, x.device, name)
    if level in ("token", "turn"):
        return mask, None, segments.cu_turns, 0
    return mask, segments.sequence_order, segments.cu_sequences, 0


def _like(name: str, x: Tensor, model: Tensor, model_name: str) -> None:
    checks.same_shape(name, x, model.shape, model_name)
    checks.same_device(name, x, model.device, model_name)


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
