"""The learned process reward: its formula, readings of conversations, training, files, and the commands around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rspo_toys import make_trajectory, small_config, small_policy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rspo.algorithm.rewards import DenseReward, NonFiniteError, make_dense_reward, relabel
from rspo.algorithm.rollout import rollout
from rspo.cli import main
from rspo.config import Config, ConfigError, PolicyConfig, RewardConfig, RewardModelConfig, paper_config
from rspo.config.files import apply_flags
from rspo.data.conversations import read_conversations
from rspo.data.layouts import make_layout
from rspo.data.trajectory import Trajectory, trajectory_from_json, trajectory_to_json
from rspo.engines import ScriptedEngine
from rspo.envs import make_env
from rspo.envs.household import HouseholdEnv
from rspo.models.agent import Agent
from rspo.models.policy import Policy
from rspo.models.reward_model import RewardModel, micro_batches
from rspo.runs.collect import TRAJECTORIES_FILE, load_trajectories
from rspo.runs.records import read_metrics
from rspo.runs.reward_training import final_rewards, measure, train_reward_model
from rspo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = ("go", "take", "put", "open", "clean")
CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def talk(index: int, turns: int = 4, rng_seed: int = 0) -> Trajectory:
    """An episode in words, won where "take" was said at least twice; a compact prompt opens it."""
    rng = np.random.default_rng((rng_seed, index))
    trajectory = make_trajectory(group=index, turns=turns, seed=rng_seed)
    said = [WORDS[i] for i in rng.integers(len(WORDS), size=turns)]
    for number, (turn, verb) in enumerate(zip(trajectory.turns, said, strict=True)):
        turn.message = "cool mug drawer ok hall" if number == 0 else f"ok shelf {WORDS[number % 5]}"
        turn.response = f"{verb} mug"
    trajectory.won = said.count("take") >= 2
    trajectory.task_score = float(trajectory.won)
    return trajectory


def talks(count: int, rng_seed: int = 0) -> list[Trajectory]:
    return [talk(index, turns=3 + index % 4, rng_seed=rng_seed) for index in range(count)]


def byte_policy(chat: bool = True, positions: int = 512) -> Policy:
    """A tiny model of another vocabulary: bytes, with or without a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", *letters]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = CHAT if chat else None
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Policy(LlamaForCausalLM(shape), tokenizer)


def random_head(model: RewardModel, seed: int = 0) -> RewardModel:
    """Fresh heads give 0 for everything."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.head.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


# The formula


@pytest.mark.parametrize("make", [small_policy, byte_policy, lambda: byte_policy(chat=False)])
def test_rewards_are_the_formula_on_each_prefix(make: Callable[[], Policy]) -> None:
    """r̂_t from a pass over the conversation that ends with turn t's response, with the MLP written out."""
    model = random_head(RewardModel(make(), head_width=7))
    trajectory = talk(0)
    rewards = model(trajectory)
    (reading,) = model.read([trajectory])
    first, _, second = model.head
    for column, reward in zip(reading.turn_column, rewards, strict=True):
        prefix = torch.from_numpy(reading.rows[0][: column + 1]).unsqueeze(0)
        with torch.no_grad():
            h = model.policy.model(prefix, output_hidden_states=True).hidden_states[-1][0, -1]
            x = first.weight @ h + first.bias
            gelu = 0.5 * x * (1 + torch.erf(x / 2**0.5))
            expected = torch.tanh(second.weight @ gelu + second.bias)
        assert reward == pytest.approx(expected.item(), abs=1e-5)
    assert len(rewards) == 4
    total = model.totals([reading]).item()
    assert total == pytest.approx(rewards.sum(), abs=1e-5)


