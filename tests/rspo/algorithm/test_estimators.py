"""Rewards and advantages against values worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from rspo_toys import make_trajectory

from rspo.algorithm.estimators import Estimator, make_estimator
from rspo.algorithm.metrics import identical_states, zero_advantages
from rspo.algorithm.rewards import NonFiniteError, environment_dense_reward, make_dense_reward, outcome_reward, relabel
from rspo.config import ConfigError, EstimatorConfig, RewardConfig, default_config
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY, Trajectory


def advantages(trajectories: list[Trajectory], name: str = "grpo", **settings: object) -> list[np.ndarray]:
    make_estimator(name, EstimatorConfig(**settings))(trajectories)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo"])
@pytest.mark.parametrize(("on", "paying"), [("refused", [3, 5]), ("format", [5])])
def test_who_pays_the_penalty_is_a_setting(name: str, on: str, paying: list[int]) -> None:
    """Turn 3 was well formed and refused by the environment, turn 5 badly formed."""
    trajectories = short_success_and_long_failure()
    trajectories[1].turns[3].is_action_valid = False
    trajectories[1].turns[5].is_action_valid = trajectories[1].turns[5].is_well_formed = False
    _, free = advantages(trajectories, name, invalid_penalty_on=on, step_weight=0.0)
    _, paid = advantages(trajectories, name, invalid_penalty_on=on, step_weight=0.0, invalid_penalty=0.1)
    assert (free - paid).nonzero()[0].tolist() == paying
    rounding = 10 * float(np.finfo(np.float32).eps)  # advantages are of the size of the reward, 10
    assert (free - paid)[paying] == pytest.approx(0.1, abs=rounding)


def test_one_invalid_row_among_successes() -> None:
    """80 rows of success, one invalid: a penalty over rows becomes -8.8 deviations, over trajectories it stays 0.1."""
    group = [make_trajectory(0, i, turns=10, reward=10) for i in range(8)]
    group[2].turns[4].is_action_valid = False
    assert advantages(group, invalid_penalty=0.1)[2][4] == pytest.approx(-0.1)
    assert advantages(group, invalid_penalty=0.1, rows=True)[2][4] == pytest.approx(-8.83, abs=0.01)


def test_rloo_compares_with_the_others() -> None:
    rewards = [10.0, 0.0, 10.0, 4.0]
    group = [make_trajectory(0, i, reward=reward, invalid=[1] if i == 1 else []) for i, reward in enumerate(rewards)]
    seen = advantages(group, "rloo", invalid_penalty=0.1)
    others = [(sum(rewards) - reward) / 3 for reward in rewards]
    assert [a[0] for a in seen] == pytest.approx(np.subtract(rewards, others).tolist(), abs=1e-5)
    assert seen[1][1] == pytest.approx(-8.1, abs=1e-5)


def test_gigpo_adds_the_step_level() -> None:
    """Two trajectories of two turns that begin in the same state, and end in another one: by hand, without deviations.
    Returns are 0.5·10 and 10 of the success, 0 of the failure."""
    group = [make_trajectory(0, 0, reward=10.0), make_trajectory(0, 1)]
    seen = advantages(group, "gigpo", std=False, gamma=0.5)
    assert seen[0] == pytest.approx([5.0 + 2.5, 5.0 + 5.0])
    assert seen[1] == pytest.approx([-5.0 - 2.5, -5.0 - 5.0])
    alone = [
        replace(t, turns=[replace(turn, anchor=4 * turn.anchor + f"{t.index}") for turn in t.turns]) for t in group
    ]
    assert advantages(alone, "gigpo", std=False)[0] == pytest.approx([5.0, 5.0]), "no state is shared"
    similar = advantages(alone, "gigpo", std=False, gamma=0.5, similarity=0.9)
    assert similar[0] == pytest.approx(seen[0]), "they differ in one letter of 29"
    assert advantages(group, "gigpo", step_weight=0.0)[0] == pytest.approx([0.7071] * 2, abs=1e-4)
    assert advantages(group, "gigpo")[0] == pytest.approx([1.4142] * 2, abs=1e-4)


def test_gigpo_penalties_stay_with_their_turn() -> None:
    group = [make_trajectory(0, 0, reward=10.0), make_trajectory(0, 1, invalid=[0])]
    plain = [make_trajectory(0, 0, reward=10.0), make_trajectory(0, 1)]
    with_penalty, without = (advantages(g, "gigpo", std=False, invalid_penalty=0.1) for g in (group, plain))
    # Off its own episode level and step return; the step level's mean of two is lower by half of it.
    assert with_penalty[1][0] - without[1][0] == pytest.approx(-0.1 - 0.05, abs=1e-6)
    assert with_penalty[0][0] - without[0][0] == pytest.approx(0.05, abs=1e-6)
    assert with_penalty[1][1] == without[1][1]


def test_reinforce_plus_plus_normalizes_over_the_mixed_batch() -> None:
    made = [make_trajectory(0, 0, turns=3, reward=10.0), make_trajectory(1, 0), make_trajectory(2, 0, reward=4.0)]
    made[2].source = REPLAY
    estimator = make_estimator("reinforce++", EstimatorConfig(gamma=0.5, invalid_penalty=0.0))
    batch = estimator.at_update(Batch.from_trajectories(made))
    returns = np.concatenate([np.repeat([2.5, 5.0, 10.0], [1, 2, 1]), np.zeros(3), np.repeat([2.0, 4.0], [1, 2])])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    assert batch.advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


class Constant(Estimator):
    """An estimator of a user's own."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            trajectory.advantages = np.full(len(trajectory), 7.0, dtype=np.float32)


def test_estimators_of_ones_own_go_by_class_path() -> None:
    assert advantages([make_trajectory()], f"{__name__}:Constant")[0].tolist() == [7.0, 7.0]
    config = default_config("rspo", f"{__name__}:Constant")
    assert config.title == "RSPO+CONSTANT"
    with pytest.raises(ConfigError, match=r"subclass of rspo\.algorithm\.estimators\.Estimator, got"):
        make_estimator("math:sqrt", EstimatorConfig())
    with pytest.raises(ConfigError, match="no_such_module"):
        make_estimator("no_such_module:Name", EstimatorConfig())
    with pytest.raises(ConfigError, match=r"base must be one of 'grpo', .* or a class path .* got 'grp'"):
        default_config("rspo", "grp")


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
