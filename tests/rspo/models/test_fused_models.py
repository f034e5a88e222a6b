"""The fused path of any causal LM: losses and gradients of the plain transformers forward, without its logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_forward import ALPHA, TEMPERATURE, assert_gradients_close, plain, prepared, settings, talk, talks, trained
from tiny_models import VOCAB, tiny_model_policy

from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import Mixture, update
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.models.agent import Agent
from rspo.models.critic import value_loss
from rspo.models.policy import Policy, score
from rspo_kernels import PolicyLossConfig

pytestmark = pytest.mark.usefixtures("one_thread")

FUSED = ("qwen2", "qwen2 tied", "qwen3", "llama", "gemma2", "gemma3", "cohere", "granite", "gpt2")


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", ["per_turn", "conversation"])
@pytest.mark.parametrize("name", FUSED)
def test_loss_and_gradients_are_those_of_the_plain_forward(name: str, layout: str, packs: bool) -> None:
    policy, config, made = tiny_model_policy(name, packs=packs), settings(layout=layout), talks()
    assert policy.module.fused
    batch = prepared(policy, config, made)
    assert len(batch.micro_batches(40, packs)) > 2
    stats, gradients = trained(policy, config, batch, made)
    loss, expected = plain(policy, config, batch)
    loss.assert_close(stats["loss"])
    assert_gradients_close(gradients, expected)


@pytest.mark.parametrize(
    "flags",
    [
        ("loss.kl_coef=0", "loss.entropy_coef=0"),
        ("loss.kl_coef=0", "loss.entropy_coef=0", "loss.ratio_level=sequence"),
        ("loss.aggregation=seq-mean-token-mean", "loss.center_cap=null", "loss.clip_center=relative"),
        ("loss.loss=cispo", "optimizer.micro_batch_tokens=100000"),
    ],
    ids=["sparse", "gspo", "sequences", "cispo"],
)
def test_every_loss_comes_from_hidden_states(flags: tuple[str, ...]) -> None:
    """Also those that leave rows without an advantage out, and whose ratios are of whole sequences; and the statistics
    are those of the path through logits."""
    config, made = settings(*flags), talks()
    policy = tiny_model_policy("gemma2")
    batch = prepared(policy, config, made)
    stats, gradients = trained(policy, config, batch, made)
    loss, expected = plain(policy, config, batch)
    loss.assert_close(stats["loss"])
    assert_gradients_close(gradients, expected)

    by_logits = Policy(policy.model, policy.tokenizer, fused="off")
    assert not by_logits.module.fused
    other, others = trained(by_logits, config, batch, made)
    assert stats.keys() == other.keys()
    for statistic, value in other.items():
        # Means of terms of the order of 1, which may cancel, and of float32.
        assert stats[statistic] == pytest.approx(value, rel=1e-3, abs=1e-5), statistic
    assert_gradients_close(gradients, others)
    assert stats["entropy"] > 0


def test_ratios_begin_at_one() -> None:
    config, made = settings("loss.kl_coef=0", "optimizer.learning_rate=0"), talks()[:6]
    policy = tiny_model_policy("qwen2 tied")
    batch = Batch.from_trajectories(made)
    logp = score(policy, batch, TEMPERATURE, 40)
    stats, _ = trained(policy, config, replace(batch, behavior_logp=logp, old_logp=logp), made)
    assert stats["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert stats["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert stats["clip_frac_low"] == stats["clip_frac_high"] == 0


@pytest.mark.parametrize("fused", ["on", "off"])
def test_full_logits_are_never_made(fused: str) -> None:
    """Of 600 tokens those of at most 320 exist at once, and the model's own head is not called. The path through
    logits shows that the check sees them."""
    made = [talk(i, turns=4, advantage=1.0) for i in range(60)]
    config = settings("optimizer.micro_batch_tokens=100000", layout="conversation")
    policy = tiny_model_policy("qwen2", fused=fused)
    batch = prepared(policy, config, made)
    assert batch.num_tokens > 500
    calls: list[int] = []
    policy.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        trained(policy, config, batch, made)
    seen = [shape for event in profile.events() for shape in event.input_shapes if shape and shape[-1] == VOCAB]
    most = max(int(np.prod(shape[:-1])) for shape in seen)
    assert (most <= 320 and not calls) == (fused == "on"), most
    assert (most >= batch.num_tokens and len(calls) == 1) == (fused == "off"), most


def test_both_parts_of_the_mixture_share_one_gradient_of_the_head() -> None:
    """[V, H] in float32 is the largest tensor of a short micro-batch: it is held once."""
    config, policy = settings(), tiny_model_policy("qwen2")
    batch = prepared(policy, config, talks())
    assert 0 < int(batch.is_replay.sum()) < batch.num_tokens
    mixture = Mixture.of(batch, config.loss, ALPHA, pooled=False)
    head = policy.model.get_output_embeddings().weight
    held: set[int] = set()

    def note(saved: torch.Tensor) -> torch.Tensor:
        if saved.shape == head.shape and saved.data_ptr() != head.data_ptr():
            held.add(saved.data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        loss, stats = policy.module(batch, lambda predictions: mixture.loss(predictions, TEMPERATURE, config.loss))
    assert len(held) == 1
    assert stats["replay"]["num_tokens"] + stats["on_policy"]["num_tokens"] == batch.num_tokens
    loss.backward()
    assert_gradients_close(
        {"lm_head.weight": head.grad}, {"lm_head.weight": plain(policy, config, batch)[1]["lm_head.weight"]}
    )


def test_a_frozen_head_gets_no_gradient_and_the_body_all_of_its_own() -> None:
    config, made = settings(), talks()
    policy = tiny_model_policy("qwen2")
    batch = prepared(policy, config, made)
    _, expected = plain(policy, config, batch)
    policy.model.get_output_embeddings().weight.requires_grad_(False)
    _, gradients = trained(policy, config, batch, made)
    del expected["lm_head.weight"]
    assert_gradients_close(gradients, expected)


def test_adapters_in_the_body_are_trained_and_one_on_the_head_is_not_left_out() -> None:
    """LoRA beside the head leaves it understood; LoRA on the head does not, though it does nothing at first."""
    peft = pytest.importorskip("peft")
    made = talks()
    for targets, fused in ((["q_proj", "v_proj"], True), (["q_proj", "lm_head"], False)):
        config = settings()
        base = tiny_model_policy("qwen2")
        model = peft.get_peft_model(base.model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        policy = Policy(model, base.tokenizer, fused="auto" if not fused else "on")
        assert policy.module.fused == fused
        assert (policy.module.head is not None) == fused
        batch = prepared(policy, config, made)
        _, gradients = trained(policy, config, batch, made)
        assert gradients
        assert all("lora" in name for name in gradients)
        assert_gradients_close(gradients, plain(policy, config, batch)[1])


@pytest.mark.parametrize("fused", ["on", "off"])
def test_a_shared_critic_reads_the_states_of_the_same_pass(fused: str) -> None:
    """Its values and its share of the body's gradient are those of the plain hidden states."""
    config = apply_flags(settings("critic.backbone=shared", "loss.kl_coef=0"), ["method=ppo", "rollout.group_size=1"])
    policy, made = tiny_model_policy("gemma2", fused=fused), talks()
    agent = Agent(policy, config, has_critic=True)
    agent.step = lambda: None  # type: ignore[method-assign]
    assert agent.critic is not None
    torch.nn.init.normal_(agent.critic.head.weight, std=0.1)
    batch = prepared(policy, config, made)
    batch = replace(batch, values=torch.zeros(batch.num_tokens), returns=torch.linspace(-1, 1, batch.num_tokens))
    batch = replace(batch, advantages=torch.zeros(batch.num_tokens))
    silent = replace(config, loss=PolicyLossConfig())
    update(agent, batch, made, silent, ALPHA, np.random.default_rng(0), PhaseTimer())

    hidden = policy.model.model(batch.input_ids).last_hidden_state[batch.token_row, batch.token_column]
    values = hidden @ agent.critic.head.weight[0] + agent.critic.head.bias
    loss = value_loss(values, batch.values, batch.returns, config.critic.value_clip).mean() * config.critic.coef
    body = {name: p for name, p in policy.model.model.named_parameters() if p.grad is not None}
    expected = dict(zip(body, torch.autograd.grad(loss, list(body.values())), strict=True))
    assert len(expected) > 10
    assert_gradients_close({name: p.grad for name, p in body.items()}, expected)
