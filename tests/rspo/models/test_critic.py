"""PPO: values, their loss, advantages over tokens, turns and inside turns, at the update and on replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rspo_toys import make_trajectory, small_config, small_policy
from torch import Tensor

from rspo.algorithm.estimators import make_estimator
from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import prepare, update
from rspo.config import Config, EstimatorConfig
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY, Trajectory
from rspo.models.agent import Agent
from rspo.models.critic import score_values, value_loss
from rspo.runs.checkpoint import load_checkpoint, save_checkpoint


def trajectories() -> list[Trajectory]:
    """Of 2 to 4 turns; the second ends with a reward, the third was cut off, the fourth is replayed."""
    made = [make_trajectory(0, i, turns=2 + i % 3, reward=10.0 * (i == 1)) for i in range(4)]
    made[2].truncated, made[2].final_prompt_ids = True, np.array([5, 6, 7])
    made[3].source = REPLAY
    return made


def ppo_config(*flags: str) -> Config:
    return apply_flags(small_config(method="ppo"), list(flags))


def agent_of(config: Config, seed: int = 0) -> Agent:
    torch.manual_seed(seed)
    agent = Agent(small_policy(), config, has_critic=True)
    assert agent.critic is not None
    torch.nn.init.normal_(agent.critic.head.weight, std=0.1)  # at 0, as it starts, every value is 0
    return agent


def prepared(agent: Agent, config: Config, made: list[Trajectory] | None = None) -> Batch:
    made = trajectories() if made is None else made
    batch = Batch.from_trajectories(made, config.env.layout)
    return make_estimator("ppo", config.estimator).at_update(prepare(agent, batch, made, config, None))


def gae_by_hand(rewards: list[float], values: list[float], after: float, gamma: float, lam: float) -> list[float]:
    advantages, following = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * (values[t + 1] if t + 1 < len(values) else after) - values[t]
        advantages[t] = following = delta + gamma * lam * following
    return advantages


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_values_are_of_the_states_in_which_tokens_were_chosen(backbone: str) -> None:
    config = ppo_config(f"critic.backbone={backbone}")
    agent = agent_of(config)
    batch = prepared(agent, config)
    hidden = agent.policy.model.base_model(batch.input_ids).last_hidden_state[batch.token_row, batch.token_column]
    assert agent.critic is not None
    assert batch.values is not None
    torch.testing.assert_close(batch.values, agent.critic.of_hidden(hidden).detach(), atol=1e-5, rtol=1e-4)
    assert (agent.critic.body is None) == (backbone == "shared")
    assert (agent.critic_optimizer is None) == (backbone == "shared")


def test_trajectory_level_steps_over_tokens_and_bootstraps_what_was_cut_off() -> None:
    flags = ["estimator.whiten=false", "estimator.gamma=0.9", "estimator.lam=0.8", "estimator.bootstrap=true"]
    config = ppo_config(*flags)
    agent = agent_of(config)
    made = trajectories()
    batch = prepared(agent, config, made)
    assert batch.values is not None
    assert batch.returns is not None
    assert agent.critic is not None
    token_trajectory = batch.turn_trajectory[batch.token_turn]
    states = Batch.from_prompts([np.array([5, 6, 7])])
    (after,) = score_values(agent.critic, agent.policy, states, 64).tolist()
    assert after != 0
    for i, trajectory in enumerate(made):
        tokens = (token_trajectory == i).nonzero().squeeze(-1)
        values = batch.values[tokens].tolist()
        rewards = [0.0] * len(tokens)
        rewards[-1] = trajectory.outcome
        expected = gae_by_hand(rewards, values, after if i == 2 else 0.0, 0.9, 0.8)
        assert batch.advantages[tokens].tolist() == pytest.approx(expected, abs=1e-4)
        assert batch.returns[tokens].tolist() == pytest.approx(np.add(expected, values).tolist(), abs=1e-4)


def test_without_bootstrap_a_cut_off_trajectory_ends_with_zero() -> None:
    config = ppo_config()
    batch = prepared(agent_of(config), config)
    assert batch.bootstrap is not None
    assert not batch.bootstrap.any()


def test_turn_level_takes_one_value_for_each_turn() -> None:
    config = ppo_config("estimator.whiten=false", "estimator.level=turn", "estimator.gamma=0.9")
    made = [make_trajectory(0, 0, turns=4, reward=10.0)]
    batch = prepared(agent_of(config), config, made)
    assert batch.values is not None
    first = torch.cumsum(batch.turn_lengths, 0) - batch.turn_lengths
    expected = gae_by_hand([0, 0, 0, 10.0], batch.values[first].tolist(), 0.0, 0.9, 0.95)
    assert batch.advantages[first].tolist() == pytest.approx(expected, abs=1e-4)
    assert batch.advantages.tolist() == batch.advantages[first][batch.token_turn].tolist()


def test_token_level_ends_each_turn_with_the_total_reward() -> None:
    config = ppo_config("estimator.whiten=false", "estimator.level=token")
    made = [make_trajectory(0, 0, turns=4, reward=10.0)]
    batch = prepared(agent_of(config), config, made)
    assert batch.values is not None
    for turn in range(4):
        tokens = (batch.token_turn == turn).nonzero().squeeze(-1)
        rewards = [0.0] * len(tokens)
        rewards[-1] = 10.0
        expected = gae_by_hand(rewards, batch.values[tokens].tolist(), 0.0, 1.0, 0.95)
        assert batch.advantages[tokens].tolist() == pytest.approx(expected, abs=1e-4)


def test_an_invalid_turn_pays_in_its_own_reward() -> None:
    made = [make_trajectory(0, 0, turns=3, reward=10.0, invalid=[1])]
    estimator = make_estimator("ppo", EstimatorConfig(invalid_penalty=0.25))
    assert estimator.turn_rewards(Batch.from_trajectories(made)).tolist() == [0.0, -0.25, 10.0]


@pytest.mark.parametrize(("on", "paying"), [("refused", [1, 2]), ("format", [2])])
def test_who_pays_is_a_setting(on: str, paying: list[int]) -> None:
    """Turn 1 was well formed and refused, turn 2 badly formed; under any level of GAE."""
    made = [make_trajectory(0, 0, turns=4, reward=10.0, invalid=[1, 2])]
    made[0].turns[2].is_well_formed = False
    batch = Batch.from_trajectories(made)
    batch = replace(batch, values=torch.zeros(batch.num_tokens), bootstrap=torch.zeros(batch.num_tokens))
    for level in ("trajectory", "turn", "token"):
        settings = EstimatorConfig(level=level, lam=0.0, gamma=0.0, whiten=False, invalid_penalty_on=on)
        free = make_estimator("ppo", settings).at_update(batch).advantages
        paid = make_estimator("ppo", replace(settings, invalid_penalty=0.25)).at_update(batch).advantages
        ends = torch.cumsum(batch.turn_lengths, 0) - 1
        assert ((free - paid)[ends] != 0).nonzero().flatten().tolist() == paying, level


def test_whitening_is_over_the_mixed_batch() -> None:
    config = ppo_config()
    batch = prepared(agent_of(config), config)
    assert batch.is_replay.any()
    assert float(batch.advantages.mean()) == pytest.approx(0, abs=1e-5)
    assert float(batch.advantages.std()) == pytest.approx(1, abs=1e-3)


def test_value_loss_by_hand() -> None:
    values, old = torch.tensor([2.0, 0.2, -1.0]), torch.zeros(3)
    returns = torch.tensor([1.0, 1.0, 1.0])
    # 2 is beyond 0.5 of the old value: max(1², 0.5²); 0.2 is within; -1: max(2², 1.5²).
    assert value_loss(values, old, returns, 0.5).tolist() == pytest.approx([0.5, 0.32, 2.0])
    assert value_loss(values, old, returns, None).tolist() == pytest.approx([0.5, 0.32, 2.0])
    # Moved up by more than 0.5 towards a return that is higher still: nothing pulls any more.
    value = torch.tensor([0.8], requires_grad=True)
    value_loss(value, torch.zeros(1), torch.ones(1), 0.5).sum().backward()
    assert value.grad is not None
    assert value.grad.item() == 0


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_updates_teach_the_critic(backbone: str) -> None:
    flags = [f"critic.backbone={backbone}", "optimizer.learning_rate=1e-3", "critic.learning_rate=3e-3"]
    config = ppo_config(*flags, "critic.value_clip=null", "estimator.lam=1.0")
    agent = agent_of(config)
    made = trajectories()
    errors = []
    for _ in range(25):
        batch = prepared(agent, config, made)
        stats = update(agent, batch, made, config, 0.25, np.random.default_rng(0), PhaseTimer())
        errors.append(stats["critic/loss"])
        assert {"critic/value_mean", "critic/return_mean", "critic/explained_variance"} <= stats.keys()
    assert errors[-1] < 0.3 * errors[0]


def test_the_critics_gradient_does_not_depend_on_micro_batches() -> None:
    gradients: list[list[Tensor]] = []
    for tokens in (8, 100_000):
        flags = [f"optimizer.micro_batch_tokens={tokens}", "optimizer.minibatches=1", "optimizer.grad_clip=1e9"]
        config = ppo_config(*flags)
        agent = agent_of(config)
        agent.step = lambda: None  # type: ignore[method-assign]
        update(agent, prepared(agent, config), trajectories(), config, 0.25, np.random.default_rng(0), PhaseTimer())
        gradients.append([p.grad.clone() for _, p in agent.named_parameters() if p.grad is not None])
        assert len(gradients[-1]) == len(list(agent.named_parameters()))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)


def test_an_own_critic_leaves_the_policys_gradient_alone_and_a_shared_one_does_not() -> None:
    policy_gradients = {}
    for backbone in ("own", "shared"):
        config = ppo_config(f"critic.backbone={backbone}", "optimizer.minibatches=1", "optimizer.grad_clip=1e9")
        agent = agent_of(config)
        agent.step = lambda: None  # type: ignore[method-assign]
        batch = replace(prepared(agent, config), advantages=torch.zeros(sum(t.num_tokens for t in trajectories())))
        update(agent, batch, trajectories(), config, 0.25, np.random.default_rng(0), PhaseTimer())
        weights = [p.grad for p in agent.policy.model.parameters()]
        policy_gradients[backbone] = sum(float(g.abs().sum()) for g in weights if g is not None)
    assert policy_gradients["own"] == 0
    assert policy_gradients["shared"] > 0


def test_agent_b_takes_a_copy_of_the_critic() -> None:
    config = ppo_config()
    agent = agent_of(config)
    update(agent, prepared(agent, config), trajectories(), config, 0.25, np.random.default_rng(0), PhaseTimer())
    twin = agent.branch()
    assert agent.critic is not None
    assert twin.critic is not None
    before = {name: p.clone() for name, p in agent.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in twin.named_parameters())
    assert twin.critic_optimizer is not None
    assert len(twin.critic_optimizer.state_dict()["optimizer"]["state"]) > 0
    update(twin, prepared(twin, config), trajectories(), config, 0.25, np.random.default_rng(0), PhaseTimer())
    assert all(torch.equal(p, before[name]) for name, p in agent.named_parameters())
    assert not all(torch.equal(p, before[name]) for name, p in twin.named_parameters())


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_checkpoints_keep_critic_and_optimisers(backbone: str, tmp_path: Path) -> None:
    config = ppo_config(f"critic.backbone={backbone}")
    agent = agent_of(config)
    update(agent, prepared(agent, config), trajectories(), config, 0.25, np.random.default_rng(0), PhaseTimer())
    save_checkpoint(tmp_path / "step-000001", agent, {"step": 1})
    again = load_checkpoint(tmp_path / "step-000001", config, has_critic=True).agent
    for one in (agent, again):
        update(one, prepared(one, config), trajectories(), config, 0.25, np.random.default_rng(1), PhaseTimer())
    for (name, p), (_, q) in zip(agent.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_ppo_needs_values() -> None:
    with pytest.raises(ValueError, match="needs a batch with values"):
        make_estimator("ppo", EstimatorConfig()).at_update(Batch.from_trajectories(trajectories()))
