"""What is reported of a batch of trajectories."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..data.batch import Batch
from ..data.trajectory import Trajectory

Z_95 = 1.959964
"""The standard normal's quantile of a 95 % interval."""


@dataclass(frozen=True)
class SuccessRate:
    """Successes among independent episodes."""

    successes: int
    episodes: int

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> SuccessRate:
        """Of at least one trajectory."""
        return cls(sum(trajectory.won for trajectory in trajectories), len(trajectories))

    @property
    def value(self) -> float:
        """The share of successes."""
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval: the rates p with |p̂ - p| ≤ z·√(p(1 - p)/n), z = 1.96, which are

            (p̂ + z²/2n ± z·√(p̂(1 - p̂)/n + z²/4n²)) / (1 + z²/n).

        It stays inside [0, 1] and has a width also at 0 and n successes. It covers the chance of which episodes
        succeeded, not how runs with other seeds differ.
        """
        n, p = self.episodes, self.value
        middle = p + Z_95**2 / (2 * n)
        half = Z_95 * math.sqrt(p * (1 - p) / n + (Z_95 / (2 * n)) ** 2)
        scale = 1 + Z_95**2 / n
        return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def success_by_type(trajectories: Sequence[Trajectory]) -> dict[str, SuccessRate]:
    """Success of each kind of task, sorted by name; empty where the environment has no kinds."""
    kinds = sorted({trajectory.task_type for trajectory in trajectories} - {""})
    return {kind: SuccessRate.of([t for t in trajectories if t.task_type == kind]) for kind in kinds}


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over trajectories: success and truncation rate, outcome reward, task score, the environment's dense return,
    turns; where they are labelled, the sum of the rewards that are trained on; and the share of invalid actions among
    turns."""
    turns = sum(len(t) for t in trajectories)
    invalid = sum(not turn.is_action_valid for t in trajectories for turn in t.turns)
    trained = [float(t.rewards.sum()) for t in trajectories if t.rewards is not None]
    return {
        "success": float(np.mean([t.won for t in trajectories])),
        "reward": float(np.mean([t.outcome for t in trajectories])),
        "task_score": float(np.mean([t.task_score for t in trajectories])),
        "dense_return": float(np.mean([t.dense_return for t in trajectories])),
        "turns": turns / len(trajectories),
        "truncated": float(np.mean([t.truncated for t in trajectories])),
        "invalid_actions": invalid / max(turns, 1),
        **({"trained_return": float(np.mean(trained))} if trained else {}),
    }


def identical_states(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Repeated visits, Σ (visits - 1) over the anchors of each group (the paper's Table 6): raw, and per turn,
    because methods sample different numbers of turns."""
    visits = Counter((t.group, turn.anchor) for t in trajectories for turn in t.turns)
    turns = sum(visits.values())
    repeated = turns - len(visits)
    return {"identical_states": float(repeated), "identical_states_per_turn": repeated / max(turns, 1)}


def zero_advantages(batch: Batch) -> dict[str, float]:
    """Share of trajectories without any advantage, of which nothing is learned: on-policy and replayed ones."""
    trajectory = batch.turn_trajectory[batch.token_turn]
    count = int(trajectory.max()) + 1
    teaches = batch.advantages.new_zeros(count).scatter_reduce_(0, trajectory, batch.advantages.abs(), "amax") > 0
    replayed = torch.zeros_like(teaches)
    replayed[trajectory[batch.is_replay]] = True
    shares = {"zero_advantages": teaches[~replayed], "replay/zero_advantages": teaches[replayed]}
    return {name: 1.0 - float(part.float().mean()) for name, part in shares.items() if len(part)}
