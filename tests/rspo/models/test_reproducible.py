"""The same bits on one CPU thread: where weights lie in memory, and MKL's mode, which the product sets itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rspo_toys import small_config, small_policy
from torch import nn
from transformers import AutoModelForCausalLM

from rspo.config import PolicyConfig
from rspo.models.agent import Agent
from rspo.models.policy import Policy
from rspo.models.reproducible import ALIGNMENT, align, mkl_mode
from rspo.runs.checkpoint import load_checkpoint, save_checkpoint

FLAGS = (
    "env.name=rspo_parity:ParityEnv",
    "estimator.invalid_penalty=0",
    "rollout.tasks=4",
    "rollout.group_size=4",
    "swap.k=2",
    "swap.alpha=0.25",
    "swap.buffer_tasks=3",
    "optimizer.minibatches=2",
    "evaluation.episodes=8",
)


def at_eight(weight: torch.Tensor) -> torch.Tensor:
    """The same values at an address of 8 modulo 64, where a mapped file may have them."""
    room = torch.empty(weight.numel() + 2 * ALIGNMENT, dtype=weight.dtype)
    first = (8 - room.data_ptr()) % ALIGNMENT // weight.element_size()
    moved = room[first : first + weight.numel()].view(weight.shape).copy_(weight)
    assert moved.data_ptr() % ALIGNMENT == 8
    return moved


def aligned(module: nn.Module) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*module.parameters(), *module.buffers()))


def test_weights_at_odd_addresses_are_moved_with_their_ties() -> None:
    module = nn.ModuleList([nn.Linear(5, 7), nn.Linear(5, 7), nn.BatchNorm1d(3)])
    module[1].weight = module[0].weight
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = at_eight(tensor.data)
    align(module)
    assert aligned(module)
    assert module[1].weight is module[0].weight
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def test_a_policy_lies_in_memory_of_pytorchs_own(start: Path) -> None:
    """Also one of a model object whose weights are still in the file that they were mapped from."""
    model = AutoModelForCausalLM.from_pretrained(start)
    for parameter in model.parameters():
        parameter.data = at_eight(parameter.data)
    given = Policy(model, small_policy().tokenizer)
    for policy in (given, given.copy(), Policy.load(start, PolicyConfig())):
        assert aligned(policy.model)


CHILD = """
import os, sys, warnings
import torch
from pathlib import Path
torch.set_num_threads(1)
if "late" in sys.argv:
    torch.randn(64, 64) @ torch.randn(64, 64)
from rspo.config import Config
from rspo.config.files import apply_flags
from rspo.models.reproducible import mkl_mode
from rspo.runs.setting import set_threads
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    set_threads(apply_flags(Config(), [flag for flag in sys.argv[1:] if "=" in flag]))
print(os.environ.get("MKL_CBWR"), mkl_mode(), [str(w.message) for w in caught if "MKL" in str(w.message)])
"""


def child(*arguments: str, code: str = CHILD, **environment: str) -> str:
    """What a process prints in whose environment nobody has set MKL's mode."""
    inherited = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    inherited |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(mkl_mode() is None, reason="this PyTorch has no MKL that can be asked")
def test_mkl_is_set_where_a_run_has_one_thread() -> None:
    mode, branch, said = child().split(maxsplit=2)
    assert mode in ("AVX512,STRICT", "AVX2,STRICT")
    assert (int(branch) != 1, said.strip()) == (True, "[]")
    assert child("run.threads=2").startswith("None 1 []")
    assert child("run.reproducible=false").startswith("None 1 []")
    assert child(MKL_CBWR="COMPATIBLE").startswith("COMPATIBLE 3 []")
    assert "run.reproducible=true came too late for MKL" in child("late")


def test_a_resumed_agent_lies_in_memory_of_pytorchs_own(tmp_path: Path) -> None:
    """Its policy, critic, float32 weights and moments."""
    config = small_config("policy.dtype=bfloat16", method="ppo")
    policy = small_policy()
    policy.model.to(torch.bfloat16)
    agent = Agent(policy, config, has_critic=True)
    for master in (master for optimizer in agent.optimizers for master in optimizer.masters):
        master.grad = torch.ones_like(master)
    agent.step()
    save_checkpoint(tmp_path / "step-000001", agent, {"method": "ppo", "estimator": config.estimator_name})
    resumed = load_checkpoint(tmp_path / "step-000001", config, has_critic=True).agent
    assert aligned(resumed.policy.model)
    assert resumed.critic is not None
    assert aligned(resumed.critic)
    for optimizer in resumed.optimizers:
        moments = [value for values in optimizer.optimizer.state.values() for value in values.values()]
        assert moments
        assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*optimizer.masters, *moments))


TRAIN = "import sys; from rspo.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_a_run_is_the_same_in_every_process_resumed_and_offloaded(tmp_path: Path, start: Path) -> None:
    def train(folder: Path, *more: str) -> bytes:
        child("train", "--policy", str(start), "--out", str(folder), "--quiet", *more, *flags, code=TRAIN)
        return max((folder / "checkpoints").glob("step-*/model.safetensors")).read_bytes()

    flags = [part for flag in FLAGS for part in ("--set", flag)]
    whole = train(tmp_path / "whole", "--steps", "4")
    half = train(tmp_path / "parts", "--steps", "2", "--set", "swap.copy=offload")
    assert half != whole
    assert train(tmp_path / "parts", "--steps", "4", "--resume") == whole
