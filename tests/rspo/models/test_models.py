"""Any causal LM: heads understood or refused, gradient checkpointing, and what is found out before a rollout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rspo_toys import make_trajectory, small_config, small_policy
from tiny_models import tiny_model, tiny_model_policy
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from rspo.algorithm.warmup import fresh_policy
from rspo.config import Config, ConfigError, PolicyConfig, RolloutConfig
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.engines import TransformersEngine
from rspo.envs import make_env
from rspo.models.agent import Agent
from rspo.models.forward import LARGE_VOCABULARY
from rspo.models.gradient_checkpointing import recompute_layers
from rspo.models.heads import Head, UnknownHeadError, find_head
from rspo.models.policy import Policy
from rspo.models.reward_model import RewardModel
from rspo.models.tiny import tiny_policy
from rspo.runs.checks import check_run
from rspo.runs.records import read_metrics
from rspo.start import open_run

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(3, 15).view(2, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "settings", "softcap", "scale"),
    [
        ("qwen2", {}, None, 1.0),
        ("qwen2 tied", {}, None, 1.0),
        ("gpt2", {}, None, 1.0),
        ("gemma2", {"final_logit_softcapping": 30.0, "initializer_range": 0.02}, 30.0, 1.0),
        ("gemma2", {"final_logit_softcapping": None}, None, 1.0),
        ("gemma3", {"final_logit_softcapping": 5.0}, 5.0, 1.0),
        ("cohere", {"logit_scale": 0.25}, None, 0.25),
        ("cohere", {"logit_scale": 1.0}, None, 1.0),
        ("granite", {"logits_scaling": 4.0}, None, 0.25),
        # Named in the configuration, and not used by the model.
        ("llama", {"final_logit_softcapping": 30.0, "logit_scale": 2.0}, None, 1.0),
    ],
)
def test_heads_are_what_the_model_does(
    name: str, settings: dict[str, Any], softcap: float | None, scale: float, dtype: torch.dtype
) -> None:
    model = tiny_model(name, **settings).to(dtype)
    head = find_head(model)
    assert head == Head(model.get_output_embeddings(), softcap, scale)
    with torch.no_grad():
        hidden = model.base_model(IDS).last_hidden_state
        torch.testing.assert_close(head.logits(hidden).float(), model(IDS).logits.float(), rtol=0.01, atol=1e-5)


class Warped(LlamaForCausalLM):
    """A Llama that does with its logits what no configuration says."""

    def warp(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, *arguments: Any, **options: Any) -> Any:
        output = super().forward(*arguments, **options)
        output.logits = self.warp(output.logits)
        return output


class Capped(Warped):
    def warp(self, logits: Tensor) -> Tensor:
        return 100 * torch.tanh(logits / 100)


class Shifted(Warped):
    def warp(self, logits: Tensor) -> Tensor:
        return logits + 0.5 * torch.arange(logits.shape[-1]) / logits.shape[-1]


class Scaled(Warped):
    def warp(self, logits: Tensor) -> Tensor:
        return 1.05 * logits


@pytest.mark.parametrize("kind", [Capped, Shifted, Scaled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_head_that_is_not_understood_is_never_guessed(kind: type[Warped], dtype: torch.dtype) -> None:
    """Even where it hardly shows: this model's own logits are far from the cap."""
    model = kind(tiny_model("llama", initializer_range=0.02).config).to(dtype).eval()
    with pytest.raises(UnknownHeadError, match="are not those of its output embeddings"):
        find_head(model)
    tokenizer = small_policy().tokenizer
    with pytest.raises(ConfigError, match=rf"policy\.fused must be 'auto' or 'off' .* {kind.__name__}"):
        Policy(model, tokenizer, fused="on")
    policy = Policy(model, tokenizer)  # a small vocabulary: no warning
    assert (policy.module.head, policy.module.fused) == (None, False)
    batch = Batch.from_prompts([IDS[0].numpy(), IDS[1, :3].numpy()])
    with torch.no_grad():
        logits, hidden = policy.logits_and_hidden(batch)
        output = model(batch.input_ids, output_hidden_states=True)
        at = batch.token_row, batch.token_column
        assert torch.equal(logits, output.logits[at])
        assert hidden is not None
        assert torch.equal(hidden, output.hidden_states[-1][at])


