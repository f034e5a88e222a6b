"""Advantages of turns in verl's registry: rows are turns of trajectories, as in the per_turn layout."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from rspo_kernels import anchor_ids, group_advantages, step_advantages

TURN_FIELDS = {"trajectory": "trajectories", "anchor": "anchors"}
"""Of a batch's `non_tensor_batch`, and the arguments that they become."""


def gigpo_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    *,
    trajectories: Sequence[Hashable] | None = None,
    anchors: Sequence[Hashable] | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """GiGPO, `rspo_kernels.step_advantages`: a trajectory against its group plus a turn against those of its state.

    Args:
        token_level_rewards: [B, L] float; a row's sum is its turn's reward.
        response_mask: [B, L].
        index: [B], verl's uid: the task of each row.
        trajectories: [B], the trajectory of each row; its rows stand in order.
        anchors: [B], the raw observation that each turn began with.
        config: verl's algorithm section. `gamma` discounts the step level, verl's 1.0 as it is (GiGPO: 0.95);
            `norm_adv_by_std_in_grpo` divides by deviations; `gigpo_step_weight` and `gigpo_similarity` may be added.

    Returns:
        advantages, returns: [B, L] each; the discounted returns of the turns.

    Raises:
        ValueError: no trajectories or anchors, which verl itself passes to no estimator: call `compute_advantage`.
    """
    if trajectories is None or anchors is None:
        raise ValueError(
            "gigpo needs the trajectory and the anchor of each row; put them into non_tensor_batch['trajectory'] and"
            " ['anchor'] and call rspo.integrations.verl.compute_advantage in the place of verl's"
        )
    groups = _ids(index)
    result = step_advantages(
        token_level_rewards.sum(-1),
        groups,
        _ids(trajectories),
        anchor_ids(list(anchors), groups, _setting(config, "gigpo_similarity", None)),
        gamma=_setting(config, "gamma", 1.0),
        step_weight=_setting(config, "gigpo_step_weight", 1.0),
        mode="mean_std_norm" if _setting(config, "norm_adv_by_std_in_grpo", True) else "mean_norm",
    )
    return _spread(result.advantages, response_mask), _spread(result.returns, response_mask)


def grpo_advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    *,
    trajectories: Sequence[Hashable] | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """GRPO over trajectories, however many rows each has; verl's "grpo" counts a trajectory once for each row.

    Arguments and results as of `gigpo_advantages`. trajectories None: each row is one.
    """
    rewards = token_level_rewards.sum(-1)
    of_row = torch.arange(len(rewards)) if trajectories is None else _ids(trajectories)
    count = int(of_row.max()) + 1
    totals = rewards.new_zeros(count).index_add(0, of_row, rewards)
    groups = torch.zeros(count, dtype=torch.int64).scatter(0, of_row, _ids(index))
    scale = "std" if _setting(config, "norm_adv_by_std_in_grpo", True) else None
    advantages = group_advantages(totals, groups, scale=scale)[of_row]
    return _spread(advantages, response_mask), _spread(totals[of_row], response_mask)


def compute_advantage(data: DataProto, adv_estimator: str, config: Any = None) -> DataProto:
    """verl's function of this name, for estimators that need to know more of a row than its uid.

    Of `data.non_tensor_batch` it passes on "trajectory" and "anchor". Writes advantages and returns [B, L] into
    `data.batch`, which must have token_level_rewards and response_mask, and returns `data`.
    """
    fields = data.non_tensor_batch
    known = {argument: fields[name] for name, argument in TURN_FIELDS.items() if name in fields}
    data.batch["advantages"], data.batch["returns"] = get_adv_estimator_fn(adv_estimator)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        index=fields["uid"],
        config=config,
        **known,
    )
    return data


def _ids(names: Sequence[Hashable]) -> Tensor:
    """Equal names as equal numbers from 0, int64 [B]."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)


def _setting(config: Any, name: str, default: Any) -> Any:
    return default if config is None else config.get(name, default)


def _spread(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.unsqueeze(-1) * mask
