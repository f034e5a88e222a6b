"""The operators of the scans and of step_advantages: opcheck, torch.compile, recompilations."""

from __future__ import annotations

import pytest
import torch
from numerics import assert_close
from torch._dynamo.testing import CompileCounter

from rspo_kernels import Segments, discounted_returns, gae, group_advantages, masked_whiten, step_advantages

ops = torch.ops.rspo_kernels
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_opcheck_scans(place):
    device, backend = place
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 6, device=device)
    mask = torch.arange(6, device=device) != 2
    segments = Segments.from_lengths(torch.tensor([2, 1, 3], device=device), torch.tensor([1, 0, 1], device=device))
    layout = (segments.sequence_order, segments.cu_sequences, 0)
    bootstrap = torch.ones(2, device=device)
    torch.library.opcheck(ops.gae, (rewards, values, None, None, None, None, 3, 1.0, 0.9, backend))
    torch.library.opcheck(ops.gae, (rewards, values, mask, bootstrap, *layout, 0.9, 0.9, backend))
    torch.library.opcheck(ops.discounted_returns, (rewards, None, None, None, 6, 0.9, backend))
    torch.library.opcheck(ops.discounted_returns, (rewards, mask, *layout, 0.9, backend))
    for shift_mean, dropped in ((True, None), (False, mask)):
        torch.library.opcheck(ops.masked_whiten, (rewards, dropped, shift_mean, 1e-8, backend))


def test_opcheck_step_advantages(place):
    device, backend = place
    rewards = torch.randn(4, device=device)
    ids = [torch.tensor(x, device=device) for x in ([0, 0, 0, 1], [0, 1, 1, 0], [5, 5, 6, 6])]
    valid = torch.tensor([True, True, False, True], device=device)
    plain = (0.95, 1.0, "mean_norm", False, "zero", 1e-6, False, backend)
    torch.library.opcheck(ops.step_advantages, (rewards, *ids, None, None, None, *plain))
    full = (0.95, 1.0, "mean_std_norm", True, "raw", 1e-6, True, backend)
    torch.library.opcheck(ops.step_advantages, (rewards, *ids, valid, rewards.abs(), rewards, *full))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(place, dynamic):
    """Everything that makes advantages in one graph, with the eager result."""
    device, backend = place

    def all_advantages(rewards, values, mask, groups):
        advantages, returns = gae(rewards, values, mask=mask, gamma=0.9, backend=backend)
        white = masked_whiten(advantages, mask, backend=backend)
        discounted = discounted_returns(rewards[0], backend=backend)
        step = step_advantages(discounted, groups, groups, groups, validate=False, backend=backend)
        return white, returns, discounted, *step, group_advantages(rewards[1], groups, validate=False, backend=backend)

    torch.manual_seed(0)
    compiled = torch.compile(all_advantages, fullgraph=True, dynamic=dynamic)
    for length in (5, 9):
        rewards, values = torch.randn(2, 2, length, device=device)
        mask = torch.rand(2, length, device=device) < 0.8
        groups = torch.arange(length, device=device) % 2
        eager = all_advantages(rewards, values, mask, groups)
        for graph, expected in zip(compiled(rewards, values, mask, groups), eager, strict=True):
            assert_close("compiled", graph, expected, rtol=1e-6, atol=1e-6)


def test_no_recompilation_when_only_the_number_of_tokens_changes(place):
    device, backend = place
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def white_advantages(rewards, values):
        return masked_whiten(gae(rewards, values, backend=backend)[0], backend=backend)

    for n in (5, 17, 40):
        white_advantages(*torch.randn(2, n, device=device))
    assert counter.frame_count == 1