def test_heads_with_something_on_them_are_not_taken_for_plain() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("qwen2"), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(UnknownHeadError, match="not a plain linear layer"):
        find_head(model)
    with pytest.raises(UnknownHeadError, match="not those of its output embeddings"):
        find_head(tiny_model("opt"))  # its body's last step is not where transformers says
    broken = tiny_model("llama")
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(UnknownHeadError, match="not those of its output embeddings"):
        find_head(broken)
    inner = peft.get_peft_model(tiny_model("granite"), peft.LoraConfig(target_modules=["q_proj"]))
    assert find_head(inner).logit_scale == 0.25


def test_auto_fuses_large_vocabularies_and_warns_where_it_cannot() -> None:
    assert not tiny_model_policy("qwen2", fused="auto").module.fused
    assert tiny_model_policy("qwen2", fused="auto", vocab_size=LARGE_VOCABULARY).module.fused
    assert not tiny_model_policy("qwen2", fused="off", vocab_size=LARGE_VOCABULARY).module.fused
    with pytest.warns(UserWarning, match=f"logits of all {LARGE_VOCABULARY} words .* OPTForCausalLM"):
        assert not tiny_model_policy("opt", fused="auto", vocab_size=LARGE_VOCABULARY).module.fused
    policy = tiny_model_policy("qwen2")
    assert policy.copy().module.fused
    assert policy.copy().module.head is not None
    assert policy.copy().module.head.linear is not policy.module.head.linear


def summed(policy: Policy, batch: Batch) -> Tensor:
    logp, entropy = policy.logprobs(batch, 1.0)
    return (logp + 0.1 * entropy).sum()


def gradients_of(policy: Policy, batch: Batch) -> list[Tensor]:
    return list(torch.autograd.grad(summed(policy, batch), list(policy.model.parameters())))


def passes(layer: nn.Module) -> list[str]:
    """Whether gradients were on in each forward pass of a layer's inside."""
    seen: list[str] = []
    inside = next(child for name, child in layer.named_modules() if name.endswith(("mlp", "fc1")))
    inside.register_forward_pre_hook(lambda *_: seen.append("with" if torch.is_grad_enabled() else "without"))
    return seen


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt2", "opt"])
def test_layers_are_computed_again_in_the_backward_pass(name: str) -> None:
    """With the same gradients, bit for bit, and without dropout, which all but Qwen2 and Gemma have here."""
    dropout = {"gpt2": {"resid_pdrop": 0.5, "attn_pdrop": 0.5}, "opt": {"dropout": 0.5}}.get(name, {})
    kept, recomputed = (tiny_model_policy(name, fused="off", **dropout) for _ in range(2))
    recompute_layers(recomputed.model)
    layer = next(m for n, m in recomputed.model.named_modules() if n.endswith(("layers.1", "h.1")))
    seen = passes(layer)
    batch = Batch.from_trajectories([make_trajectory(0, i) for i in range(3)])
    loss = summed(recomputed, batch)
    assert seen == ["with"]
    loss.backward()
    assert seen == ["with", "with"]
    expected = gradients_of(kept, batch)
    for parameter, gradient in zip(recomputed.model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_recomputed_layers_keep_less_for_the_backward_pass() -> None:
    batch = Batch.from_trajectories([make_trajectory(0, i, turns=8) for i in range(8)])

    def kept_bytes(policy: Policy) -> int:
        total = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            summed(policy, batch)
        return total

    policy = tiny_model_policy("qwen2", num_hidden_layers=8)
    before = kept_bytes(policy)
    recompute_layers(policy.model)
    assert kept_bytes(policy) < 0.5 * before


def test_recomputing_changes_neither_generation_nor_agent_b() -> None:
    """Agent B's layers are its own: what it is trained on, and what it computes again, are B's weights."""
    plain, policy = tiny_model_policy("qwen2"), tiny_model_policy("qwen2")
    recompute_layers(policy.model)
    prompts = [IDS[0].numpy(), IDS[1, :4].numpy()]
    made = []
    for one in (plain, policy):
        engine = TransformersEngine(one, RolloutConfig(max_response_tokens=5), torch.Generator().manual_seed(0))
        made.append([generation.response_ids.tolist() for generation in engine.generate(prompts)])
    assert made[0] == made[1]

    twin = policy.copy()
    batch = Batch.from_trajectories([make_trajectory(0, i) for i in range(3)])
    with torch.no_grad():
        for parameter in twin.model.parameters():
            parameter *= 1.1
        for parameter in plain.model.parameters():
            parameter *= 1.1
    for ours, expected in zip(gradients_of(twin, batch), gradients_of(plain, batch), strict=True):
        assert torch.equal(ours, expected)


def test_a_model_without_such_layers_is_refused() -> None:
    class Bare(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"policy\.gradient_checkpointing must be false for Bare"):
        recompute_layers(Bare())  # type: ignore[arg-type]


# A model in a folder: loaded, checked, and trained for a step.


def saved(folder: Path, model: PreTrainedModel, **tokenizer_settings: Any) -> Path:
    tokenizer = small_policy().tokenizer
    for name, value in tokenizer_settings.items():
        setattr(tokenizer, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> Policy:
    return Policy.load(folder, PolicyConfig(path=str(folder), **settings))


def test_flash_attention_is_refused_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, tiny_model("llama"))
    with pytest.raises(ConfigError, match=r"'flash_attention_2' needs a GPU, got policy\.device='cpu'"):
        load(tmp_path, attention="flash_attention_2")
    monkeypatch.setattr("rspo.models.checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package flash-attn \(pip install 'rspo\[flash\]'\)"):
        load(tmp_path, attention="flash_attention_2", device="cuda", dtype="bfloat16")


def test_a_device_that_is_not_here_is_said_before_a_model_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.device='cuda:99' cannot be used here"):
        load(tmp_path, device="cuda:99")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("attention=flash_attention_2", r"policy\.attention='flash_attention_2' needs a GPU, got policy\.device='cpu'"),
        ("device=cuda:99", r"policy\.device='cuda:99' cannot be used here"),
        ("dtype=float16", r"policy\.dtype must be 'float32' or 'bfloat16' where policy\.path is None.*got 'float16'"),
    ],
)
def test_a_small_model_that_cannot_run_here_is_refused(flag: str, said: str, tmp_path: Path) -> None:
    config = small_config(f"policy.{flag}")
    with pytest.raises(ConfigError, match=said):
        open_run(config, tmp_path / "run", progress=False)
    if config.policy.dtype == "float32":
        with pytest.raises(ConfigError, match=said):
            tiny_policy(["go"], 0, config.policy)


