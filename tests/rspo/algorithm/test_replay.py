"""The buffer's order: reward first, ties by task score, advantage, then chance; no trajectory twice before its turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rspo_toys import make_trajectory

from rspo.algorithm.replay import ReplayBuffer
from rspo.config import SwapConfig
from rspo.data.trajectory import REPLAY, Trajectory


def buffer_of(trajectories: list[Trajectory], seed: int = 0, **settings: object) -> ReplayBuffer:
    buffer = ReplayBuffer(SwapConfig(**settings), np.random.default_rng(seed))  # type: ignore[arg-type]
    buffer.add(trajectories)
    return buffer


def names(trajectories: list[Trajectory]) -> list[tuple[int, int]]:
    return [(t.group, t.index) for t in trajectories]


def test_successes_from_mixed_groups_come_first() -> None:
    mixed = [make_trajectory(0, 0, reward=10, advantage=2.5), make_trajectory(0, 1, advantage=-0.3)]
    solved = [make_trajectory(1, i, reward=10, advantage=0.0) for i in range(2)]
    buffer = buffer_of([*mixed, *solved])
    drawn = names(buffer.sample(4))
    assert drawn[0] == (0, 0)
    assert set(drawn[1:3]) == {(1, 0), (1, 1)}
    assert drawn[3] == (0, 1)


def test_task_score_breaks_ties_before_the_advantage() -> None:
    near = make_trajectory(0, 0, task_score=0.8, advantage=-0.4)
    far = make_trajectory(1, 0, task_score=0.1, advantage=-0.1)
    assert names(buffer_of([far, near]).sample(2)) == [(0, 0), (1, 0)]


def test_full_ties_are_broken_by_the_seed() -> None:
    tied = [make_trajectory(g, 0, reward=10, advantage=1.0) for g in range(12)]
    first = names(buffer_of(tied, seed=0).sample(12))
    assert first == names(buffer_of(tied, seed=0).sample(12))
    assert first != names(buffer_of(tied, seed=1).sample(12))
    assert first != sorted(first)


def test_no_replacement_until_exhausted_then_it_starts_over() -> None:
    buffer = buffer_of([make_trajectory(0, i, reward=float(i), advantage=0.0) for i in range(5)])
    assert names(buffer.sample(3)) == [(0, 4), (0, 3), (0, 2)]
    assert names(buffer.sample(4)) == [(0, 1), (0, 0), (0, 4), (0, 3)]


def test_too_few_successes_are_filled_with_the_next_best_or_not() -> None:
    trajectories = [make_trajectory(0, 0, reward=10, advantage=1.0)]
    trajectories += [make_trajectory(0, i, advantage=-1.0) for i in range(1, 4)]
    filled = buffer_of(trajectories).sample(3)
    assert [t.won for t in filled] == [True, False, False]
    only = buffer_of(trajectories, success_only=True)
    assert names(only.sample(3)) == [(0, 0)]
    assert names(only.sample(3)) == [(0, 0)], "the next update may use it again"
    assert buffer_of(trajectories[1:], success_only=True).sample(3) == []


def test_variance_takes_whole_groups() -> None:
    flat = [make_trajectory(0, i, reward=10, advantage=0.0) for i in range(2)]
    varied = [make_trajectory(1, 0, reward=10, advantage=0.7), make_trajectory(1, 1, advantage=-0.7)]
    assert {t.group for t in buffer_of([*flat, *varied], sampling="variance").sample(2)} == {1}


@pytest.mark.parametrize(("sampling", "first"), [("variance", 1), ("reward", 0)])
def test_groups_of_which_only_successes_are_taken_are_ranked_whole(sampling: str, first: int) -> None:
    """Among successes alone every group would be like the others: no variance, the same mean."""
    for seed in range(8):
        easy = [make_trajectory(0, i, reward=10, advantage=0.0) for i in range(4)]
        hard = [make_trajectory(1, i, reward=10 * (i > 1), advantage=0.0) for i in range(4)]
        buffer = buffer_of([*easy, *hard], seed=seed, sampling=sampling, unit="group", success_only=True)
        drawn = buffer.sample(6)
        assert all(t.won for t in drawn)
        assert drawn[0].group == first
        assert len(drawn) == 6


def test_groups_by_mean_reward() -> None:
    better = [make_trajectory(0, i, reward=10 * (i > 0), advantage=0.0) for i in range(3)]
    worse = [make_trajectory(1, i, reward=10 * (i > 1), advantage=0.0) for i in range(3)]
    drawn = buffer_of([*worse, *better], unit="group").sample(6)
    assert [t.group for t in drawn] == [0, 0, 0, 1, 1, 1]


def test_random_sampling_is_uniform() -> None:
    trajectories = [make_trajectory(0, 0, reward=10, advantage=1.0)]
    trajectories += [make_trajectory(0, i, advantage=0.0) for i in range(1, 4)]
    firsts = [buffer_of(trajectories, seed=s, sampling="random").sample(1)[0].index for s in range(200)]
    assert all(30 < firsts.count(i) < 70 for i in range(4))


def test_entries_are_marked_and_keep_their_advantages() -> None:
    original = make_trajectory(0, 0, reward=10, advantage=2.475)
    (drawn,) = buffer_of([original]).sample(1)
    assert drawn.source == REPLAY
    assert original.source != REPLAY, "a trajectory that is still in use elsewhere is not changed"
    assert drawn.advantages is not None
    assert drawn.advantages.tolist() == [np.float32(2.475)] * 2


def test_empty_and_cleared_buffers_give_nothing() -> None:
    buffer = buffer_of([make_trajectory(0, 0, advantage=0.0)])
    buffer.clear()
    assert len(buffer) == 0
    assert buffer.sample(3) == []


def test_rewards_are_required() -> None:
    with pytest.raises(ValueError, match=r"trajectory 0 of group 0 .* needs rewards before it enters"):
        buffer_of([replace(make_trajectory(0, 0), rewards=None)])


def test_groups_of_different_calls_stay_apart() -> None:
    """As when the buffer holds the trajectories of several updates, whose groups are numbered from 0 each."""
    buffer = buffer_of([make_trajectory(0, i, reward=10.0 * i, advantage=1.0) for i in range(2)], sampling="variance")
    buffer.add([make_trajectory(0, i, advantage=0.0, seed=1) for i in range(2)])
    assert sorted({t.group for t in buffer.trajectories}) == [0, 1]
    assert {t.outcome for t in buffer.sample(2)} == {0.0, 10.0}
