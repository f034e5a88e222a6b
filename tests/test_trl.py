"""The TRL plug-in beside TRL itself: equal losses, metrics and runs; the reward swap; environments as tools."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_examples import code_blocks
from numerics import assert_close
from torch import Tensor

pytest.importorskip("trl", reason="needs pip install rspo[trl]")
pytest.importorskip("datasets", reason="needs pip install rspo[trl]")

from transformers import CohereConfig, Gemma2Config, GraniteConfig, PreTrainedModel, Qwen2ForCausalLM
from trl import GRPOTrainer
from trl_toys import prompts, small_args, small_model, tool_caller, variety, word_level

from rspo.config import SwapConfig
from rspo.integrations.trl import (
    EnvironmentTool,
    FusedGRPOTrainer,
    RSPOGRPOTrainer,
    dense_reward,
    environment_dataset,
    environment_factory,
    outcome_reward,
)
from rspo.integrations.trl.agents import Snapshot
from rspo.integrations.trl.completions import CompletionBatch
from rspo.integrations.trl.grpo import Part
from rspo.integrations.trl.rspo import Replay
from rspo_kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = word_level()
PER_SEQUENCE = {"clip_ratio/low_min", "clip_ratio/high_max"}
"""Metrics of TRL that the fused loss does not have."""


def made_up_inputs(rows: int = 4, prompt: int = 5, completion: int = 6, seed: int = 1) -> dict[str, Tensor]:
    """A micro-batch as TRL makes them: padding on either side, a tool's answer, a row that is cut away."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, len(TOKENIZER), (rows, prompt + completion), generator=rng)
    prompt_mask, completion_mask = torch.ones(rows, prompt).long(), torch.ones(rows, completion).long()
    prompt_mask[0, :2] = 0
    completion_mask[1, 4:] = 0
    completion_mask[3] = 0
    tool_mask = torch.ones_like(completion_mask)
    tool_mask[2, 2:4] = 0
    return {
        "prompt_ids": ids[:, :prompt].where(prompt_mask.bool(), TOKENIZER.pad_token_id),
        "prompt_mask": prompt_mask,
        "completion_ids": ids[:, prompt:].where(completion_mask.bool(), TOKENIZER.pad_token_id),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([1.0, -0.7, 0.4, -0.3]).repeat(rows // 4),
        "num_items_in_batch": torch.tensor(37),
    }


def with_partners(inputs: dict[str, Tensor], logp: Tensor) -> dict[str, Tensor]:
    """The same with old and reference log-probs near `logp`, so that some ratios are clipped."""
    rng = torch.Generator().manual_seed(2)
    offsets = [0.3 * torch.randn(logp.shape, generator=rng) for _ in range(2)]
    return inputs | {"old_per_token_logps": logp + offsets[0], "ref_per_token_logps": logp + offsets[1]}


def trainer_of(kind: type[GRPOTrainer], model: Any, folder: Path, **settings: Any) -> GRPOTrainer:
    """A trainer in the middle of training."""
    trainer = kind(model, variety, small_args(folder, **settings), prompts(), processing_class=TOKENIZER)
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    return trainer


def loss_gradients_metrics(
    trainer: GRPOTrainer, inputs: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss, gradients, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def assert_equal_losses(ours: GRPOTrainer, theirs: GRPOTrainer, inputs: dict[str, Tensor]) -> set[str]:
    """Loss, gradients and common metrics to float32's rounding; the metrics that only TRL has."""
    (loss, gradients, metrics), (expected, their_gradients, their_metrics) = (
        loss_gradients_metrics(trainer, inputs) for trainer in (ours, theirs)
    )
    assert_close("loss", loss, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == their_gradients.keys()
    size = max(float(gradient.abs().max()) for gradient in their_gradients.values())
    assert size > 1e-3
    for name, gradient in gradients.items():
        assert_close(name, gradient, their_gradients[name], rtol=1e-5, atol=2e-6 * size)
    shared = metrics.keys() & their_metrics.keys()
    assert metrics.keys() == shared
    for name in shared:
        assert metrics[name] == pytest.approx(their_metrics[name], rel=1e-5, abs=1e-6), name
    return their_metrics.keys() - shared


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder, where TRL finds its reference."""
    folder = tmp_path_factory.mktemp("model")
    small_model(TOKENIZER).save_pretrained(folder)
    return folder


TOKEN_LEVEL = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo", "epsilon": 0.1, "epsilon_high": 0.3},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "temperature": 0.7},
    "dapo, longer generation": {"loss_type": "dapo", "steps_per_generation": 4},
    "luspo": {"loss_type": "luspo"},
    "sapo": {"loss_type": "sapo"},
    "delta": {"loss_type": "dapo", "delta": 1.3},
    "kl": {"loss_type": "grpo", "beta": 0.1},
    "kl, dapo": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.1},
}
SEQUENCE_LEVEL = {
    "gspo": {"loss_type": "grpo", "epsilon": 0.02, "epsilon_high": 0.03},
    "dapo": {"loss_type": "dapo", "epsilon": 0.02},
    "luspo": {"loss_type": "luspo", "epsilon": 0.02, "beta": 0.1},
}


@pytest.mark.parametrize("settings", TOKEN_LEVEL.values(), ids=TOKEN_LEVEL)
def test_loss_gradients_and_metrics_are_trls(settings: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    ours, theirs = (trainer_of(kind, str(saved), tmp_path, **settings) for kind in (FusedGRPOTrainer, GRPOTrainer))
    inputs = made_up_inputs()
    ids, mask = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1), inputs["completion_mask"]
    attention = torch.cat([inputs["prompt_mask"], mask], 1)
    logp = theirs._get_per_token_logps_and_entropies(theirs.model, ids, attention, 6)[0].detach()
    inputs = with_partners(inputs, logp)
    if settings["loss_type"] == "cispo":
        # Only where all advantages have one sign do the two count the same tokens.
        inputs["advantages"] = inputs["advantages"].abs()
    only_trl = assert_equal_losses(ours, theirs, inputs)
    assert only_trl <= PER_SEQUENCE
    if settings["loss_type"] in ("grpo", "dapo", "bnpo"):
        assert 0 < ours._metrics["train"]["clip_ratio/region_mean"][-1] < 1, "the test must see clipping"


@pytest.mark.parametrize("settings", SEQUENCE_LEVEL.values(), ids=SEQUENCE_LEVEL)
def test_loss_of_sequence_ratios_is_trls(settings: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    settings = {"importance_sampling_level": "sequence", **settings}
    ours, theirs = (trainer_of(kind, str(saved), tmp_path, **settings) for kind in (FusedGRPOTrainer, GRPOTrainer))
    inputs = made_up_inputs()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    inputs = with_partners(inputs, ours._get_per_token_logps_and_entropies(ours.model, ids, attention, 6)[0].detach())
    results = [loss_gradients_metrics(trainer, inputs) for trainer in (ours, theirs)]
    assert_close("loss", results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for name, gradient in results[0][1].items():
        assert_close(name, gradient, results[1][1][name], rtol=1e-5, atol=1e-6)
    # Counted in tokens here, in sequences there.
    assert (results[0][2]["clip_ratio/region_mean"] > 0) == (results[1][2]["clip_ratio/region_mean"] > 0)
    assert results[0][2]["entropy"] == pytest.approx(results[1][2]["entropy"], rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_vllms_importance_ratios_scale_the_policy_term_alone(level: str, saved: Path, tmp_path: Path) -> None:
    ours, theirs = (
        trainer_of(kind, str(saved), tmp_path, loss_type="dapo", beta=0.1) for kind in (FusedGRPOTrainer, GRPOTrainer)
    )
    theirs.use_vllm = True  # which only tells the loss that there are ratios
    inputs = made_up_inputs()
    width = 6 if level == "token" else 1
    inputs["importance_sampling_ratio"] = torch.rand(4, width, generator=torch.Generator().manual_seed(3)) + 0.5
    inputs["ref_per_token_logps"] = torch.full((4, 6), -4.0)
    assert_equal_losses(ours, theirs, inputs)


def test_first_update_needs_no_old_logprobs(saved: Path, tmp_path: Path) -> None:
    ours, theirs = (trainer_of(kind, str(saved), tmp_path) for kind in (FusedGRPOTrainer, GRPOTrainer))
    inputs = made_up_inputs()
    del inputs["tool_mask"]
    assert_equal_losses(ours, theirs, inputs)


HEADS = {
    "Gemma2: softcap, tied": (Gemma2Config, {"final_logit_softcapping": 2.0, "head_dim": 16}),
    "Cohere: scale": (CohereConfig, {"logit_scale": 0.25, "use_qk_norm": False}),
    "Granite: divided": (GraniteConfig, {"logits_scaling": 3.0}),
}


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_heads_that_cap_or_scale(config: Any, tmp_path: Path) -> None:
    ours, theirs = (
        trainer_of(kind, small_model(TOKENIZER, config), tmp_path, temperature=0.8)
        for kind in (FusedGRPOTrainer, GRPOTrainer)
    )
    assert_equal_losses(ours, theirs, made_up_inputs())


class HalvedLogits(Qwen2ForCausalLM):
    """A model that does to its logits what no setting of its configuration says."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output


def test_head_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = HalvedLogits(small_model(TOKENIZER).config)
    with pytest.raises(ValueError, match=r"the logits of HalvedLogits must be logit_scale"):
        trainer_of(FusedGRPOTrainer, model, tmp_path)


def test_logprobs_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    trainer = trainer_of(FusedGRPOTrainer, small_model(TOKENIZER), tmp_path, temperature=0.7)
    inputs = made_up_inputs()
    batch = CompletionBatch.from_inputs(inputs)
    logp, entropy, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, batch.input_ids, batch.attention_mask, 6, batch_size=3, compute_entropy=True
    )
    expected, their_entropy = plain_logprobs(trainer.model, batch, 0.7)
    assert_close("logp", logp, expected, rtol=1e-5, atol=1e-6)
    assert_close("entropy", entropy, their_entropy, rtol=1e-5, atol=1e-6)


def plain_logprobs(model: PreTrainedModel, batch: CompletionBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """In float64, from the logits of the model's own forward."""
    width = batch.completion_ids.shape[1]
    model = copy.deepcopy(model).double()
    logits = Qwen2ForCausalLM.forward(model, batch.input_ids, batch.attention_mask).logits[:, -width - 1 : -1]
    mask = batch.completion_mask.bool()
    return reference.token_logprobs(logits, batch.completion_ids, temperature=temperature, mask=mask)


REFUSED = {
    "loss_type must be one of": {"loss_type": "vespo"},
    "epsilon_high must be at least 1": {"loss_type": "cispo", "epsilon_high": 0.3},
    "delta must be above 1 \\+ epsilon_high": {"delta": 1.2},
    "delta must be None": {"delta": 4.0, "loss_type": "sapo"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.2},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5},
    "entropy_coef must be 0": {"entropy_coef": 0.01},
    "use_adaptive_entropy": {"use_adaptive_entropy": True},
    "importance_sampling_level": {"importance_sampling_level": "turn"},
}


@pytest.mark.parametrize(("message", "settings"), REFUSED.items(), ids=REFUSED)
def test_settings_that_cannot_be_honoured_are_refused(message: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(FusedGRPOTrainer, "no such model, which is not looked for", tmp_path, **settings)


RUNS = {
    "two passes over a generation batch": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "KL to a reference model": {"beta": 0.1, "loss_type": "grpo"},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_run_is_trls(settings: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    assert_runs_alike(
        lambda kind: kind(str(saved), variety, small_args(tmp_path, **settings), prompts(), processing_class=TOKENIZER)
    )


def test_a_run_with_lora_is_trls(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs pip install rspo[lora]")
    assert_runs_alike(
        lambda kind: kind(
            small_model(TOKENIZER),
            variety,
            small_args(tmp_path, beta=0.1),
            prompts(),
            processing_class=TOKENIZER,
            peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        )
    )


def test_a_run_on_household_is_trls(tmp_path: Path) -> None:
    model, tokenizer, settings = tool_caller()
    ours = assert_runs_alike(
        lambda kind: kind(
            copy.deepcopy(model),
            [outcome_reward, dense_reward],
            small_args(tmp_path, max_steps=2, **settings),
            environment_dataset("household", 8, prompt_style="chat"),
            environment_factory=environment_factory("household", prompt_style="chat", max_turns=60),
            processing_class=tokenizer,
        )
    )
    log = ours.state.log_history[0]
    assert log["tools/call_frequency"] > 0
    assert log["tools/failure_frequency"] == 0
    assert log["rewards/dense_reward/std"] > 0
    assert max(environment.turns for environment in ours.environments) > 0
    openings = {str(prompt) for prompt in ours._logs["prompt"]}
    assert len(openings) == 1, "a group plays one episode"


def assert_runs_alike(make: Callable[[type[GRPOTrainer]], GRPOTrainer]) -> GRPOTrainer:
    """Make and train one of each: the same metrics and weights. Returns ours."""
    ours = make(FusedGRPOTrainer)
    before = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    ours.train()
    theirs = make(GRPOTrainer)  # which seeds
    theirs.train()
    for log, expected in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        assert expected.keys() - log.keys() == PER_SEQUENCE
        for name in log.keys() - {"step_time"}:
            assert log[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    moved = 0.0
    for (name, weight), expected in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert_close(name, weight, expected, rtol=1e-4, atol=1e-5)
        moved = max(moved, float((weight.detach() - before[name]).abs().max()))
    assert moved > 1e-3, "the test must see training"
    return ours


# Environments


def test_the_expert_wins_by_tool_calls() -> None:
    tool = environment_factory("household")()
    row = environment_dataset("household", 3)[2]
    opening = tool.reset(**row)
    twin = environment_factory("household")()
    assert opening == twin.reset(**row), "members of a group see the same"
    assert (tool.outcome, tool.dense_return, tool.won, tool.is_over) == (0.0, 0.0, False, False)
    dense = 0.0
    while not tool.is_over:
        (action,) = tool.env.expert_actions()
        _, _, _, _, (info,) = twin.env.step([action])
        dense += info["dense_reward"]
        answer = tool.act(f"  {action.upper()} ")
    assert tool.won
    assert answer.endswith("The episode is over.")
    assert outcome_reward([tool, twin]) == [10.0, 0.0]
    assert dense_reward([tool]) == [pytest.approx(dense)]
    assert tool.task_score == 1.0
    with pytest.raises(ValueError, match="The episode is over"):
        tool.act("go fridge")
    tool.reset(**row)
    assert (tool.outcome, tool.turns, tool.won) == (0.0, 0, False)


def test_a_turn_limit_ends_an_episode() -> None:
    tool = environment_factory("household", max_turns=2)()
    tool.reset(task=0, seed=1)
    tool.act("go fridge")
    tool.act("fly to the moon")
    assert tool.is_over
    assert not tool.won


def test_models_are_told_to_call_the_tool() -> None:
    tool = environment_factory("household", prompt_style="chat")()
    for text in (tool.reset(task=0, seed=1), tool.act("go fridge")):
        assert "<action>" not in text
        assert "Call the tool `act`" in text
    public = {name for name in vars(EnvironmentTool) if not name.startswith("_")}
    assert public == {"reset", "act"}, "any other public method would be offered to the model"


def test_data_sets_of_environments() -> None:
    rows = environment_dataset("household", 200, split="eval", seed=3)
    assert rows["split"] == ["eval"] * 200
    assert sorted(rows["task"][:115]) == list(range(115)), "every task comes before any comes twice"
    assert rows["seed"] == environment_dataset("household", 200, split="eval", seed=3)["seed"]
    with pytest.raises(ValueError, match="size must be at least 1"):
        environment_dataset("household", 0)
    with pytest.raises(ValueError, match="columns 'task' and 'seed'"):
        environment_factory("household")().reset(prompt=[])
    with pytest.raises(ValueError, match="unknown environment 'nowhere'"):
        environment_factory("nowhere")
    with pytest.raises(ValueError, match="prompt_style must be one of"):
        environment_factory("household", prompt_style="sung")


# The reward swap


def third_words(completions: list[str], **_: Any) -> list[float]:
    """A dense reward that wants something else than the outcome."""
    return [float(sum(word in ("w3", "w6", "w9", "w12", "w15") for word in text.split())) for text in completions]


def long_enough(completions: list[str], **_: Any) -> list[float]:
    """An outcome of 0 or 1."""
    return [float(len(set(text.split())) > 6) for text in completions]


class Watched(RSPOGRPOTrainer):
    """Keeps what the tests want to see of the loops."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loops: list[dict[str, Any]] = []
        self.replays: list[tuple[int, list[Replay]]] = []

    def train_b_and_collect(self) -> None:
        """With A before and after."""
        loop: dict[str, Any] = {"before": snapshot(self), "step": self.state.global_step}
        self.loops.append(loop)
        super().train_b_and_collect()
        loop |= {"after": snapshot(self), "buffer": self.buffer.trajectories}

    def _collect(self, prompts: Any) -> Any:
        self.loops[-1].setdefault("b", copy.deepcopy(self.model))
        return super()._collect(prompts)

    def _sample_replay(self) -> list[Replay]:
        replay = super()._sample_replay()
        if replay:
            self.replays.append((len(self.loops), replay))
        return replay


def snapshot(trainer: RSPOGRPOTrainer) -> list[Tensor]:
    kept = Snapshot(trainer.model, trainer.optimizer)
    state = [value for _, values in kept.state for value in values.values()]
    return [*(weight for _, weight in kept.weights), *state]


def swap_trainer(folder: Path, kind: type[RSPOGRPOTrainer] = RSPOGRPOTrainer, **settings: Any) -> Any:
    options = {name: settings.pop(name) for name in ("swap", "offload", "center_cap") if name in settings}
    defaults = {"max_steps": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    args = small_args(folder, **{**defaults, "optim": "adamw_torch", "learning_rate": 1e-2, **settings})
    options.setdefault("swap", SwapConfig(k=2, alpha=0.25, buffer_tasks=8))
    model = small_model(TOKENIZER)
    return kind(model, long_enough, third_words, args, prompts(), processing_class=TOKENIZER, **options)


@pytest.mark.parametrize("offload", [False, True])
def test_agent_a_is_as_it_was_after_b(offload: bool, tmp_path: Path) -> None:
    trainer = swap_trainer(tmp_path, Watched, offload=offload)
    trainer.train()
    assert [loop["step"] for loop in trainer.loops] == [0, 2], "max_steps counts updates of A"
    for loop in trainer.loops:
        before, after = loop["before"], loop["after"]
        assert len(before) == len(after)
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        moved = [not torch.equal(x, y) for x, y in zip(before, loop["b"].parameters(), strict=False)]
        assert any(moved), "B has learned"
    assert len(trainer.loops[1]["before"]) > len(list(trainer.model.parameters())), "with optimiser state"
    first = trainer.state.log_history[0]
    assert first["dense/rewards/third_words/mean"] >= 0
    assert "rewards/third_words/mean" not in first
    assert first["rewards/long_enough/mean"] == first["reward"]
    assert first["num_tokens"] > first["completions/mean_length"] * 16 * 3, "B's tokens count"


def test_replay_has_bs_logprobs_and_the_best_outcomes(tmp_path: Path) -> None:
    trainer = swap_trainer(tmp_path, Watched, temperature=0.9)
    trainer.train()
    buffer = trainer.loops[-1]["buffer"]
    assert len(buffer) == 8 * 4
    for entry in buffer[:6]:
        batch = CompletionBatch.from_collected([entry], TOKENIZER.pad_token_id, torch.device("cpu"))
        expected, _ = plain_logprobs(trainer.loops[-1]["b"], batch, 0.9)
        assert_close("behaviour", batch.behavior_logp, expected, rtol=1e-5, atol=1e-5)
    for group in range(8):
        rewards = torch.tensor([float(entry.rewards[0]) for entry in buffer if entry.group == group])
        advantages = torch.tensor([float(entry.advantages[0]) for entry in buffer if entry.group == group])
        assert_close(
            "advantages", advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-4), rtol=1e-4, atol=1e-6
        )
    assert [loop for loop, _ in trainer.replays] == [1, 1, 2, 2]
    for loop, replay in trainer.replays:
        rows = sum(len(part.part.completions) for part in replay)
        assert rows == 5, "a quarter of the update: 5 beside 16"
        best = sorted((float(entry.rewards[0]) for entry in trainer.loops[loop - 1]["buffer"]), reverse=True)
        assert trainer.state.log_history[2 * loop - 2]["replay/success"] == np.mean([r > 0 for r in best[:5]])


def test_replayed_tokens_have_their_own_clip_centre_and_eq_1(tmp_path: Path) -> None:
    trainer = swap_trainer(tmp_path, loss_type="dapo", beta=0.0)
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    inputs = made_up_inputs()
    on_policy, off_policy = (CompletionBatch.from_inputs(made_up_inputs(seed=seed)) for seed in (1, 5))
    logp_on, logp_off = (plain_logprobs(trainer.model, batch, 1.0)[0].detach() for batch in (on_policy, off_policy))
    rng = torch.Generator().manual_seed(4)
    old, behavior = (logp_off + 0.4 * torch.randn(logp_off.shape, generator=rng) for _ in range(2))
    # A narrower completion than the on-policy ones, whose padding must not matter.
    off_policy = replace(off_policy, old_logp=old.float(), behavior_logp=behavior.float())
    alpha = 0.25
    part = Part(off_policy, 11.0 / alpha, "replay/")
    loss = trainer._compute_loss(trainer.model, {**inputs, "replay": Replay(alpha, part)})
    loss.backward()
    gradient = trainer.model.lm_head.weight.grad

    model = copy.deepcopy(trainer.model).double()
    model.zero_grad()
    logps = []
    for batch in (on_policy, off_policy):
        logits = Qwen2ForCausalLM.forward(model, batch.input_ids, batch.attention_mask).logits[:, -7:-1]
        logps.append(reference.token_logprobs(logits, batch.completion_ids)[0])
    normalizer = 37 * 2 / trainer.args.steps_per_generation
    expected_on, _ = reference.policy_loss(
        logps[0].flatten(), on_policy.advantages.double().flatten(), trainer.loss_config,
        mask=on_policy.loss_mask.flatten(), normalizer=normalizer,
    )  # fmt: skip
    expected_off, _ = reference.policy_loss(
        logps[1].flatten(), off_policy.advantages.double().flatten(), trainer.loss_config,
        mask=off_policy.loss_mask.flatten(), normalizer=11.0,
        old_logp=old.flatten(), behavior_logp=behavior.flatten(),
    )  # fmt: skip
    expected = (1 - alpha) * expected_on + alpha * expected_off
    expected.backward()
    assert_close("logp", logps[0].where(on_policy.loss_mask, 0), logp_on.where(on_policy.loss_mask, 0), rtol=1e-12)
    assert_close("loss", loss, expected, rtol=1e-5, atol=1e-6)
    assert_close("gradient", gradient, model.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    assert trainer.loss_config.center_cap == 1.0
    assert trainer._metrics["train"]["replay/center_mean"][-1] != 1.0


def test_replay_of_other_lengths_stands_beside_a_batch(tmp_path: Path) -> None:
    trainer = swap_trainer(tmp_path)
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    inputs = made_up_inputs(prompt=3, completion=6)
    short = CompletionBatch.from_inputs(made_up_inputs(prompt=7, completion=5, seed=6))
    short = replace(short, old_logp=torch.full((4, 5), -4.0))
    together = trainer._compute_loss(trainer.model, {**inputs, "replay": Replay(0.25, Part(short, 44.0, "replay/"))})
    alone = trainer._compute_loss(trainer.model, {**inputs, "replay": Replay(0.25, None)})
    ((loss, _),) = trainer._read(trainer.model, [short], [partial(trainer._loss, Part(short, 44.0))])
    assert_close("loss", together, alone + loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "swap": SwapConfig(k=1, alpha=0.25, buffer_tasks=8)}])
def test_a_resumed_run_is_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, **settings}
    straight = swap_trainer(tmp_path / "straight", **saving)
    straight.train()
    resumed = swap_trainer(tmp_path / "resumed", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for name, weight in straight.model.named_parameters():
        assert torch.equal(weight, resumed.model.get_parameter(name)), name


def test_the_swap_with_lora_and_household(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs pip install rspo[lora]")
    model, tokenizer, settings = tool_caller()
    trainer = Watched(
        model,
        outcome_reward,
        dense_reward,
        small_args(tmp_path, max_steps=2, optim="adamw_torch", **settings),
        environment_dataset("household", 8, prompt_style="chat"),
        swap=SwapConfig(k=1, alpha=0.25, buffer_tasks=1, sampling="random"),
        environment_factory=environment_factory("household", prompt_style="chat"),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        processing_class=tokenizer,
    )
    trainer.train()
    adapters = sum(p.requires_grad for p in trainer.model.parameters())
    assert len(Snapshot(trainer.model, trainer.optimizer).weights) == adapters == 8, "B copies the adapters alone"
    for loop in trainer.loops:
        assert all(torch.equal(x, y) for x, y in zip(loop["before"], loop["after"], strict=True))
        tool_tokens = [int((~entry.loss_mask).sum()) for entry in loop["buffer"]]
        assert max(tool_tokens) > 0, "what the environment says is not trained on"
    assert "dense/rewards/dense_reward/mean" in trainer.state.log_history[0]
    assert trainer.state.log_history[0]["replay/completions"] == 1


REFUSED_SWAPS = {
    "swap.source and swap.mixture": {"swap": SwapConfig(source="history", buffer_tasks=4)},
    "swap.alpha=0.001 replays no completion": {"swap": SwapConfig(alpha=0.001, buffer_tasks=4)},
    "swap.buffer_tasks must be a multiple of the 4 prompts": {"swap": SwapConfig(buffer_tasks=6)},
    "must be a multiple of gradient_accumulation_steps": {"steps_per_generation": 1},
    "sync_ref_model": {"sync_ref_model": True, "beta": 0.1},
}


@pytest.mark.parametrize(("message", "settings"), REFUSED_SWAPS.items(), ids=REFUSED_SWAPS)
def test_swaps_that_do_not_go_together_are_refused(message: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        swap_trainer(tmp_path, **settings)


def test_a_swap_needs_both_rewards(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dense_reward_funcs must hold"):
        RSPOGRPOTrainer(small_model(TOKENIZER), long_enough, None, small_args(tmp_path), prompts())
    with pytest.raises(ValueError, match="reward_funcs must hold an outcome reward"):
        RSPOGRPOTrainer(
            small_model(TOKENIZER), None, third_words, small_args(tmp_path, per_device_train_batch_size=8), prompts(),
            swap=SwapConfig(buffer_tasks=2), processing_class=TOKENIZER,
        )  # fmt: skip


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("trl_processes.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()


class SmallArguments:
    """Stands for GRPOConfig in the page's examples, whose sizes are for a GPU."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.settings = settings
        self.folder = folder

    def __call__(self, output_dir: str, **given: Any) -> Any:
        """The arguments of a test, with the rest of the example's settings."""
        wanted = {name: value for name, value in given.items() if name not in self.settings}
        return small_args(self.folder / output_dir, **wanted, **self.settings)


@pytest.mark.parametrize("number", range(2))
def test_examples_of_the_page_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, settings = tool_caller()
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    settings |= {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    arguments = SmallArguments(settings if number else settings | {"max_completion_length": 20}, tmp_path)
    monkeypatch.setattr("trl.GRPOConfig", arguments)
    code = code_blocks("trl.md")[number].replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))
    code = code.replace("k=3, alpha=1 / 8, buffer_tasks=28", "k=1, alpha=1 / 4, buffer_tasks=1")
    namespace: dict[str, Any] = {}
    exec(compile(code, "trl.md", "exec"), namespace)
    assert namespace["trainer"].state.global_step == 1