def test_a_small_model_with_flash_attention_needs_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rspo.models.checks.find_spec", lambda name: object())
    config = small_config("policy.attention=flash_attention_2", "policy.device=cuda")
    with pytest.raises(ConfigError, match=r"policy\.dtype 'bfloat16' or 'float16', got 'float32'"):
        fresh_policy(make_env("household"), config)


def test_capped_attention_is_not_left_to_sdpa(tmp_path: Path) -> None:
    saved(tmp_path, tiny_model("gemma2"))
    with pytest.raises(ConfigError, match=r"policy\.attention must be 'eager' or 'flash_attention_2' .* 'gemma2'"):
        load(tmp_path)
    assert load(tmp_path, attention="eager").module.head.softcap == 3.0
    saved(tmp_path / "uncapped", tiny_model("gemma2", attn_logit_softcapping=None))
    with pytest.raises(ConfigError, match=r"with policy\.attention='sdpa'\): Gemma2ForCausalLM does not support"):
        load(tmp_path / "uncapped")


def test_chat_templates_can_be_asked_for_and_left_alone(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] + ' hall' }}{% endfor %}"
    bare = saved(tmp_path / "bare", tiny_model("llama"))
    chat = saved(tmp_path / "chat", tiny_model("llama"), chat_template=template)
    with pytest.raises(
        ConfigError, match=r"policy\.chat='on', but the tokenizer at .*bare' has no chat template: take"
    ):
        load(bare, chat="on")
    lengths = {
        (folder.name, setting): len(load(folder, chat=setting).encode(["pick apple"])[0])
        for folder, setting in ((bare, "auto"), (chat, "auto"), (chat, "on"), (chat, "off"))
    }
    assert lengths == {("bare", "auto"): 2, ("chat", "auto"): 3, ("chat", "on"): 3, ("chat", "off"): 2}
    copied = load(chat, chat="off").copy()
    assert len(copied.encode(["pick apple"])[0]) == len(copied.encode_replies(["pick apple"])[0]) == 2
    # The small model from scratch has none, and a reward model needs none.
    Policy.load(bare, PolicyConfig(chat="on"))
    RewardModel(load(bare)).save(tmp_path / "reward model")
    RewardModel.load(tmp_path / "reward model", PolicyConfig(path=str(chat), chat="on", fused="on"))


def test_a_tokenizer_larger_than_its_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, tiny_model("llama", vocab_size=16))
    with pytest.raises(ConfigError, match=rf"has {len(small_policy().tokenizer)} tokens, its model only 16"):
        load(tmp_path)


