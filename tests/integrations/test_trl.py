"""The TRL plug-in beside TRL itself: equal losses, metrics and runs; the reward swap; environments as tools."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_examples import code_blocks
from numerics import assert_close
from torch import Tensor

pytest.importorskip("trl", reason="needs pip install rspo[trl]")
pytest.importorskip("datasets", reason="needs pip install rspo[trl]")

from transformers import CohereConfig, Gemma2Config, GraniteConfig, Qwen2ForCausalLM
from trl import GRPOTrainer
from trl_toys import (
    TOKENIZER,
    loss_gradients_metrics,
    made_up_inputs,
    plain_logprobs,
    prompts,
    small_args,
    small_model,
    tool_caller,
    trainer_of,
    variety,
)

from rspo.envs.base import EnvironmentValueError
from rspo.integrations.trl import (
    EnvironmentTool,
    FusedGRPOTrainer,
    dense_reward,
    environment_dataset,
    environment_factory,
    outcome_reward,
)
from rspo.integrations.trl.completions import CompletionBatch
from rspo.integrations.trl.grpo import Part

pytestmark = pytest.mark.usefixtures("one_thread")

PER_SEQUENCE = {"clip_ratio/low_min", "clip_ratio/high_max"}
"""Metrics of TRL that the fused loss does not have."""


def with_partners(inputs: dict[str, Tensor], logp: Tensor) -> dict[str, Tensor]:
    """The same with old and reference log-probs near `logp`, so that some ratios are clipped."""
    rng = torch.Generator().manual_seed(2)
    offsets = [0.3 * torch.randn(logp.shape, generator=rng) for _ in range(2)]
    return inputs | {"old_per_token_logps": logp + offsets[0], "ref_per_token_logps": logp + offsets[1]}


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
    "head in float32": {"loss_type": "dapo", "cast_lm_head_to_fp32": True},
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


def test_tokens_without_advantage_may_stay_out(tmp_path: Path) -> None:
    ours, lean = (trainer_of(FusedGRPOTrainer, small_model(TOKENIZER), tmp_path) for _ in range(2))
    lean.exact_metrics = False
    inputs = made_up_inputs()
    inputs["advantages"][0] = 0
    (loss, gradients, metrics), (lean_loss, lean_gradients, lean_metrics) = (
        loss_gradients_metrics(trainer, inputs) for trainer in (ours, lean)
    )
    assert_close("loss", lean_loss, loss, rtol=1e-6)
    for name, gradient in lean_gradients.items():
        assert_close(name, gradient, gradients[name], rtol=1e-5, atol=1e-7)
    assert metrics.keys() == lean_metrics.keys()
    assert metrics["entropy"] != lean_metrics["entropy"]


def test_ratios_begin_at_1_in_bfloat16(tmp_path: Path) -> None:
    """Under autocast, as `bf16=True` trains: the head too is in bfloat16 and gives its own old log-probs."""
    ours, theirs = (
        trainer_of(kind, small_model(TOKENIZER), tmp_path, bf16=True) for kind in (FusedGRPOTrainer, GRPOTrainer)
    )
    batch = CompletionBatch.from_inputs(made_up_inputs())
    model = ours.accelerator.prepare_model(ours.model)
    old, _, _ = ours._get_per_token_logps_and_entropies(model, batch.input_ids, batch.attention_mask, 6)
    part = Part(replace(batch, old_logp=old.detach()), 7.0)
    ((_, stats),) = ours._read(model, [part.completions], [partial(ours._loss, part)])
    assert float(stats["ratio_max"]) == 1.0
    exact, _ = plain_logprobs(small_model(TOKENIZER), batch, 1.0)
    assert not torch.equal(old.double(), exact), "the test must see bfloat16"
    theirs.model_wrapped = theirs.accelerator.prepare_model(theirs.model)
    results = [loss_gradients_metrics(trainer, made_up_inputs()) for trainer in (ours, theirs)]
    assert_close("loss", results[0][0], results[1][0], rtol=0.02, atol=2e-3)
    for name, gradient in results[0][1].items():
        expected = results[1][1][name]
        assert_close(name, gradient, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


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
    with pytest.raises(ValueError, match="the logits of HalvedLogits are not those of its output embeddings"):
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
    "two passes over a generation batch": {
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": True,
    },
    "KL to a reference model": {"beta": 0.1, "loss_type": "grpo"},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_run_is_trls(settings: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    assert_runs_alike(
        lambda kind: kind(str(saved), variety, small_args(tmp_path, **settings), prompts(), processing_class=TOKENIZER)
    )


def test_evaluation_is_trls(tmp_path: Path) -> None:
    results = [
        trainer_of(kind, small_model(TOKENIZER), tmp_path, loss_type=loss_type).evaluate(prompts().select(range(4)))
        for loss_type in ("dapo", "grpo")
        for kind in (FusedGRPOTrainer, GRPOTrainer)
    ]
    for ours, theirs in (results[:2], results[2:]):
        for name in ("eval_loss", "eval_reward", "eval_entropy", "eval_clip_ratio/region_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
        assert ours["eval_loss"] != 0


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


@pytest.mark.parametrize(
    ("found", "message"), [(None, "pip install 'rspo"), ("1.15.2", "needs TRL 1.16, found 1.15.2")]
)
def test_a_missing_or_old_trl_is_told(found: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rspo.integrations.trl")]:
        monkeypatch.delitem(sys.modules, name)
    if found is None:
        monkeypatch.setitem(sys.modules, "trl", None)
    else:
        monkeypatch.setattr("trl.__version__", found)
    with pytest.raises(ImportError, match=message):
        importlib.import_module("rspo.integrations.trl")


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


def test_wrong_values_and_exceptions_of_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL answers the model with what a tool raises, and goes on."""
    tool = environment_factory("household")()
    tool.reset(task=0, seed=1)
    step = tool.env.step
    monkeypatch.setattr(tool.env, "step", lambda actions: 1 / 0 if actions else None)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        tool.act("go fridge")
    monkeypatch.setattr(tool.env, "step", lambda actions: {}["</s> <|im_end|>"])
    with pytest.raises(RuntimeError, match=r"KeyError: '< /s> < \|im_end\|>'"):
        tool.act("go fridge")
    assert outcome_reward([tool]) == [0.0]
    monkeypatch.setattr(tool.env, "step", lambda actions: ([None], *step(actions)[1:]))
    with pytest.raises(EnvironmentValueError, match="observations of episode 0 must be a str"):
        tool.act("go fridge")
    for again in (outcome_reward, dense_reward, lambda tools: tools[0].reset(task=0, seed=1)):
        with pytest.raises(EnvironmentValueError, match="observations of episode 0 must be a str"):
            again([tool])


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


# The page


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
