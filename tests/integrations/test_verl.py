"""The verl plug-in against the real verl package: registries, losses, advantages, rows, configuration, agent loop."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rspo_toys import make_trajectory, small_policy
from torch import Tensor
from verl_import import real_verl

from rspo.algorithm.estimators import make_estimator
from rspo.config import Config, ConfigError, EstimatorConfig, paper_config
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY, Trajectory
from rspo.models.policy import score
from rspo_kernels import PolicyLossConfig, policy_loss

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module", autouse=True)
def _verl() -> None:
    real_verl()


def actor_config(**info: Any) -> Any:
    """verl's ActorConfig as its workers have it."""
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0
    )
    config.global_batch_info.update(info)
    return config


def tokens(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Ratios from far below to far above all bounds, rows of many lengths, one of them empty."""
    torch.manual_seed(1)
    old = -3.0 * torch.rand(6, 9, dtype=dtype)
    lengths = torch.tensor([9, 1, 0, 5, 7, 3])
    return {
        "old_log_prob": old,
        "log_prob": (old + 1.0 * torch.randn(6, 9, dtype=dtype)).requires_grad_(),
        "advantages": torch.randn(6, 9, dtype=dtype),
        "response_mask": torch.arange(9) < lengths.unsqueeze(1),
    }


def with_gradient(function: Any, x: dict[str, Tensor], **arguments: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    loss, metrics = function(**x, **arguments)
    (gradient,) = torch.autograd.grad(loss, x["log_prob"])
    return loss.detach(), gradient, metrics


def labelled(estimator: str = "gigpo", **settings: Any) -> list[Trajectory]:
    """Three groups of four trajectories of one to three turns, with advantages."""
    made = [
        make_trajectory(group, index, turns=1 + (group + index) % 3, reward=10.0 * ((group + index) % 2), invalid=[0])
        for group in range(3)
        for index in range(4)
    ]
    make_estimator(estimator, EstimatorConfig(**settings))(made)
    return made


def mixed_batch(layout: str = "per_turn") -> Batch:
    """On-policy and replayed trajectories, whose old log-probs differ from those of who wrote them."""
    made = labelled("grpo")
    if layout == "conversation":
        for trajectory in made:
            for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
                turn.prompt_ids = np.concatenate([before.prompt_ids, before.response_ids, turn.prompt_ids])
    made = [replace(t, source=REPLAY) if t.group == 2 else t for t in made]
    batch = Batch.from_trajectories(made, layout)
    noise = 0.3 * torch.randn(batch.num_tokens)
    return replace(batch, old_logp=torch.where(batch.is_replay, batch.old_logp + noise, batch.old_logp))


def equation_one(
    batch: Batch, logp: Tensor, entropy: Tensor, config: PolicyLossConfig, alpha: float, pooled: bool
) -> Tensor:
    """(1 - α)·J_on + α·J_off of packed tokens, each part a mean of its own; or one mean."""
    parts = (
        [(1.0, torch.ones_like(batch.is_replay))]
        if pooled
        else [(1 - alpha, ~batch.is_replay), (alpha, batch.is_replay)]
    )
    total = torch.zeros(())
    for weight, mask in parts:
        loss, _ = policy_loss(
            logp,
            batch.advantages,
            mask=mask,
            old_logp=batch.old_logp,
            behavior_logp=batch.behavior_logp,
            ref_logp=batch.ref_logp,
            entropy=entropy,
            segments=batch.segments(),
            config=config,
        )
        total += weight * loss
    return total


def test_registries() -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    import rspo.integrations.verl as plugin

    plugin.register()  # a second time
    assert get_policy_loss_fn("rspo") is plugin.rspo_policy_loss
    assert get_adv_estimator_fn("gigpo") is plugin.gigpo_advantages
    assert get_adv_estimator_fn("rspo_grpo") is plugin.grpo_advantages
    assert _agent_loop_registry["rspo_env"]["_target_"].endswith("agent_loop.EnvAgentLoop")


@pytest.mark.parametrize("info", [{}, {"dp_size": 2, "batch_num_tokens": 70, "global_batch_size": 12}])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_is_vanilla_where_the_center_is_one(mode: str, info: dict[str, int], dtype: torch.dtype) -> None:
    """Value, gradient and metrics, with a dual clip, two clip ratios, masks, and verl's counts of the whole batch."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    from rspo.integrations.verl import rspo_policy_loss

    x = tokens(dtype)
    arguments = {"loss_agg_mode": mode, "config": actor_config(**info)}
    expected, expected_gradient, expected_metrics = with_gradient(compute_policy_loss_vanilla, x, **arguments)
    for center in (None, torch.ones_like(x["advantages"])):
        loss, gradient, metrics = with_gradient(rspo_policy_loss, x, rollout_is_weights=center, **arguments)
        # verl adds 1e-8 to the length of a sequence.
        tolerance = 3e-8 if dtype == torch.float64 and mode == "seq-mean-token-mean" else 1e-12
        tolerance = 2e-6 if dtype == torch.float32 else tolerance
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)
        assert metrics["actor/center_max"] == pytest.approx(1.0)
        for name, value in expected_metrics.items():
            assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert all(expected_metrics[name] > 0 for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"))


def test_loss_scale_factor_is_any_number() -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    from rspo.integrations.verl import rspo_policy_loss

    x, config = tokens(), actor_config(loss_scale_factor=7.5)
    arguments = {"loss_agg_mode": "seq-mean-token-sum-norm", "config": config}
    expected, *_ = with_gradient(compute_policy_loss_vanilla, x, **arguments)
    torch.testing.assert_close(with_gradient(rspo_policy_loss, x, **arguments)[0], expected)


def test_loss_with_centers_is_the_papers() -> None:
    """Eq. 2 and 4 written out: replayed tokens with centres from 0.2 to 5, the dual clip for centre 1 only."""
    from rspo.integrations.verl import rspo_policy_loss

    x = tokens()
    center = torch.exp(3.2 * torch.rand_like(x["advantages"]) - 1.6)
    center[0] = 1.0
    loss, gradient, _ = with_gradient(rspo_policy_loss, x, rollout_is_weights=center, config=actor_config())

    ratio = torch.exp(x["log_prob"] - x["old_log_prob"]) * center
    advantages = x["advantages"]
    objective = torch.minimum(ratio * advantages, ratio.clamp(center - 0.1, center + 0.3) * advantages)
    dual = (advantages < 0) & (center == 1)
    objective = torch.where(dual, torch.maximum(objective, 2.0 * advantages), objective)
    expected = -objective[x["response_mask"]].mean()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, x["log_prob"])[0])


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("estimator", ["gigpo", "grpo"])
def test_advantages_are_the_estimators(estimator: str, std: bool) -> None:
    """Of rows in verl's form, groups mixed up, the same as of trajectories."""
    from rspo.integrations.verl import compute_advantage
    from rspo.integrations.verl.rows import Rows

    made = labelled(estimator, std=std)
    made = [made[i] for i in np.random.default_rng(0).permutation(len(made))]
    batch = Batch.from_trajectories(made)
    rows = Rows.of(batch, 0)
    of_turn = [made[i] for i in batch.turn_trajectory]
    data = rows.data
    data.batch["token_level_rewards"] = rows.spread(batch.rewards)
    data.non_tensor_batch = {
        "uid": np.array([f"task {t.group}" for t in of_turn], dtype=object),
        "trajectory": np.array([(t.group, t.index) for t in of_turn] + [None], dtype=object)[:-1],
        "anchor": np.array([turn.anchor for t in made for turn in t.turns], dtype=object),
    }
    name = {"gigpo": "gigpo", "grpo": "rspo_grpo"}[estimator]
    compute_advantage(data, name, {"gamma": 0.95, "norm_adv_by_std_in_grpo": std})
    torch.testing.assert_close(rows.gather(data.batch["advantages"]), batch.advantages)
    assert batch.advantages.abs().max() > 0.5
    assert data.batch["advantages"][data.batch["response_mask"] == 0].abs().max() == 0