def run_config(*flags: str, **sections: Any) -> Config:
    return replace(apply_flags(small_config(), list(flags)), **sections)


def test_a_run_needs_an_end_of_sequence_token() -> None:
    policy = tiny_model_policy("llama", eos_token_id=None)
    check_run(policy, run_config())  # the tokenizer's
    policy.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="nothing would end a response"):
        check_run(policy, run_config())
    policy.model.generation_config.eos_token_id = [1, 2]
    check_run(policy, run_config())
    policy.tokenizer.pad_token = None  # which nothing here needs
    check_run(policy, run_config())


def test_positions_that_do_not_suffice(recwarn: pytest.WarningsRecorder) -> None:
    config = run_config("rollout.max_prompt_tokens=250", "rollout.max_response_tokens=7")
    said = r"rollout\.max_prompt_tokens=250 and .* allow 257 tokens, the model has 256 positions"
    with pytest.warns(UserWarning, match=said):
        check_run(tiny_model_policy("llama"), config)
    with pytest.raises(ConfigError, match=said):
        check_run(tiny_model_policy("gpt2"), config)
    recwarn.clear()
    check_run(tiny_model_policy("llama"), run_config("rollout.max_prompt_tokens=250", "rollout.max_response_tokens=6"))
    assert not recwarn.list


def test_rspo_without_anything_to_replay_is_a_warning() -> None:
    config = small_config("rollout.tasks=2", "rollout.group_size=2", "swap.alpha=0.1")
    with pytest.warns(UserWarning, match=r"swap\.alpha=0\.1 of .* is 0\.4 trajectories, rounded to none"):
        check_run(small_policy(), config)


def test_flash_attention_needs_half_precision() -> None:
    policy = tiny_model_policy("llama")
    config = run_config("policy.attention=flash_attention_2", "policy.packing=off")
    with pytest.raises(ConfigError, match=r"policy\.dtype 'bfloat16' or 'float16', got 'float32'"):
        check_run(policy, config)


def test_rows_that_would_see_each_other_are_not_packed() -> None:
    """A recurrent model takes no notice of positions that begin anew."""
    for name in ("llama", "gemma2", "gpt2"):
        check_run(tiny_model_policy(name, packs=True), run_config())
    with pytest.raises(ConfigError, match=r"policy\.packing must be 'off' for MambaForCausalLM"):
        check_run(tiny_model_policy("mamba", packs=True), run_config())
    check_run(tiny_model_policy("mamba"), run_config())


def test_a_run_on_the_fused_path(tmp_path: Path) -> None:
    """From a folder to a trained agent B and A, with a large vocabulary, recomputed layers and a checkpoint; the
    policy has not moved, so that ratios are 1 up to rounding."""
    words = LARGE_VOCABULARY
    folder = saved(tmp_path / "model", tiny_model("llama", vocab_size=words, initializer_range=0.02))
    flags = [f"policy.path={folder}", "policy.gradient_checkpointing=true", "method=grpo", "optimizer.learning_rate=0"]
    config = apply_flags(small_config(), [*flags, "estimator.invalid_penalty=0.1", "run.steps=1"])
    trainer = open_run(config, tmp_path / "run", progress=False)
    try:
        assert trainer.agent.policy.module.fused
        seen = passes(trainer.agent.policy.model.model.layers[0])
        trainer.train()
        assert seen.count("with") >= 2
    finally:
        trainer.close()
    (record,) = read_metrics(tmp_path / "run", "update")
    assert record["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert record["entropy"] == pytest.approx(np.log(words), rel=0.01)
    settings = json.loads((tmp_path / "run" / "checkpoints" / "step-000001" / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]


def test_agents_in_lower_precision_start_at_ratio_one() -> None:
    """bfloat16 hidden states and weights; the log-probs accumulate in float32."""
    policy = tiny_model_policy("llama", fused="on")
    half = Policy(policy.model.to(torch.bfloat16), policy.tokenizer, fused="on")
    agent = Agent(half, small_config())
    batch = Batch.from_trajectories([make_trajectory(0, i) for i in range(4)])
    with torch.no_grad():
        logp, entropy = agent.policy.logprobs(batch, 1.0)
        logits = half.model(batch.input_ids).logits[batch.token_row, batch.token_column].float()
    assert (logp.dtype, entropy.dtype) == (torch.float32, torch.float32)
    expected = torch.log_softmax(logits, -1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    # Logits as the model makes them are rounded to 8 bits.
    torch.testing.assert_close(logp, expected, rtol=0, atol=2**-8 * float(logits.abs().max()))
