"""Rewards and advantages against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from rspo_toys import make_trajectory

from rspo.batch import Batch
from rspo.config import ConfigError, EstimatorConfig, RewardConfig
from rspo.estimators import make_estimator
from rspo.metrics import identical_states, zero_advantages
from rspo.rewards import NonFiniteError, environment_dense_reward, make_dense_reward, outcome_reward, relabel
from rspo.trajectory import Trajectory


def advantages(trajectories: list[Trajectory], **settings: object) -> list[np.ndarray]:
    make_estimator("grpo", EstimatorConfig(**settings))(trajectories)  # type: ignore[arg-type]
    return [t.advantages for t in trajectories if t.advantages is not None]


def short_success_and_long_failure() -> list[Trajectory]:
    return [make_trajectory(0, 0, turns=2, reward=10), make_trajectory(0, 1, turns=8)]


def test_trajectory_statistics() -> None:
    success, failure = advantages(short_success_and_long_failure())
    assert success == pytest.approx([0.7071] * 2, abs=1e-4)
    assert failure == pytest.approx([-0.7071] * 8, abs=1e-4)


def test_row_statistics_weigh_long_trajectories_more() -> None:
    success, failure = advantages(short_success_and_long_failure(), rows=True)
    assert success == pytest.approx([1.897] * 2, abs=1e-3)
    assert failure == pytest.approx([-0.474] * 8, abs=1e-3)


def test_without_deviation() -> None:
    success, failure = advantages(short_success_and_long_failure(), std=False)
    assert (success[0], failure[0]) == (5.0, -5.0)


def test_groups_are_apart_and_need_not_be_sorted() -> None:
    trajectories = [
        make_trajectory(1, 0, reward=10),
        make_trajectory(0, 0),
        make_trajectory(1, 1, reward=10),
        make_trajectory(0, 1, reward=10),
    ]
    values = [float(a[0]) for a in advantages(trajectories)]
    assert values == pytest.approx([0.0, -0.7071, 0.0, 0.7071], abs=1e-4)
    assert zero_advantages(Batch.from_trajectories(trajectories)) == {"zero_advantages": 0.5}


def test_invalid_action_penalty_stays_with_its_turn() -> None:
    trajectories = short_success_and_long_failure()
    trajectories[1].turns[3].is_action_valid = False
    success, failure = advantages(trajectories, invalid_penalty=0.1)
    assert success == pytest.approx([0.7071] * 2, abs=1e-4)
    expected = np.full(8, -0.7071)
    expected[3] -= 0.1
    assert failure == pytest.approx(expected, abs=1e-4)


def test_one_invalid_row_among_successes() -> None:
    """80 rows of success, one invalid: a penalty over rows becomes -8.8 deviations, over trajectories it stays 0.1."""
    group = [make_trajectory(0, i, turns=10, reward=10) for i in range(8)]
    group[2].turns[4].is_action_valid = False
    assert advantages(group, invalid_penalty=0.1)[2][4] == pytest.approx(-0.1)
    assert advantages(group, invalid_penalty=0.1, rows=True)[2][4] == pytest.approx(-8.83, abs=0.01)


def test_relabelling_swaps_rewards() -> None:
    trajectory = make_trajectory(turns=3, reward=10)
    relabel([trajectory], environment_dense_reward)
    assert trajectory.rewards == pytest.approx([0.0, 0.1, 0.2])
    relabel([trajectory], outcome_reward)
    assert trajectory.rewards is not None
    assert trajectory.rewards.tolist() == [0, 0, 10]


def turn_number(trajectory: Trajectory) -> list[float]:
    return [float(i) for i in range(len(trajectory))]


def test_dense_rewards_by_name_with_scale_and_noise() -> None:
    rng = np.random.default_rng(0)
    config = RewardConfig(dense=f"{__name__}:turn_number", dense_scale=10.0)
    assert make_dense_reward(config, False, rng)(make_trajectory(turns=3)).tolist() == [0, 10, 20]
    noisy = make_dense_reward(RewardConfig(dense_noise=0.3), True, rng)
    values = np.concatenate([noisy(make_trajectory(turns=1)) for _ in range(2000)])
    assert values.std() == pytest.approx(0.3, rel=0.05)


def test_dense_reward_must_exist() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"no dense reward: set rewards\.dense"):
        make_dense_reward(RewardConfig(), False, rng)
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_dense_reward(RewardConfig(dense="rspo:nothing_there"), False, rng)


def test_non_finite_reward_names_the_trajectory() -> None:
    trajectory = make_trajectory(group=3, index=5, turns=2, reward=float("nan"))
    with pytest.raises(NonFiniteError, match=r"turn 1 of trajectory 5 of group 3"):
        relabel([trajectory], outcome_reward)


def test_identical_states_are_counted_within_groups() -> None:
    # Anchors alternate between two places: 4 turns visit each twice, in two trajectories of one group and one apart.
    same = [make_trajectory(0, i, turns=4) for i in range(2)]
    apart = [make_trajectory(1, 0, turns=4)]
    counts = identical_states([*same, *apart])
    assert counts["identical_states"] == (8 - 2) + (4 - 2)
    assert counts["identical_states_per_turn"] == 8 / 12