def test_rspo_grpo_of_single_rows_is_verls_grpo() -> None:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    from rspo.integrations.verl import grpo_advantages

    rewards, mask = torch.zeros(8, 5), torch.ones(8, 5)
    rewards[:, -1] = torch.tensor([0.0, 10, 0, 0, 10, 10, 0, 10])
    index = np.array(list("aaaabbbb"), dtype=object)
    expected, _ = compute_grpo_outcome_advantage(rewards.clone(), mask, index)
    torch.testing.assert_close(grpo_advantages(rewards, mask, index)[0], expected)


def test_gigpo_says_what_it_needs() -> None:
    from rspo.integrations.verl import gigpo_advantages

    with pytest.raises(ValueError, match=r"anchor.*compute_advantage"):
        gigpo_advantages(torch.zeros(2, 3), torch.ones(2, 3), ["a", "a"])


@pytest.mark.parametrize("layout", ["per_turn", "conversation"])
def test_rows_are_read_like_the_batch(layout: str) -> None:
    """A plain transformers forward over verl's padded tensors has the log-probs that the trainer has of its batch."""
    from rspo.integrations.verl.rows import Rows

    policy, batch = small_policy(), mixed_batch(layout)
    rows = Rows.of(batch, pad_token_id=0)
    data = rows.data.batch
    with torch.no_grad():
        logits = policy.model(
            input_ids=data["input_ids"], attention_mask=data["attention_mask"], position_ids=data["position_ids"]
        ).logits
    width = data["responses"].shape[1]
    logp = torch.log_softmax(logits[:, -width - 1 : -1], -1).gather(-1, data["responses"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(rows.gather(logp), score(policy, batch, 1.0, 10_000), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.gather(rows.spread(batch.old_logp)), batch.old_logp)
    assert int(data["response_mask"].sum()) == batch.num_tokens
    assert torch.equal(torch.cat([data["prompts"], data["responses"]], 1), data["input_ids"])


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-sum"])
def test_actor_loss_over_micro_batches_is_equation_one(mode: str, pooled: bool) -> None:
    """Rows dealt to 2 mini-batches on 2 processes, each row its own micro-batch: the sum is the trainer's loss."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    from rspo.integrations.verl import actor_loss
    from rspo.integrations.verl.rows import Rows, deal_rows, loss_weights

    batch = mixed_batch()
    config = PolicyLossConfig(
        aggregation=mode, horizon=7, dual_clip=3.0, center_cap=1.0, kl_coef=0.1, entropy_coef=0.01
    )
    batch = replace(batch, ref_logp=batch.old_logp - 0.1)
    logp, entropy = batch.old_logp + 0.3 * torch.randn(batch.num_tokens), torch.rand(batch.num_tokens)
    expected = equation_one(batch, logp, entropy, config, 0.25, pooled)

    rows = Rows.of(batch, 0)
    order = torch.from_numpy(deal_rows(batch.num_rows, 2, 2, 4, np.random.default_rng(0)))
    values = {
        "old_log_probs": batch.old_logp,
        "behavior_log_probs": batch.behavior_logp,
        "advantages": batch.advantages,
        "ref_log_prob": batch.ref_logp,
        "loss_weights": loss_weights(batch, config, 0.25, pooled, minibatches=2),
        "logp": logp,
        "entropy": entropy,
    }
    data = rows.deal(order, values)
    assert (order < 0).any()  # there is padding
    tensors: TensorDict = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(tensors, dp_size=2)
    total = torch.zeros(())
    for row in tu.chunk_tensordict(tensors, len(order)):
        length = int(row["attention_mask"].sum())
        answer = int(row["attention_mask"][:, -row["responses"].shape[1] :].sum())
        packed = {}
        for name, output in (("logp", "log_probs"), ("entropy", "entropy")):
            flat = torch.zeros(length)
            flat[length - answer - 1 : length - 1] = row[name][0, :answer]
            packed[output] = torch.nested.nested_tensor_from_jagged(flat, torch.tensor([0, length]))
        total += actor_loss(replace(config, aggregation="token-mean"), packed, row)[0]
    # The mean over 2 processes of the mean over 2 mini-batches.
    torch.testing.assert_close(total / 4, expected)


@pytest.mark.parametrize(("rows", "minibatches", "processes", "divisor"), [(7, 2, 2, 1), (24, 3, 2, 2), (5, 5, 4, 3)])
def test_rows_are_dealt_once(rows: int, minibatches: int, processes: int, divisor: int) -> None:
    """Each row goes to one mini-batch of one process, and no mini-batch is all padding."""
    from rspo.integrations.verl.rows import deal_rows

    order = deal_rows(rows, minibatches, processes, divisor, np.random.default_rng(0))
    assert sorted(order[order >= 0]) == list(range(rows))
    parts = order.reshape(processes, minibatches, -1)
    assert parts.shape[-1] % divisor == 0
    held = (parts >= 0).sum((0, 2))
    assert held.min() >= 1
    assert held.max() - held.min() <= 1


@cache
def default() -> Any:
    """The plug-in's configuration over verl's, as hydra composes it."""
    import hydra

    with hydra.initialize_config_module("rspo.integrations.verl.config", version_base=None):
        return hydra.compose("rspo_trainer")


def test_configuration_file_has_the_trainers_defaults() -> None:
    """The section `rspo` lists settings as rspo.config has them, so that they can be overridden by name."""
    from rspo.integrations.verl.settings import VERL_SETTINGS

    config, theirs = default(), asdict(Config())
    for section in ("estimator", "rewards", "swap", "loss"):
        for field, value in config.rspo[section].items():
            assert value == theirs[section][field], f"{section}.{field}"
    assert set(config.rspo.swap) == set(theirs["swap"]) - {"copy"}  # verl's workers keep agent A in their own way
    assert not {f"{section}.{field}" for section in ("loss", "optimizer") for field in config.rspo[section]} & set(
        VERL_SETTINGS
    )


def test_recipe_is_the_papers() -> None:
    """recipes/verl composes over verl's own defaults, passes verl's checks, and has the paper's settings."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    from rspo.integrations.verl.main import check
    from rspo.integrations.verl.settings import rspo_config

    with initialize_config_module("rspo.integrations.verl.config", version_base=None):
        config = hydra_compose(
            "rspo_trainer",
            [f"hydra.searchpath=[pkg://verl.trainer.config,{RECIPES}]", "+verl=rspo_alfworld_qwen2.5_1.5b"],
        )
    check(config)
    settings, paper = rspo_config(config), paper_config("rspo", "gigpo")
    for section in ("rollout", "swap", "loss", "estimator"):
        theirs, ours = asdict(getattr(paper, section)), asdict(getattr(settings, section))
        for field in theirs.keys() - {"max_batch", "rescore"}:
            assert ours[field] == theirs[field], f"{section}.{field}"
    assert settings.base == "gigpo"
    assert settings.optimizer.learning_rate == paper.optimizer.learning_rate == 1e-6
    assert settings.optimizer.minibatch_rows == paper.optimizer.minibatch_rows
    assert (settings.run.steps, settings.env.name) == (150, "alfworld")
    assert settings.env.options == {"prompt_style": "verl-agent", "max_turns": 50}
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0.4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rspo.swap.alpha=1.5"], r"swap\.alpha must be in \[0, 1\), got 1\.5"),
        (["rspo.env.name=moon"], r"rspo\.env\.name='moon': unknown environment 'moon'; available: .*household"),
        (["rspo.env.name=nowhere.at_all:Env"], r"rspo\.env\.name='nowhere\.at_all:Env': No module"),
        (["rspo.env.style=verl-agent"], r"rspo\.env\.style must be 'readable' on verl, got 'verl-agent'"),
        (["rspo.swap.kk=3"], r"unknown setting 'rspo\.swap\.kk' \(did you mean 'k'"),
        (["rspo.rollout.tasks=3"], r"rspo\.rollout is not a setting on verl"),
        (["rspo.loss.kl_coef=0.1"], r"rspo\.loss\.kl_coef is verl's setting actor_rollout_ref\.actor\.kl_loss_coef"),
        (["data.apply_chat_template_kwargs.tokenize=true"], r"chat_template_kwargs\.tokenize cannot be set"),
        (["rspo.base=ppo"], r"rspo\.base='ppo' needs a critic"),
        (["rspo.swap.source=history"], r"'dense' or 'outcome' on verl, got 'history'"),
        (["rspo.base=grop"], r"base must be one of .*got 'grop'"),
        (["trainer.total_training_steps=null"], r"trainer\.total_training_steps must be given"),
        (["algorithm.use_kl_in_reward=true"], r"use_kl_in_reward must be False"),
        (["actor_rollout_ref.actor.kl_loss_type=abs"], r"kl_loss_type must be one of .*got 'abs'"),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"], r"must be 'rspo_env'.*got 'tool_agent'"),
    ],
)
def test_wrong_settings(overrides: list[str], message: str) -> None:
    from omegaconf import OmegaConf

    from rspo.integrations.verl.settings import rspo_config

    config = default().copy()
    OmegaConf.set_struct(config, False)
    config.merge_with_dotlist(overrides)
    with pytest.raises(ConfigError, match=message):
        rspo_config(config)


