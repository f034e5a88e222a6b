"""A tensor that is spread over a mesh is refused by the name of the argument, whichever it is."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from rspo_kernels import (
    PolicyLossConfig,
    Segments,
    discounted_returns,
    gae,
    group_advantages,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    masked_whiten,
    policy_loss,
    step_advantages,
    token_logprobs,
)

N, WIDTH, VOCAB = 6, 4, 9
FLOATS = ("logp", "advantages", "weights", "old_logp", "behavior_logp", "ref_logp", "entropy", "rewards", "values",
          "step_rewards", "penalties", "episode_rewards", "x")  # fmt: skip
IDS = ("groups", "trajectories", "anchors", "targets")
OPS = (
    token_logprobs, linear_token_logprobs, policy_loss, logits_policy_loss, linear_policy_loss, group_advantages,
    step_advantages, gae, discounted_returns, masked_whiten,
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    path = tmp_path_factory.mktemp("mesh") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def arguments(op):
    """Every tensor that the op takes, and what else it needs."""
    tensors = {name: torch.rand(N) for name in FLOATS} | {name: torch.arange(N) for name in IDS}
    tensors |= {"logits": torch.randn(N, VOCAB), "hidden": torch.randn(N, WIDTH), "weight": torch.randn(VOCAB, WIDTH)}
    tensors |= {"bias": torch.randn(VOCAB), "normalizer": torch.tensor(3.0), "parts": torch.ones(2, N) > 0}
    tensors |= {"mask": torch.ones(N) > 0, "valid": torch.ones(N) > 0, "bootstrap": torch.rand(2)}
    others = {"config": PolicyLossConfig(entropy_coef=0.1 if op is policy_loss else 0.0), "backend": "torch"}
    others |= {"segments": Segments.from_lengths(torch.tensor([4, 2])), "gamma": 0.9, "lam": 0.9}
    taken = inspect.signature(op).parameters
    return {n: x for n, x in tensors.items() if n in taken}, {n: x for n, x in others.items() if n in taken}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_a_dtensor_is_named(mesh, op):
    tensors, others = arguments(op)
    op(**tensors, **others)
    for name, x in tensors.items():
        spread = distribute_tensor(x, mesh)
        assert isinstance(spread, DTensor)
        with pytest.raises(TypeError, match=f"^{name} must be an ordinary tensor, got a DTensor"):
            op(**tensors | {name: spread}, **others)


def test_segments_of_dtensors_are_named(mesh):
    lengths, ids = torch.tensor([4, 2]), torch.tensor([0, 1])
    for i in range(3):
        given = [lengths, ids, ids]
        given[i] = distribute_tensor(given[i], mesh)
        with pytest.raises(TypeError, match="must be an ordinary tensor, got a DTensor"):
            Segments.from_lengths(*given)
