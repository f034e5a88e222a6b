"""A few whole RSPO steps with a real pre-trained model, tokenizer and chat template, on every environment.

The model is small and untrained for the tasks: what is tested is that everything fits together, not that it learns.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_forward import assert_gradients_close, plain, prepared, talks, trained
from plain_forward import settings as plain_settings
from rspo_servers import transformers_serve
from smollm2 import save_smollm2
from torch import Tensor

from rspo.algorithm.update import rescore
from rspo.config import Config, default_config
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.data.trajectory import Trajectory
from rspo.engines import EngineError, open_backend
from rspo.envs.base import PromptContext
from rspo.envs.household import HouseholdEnv
from rspo.models.policy import Policy
from rspo.runs.collect import collect, load_trajectories
from rspo.runs.records import read_metrics
from rspo.start import open_run

pytestmark = [pytest.mark.real_model, pytest.mark.usefixtures("one_thread")]

ENVIRONMENTS = ("household", "alfworld", "webshop")
GIB = 2**30


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("smollm2"))


def settings(env: str, model: Path, *flags: str) -> Config:
    """Two loops of one update each of B and A, at the smallest size that has groups and replay."""
    small = [
        f"env.name={env}",
        "env.options={prompt_style: chat, max_turns: 2}",
        f"policy.path={model}",
        "rollout.tasks=2",
        "rollout.group_size=2",
        "rollout.max_prompt_tokens=1536",
        "rollout.max_response_tokens=24",
        "swap.k=1",
        "swap.alpha=0.5",
        "swap.buffer_tasks=1",
        "loss.kl_coef=0.01",
        "estimator.invalid_penalty=0.1",  # rewards that differ, where nothing succeeds
        "optimizer.learning_rate=1e-5",
        "optimizer.minibatches=1",
        "optimizer.micro_batch_tokens=4096",
        "evaluation.every=0",
        "evaluation.episodes=2",
        "evaluation.temperatures=[0.4]",
        "run.steps=2",
        "run.threads=null",
    ]
    return apply_flags(default_config("rspo"), [*small, *flags])


def data_of(env: str, folder: Path) -> tuple[str, ...]:
    """Flags for data that need no download."""
    if env == "webshop":
        pytest.importorskip("bm25s", reason="needs rspo[webshop]")
        return ("env.options.data=own",)
    if env == "alfworld":
        pytest.importorskip("alfworld", reason="needs rspo[alfworld]")
        from rspo.envs.alfworld.generator import generate_games

        generate_games(folder / "games", 3)
        return (f"env.options.data={folder / 'games'}",)
    return ()


def resident_at_most(*, anew: bool = False) -> int:
    """The most memory that this process has had, in bytes; counted anew from here on where that is asked for."""
    if anew:
        gc.collect()  # what an earlier test has left in cycles
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_rspo_steps(env: str, smollm2: Path, tmp_path: Path) -> None:
    held = resident_at_most(anew=True)
    trainer = open_run(settings(env, smollm2, *data_of(env, tmp_path)), tmp_path / "run", progress=False)
    before = [p.detach().clone() for p in trainer.agent.policy.model.parameters()]
    try:
        trainer.train()
    finally:
        trainer.close()
    updates, dense = read_metrics(tmp_path / "run", "update"), read_metrics(tmp_path / "run", "dense")
    assert [record["step"] for record in updates] == [1, 2]
    assert len(dense) == 2
    for record in [*updates, *dense]:
        numbers = {name: value for name, value in record.items() if isinstance(value, float)}
        assert all(math.isfinite(value) for value in numbers.values()), numbers
    moved = sum(
        float((a - b).detach().abs().sum())
        for a, b in zip(before, trainer.agent.policy.model.parameters(), strict=True)
    )
    assert moved > 0

    # What a person reads of it: the chat template around the prompt, and responses of the model's own.
    transcripts = sorted((tmp_path / "run" / "transcripts").glob("*.txt"))
    text = transcripts[-1].read_text()
    assert "<|im_start|>user" in text
    assert "<|im_start|>assistant" in text
    added = resident_at_most() - held
    assert added < 12 * GIB, "two agents with Adam's state, a reference and the activations of a micro-batch"


@pytest.mark.parametrize("packing", ["on", "off"])
def test_ratios_begin_at_one(packing: str, smollm2: Path, tmp_path: Path) -> None:
    """What generation said of its tokens is what a training forward pass says, packed or padded."""
    flags = ("method=grpo", f"policy.packing={packing}", "run.steps=1", "optimizer.learning_rate=0.0")
    config = settings("household", smollm2, *flags)
    trainer = open_run(config, tmp_path / "run", progress=False)
    try:
        trainer.train()
    finally:
        trainer.close()
    (record,) = read_metrics(tmp_path / "run", "update")
    assert abs(record["ratio_mean"] - 1) < 1e-4
    assert record["ratio_max"] < 1 + 1e-3


def test_prompts_and_projection_with_a_real_tokenizer(smollm2: Path) -> None:
    policy = Policy.load(smollm2, settings("household", smollm2).policy)
    env = HouseholdEnv(prompt_style="chat")
    _, infos = env.reset([env.tasks()[0]], [0])
    context = PromptContext(infos[0]["task"], (), "You see: nothing.", tuple(infos[0]["admissible_actions"]), 0)
    prompt = env.render_prompt(context)
    (ids,) = policy.encode([prompt])
    text = policy.tokenizer.decode(ids)
    assert text.endswith(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    (response,) = policy.encode_responses([env.render_action("go fridge")])
    assert env.project(policy.decode([np.append(response, policy.eos_token_ids)])[0]) == ("go fridge", True)
    assert policy.eos_token_ids == (policy.tokenizer.convert_tokens_to_ids("<|im_end|>"),)


@pytest.fixture
def few_rows(smollm2: Path) -> tuple[Policy, Config, list[Trajectory], Batch]:
    """The model on the fused path, which its 49152 words ask for, and rows of random tokens."""
    policy = Policy.load(smollm2, Config().policy)
    assert policy.module.fused
    made = talks(vocab=49152, length=12)
    config = plain_settings("optimizer.micro_batch_tokens=256", layout="conversation")
    return policy, config, made, prepared(policy, config, made)


def test_fused_loss_and_gradients_in_float32(few_rows: tuple[Policy, Config, list[Trajectory], Batch]) -> None:
    """Those of the plain forward pass with its logits in full."""
    policy, config, made, batch = few_rows
    stats, gradients = trained(policy, config, batch, made)
    loss, expected = plain(policy, config, batch)
    loss.assert_close(stats["loss"])
    assert_gradients_close(gradients, expected, rtol=1e-3)


def test_fused_loss_and_gradients_in_bfloat16(few_rows: tuple[Policy, Config, list[Trajectory], Batch]) -> None:
    """As near to the exact gradient as the plain forward pass in bfloat16 is, within a factor of 2."""
    policy, config, made, batch = few_rows
    policy.model.to(torch.bfloat16)  # what is exact is then what these rounded weights give
    exact_loss, exact = plain(policy, config, batch)
    loss, rounded = plain(policy, config, batch, torch.bfloat16)
    stats, ours = trained(policy, config, batch, made)

    def error(gradients: dict[str, Tensor]) -> float:
        assert gradients.keys() == exact.keys()
        squares = sum(float((gradients[name].double() - g).square().sum()) for name, g in exact.items())
        return math.sqrt(squares / sum(float(g.square().sum()) for g in exact.values()))

    assert error(ours) <= 2 * error(rounded)
    exact_loss.assert_close(stats["loss"], rtol=2 * abs(loss.value - exact_loss.value) / exact_loss.size + 0.01)


def test_episodes_by_transformers_serve(smollm2: Path, tmp_path: Path) -> None:
    """A real server plays episodes: its tokens have, under the training model, the surprise of samples from the whole
    distribution at temperature 1. It dies, and collection goes on at another."""
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    server_settings = ("engine.name=openai", "engine.server=transformers", "engine.concurrency=2", "engine.retries=0")
    policy = Policy.load(smollm2, settings("household", smollm2).policy)
    env = HouseholdEnv(prompt_style="chat", max_turns=2)
    with transformers_serve(smollm2, tmp_path / "log") as server:
        config = settings("household", smollm2, *server_settings, f"engine.url={server.url}")
        backend = open_backend(config)
        collect(env, policy, config, tmp_path, 4, progress=False, backend=backend)
        server.kill()
        with pytest.raises(EngineError, match="cannot be reached"):
            collect(env, policy, config, tmp_path, 8, resume=True, progress=False, backend=backend)
    with transformers_serve(smollm2, tmp_path / "log") as server:
        config = settings("household", smollm2, *server_settings, f"engine.url={server.url}")
        collect(env, policy, config, tmp_path, 8, resume=True, progress=False, backend=open_backend(config))
    trajectories = load_trajectories([tmp_path])
    assert len(trajectories) == 8

    rescore(policy, trajectories, config)
    surprise, variance, tokens = 0.0, 0.0, 0
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.response_ids]))
        with torch.no_grad():
            logits = policy.model(ids.unsqueeze(0)).logits[0, len(turn.prompt_ids) - 1 : -1]
        logp = torch.log_softmax(logits.double(), dim=-1)
        drawn = logp.gather(1, ids[len(turn.prompt_ids) :, None]).squeeze(1)
        np.testing.assert_allclose(turn.behavior_logp, drawn, atol=1e-3)
        mean = (logp.exp() * logp).sum(-1)
        surprise += float((drawn - mean).sum())
        variance += float(((logp.exp() * logp**2).sum(-1) - mean**2).sum())
        tokens += len(drawn)
    assert tokens > 100
    deviations = surprise / math.sqrt(variance)
    assert abs(deviations) < 4, f"{tokens} tokens are {deviations:.1f} standard deviations from samples of the model"
