"""Calculated memory and work against what is there: counted weights, counted storages, counted graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rspo_toys import small_config
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from updates import mixed_trajectories, run_update, scored_batch

from rspo.algorithm.estimators import make_estimator
from rspo.cli.memory import MemorySetup
from rspo.cli.workload import Between, Flops, Workload
from rspo.config import ConfigError, default_config, paper_config
from rspo.config.files import apply_flags
from rspo.envs.household import VOCABULARY
from rspo.models.agent import Agent
from rspo.models.gradient_checkpointing import recompute_layers
from rspo.models.shapes import config_shape, dense_shape, local_shape, published_shape
from rspo.models.tiny import tiny_policy

FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "gemma2": Gemma2Config}
SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SEQUENCE = 40


def small(family: str, **changes: Any) -> PretrainedConfig:
    own = {} if family in ("qwen2",) else {"head_dim": 24}
    return FAMILIES[family](**SIZES, **own, **changes)


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# Weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_formula_of_weights_is_the_count(family: str, tied: bool) -> None:
    config = small(family, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    counted = sum(weight.numel() for weight in model.parameters())
    head_dim = None if family == "qwen2" else 24
    shape = dense_shape(family, 96, 48, 80, 3, 4, 2, head_dim=head_dim, tied=tied)
    assert shape.parameters == counted
    assert shape.body_parameters == sum(weight.numel() for weight in model.base_model.parameters())
    assert shape == config_shape(config)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
    ],
)
def test_published_models_have_their_published_sizes(name: str, weights: int) -> None:
    shape = published_shape(name)
    assert shape is not None
    assert shape.parameters == weights


def test_shapes_of_local_and_of_unknown_models(tmp_path: Path) -> None:
    assert published_shape("somebody/some-model") is None
    with pytest.raises(ConfigError, match="no causal LM that transformers knows"):
        local_shape(tmp_path)
    small("llama").save_pretrained(tmp_path)
    assert (
        local_shape(tmp_path).parameters
        == dense_shape("llama", 96, 48, 80, 3, 4, 2, head_dim=24, tied=False).parameters
    )
    gpt2 = config_shape(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2))
    assert (gpt2.intermediate_size, gpt2.kv_heads, gpt2.head_dim) == (128, 2, 16)


# What an update leaves behind


def measured_agent(dtype: str, critic: str) -> tuple[Agent, MemorySetup]:
    """An agent after a real update, and the setup that describes it."""
    base = ["method=ppo", f"critic.backbone={critic}"] if critic != "none" else ["method=grpo"]
    config = apply_flags(small_config(), [*base, f"policy.dtype={dtype}", "swap.alpha=0.25"])
    agent = Agent(tiny_policy(VOCABULARY, 0, config.policy), config, has_critic=critic != "none")
    trajectories = mixed_trajectories()
    batch = make_estimator(config.estimator_name, config.estimator).at_update(scored_batch(agent, config, trajectories))
    run_update(agent, config, trajectories, batch)
    shape = config_shape(agent.policy.model.config)
    size = getattr(torch, dtype).itemsize
    return agent, MemorySetup(shape, weight_bytes=size, critic=critic, agent_b="none", reference=False)


def states(agent: Agent) -> dict[str, int]:
    """Bytes of all that an agent's optimisers hold and change; their counters of steps, one number each, aside."""
    optimizers = [o for o in (agent.optimizer, agent.critic_optimizer) if o is not None]
    weights = [p for o in optimizers for p in o.parameters]
    masters = [m for o in optimizers for m in o.masters]
    moments = [t for o in optimizers for s in o.optimizer.state.values() for t in s.values() if t.dim() > 0]
    gradients = [p.grad for p in [*weights, *masters] if p.grad is not None]
    return {
        "weights and masters": unique_bytes([*weights, *masters]),
        "moments": unique_bytes(moments),
        "gradients": unique_bytes(gradients),
    }


