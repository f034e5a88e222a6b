"""Agent B of a fully trained agent A: a copy in A's place while A waits in CPU memory, or an adapter on A's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_updates import prepared, run_update, same, train, weights
from rspo_storages import held_bytes, storages, tensors_of
from rspo_toys import small_config
from torch import Tensor

from rspo.algorithm.rewards import NonFiniteError
from rspo.config import Config, ConfigError
from rspo.models import agent as agents
from rspo.models.agent import Agent
from rspo.models.policy import Policy
from rspo.runs.checkpoint import list_checkpoints
from rspo.runs.records import read_metrics, without_timings
from rspo.start import open_run, policy_and_reference

pytestmark = pytest.mark.usefixtures("one_thread")

LARGE = ["optimizer.learning_rate=0.01", "critic.learning_rate=0.01"]


def agent_of(config: Config, start: Path) -> Agent:
    return Agent(Policy.load(start, config.policy), config, has_critic=config.estimator_name == "ppo")


def everything(agent: Agent) -> dict[str, Tensor]:
    """Weights, masters, optimiser states and step counts of an agent, as copies."""
    found = {name: parameter.detach().clone() for name, parameter in agent.named_parameters()}
    for number, optimizer in enumerate(agent.optimizers):
        found |= {f"{number} master {i}": master.detach().clone() for i, master in enumerate(optimizer.masters)}
        for i, master in enumerate(optimizer.masters):
            state = optimizer.optimizer.state.get(master, {})
            found |= {f"{number} {name} {i}": value.clone() for name, value in state.items()}
    return found


# Offloaded: B in A's place


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("updates", [0, 2])
def test_what_was_set_aside_comes_back_bit_for_bit(start: Path, dtype: str, fresh: bool, updates: int) -> None:
    flags = ["base=ppo", "swap.copy=offload", f"policy.dtype={dtype}", f"swap.fresh_optimizer={fresh}".lower()]
    config = small_config(*flags, *LARGE)
    agent = agent_of(config, start)
    for _ in range(updates):  # before the first there is no state, and none must be left
        run_update(agent, config)
    before = everything(agent)
    with agent.branched() as agent_b:
        assert len(agent_b.optimizer.optimizer.state) == (0 if fresh or not updates else len(agent.optimizer.masters))
        run_update(agent_b, config)
        learned = everything(agent_b)
    assert same(everything(agent), before)
    assert not any(torch.equal(learned[name], before[name]) for name in before if name.endswith("up_proj.weight"))
    # And A learns on from where it was, as an agent does that never made way.
    undisturbed = agent_of(config, start)
    for _ in range(updates + 1):
        run_update(undisturbed, config)
    run_update(agent, config)
    assert same(everything(agent), everything(undisturbed))


def test_an_agent_comes_back_from_a_failed_update_too(start: Path) -> None:
    config = small_config("swap.copy=offload", *LARGE)
    agent = agent_of(config, start)
    run_update(agent, config)
    before = everything(agent)

    def fail() -> None:
        with agent.branched() as agent_b:
            run_update(agent_b, config)
            next(agent_b.policy.model.parameters()).data.fill_(float("nan"))
            run_update(agent_b, config)

    with pytest.raises(NonFiniteError):
        fail()
    assert same(everything(agent), before)
    assert all(parameter.grad is None for _, parameter in agent.named_parameters())


def test_offloaded_the_device_holds_one_agent_and_beside_it_two(start: Path) -> None:
    """B has A's own storages and no other; a copy beside A doubles them. On a GPU the same code runs, with what waits
    in pinned memory."""
    held = {}
    for copied in ("device", "offload"):
        config = small_config("base=ppo", f"swap.copy={copied}", *LARGE)
        agent = agent_of(config, start)
        run_update(agent, config)
        agent.zero_grad()
        alone, addresses = held_bytes(agent), storages(tensors_of(agent)).keys()
        with agent.branched() as agent_b:
            run_update(agent_b, config)
            agent_b.zero_grad()
            held[copied] = held_bytes(agent, agent_b) / alone
            assert (storages(tensors_of(agent_b)).keys() == addresses) == (copied == "offload")
            assert agent_b is not agent
            assert agent_b.policy is not agent.policy
    assert held == {"device": 2.0, "offload": 1.0}


def test_a_fresh_optimiser_leaves_no_state_of_a_on_the_device(start: Path) -> None:
    config = small_config("swap.copy=offload", "swap.fresh_optimizer=true")
    agent = agent_of(config, start)
    run_update(agent, config)
    agent.zero_grad()
    with agent.branched() as agent_b:
        assert held_bytes(agent, agent_b) == held_bytes(agent.policy)


# Bytes of a bfloat16 weight: 2, its master 4, two moments 8, its gradient 2 and that of its master 4. An adapter's is
# its own master. The reference of a KL term is another copy, except where the base itself is the reference.
FULL, LEARNING, ADAPTER, ADAPTER_LEARNING, COPY = 14, 20, 12, 16, 2


@pytest.mark.parametrize(
    ("flags", "of_base", "of_adapter", "waiting"),
    [
        (["swap.copy=device"], FULL + LEARNING + COPY, 0, 0),
        (["swap.copy=offload"], LEARNING + COPY, 0, FULL - 2),
        (["swap.copy=adapter", "lora.rank=4"], FULL + COPY, ADAPTER_LEARNING, 0),
        (["lora.rank=4"], COPY, ADAPTER + ADAPTER_LEARNING, 0),
    ],
)
def test_bytes_of_each_choice_while_b_learns(
    start: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    of_base: int,
    of_adapter: int,
    waiting: int,
) -> None:
    config = small_config(*flags, "policy.dtype=bfloat16", "loss.kl_coef=0.01")
    base = Policy.load(start, config.policy)
    policy, reference = policy_and_reference(base, config)
    agent = Agent(policy, config)
    run_update(agent, config, reference)
    host: list[int] = []
    to_host = agents._to_host

    def counted(tensor: Tensor) -> Tensor:
        copied = to_host(tensor)
        host.append(copied.nbytes if copied.dim() else 0)  # without step counts
        return copied

    monkeypatch.setattr(agents, "_to_host", counted)
    held: list[int] = []
    with agent.branched() as agent_b:
        step = torch.optim.AdamW.step

        def measured(optimizer: torch.optim.AdamW) -> None:
            step(optimizer)
            held.append(held_bytes(agent, agent_b, reference))  # the most: gradients are there in both precisions

        monkeypatch.setattr(torch.optim.AdamW, "step", measured)
        run_update(agent_b, config, reference)
    adapter = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))
    assert set(held) == {of_base * base.num_parameters + of_adapter * adapter}
    assert sum(host) == waiting * base.num_parameters


def records(folder: Path) -> list[dict[str, Any]]:
    return without_timings(read_metrics(folder))


@pytest.mark.parametrize("base", ["grpo", "ppo"])
def test_a_run_with_offload_is_the_run_with_a_copy_bit_for_bit(start: Path, tmp_path: Path, base: str) -> None:
    flags = ["env.name=rspo_toys:ParityEnv", "evaluation.transcripts=0", f"base={base}", f"policy.path={start}"]
    for copied in ("device", "offload"):
        train(small_config(*flags, f"swap.copy={copied}", "run.steps=4"), tmp_path / copied)
    assert records(tmp_path / "device") == records(tmp_path / "offload")
    finals = [list_checkpoints(tmp_path / copied / "checkpoints")[-1] for copied in ("device", "offload")]
    for file in ("model.safetensors", "optimizer.pt", *(["critic.safetensors"] if base == "ppo" else [])):
        assert (finals[0] / file).read_bytes() == (finals[1] / file).read_bytes()


def test_where_a_waits_may_change_on_resume_and_what_b_is_may_not(start: Path, tmp_path: Path) -> None:
    flags = ["env.name=rspo_toys:ParityEnv", "evaluation.every=2", "run.save_every=2", f"policy.path={start}"]
    train(small_config(*flags, "run.steps=4"), tmp_path / "whole")
    train(small_config(*flags, "run.steps=2"), tmp_path / "parts")
    train(small_config(*flags, "run.steps=4", "swap.copy=offload"), tmp_path / "parts", resume=True)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    adapter = small_config(*flags, "run.steps=6", "swap.copy=adapter", "lora.rank=4")
    with pytest.raises(ConfigError, match=r"lora\.rank of the run in .* is 0 and cannot change|swap\.copy of the run"):
        open_run(adapter, tmp_path / "parts", resume=True, progress=False)


# B as an adapter on A's weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_b_is_an_adapter_over_a_which_stands_still(start: Path, dtype: str, backbone: str) -> None:
    flags = ["base=ppo", f"critic.backbone={backbone}", f"policy.dtype={dtype}", "swap.copy=adapter", "lora.rank=4"]
    config = small_config(*flags, *LARGE, "lora.learning_rate=0.02")
    agent = agent_of(config, start)
    run_update(agent, config)
    before, a_alone = everything(agent), storages(tensors_of(agent.policy, agent))
    batch = prepared(agent, config)
    with agent.branched() as agent_b:
        assert agent.critic is not None
        assert agent_b.critic is not None
        assert (agent.learning_rates["learning_rate"], agent_b.learning_rates["learning_rate"]) == (0.01, 0.02)
        with torch.no_grad():  # B begins as A
            assert torch.equal(agent_b.policy.logprobs(batch, 1.0)[0], agent.policy.logprobs(batch, 1.0)[0])
            values = agent.critic.values(agent.policy, batch)
            assert torch.equal(agent_b.critic.values(agent_b.policy, batch), values)
        for _ in range(2):
            run_update(agent_b, config)
        with torch.no_grad():
            moved = agent_b.policy.logprobs(batch, 1.0)[0] - agent.policy.logprobs(batch, 1.0)[0]
            assert float(moved.abs().max()) > 1e-3
            assert not torch.equal(agent_b.critic.values(agent_b.policy, batch), values)
        # Beside A there are only adapters and heads with their gradients and two moments, in float32.
        own = sum(master.numel() for optimizer in agent_b.optimizers for master in optimizer.masters)
        a_now = {address: size for address, size in a_alone.items() if address in storages(tensors_of(agent))}
        assert held_bytes(agent, agent_b) == sum(a_now.values()) + 4 * 4 * own
        assert all(parameter.grad is None for _, parameter in agent.named_parameters())
    assert same(everything(agent), before)
    run_update(agent, config)  # A is trained in full as before
    assert not any(torch.equal(value, before[name]) for name, value in weights(agent.policy.model).items())


@pytest.mark.parametrize("base", ["grpo", "ppo"])
def test_a_run_with_an_adapter_for_b_trains_and_resumes(start: Path, tmp_path: Path, base: str) -> None:
    flags = ["env.name=rspo_toys:ParityEnv", "evaluation.every=2", "evaluation.transcripts=0", f"policy.path={start}"]
    flags += [f"base={base}", "swap.copy=adapter", "lora.rank=4", "lora.learning_rate=0.01", "run.save_every=2"]
    train(small_config(*flags, "run.steps=4"), tmp_path / "whole")
    train(small_config(*flags, "run.steps=2"), tmp_path / "parts")
    train(small_config(*flags, "run.steps=4"), tmp_path / "parts", resume=True)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    dense, updates = (read_metrics(tmp_path / "whole", kind) for kind in ("dense", "update"))
    assert all(record["gradient_norm"] > 0 for record in [*dense, *updates])
    assert {record["learning_rate"] for record in dense} == {0.01}
    assert {record["learning_rate"] for record in updates} == {1e-3}
    # B went somewhere: what it wrote is not what A would have.
    assert updates[-1]["replay/trajectories"] == 4
    assert updates[-1]["replay/log_center_q95"] - updates[-1]["replay/log_center_q05"] > 1e-3
    assert (tmp_path / "whole" / "checkpoints" / "step-000004" / "model.safetensors").is_file()
