"""The replay buffer of one loop, and the order in which its trajectories are replayed (the paper's section 4.2.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..config import SwapConfig
from ..data.trajectory import REPLAY, Trajectory


class ReplayBuffer:
    """Trajectories with their advantages, handed out without replacement until all were used.

    Advantages against a group must have been computed on full groups before: after a selection of successes only,
    normalising again would make them all 0.

    Args:
        config: `sampling`, `unit` and `success_only` decide the order.
        rng: breaks ties and draws uniform samples.
    """

    def __init__(self, config: SwapConfig, rng: np.random.Generator) -> None:
        self.config = config
        self.rng = rng
        self.trajectories: list[Trajectory] = []
        self._waiting: list[Trajectory] = []

    def __len__(self) -> int:
        return len(self.trajectories)

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Add complete, labelled groups, other than those of earlier calls; all are ordered anew at the next sample."""
        for trajectory in trajectories:
            if trajectory.rewards is None:
                raise ValueError(f"{trajectory} needs rewards before it enters the buffer")
        first = 1 + max((trajectory.group for trajectory in self.trajectories), default=-1)
        self.trajectories += [replace(t, source=REPLAY, group=first + t.group) for t in trajectories]
        self._waiting = []

    def clear(self) -> None:
        """D <- ∅."""
        self.trajectories, self._waiting = [], []

    def sample(self, size: int) -> list[Trajectory]:
        """The next `size` trajectories; starts over when all were used.

        Fewer only if nothing (else) is eligible: an empty buffer, or with `success_only` too few successes. With
        unit "group" the last group may be cut.
        """
        chosen: list[Trajectory] = []
        while len(chosen) < size:
            if not self._waiting:
                if chosen and self.config.success_only:
                    break
                self._waiting = self._ordered()
                if not self._waiting:
                    break
            wanted = size - len(chosen)
            chosen += self._waiting[:wanted]
            self._waiting = self._waiting[wanted:]
        return chosen

    def _ordered(self) -> list[Trajectory]:
        """Every eligible trajectory, the first to be replayed first."""
        eligible = [t for t in self.trajectories if t.won or not self.config.success_only]
        # A random order first: sorting is stable, so ties stay random.
        shuffled = [eligible[i] for i in self.rng.permutation(len(eligible))]
        by_group = self.config.unit == "group" or self.config.sampling == "variance"
        if by_group:
            return [trajectory for group in self._ordered_groups(shuffled) for trajectory in group]
        if self.config.sampling == "random":
            return shuffled
        return sorted(shuffled, key=_reward_key, reverse=True)

    def _ordered_groups(self, shuffled: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """The eligible members of each group, by the rewards of the whole group."""
        groups: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in shuffled:
            groups[trajectory.group].append(trajectory)
        if self.config.sampling == "random":
            return list(groups.values())
        returns: dict[int, list[float]] = defaultdict(list)
        for trajectory in self.trajectories:
            returns[trajectory.group].append(_return(trajectory))
        score = np.var if self.config.sampling == "variance" else np.mean
        ranks = {group: float(score(sorted(values))) for group, values in returns.items()}
        return sorted(groups.values(), key=lambda members: ranks[members[0].group], reverse=True)


def _return(trajectory: Trajectory) -> float:
    assert trajectory.rewards is not None  # `add` has seen to it
    return float(trajectory.rewards.sum())


def _reward_key(trajectory: Trajectory) -> tuple[float, float, float]:
    """Highest reward first; among equals the better task score, then the larger advantage.

    Equal rewards differ in advantage by their group: a success among failures teaches more than one among successes,
    whose advantage is 0 (methods with a critic have none yet). The best turn stands for the trajectory, because
    penalties lower single turns only.
    """
    best = 0.0 if trajectory.advantages is None else float(trajectory.advantages.max())
    return _return(trajectory), trajectory.task_score, best