class FixedClient:
    """A server that always answers the same, with log-probs as asked."""

    def __init__(self, answer: list[int], error: Exception | None = None) -> None:
        self.answer, self.error = answer, error
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, **arguments: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        if self.error is not None:
            raise self.error
        self.asked.append({"request_id": request_id, **arguments})
        return TokenOutput(token_ids=self.answer, log_probs=[-0.5] * len(self.answer))


def play(client: FixedClient, tmp_path: Path, *overrides: str, template: str | None = None) -> Any:
    """One row of the dataset through verl's agent-loop worker. template: the tokenizer's for chats."""
    import verl_cpu
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.utils.dataset.rl_dataset import collate_fn

    from rspo.integrations.verl.tasks import EnvTasks

    start = small_policy()
    start.tokenizer.chat_template = template
    start.save(tmp_path)
    config = verl_cpu.tiny_config(tmp_path, tmp_path, *overrides)
    batch = DataProto.from_single_dict(collate_fn([EnvTasks("train", None, config.data, max_samples=2)[1]]))
    worker = AgentLoopWorker(config, client, reward_loop_worker_handles=[])
    return asyncio.run(worker.generate_sequences(batch))


def test_agent_loop_plays_an_episode(tmp_path: Path) -> None:
    """All turns with what the trainer needs of them; verl's padded tensors show the last one; the score is the
    outcome."""
    from rspo.envs import make_env

    policy = small_policy()
    task = make_env("rspo_parity:ParityEnv").tasks()[3]
    word = next(w for w in ("go", "take") if len(w) % 2 == len(task) % 2)
    answer = policy.tokenizer(word)["input_ids"]
    client = FixedClient(answer)
    output = play(client, tmp_path)
    trajectory = output.non_tensor_batch["trajectory"][0]
    assert trajectory.task == task
    assert len(trajectory) == len(client.asked) == 2  # 1 + seed % 4 turns
    assert trajectory.won
    assert float(output.batch["rm_scores"].sum()) == trajectory.outcome == 10.0
    assert output.non_tensor_batch["acc"][0] == 1.0
    assert [turn.anchor for turn in trajectory.turns] == ["turn 0", "turn 1"]
    assert len({asked["request_id"] for asked in client.asked}) == 1
    for turn, asked in zip(trajectory.turns, client.asked, strict=True):
        assert turn.prompt_ids.tolist() == asked["prompt_ids"]
        assert turn.response_ids.tolist() == answer
        assert asked["sampling_params"]["max_tokens"] == 2
        np.testing.assert_array_equal(turn.behavior_logp, np.float32(-0.5))
    last = trajectory.turns[-1]
    shown = output.batch["input_ids"][0][output.batch["attention_mask"][0] == 1]
    assert shown.tolist() == [*last.prompt_ids.tolist(), *last.response_ids.tolist()]