@pytest.mark.parametrize("critic", ["none", "shared", "own"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_after_an_update_are_those_calculated(dtype: str, critic: str) -> None:
    agent, setup = measured_agent(dtype, critic)
    parts = [setup._trained, setup._critic]
    assert states(agent) == {
        "weights and masters": sum(part.weights + part.masters for part in parts),
        "moments": sum(part.moments for part in parts),
        "gradients": sum(part.gradients for part in parts),
    }
    assert sum(setup.parts.values()) == sum(states(agent).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_agents_and_a_reference(dtype: str) -> None:
    agent, setup = measured_agent(dtype, "own")
    reference = agent.policy.copy()
    twin = agent.branch()
    trajectories = mixed_trajectories()
    batch = scored_batch(twin, twin.config, trajectories)
    batch = make_estimator("ppo", twin.config.estimator).at_update(batch)
    run_update(twin, twin.config, trajectories, batch)
    agent.zero_grad()
    counted = sum(states(agent).values()) + sum(states(twin).values()) + unique_bytes(reference.model.parameters())
    assert counted == sum(replace(setup, agent_b="device", reference=True).parts.values())


# Graphs and caches


def graph_bytes(body: nn.Module, vocabulary: int, rows: int = 1) -> float:
    """Bytes that a pass over sequences keeps for its backward pass, for each token; the weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in body.parameters()}
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in weights:
            kept.append(value)
        return value

    ids = torch.randint(0, vocabulary, (rows, SEQUENCE))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        output = body(input_ids=ids, use_cache=False).last_hidden_state
    assert output.requires_grad
    return unique_bytes(kept) / ids.numel()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_graph_of_a_pass_is_the_one_calculated(family: str, dtype: torch.dtype, attention: str) -> None:
    model = AutoModelForCausalLM.from_config(small(family), attn_implementation=attention).to(dtype)
    setup = MemorySetup(
        config_shape(model.config),
        weight_bytes=dtype.itemsize,
        eager=attention == "eager",
        checkpointing=False,
        prompt_tokens=SEQUENCE - 8,
        response_tokens=8,
    )
    assert graph_bytes(model.base_model, 96) == setup.graph_bytes_per_token


def test_checkpointing_keeps_the_layers_inputs() -> None:
    model = AutoModelForCausalLM.from_config(small("qwen2")).to(torch.bfloat16)
    recompute_layers(model)
    setup = MemorySetup(config_shape(model.config), weight_bytes=2, checkpointing=True)
    positions = 2 * setup.shape.head_dim * 2  # which the layers get as arguments
    # One layer's graph comes in the backward pass only.
    assert graph_bytes(model.base_model, 96) == setup.graph_bytes_per_token - setup.layer_graph_bytes - positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_under_lora(dtype: torch.dtype) -> None:
    peft = pytest.importorskip("peft")
    measured, calculated = [], []
    for layers in (2, 3):
        config = small("qwen2")
        config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        shape = config_shape(config)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
        assert trained == shape.adapter_parameters(4)
        measured.append(graph_bytes(model.base_model, 96))
        calculated.append(
            MemorySetup(shape, weight_bytes=dtype.itemsize, checkpointing=False, adapter_rank=4).graph_bytes_per_token
        )
    # A layer more is a layer more; of the first one less is kept, as nothing before it is trained.
    assert measured[1] - measured[0] == calculated[1] - calculated[0]
    assert 0.9 * calculated[1] < measured[1] <= calculated[1]


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_keys_and_values_of_a_generation(family: str) -> None:
    model = AutoModelForCausalLM.from_config(small(family), attn_implementation="eager").to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.ones((3, SEQUENCE), dtype=torch.int64), use_cache=True, past_key_values=cache)
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    setup = MemorySetup(
        config_shape(model.config), generated_rows=3, prompt_tokens=SEQUENCE - 8, response_tokens=8, weight_bytes=2
    )
    assert sum(t.numel() * t.element_size() for t in tensors) == setup.kv_cache


# Choices


def test_what_each_choice_saves() -> None:
    shape = published_shape("Qwen2.5-1.5B")
    assert shape is not None
    full = MemorySetup(shape)
    assert full.parts["agent B"] == 16 * shape.parameters
    assert full.parts["reference"] == 2 * shape.parameters
    assert "agent B" not in replace(full, agent_b="offload").parts
    assert replace(full, agent_b="offload").host == 14 * shape.parameters
    assert full.host == 0
    adapters = replace(full, adapter_rank=32)
    assert sum(adapters.parts.values()) == 2 * shape.parameters + (12 + 16) * shape.adapter_parameters(32)
    assert replace(full, agent_b="adapter").parts["agent B"] == 16 * shape.adapter_parameters(32)
    halves = replace(full, sharded=True, ranks=2, agent_b="none")
    assert sum(halves.parts.values()) == 20 * shape.parameters // 2  # float32: 16 of A, 4 of the reference
    assert replace(full, fused=False, micro_batch_responses=8192).head > replace(full, micro_batch_responses=8192).head
    assert replace(full, generated_rows=0).phases["generation"] == 0


# Work


def test_batch_arithmetic_of_the_paper() -> None:
    work = Workload(apply_flags(paper_config("rspo"), ["env.name=alfworld"]), 50)
    assert (work.on_policy, work.replayed, work.collected) == (112, 16, 224)
    assert (work.sampled, work.sampled_without_swap) == (896, 384)
    assert work.sampled_in_run == 150 * 112 + 50 * (3 * 112 + 224)
    assert work.rows == Between(128, 6400)
    assert work.minibatches == Between(1, 25)
    assert (work.tokens, work.response_tokens) == (6400 * 2560, 6400 * 512)
    assert str(work.rows) == "128 to 6,400"


def test_arithmetic_of_other_methods_and_layouts() -> None:
    plain = Workload(default_config("grpo"), 12)
    assert (plain.sampled, plain.sampled_in_run, plain.replayed, plain.has_agent_b) == (128, 54 * 128, 0, False)
    history = Workload(apply_flags(default_config(), ["swap.source=history"]), 12)
    assert (history.has_agent_b, history.sampled, history.replayed) == (False, 336, 16)
    short = Workload(apply_flags(default_config(), ["run.steps=4"]), 12)
    assert short.sampled_in_run == 4 * 112 + 2 * (3 * 112 + 224)
    talk = Workload(apply_flags(default_config(), ["env.layout=conversation", "rollout.max_prompt_tokens=100"]), 12)
    assert (talk.rows, talk.responses_in_row, talk.row_tokens) == (Between(128, 128), 24, 102)
    assert (talk.minibatches, talk.micro_batch_rows) == (Between(4, 4), 160)


def test_operations_of_an_update() -> None:
    shape = published_shape("Qwen2.5-1.5B")
    assert shape is not None
    work = Workload(apply_flags(paper_config("grpo"), ["policy.dtype=bfloat16"]), 50)
    weights, tokens = shape.parameters, work.tokens
    plain = Flops.of(work, shape, checkpointing=False, frozen=False, critic=False)
    assert plain.training == 6.0 * weights * tokens
    assert plain.scoring == 2 * 2.0 * weights * tokens  # the reference, and the responses of a bfloat16 policy
    assert plain.generation == 2.0 * weights * tokens
    assert Flops.of(work, shape, checkpointing=True, frozen=False, critic=False).training == 8.0 * weights * tokens
    assert Flops.of(work, shape, checkpointing=False, frozen=True, critic=False).training == 4.0 * weights * tokens
    swapped = Workload(apply_flags(paper_config("rspo"), ["policy.dtype=bfloat16"]), 50)
    ours = Flops.of(swapped, shape, checkpointing=False, frozen=False, critic=False)
    assert ours.generation / plain.generation == pytest.approx(896 / 384)
    assert ours.training / plain.training == pytest.approx((3 * 128 + 3 * 112) / 384)
