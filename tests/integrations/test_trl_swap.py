"""The reward swap inside TRL: agent A and agent B, the replay buffer, eq. 1, resumed runs, two processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_close
from places import HELPERS

pytest.importorskip("trl", reason="needs pip install rspo[trl]")
pytest.importorskip("datasets", reason="needs pip install rspo[trl]")

from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from trl import GRPOConfig
from trl_toys import (
    TOKENIZER,
    Watched,
    long_enough,
    made_up_inputs,
    plain_logprobs,
    prompts,
    small_args,
    small_model,
    swap_trainer,
    third_words,
    tool_caller,
)

from rspo.config import SwapConfig
from rspo.integrations.trl import (
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


def test_agent_b_moves_along_its_own_copy_of_the_schedule(tmp_path: Path) -> None:
    trainer = swap_trainer(tmp_path, Watched, warmup_steps=2, max_steps=6, lr_scheduler_type="cosine")
    trainer.train()
    for loop in trainer.loops:
        moved = [not torch.equal(x, y) for x, y in zip(loop["before"], loop["b"].parameters(), strict=False)]
        assert any(moved), "B has learned, in the first loop too"
        assert all(torch.equal(x, y) for x, y in zip(loop["before"], loop["after"], strict=True))
    of_a = [record["learning_rate"] for record in trainer.state.log_history if "loss" in record]
    expected = [0.5 * (1 + np.cos(np.pi * step / 4)) * 1e-2 for step in range(4)]
    assert of_a == pytest.approx([0.0, 0.5e-2, *expected]), "A's schedule counts A's steps alone"
    of_b = [r["dense/learning_rate"] for r in trainer.state.log_history if "dense/learning_rate" in r]
    assert of_b == pytest.approx([np.mean(of_a[i : i + 2]) for i in (0, 2, 4)]), "B's goes on from where A is"


def test_a_schedule_by_evaluations_leaves_agent_b_the_rate_of_a(tmp_path: Path) -> None:
    trainer = swap_trainer(tmp_path)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer)
    trainer.train()
    of_b = [r["dense/learning_rate"] for r in trainer.state.log_history if "dense/learning_rate" in r]
    assert of_b == [1e-2, 1e-2]


def test_a_schedule_of_ones_own_that_writes_settings_as_it_loads(tmp_path: Path) -> None:
    trainer = swap_trainer(tmp_path, Watched)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
    one = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
    trainer.optimizer, trainer.lr_scheduler = optimizer, one
    twin = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    expected = torch.optim.lr_scheduler.OneCycleLR(twin, max_lr=1e-2, total_steps=8)
    trainer.train()
    for _ in range(4):
        twin.step()
        expected.step()
    names = ("lr", "betas")
    inner = trainer.lr_scheduler.optimizer
    assert [inner.param_groups[0][name] for name in names] == [twin.param_groups[0][name] for name in names]


def test_an_agent_b_that_cannot_learn_is_told_of(tmp_path: Path) -> None:
    trainer = swap_trainer(tmp_path, warmup_steps=2, max_steps=1, swap=SwapConfig(k=1, alpha=0.25, buffer_tasks=8))
    with pytest.warns(UserWarning, match="agent B learns nothing in the loop at step 0: the schedule's learning rate"):
        trainer.train()


def test_without_arguments_it_is_trls_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_model(TOKENIZER).save_pretrained("small")
    TOKENIZER.save_pretrained("small")
    monkeypatch.setattr("rspo.integrations.trl.settings.GRPOConfig", partial(GRPOConfig, use_cpu=True, bf16=False))
    swap = SwapConfig(buffer_tasks=2)
    by_name = RSPOGRPOTrainer("./small", long_enough, third_words, train_dataset=prompts(), swap=swap)
    assert by_name.args.output_dir == "small-RSPO"
    assert by_name.args.learning_rate == GRPOConfig("x", bf16=False).learning_rate
    model = AutoModelForCausalLM.from_pretrained("./small")
    given = RSPOGRPOTrainer(model, long_enough, third_words, None, prompts(), swap=swap, processing_class=TOKENIZER)
    assert given.args.output_dir == "small-RSPO"
    fused = FusedGRPOTrainer("./small", long_enough, train_dataset=prompts())
    assert fused.args.output_dir == "small-GRPO"


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
    assert [loop for loop, _, _ in trainer.replays] == [1, 1, 2, 2]
    for loop, replay, agent_a in trainer.replays:
        rows = sum(len(part.part.completions) for part in replay)
        assert rows == 5, "a quarter of the update: 5 beside 16"
        for batch in (part.part.completions for part in replay):
            expected, _ = plain_logprobs(agent_a, batch, 0.9)
            assert_close("old", batch.old_logp, expected, rtol=1e-5, atol=1e-5)
            written, _ = plain_logprobs(trainer.loops[loop - 1]["b"], batch, 0.9)
            assert_close("behaviour", batch.behavior_logp, written, rtol=1e-5, atol=1e-5)
            assert not torch.equal(batch.old_logp, batch.behavior_logp)
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"warmup_steps": 3, "lr_scheduler_type": "cosine"},
        {"num_iterations": 2, "swap": SwapConfig(k=1, alpha=0.25, buffer_tasks=8)},
    ],
)
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


def test_both_agents_prompts_have_the_templates_arguments(tmp_path: Path) -> None:
    model, tokenizer, settings = tool_caller()
    trainer = Watched(
        model,
        long_enough_messages,
        long_enough_messages,
        small_args(
            tmp_path, max_steps=1, **settings | {"max_completion_length": 4},
            chat_template_kwargs={"enable_thinking": False},
        ),
        Dataset.from_dict({"prompt": [[{"role": "user", "content": "go"}]] * 4}),
        swap=SwapConfig(k=1, alpha=0.25, buffer_tasks=1),
        processing_class=tokenizer,
    )  # fmt: skip
    seen = []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (seen.append(inputs["prompt_ids"][0]), compute(model, inputs))[1]
    trainer.train()
    prompts = [*seen, *(entry.turns[0].prompt_ids for entry in trainer.loops[0]["buffer"])]
    assert len(prompts) >= 2 + 4
    assert all(tokenizer.decode(ids).endswith("<think>\n\n</think>\n\n") for ids in prompts)


def long_enough_messages(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


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
    script = HELPERS / "trl_processes.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()