def test_a_fresh_model_rewards_nothing() -> None:
    assert RewardModel(small_policy())(talk(0)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("tokens", [16384, 40])
def test_batched_is_single(tokens: int) -> None:
    model = random_head(RewardModel(small_policy(), micro_batch_tokens=tokens))
    trajectories = talks(9)
    batched = model.score(trajectories)
    assert [len(rewards) for rewards in batched] == [len(trajectory) for trajectory in trajectories]
    for trajectory, rewards in zip(trajectories, batched, strict=True):
        np.testing.assert_allclose(rewards, model(trajectory), atol=1e-5)
    assert all(abs(rewards).max() > 0 for rewards in batched)


# Readings


def texts(trajectory: Trajectory) -> list[str]:
    return [str(text) for turn in trajectory.turns for text in (turn.message, turn.response)]


def test_a_conversation_is_read_in_the_models_own_words() -> None:
    trajectory = talk(0, turns=2)
    for policy, expected in (
        (small_policy(), "{} {} {} {}"),
        (byte_policy(), "<|user|>{}<|end|><|assistant|>{}<|end|><|user|>{}<|end|><|assistant|>{}"),
        (byte_policy(chat=False), "{}\n{}\n{}\n{}"),
    ):
        (reading,) = read_conversations(policy, [trajectory], 512)
        assert policy.tokenizer.decode(reading.rows[0]) == expected.format(*texts(trajectory))
        for column, turn in zip(reading.turn_column, trajectory.turns, strict=True):
            assert policy.tokenizer.decode(reading.rows[0][: column + 1]).endswith(str(turn.response))


@pytest.mark.parametrize("limit", [2, 3, 9, 14, 20, 33])
def test_a_conversation_that_is_too_long_is_read_in_windows(limit: int) -> None:
    policy = small_policy()
    trajectory = talk(0, turns=12)
    trajectory.turns[5].message = "ok shelf " * 30
    (whole,) = read_conversations(policy, [trajectory], 512)
    (reading,) = read_conversations(policy, [trajectory], limit)
    opening = policy.encode([texts(trajectory)[0]])[0][: max(limit // 2, 1)]
    assert len(whole.rows) == 1 < len(reading.rows)
    assert reading.width <= limit
    assert len(reading.turn_row) == len(reading.turn_column) == 12
    assert all(np.array_equal(row[: len(opening)], opening) for row in reading.rows)
    for i, (row, column) in enumerate(zip(reading.turn_row, reading.turn_column, strict=True)):
        # What leads up to a turn's end is what was said last, back to the opening.
        recent = reading.rows[row][len(opening) : column + 1]
        assert np.array_equal(recent, whole.rows[0][: whole.turn_column[i] + 1][-len(recent) :])
    assert RewardModel(policy, max_tokens=limit)(trajectory).shape == (12,)


def test_windows_give_every_turn_its_recent_past() -> None:
    """Turns of 5 tokens and room for 4 of them: from the second window on, 2 come along from before."""
    (reading,) = read_conversations(small_policy(), [talk(0, turns=12)], 5 + 20)
    assert np.bincount(reading.turn_row).tolist()[1:-1] == [2] * (len(reading.rows) - 2)


def test_a_models_own_limit_holds() -> None:
    model = RewardModel(byte_policy(positions=64))
    assert model.max_tokens == 64
    assert model(talk(0, turns=9)).shape == (9,)
    assert RewardModel(byte_policy(positions=64), max_tokens=32).max_tokens == 32


def test_empty_texts_are_read() -> None:
    trajectory = talk(0, turns=2)
    for turn in trajectory.turns:
        turn.message = turn.response = ""
    for policy in (small_policy(), byte_policy(), byte_policy(chat=False)):
        assert np.isfinite(random_head(RewardModel(policy))(trajectory)).all()


def test_micro_batches_hold_what_they_may() -> None:
    readings = RewardModel(small_policy(), max_tokens=20).read(talks(12))
    pieces = micro_batches(readings, 100)
    assert sorted(i for piece in pieces for i in piece) == list(range(12))
    for piece in pieces:
        rows = sum(len(readings[i].rows) for i in piece)
        assert len(piece) == 1 or rows * max(readings[i].width for i in piece) <= 100


def test_both_layouts_are_read_alike() -> None:
    """An expert plays the same episodes in both layouts; a model of another vocabulary sees the same conversations."""
    env, policy = make_env("household", prompt_style="chat"), small_policy()
    assert isinstance(env, HouseholdEnv)
    config = apply_flags(small_config(), ["rollout.max_response_tokens=64"])
    found = []
    for layout in ("per_turn", "conversation"):
        engine = ScriptedEngine(env, policy, config.rollout, 1.0, np.random.default_rng(1))
        seeds = [1, 2]
        made = make_layout(layout, policy, env)
        found.append(rollout(env, engine, made, env.tasks()[:2], seeds, group_size=1, history_length=2))
        assert all(turn.is_action_valid for t in found[-1] for turn in t.turns)
    per_turn, conversation = (random_head(RewardModel(byte_policy(positions=8192))).score(part) for part in found)
    for a, b in zip(per_turn, conversation, strict=True):
        assert np.array_equal(a, b)


def test_trajectories_keep_their_texts_in_json() -> None:
    trajectory = talk(3)
    read = trajectory_from_json(json.loads(json.dumps(trajectory_to_json(trajectory))))
    assert texts(read) == texts(trajectory)
    old = trajectory_to_json(trajectory)
    for turn in old["turns"]:
        del turn["message"], turn["response"]
    with pytest.raises(ConfigError, match=r"turn 0 of trajectory 0 of group 3 .* has no texts"):
        RewardModel(small_policy())(trajectory_from_json(old))


# Training


def training_config(*flags: str) -> Config:
    values = ["epochs=12", "batch_size=16", "learning_rate=3e-3", "warmup_updates=5"]
    return apply_flags(Config(), [f"reward_model.{flag}" for flag in (*values, *flags)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A reward model's folder, and what it measured."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    return folder, train_reward_model(talks(300), training_config(), folder, progress=False)


def dealt_at_random(episodes: Sequence[Trajectory], seed: int) -> Sequence[Trajectory]:
    """The same episodes with each other's outcomes: what a model can only learn by heart."""
    scores = np.random.default_rng(seed).permutation([episode.task_score for episode in episodes])
    for episode, score in zip(episodes, scores, strict=True):
        episode.task_score = float(score)
    return episodes


def learned(folder: Path, fresh: Sequence[Trajectory]) -> tuple[float, float]:
    """What remains of the training loss, and how predictions and outcomes of fresh episodes are correlated."""
    losses = [record["loss"] for record in read_metrics(folder, "update")]
    predicted = [values.sum() for values in RewardModel.load(folder, PolicyConfig()).score(fresh)]
    correlation = np.corrcoef(predicted, [episode.task_score for episode in fresh])[0, 1]
    return float(np.mean(losses[-17:]) / np.mean(losses[:17])), float(correlation)


def test_training_learns_what_leads_to_success(tmp_path: Path) -> None:
    """More than from the same outcomes dealt to other episodes. Single trainings differ by much from one CPU to
    another, held-out losses above all; the means of three are far apart (in five pairs the loss fell to 0.28 to 0.48
    of what it was, by heart to 0.84 to 1)."""
    fresh = talks(200, rng_seed=9)
    by_sense, by_heart = [], []
    for seed in range(3):
        config = apply_flags(training_config(), [f"run.seed={seed}"])
        for found, episodes in ((by_sense, talks(300)), (by_heart, dealt_at_random(talks(300), seed))):
            folder = tmp_path / f"{len(found)} {found is by_sense}"
            train_reward_model(episodes, config, folder, progress=False)
            found.append(learned(folder, fresh))
    sense, heart = np.mean(by_sense, 0), np.mean(by_heart, 0)
    assert sense[0] < heart[0]
    assert sense[1] > heart[1]


def test_training_records_what_it_does(trained: tuple[Path, dict[str, float]]) -> None:
    folder, measured = trained
    validations, updates = read_metrics(folder, "validation"), read_metrics(folder, "update")
    assert validations[0]["step"] == 0
    assert measured["loss"] == pytest.approx(validations[-1]["loss"])  # which is written with eight digits
    assert [record["step"] for record in updates] == list(range(1, 12 * 17 + 1))
    assert updates[0]["learning_rate"] == pytest.approx(3e-3 / 6)
    assert updates[5]["learning_rate"] == updates[-1]["learning_rate"] == pytest.approx(3e-3)


def test_a_model_is_loaded_bit_for_bit(trained: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    first = RewardModel.load(trained[0], PolicyConfig())
    assert not [path.name for path in trained[0].iterdir() if path.suffix in (".bin", ".pt", ".pkl")]
    assert json.loads((trained[0] / "reward_model.json").read_text())["held_out"] == trained[1]
    first.save(tmp_path / "again")
    second = RewardModel.load(tmp_path / "again", PolicyConfig())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(np.array_equal(a, b) for a, b in zip(first.score(talks(5)), second.score(talks(5)), strict=True))


def test_training_follows_from_the_seed(tmp_path: Path) -> None:
    config = training_config("epochs=1")
    a, b, c = (
        train_reward_model(talks(40), made, tmp_path / name, progress=False)
        for name, made in (("a", config), ("b", config), ("c", apply_flags(config, ["run.seed=1"])))
    )
    assert a == b != c


def test_another_models_weights_and_words_are_trained(tmp_path: Path) -> None:
    """From a saved model with a chat template and too few positions, in pieces of one conversation; the update does not
    depend on the pieces."""
    byte_policy(positions=128).save(tmp_path / "base")
    results = []
    for tokens in (16384, 1):
        config = training_config("epochs=1", f"micro_batch_tokens={tokens}")
        folder = tmp_path / str(tokens)
        train_reward_model(talks(40), config, folder, path=str(tmp_path / "base"), progress=False)
        results.append(RewardModel.load(folder, PolicyConfig()))
    assert results[0].max_tokens == 128
    for a, b in zip(*(model.score(talks(5)) for model in results), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    assert not torch.equal(next(results[0].parameters()), next(byte_policy(positions=128).model.parameters()))


def test_measures_by_hand() -> None:
    predicted, targets = np.array([0.0, 0.4, 0.6, 1.0]), np.array([0.0, 1.0, 0.0, 1.0])
    measured = measure(predicted, targets)
    assert measured["loss"] == pytest.approx((0.36 + 0.36) / 4)
    assert measured["correlation"] == pytest.approx(np.corrcoef(predicted, targets)[0, 1])
    assert (measured["accuracy"], measured["majority"], measured["variance"]) == (0.5, 0.5, 0.25)
    assert measure(np.zeros(3), np.ones(3))["correlation"] == 0.0


def test_settings_are_spa_rls_for_a_pretrained_model() -> None:
    settings = RewardModelConfig()
    assert paper_config().reward_model == settings
    assert (settings.epochs, settings.learning_rate, settings.weight_decay) == (1, 3e-6, 0.01)
    assert (settings.warmup_updates, settings.grad_clip, settings.bf16) == (500, 1.0, True)


def test_bad_targets_are_named(tmp_path: Path) -> None:
    trajectories = talks(4)
    trajectories[2].task_score = 10.0
    with pytest.raises(ConfigError, match=r"task_score of trajectory 0 of group 2 .* must be in \[0, 1\], got 10"):
        final_rewards(trajectories, "task_score")
    assert final_rewards(trajectories, "won").tolist() == [float(t.won) for t in trajectories]
    with pytest.raises(ConfigError, match=r"held_out=0.1 of 4 trajectories leaves"):
        train_reward_model(talks(4), training_config(), tmp_path, progress=False)


def test_a_non_finite_loss_names_a_trajectory(tmp_path: Path) -> None:
    policy = small_policy()
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[policy.tokenizer.convert_tokens_to_ids("clean")] = float("nan")
    policy.save(tmp_path / "broken")
    trajectories = talks(40)
    for number, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            turn.message, turn.response = str(turn.message).replace("clean", "go"), "go mug"
        trajectory.turns[0].response = "clean mug" if number == 7 else "go mug"
    with pytest.raises(NonFiniteError, match=r"loss nan of the reward model on trajectory 0 of group 7"):
        train_reward_model(
            trajectories, training_config("held_out=0"), tmp_path / "m", path=str(tmp_path / "broken"), progress=False
        )
    assert not (tmp_path / "m" / "reward_model.json").exists()


# As a dense reward


class Counted:
    """A reward function with a batched call, which counts its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def score(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        self.calls.append(len(trajectories))
        return [[1.0] * len(trajectory) for trajectory in trajectories]

    def __call__(self, trajectory: Trajectory) -> list[float]:
        raise AssertionError("the batched call is there")


def test_a_batched_reward_is_called_once_and_noise_is_that_of_single_calls() -> None:
    source, trajectories = Counted(), talks(5)
    relabel(trajectories, DenseReward(source, 2.0, 0.5, np.random.default_rng(0)))
    assert source.calls == [5]
    noise = np.random.default_rng(0)
    for trajectory in trajectories:
        expected = 2.0 * (1.0 + noise.normal(0.0, 0.5, size=len(trajectory)))
        assert trajectory.rewards == pytest.approx(expected, abs=1e-5)


def test_a_learned_reward_has_the_outcomes_scale(trained: tuple[Path, dict[str, float]]) -> None:
    rng = np.random.default_rng(0)
    learned = make_dense_reward(RewardConfig(dense=f"model:{trained[0]}"), False, rng)
    trajectories = talks(6)
    expected = RewardModel.load(trained[0], PolicyConfig()).score(trajectories)
    for rewards, values in zip(learned.score(trajectories), expected, strict=True):
        np.testing.assert_allclose(rewards, 10 * values, rtol=1e-6)
    assert make_dense_reward(RewardConfig(), True, rng).scale == 1.0
    assert make_dense_reward(RewardConfig(dense=f"model:{trained[0]}", dense_scale=3.0), True, rng).scale == 3.0


def test_what_is_no_reward_model_is_named(trained: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    def load(path: Path) -> DenseReward:
        return make_dense_reward(RewardConfig(dense=f"model:{path}"), True, np.random.default_rng(0))

    with pytest.raises(ConfigError, match=r"must be a reward model .*: there is no such folder"):
        load(tmp_path / "missing")
    small_policy().save(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"policy' must be a reward model .*: reward_model\.json, head"):
        load(tmp_path / "policy")
    RewardModel.load(trained[0], PolicyConfig()).save(tmp_path / "damaged")
    (tmp_path / "damaged" / "head.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"head\.safetensors cannot be read"):
        load(tmp_path / "damaged")(talk(0))
    for text, message in (("{", "cannot be read"), ('{"format": 9, "head_width": 1, "max_tokens": 9}', "format 1")):
        (tmp_path / "damaged" / "reward_model.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "damaged")
    with pytest.raises(ConfigError, match=r"rewards\.dense must be 'environment', 'model:FOLDER' or"):
        RewardConfig(dense="model:")


def not_a_reward(trajectory: Trajectory) -> float:
    return 1.0


def fails(trajectory: Trajectory) -> list[float]:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math:sqrt", r"it raised TypeError: must be real number, not Trajectory"),
        ("math:pi", r"it is of type float"),
        (f"{__name__}:not_a_reward", r"it gave shape \(\) for trajectory 0 of group 0 .*, which has 4 turns"),
        (f"{__name__}:fails", r"it raised KeyError at .*test_reward_model\.py:\d+: 'gone'"),
    ],
)
def test_what_is_no_reward_function_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"rewards\.dense='{name}' must be a function of a Trajectory.*{message}"):
        relabel([talk(0)], make_dense_reward(RewardConfig(dense=name), True, np.random.default_rng(0)))


# The commands

SMALL = [
    "rollout.tasks=4",
    "rollout.group_size=4",
    "swap.k=2",
    "swap.alpha=0.25",
    "swap.buffer_tasks=3",
    "optimizer.minibatches=2",
    "evaluation.episodes=8",
]


def flags(*more: str) -> list[str]:
    return [part for flag in (*SMALL, *more) for part in ("--set", flag)]


def test_collect_reward_model_and_train_through_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, data, model, run = (tmp_path / name for name in ("start", "data", "model", "run"))
    small_policy().save(start)
    collect = ["collect", "--out", str(data), "--quiet", *flags()]
    assert main([*collect, "--expert", "0.8", "--trajectories", "60"]) == 0
    assert "trajectories 60, success 0." in capsys.readouterr().out
    assert main([*collect, "--expert", "0.8"]) == 2
    assert "exists; choose another --out, or add to it with --resume" in capsys.readouterr().err
    assert main([*collect, "--policy", str(start), "--trajectories", "80", "--resume"]) == 0
    trajectories = load_trajectories([data])
    assert [trajectory.group for trajectory in trajectories] == list(range(80))
    assert 0 < sum(trajectory.won for trajectory in trajectories) <= 60

    train = ["reward-model", str(data), "--out", str(model), "--quiet", "--epochs", "2", "--batch-size", "16"]
    assert main([*train, "--learning-rate", "2e-3"]) == 0
    assert "on held-out trajectories: loss" in capsys.readouterr().out
    assert main(train) == 2
    assert "already holds a reward model" in capsys.readouterr().err

    learned = RewardModel.load(model, PolicyConfig())
    seen: list[str] = []
    update = Trainer._update

    def spied(self: Trainer, agent: Agent, trajectories: list[Trajectory], alpha: float = 0.0) -> dict[str, float]:
        """B sees 10·r̂_t, A nothing but outcomes, replayed ones included."""
        seen.append("A" if agent is self.agent else "B")
        for trajectory, rewards in zip(trajectories, learned.score(trajectories), strict=True):
            outcomes = [turn.reward for turn in trajectory.turns]
            expected = outcomes if seen[-1] == "A" else 10 * rewards
            np.testing.assert_allclose(trajectory.rewards, expected, atol=1e-4)
        return update(self, agent, trajectories, alpha)

    monkeypatch.setattr(Trainer, "_update", spied)
    command = ["train", "--policy", str(start), "--dense-reward", f"model:{model}", "--out", str(run), "--quiet"]
    assert main([*command, "--steps", "2", *flags()]) == 0
    assert seen == ["B", "B", "A", "A"]
    dense, outcome = read_metrics(run, "dense")[-1], read_metrics(run, "update")[-1]
    assert outcome["trained_return"] == pytest.approx(outcome["reward"])
    assert dense["trained_return"] != pytest.approx(dense["dense_return"])

    capsys.readouterr()
    more = ["collect", "--run", str(run), "--out", str(tmp_path / "more"), "--trajectories", "8", "--quiet"]
    assert main(more) == 0
    assert "trajectories 8" in capsys.readouterr().out


def test_a_collection_goes_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    collect = ["collect", "--expert", "1", "--quiet", "--trajectories", "40", *flags()]
    assert main([*collect, "--out", str(tmp_path / "whole")]) == 0
    whole = (tmp_path / "whole" / TRAJECTORIES_FILE).read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / TRAJECTORIES_FILE).write_text("".join(lines[:32]) + lines[32][:50])
    assert main([*collect, "--out", str(tmp_path / "part"), "--resume"]) == 0
    assert (tmp_path / "part" / TRAJECTORIES_FILE).read_text() == whole, "32 is where a round of 16 ends"


def test_wrong_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps(trajectory_to_json(talk(0)))
    for name, text, message in (
        ("empty", "", "is empty; expected trajectories"),
        ("malformed", f"{good}\n{{'no json'\n", r"line 2 of .*malformed is not a trajectory (JSONDecodeError"),
        ("other", f"{good}\n{good}\n[1, 2]\n", r"line 3 of .*other is not a trajectory (TypeError"),
        ("short", '{"task": "x"}\n', r"line 1 of .*short is not a trajectory (KeyError: 'turns')"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["reward-model", str(tmp_path / name), "--out", str(tmp_path / "m"), "--quiet"]) == 2
        error = capsys.readouterr().err
        assert all(part in error for part in message.split(".*")), error
    assert main(["reward-model", str(tmp_path / "missing"), "--out", str(tmp_path / "m")]) == 2
    assert "missing does not exist; expected trajectories" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "--expert", "1.5"], "--expert must be a probability in [0, 1], got 1.5"),
        (["collect", "--expert", "1", "--trajectories", "0"], "--trajectories must be >= 1, got 0"),
        (["collect", "--expert", "1", "--env", "rspo_toys:ParityEnv"], "ParityEnv has no scripted expert"),
        (["collect", "--run", "nowhere"], "--run: nowhere holds no run"),
        (["collect", "--policy", "nowhere"], "policy.path='nowhere' is not a folder"),
        (["train", "--steps", "1", "--dense-reward", "model:nowhere"], "rewards.dense='model:nowhere': 'nowhere'"),
        (["train", "--steps", "1", "--dense-reward", "nowhere"], "rewards.dense must be 'environment', 'model:FOLDER'"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_a_callable_that_is_no_reward_stops_training_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_policy().save(tmp_path / "start")
    command = ["train", "--policy", str(tmp_path / "start"), "--out", str(tmp_path / "run"), "--quiet", "--steps", "2"]
    assert main([*command, "--dense-reward", "math:sqrt", *flags()]) == 2
    assert "rewards.dense='math:sqrt' must be a function of a Trajectory" in capsys.readouterr().err


def test_trained_rewards_are_finite_for_an_agents_odd_responses(trained: tuple[Path, dict[str, float]]) -> None:
    """Words that the model has never seen, and none at all."""
    odd = talk(0)
    for turn, response in zip(odd.turns, ["", "Zürich 東京", "take " * 400, "\n\n"], strict=True):
        turn.response = response
    assert np.isfinite(RewardModel.load(trained[0], PolicyConfig())(odd)).all()
    relabel(
        [replace(odd)], make_dense_reward(RewardConfig(dense=f"model:{trained[0]}"), False, np.random.default_rng(0))
    )