THINKING = "{% for m in messages %}{{ m.content }} {% endfor %}{% if enable_thinking is false %}take{% endif %}"


@pytest.mark.parametrize("layout", ["per_turn", "conversation"])
def test_agent_loop_gives_the_template_its_arguments(layout: str, tmp_path: Path) -> None:
    tokenizer = small_policy().tokenizer
    client = FixedClient(tokenizer("go")["input_ids"])
    setting = ["+data.apply_chat_template_kwargs.enable_thinking=false", f"rspo.env.layout={layout}"]
    play(client, tmp_path, *setting, template=THINKING)
    assert len(client.asked) == 2
    (end,) = tokenizer("take")["input_ids"]
    assert [asked["prompt_ids"][-1] for asked in client.asked] == [end, end]
    with pytest.raises(ConfigError, match="does not read 'thinking'"):
        play(client, tmp_path, "+data.apply_chat_template_kwargs.thinking=false", template=THINKING)
    with pytest.raises(ConfigError, match="needs a chat template"):
        play(client, tmp_path / "bare", *setting)


def test_failing_environment_loses_the_episode(tmp_path: Path) -> None:
    output = play(FixedClient([5]), tmp_path, "rspo.env.name=verl_cpu:FailingEnv")
    trajectory = output.non_tensor_batch["trajectory"][0]
    assert trajectory.lost
    assert not trajectory.turns
    assert int(output.batch["response_mask"].sum()) == 0


def test_failing_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="gone"):
        play(FixedClient([5], ConnectionError("gone")), tmp_path)


def test_long_prompt_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a prompt has \d+ tokens, data\.max_prompt_length=1 allows"):
        play(FixedClient([5]), tmp_path, "data.max_prompt_length=1")
