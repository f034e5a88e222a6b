"""The fused path of any causal LM: losses and gradients of the plain transformers forward, without its logits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numerics import assert_close
from rspo_toys import small_config
from tiny_models import VOCAB, tiny_model_policy
from torch import Tensor

from rspo.agent import Agent
from rspo.batch import Batch
from rspo.config import Config
from rspo.config_io import apply_flags
from rspo.models import Policy, score
from rspo.timing import PhaseTimer
from rspo.trajectory import REPLAY, Trajectory, Turn
from rspo.update import Mixture, prepare, update
from rspo_kernels import PolicyLossConfig, reference

pytestmark = pytest.mark.usefixtures("one_thread")

ALPHA = 0.25
TEMPERATURE = 0.7
FUSED = ("qwen2", "qwen2 tied", "qwen3", "llama", "gemma2", "gemma3", "cohere", "granite", "gpt2")


def talk(index: int, *, turns: int, advantage: float, source: str = "on_policy") -> Trajectory:
    """A trajectory whose prompts each continue the turn before, so that it fits both layouts."""
    rng = np.random.default_rng(index)
    said = np.zeros(0, dtype=np.int64)
    made = []
    for turn in range(turns):
        prompt = np.concatenate([said, rng.integers(3, VOCAB, size=3 + (index + turn) % 3)])
        response = rng.integers(3, VOCAB, size=1 + (index + turn) % 4)
        logp = rng.normal(-4.0, 0.5, size=len(response)).astype(np.float32)
        made.append(Turn(prompt, response, logp, 0.0, 0.0, "", "", True))
        said = np.concatenate([prompt, response])
    trajectory = Trajectory(task="", group=index // 4, index=index, turns=made)
    trajectory.advantages = np.full(turns, advantage, dtype=np.float32)
    trajectory.source = source
    return trajectory


def talks() -> list[Trajectory]:
    """Six of A's own, one of which teaches nothing, and two that are replayed."""
    on_policy = [talk(i, turns=2 + i % 2, advantage=(1.0, -1.5, 0.0)[i % 3]) for i in range(6)]
    return [*on_policy, *(talk(6 + i, turns=2, advantage=1.0 - 2 * i, source=REPLAY) for i in range(2))]


def settings(*flags: str, layout: str = "per_turn") -> Config:
    """One mini-batch of several micro-batches, whose gradient is left as it is."""
    fixed = ["optimizer.minibatches=1", "optimizer.grad_clip=1e9", f"rollout.temperature={TEMPERATURE}"]
    full = ["loss.kl_coef=0.1", "loss.entropy_coef=0.05", "loss.center_cap=1.0", "optimizer.micro_batch_tokens=40"]
    return apply_flags(small_config(f"env.layout={layout}"), [*fixed, *full, *flags])


def prepared(policy: Policy, config: Config, made: Sequence[Trajectory]) -> Batch:
    """A batch as the trainer makes it, for a policy that has moved a little since its own rows were written."""
    agent, base = Agent(policy, config), policy.copy()
    with torch.no_grad():
        for parameter in base.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    batch = Batch.from_trajectories(made, config.env.layout)
    logp = score(base, batch, TEMPERATURE, 64)
    logp = torch.where(batch.is_replay, batch.behavior_logp, logp)
    return prepare(agent, replace(batch, behavior_logp=logp, old_logp=logp), made, config, base)


def trained(policy: Policy, config: Config, batch: Batch, made: Sequence[Trajectory]) -> tuple[dict, dict[str, Tensor]]:
    """Statistics and gradients of one update, whose step is left out."""
    agent = Agent(policy, config)
    agent.step = lambda: None  # type: ignore[method-assign]
    stats = update(agent, batch, made, config, ALPHA, np.random.default_rng(0), PhaseTimer())
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return stats, {name: gradient.clone() for name, gradient in gradients.items()}


def plain(policy: Policy, config: Config, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the transformers model's own forward pass over one row at a time, in float64."""
    model = copy.deepcopy(policy.model).double()
    logits = []
    for row in range(batch.num_rows):
        ids = batch.input_ids[row : row + 1, : int(batch.row_lengths[row])]
        logits.append(model(input_ids=ids, use_cache=False).logits[0, batch.token_column[batch.token_row == row]])
    logp, entropy = reference.token_logprobs(torch.cat(logits), batch.targets, temperature=TEMPERATURE)
    mixture = Mixture.of(batch, config.loss, ALPHA, pooled=False)
    loss = torch.zeros((), dtype=torch.float64)
    for mask, divisor in ((~batch.is_replay, mixture.on_policy), (batch.is_replay, mixture.replay)):
        part, _ = reference.policy_loss(
            logp,
            batch.advantages.double(),
            config.loss,
            mask=mask,
            normalizer=divisor,
            sequence_ids=batch.token_row,
            member_ids=batch.token_turn if config.loss.ratio_level == "turn" else batch.token_row,
            old_logp=batch.old_logp.double(),
            behavior_logp=batch.behavior_logp.double(),
            ref_logp=None if batch.ref_logp is None else batch.ref_logp.double(),
            entropy=entropy,
        )
        loss = loss + part
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-4) -> None:
    """Every parameter's, against the largest entry of each."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        size = float(gradient.abs().max())
        assert size > 0, name
        assert_close(f"gradient of {name}", actual[name], gradient, rtol=0, atol=rtol * size)


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
    assert stats["loss"] == pytest.approx(loss, rel=1e-4)
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
    assert stats["loss"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(gradients, expected)

    by_logits = Policy(policy.model, policy.tokenizer, fused="off")
    assert not by_logits.module.fused
    other, others = trained(by_logits, config, batch, made)
    assert stats.keys() == other.keys()
    for statistic, value in other.items():
        assert stats[statistic] == pytest.approx(value, rel=1e-3, abs=1e-6), statistic
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
    from rspo.critic import value_loss

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
