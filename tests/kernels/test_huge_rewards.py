"""Rewards near the end of float32: what the sums inside do not overflow at is what comes out, on either backend."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from numerics import assert_close

from rspo_kernels import discounted_returns, gae, group_advantages, masked_whiten, step_advantages

LARGEST = 3.4e38
REWARDS = {
    "ends": [LARGEST, -LARGEST, 0.0, LARGEST, 1e38, -3e38, LARGEST, -1.0],
    "equal": [LARGEST] * 8,
    "ordinary": [1.0, 0.0, -2.5, 1000.01, 0.3, 0.3, 7e-6, -1.0],
    "tiny": [1e-20, -1e-20, 3e-21, 0.0, 5e-20, 1e-24, 2e-20, -1e-20],
}


def results(rewards, device, backend):
    """Everything that comes of the rewards, by the options."""
    rewards = torch.tensor(rewards, device=device)
    penalties, totals = rewards.flip(0).abs() / 2, rewards.abs()
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2], device=device)
    trajectories = torch.tensor([0, 0, 1, 1, 2, 2, 3, 4], device=device)
    anchors = torch.tensor([0, 1, 0, 1, 0, 0, 0, 1], device=device)
    out = {}
    for baseline, scale, single in product(("mean", "leave_one_out"), ("std", None), ("zero", "raw")):
        options = {"baseline": baseline, "scale": scale, "singleton": single, "backend": backend}
        out["group", baseline, scale, single] = group_advantages(rewards, groups, **options)
    for mode, rows, pay, total in product(("mean_std_norm", "mean_norm"), (False, True), (False, True), (False, True)):
        levels = step_advantages(
            rewards, groups, trajectories, anchors, mode=mode, rows=rows, singleton="raw",
            penalties=penalties if pay else None, episode_rewards=totals if total else None, backend=backend,
        )  # fmt: skip
        out |= {(name, mode, rows, pay, total): x for name, x in levels._asdict().items()}
    out["whitened"] = masked_whiten(rewards, backend=backend)
    out["whitened in place"] = masked_whiten(rewards, rewards >= 0, shift_mean=False, backend=backend)
    for gamma in (0.9, 1.0):
        out["advantages", gamma], out["returns", gamma] = gae(
            rewards, rewards.flip(0), gamma=gamma, lam=0.9, backend=backend
        )
        out["sums", gamma] = discounted_returns(rewards, gamma=gamma, backend=backend)
    return out


@pytest.mark.parametrize("name", REWARDS)
def test_as_in_float64(place, name):
    """Infinite only where the float64 result is beyond float32."""
    device, backend = place
    expected = results(REWARDS[name], "cpu", "torch")  # which computes in float64 inside
    for key, x in results(REWARDS[name], device, backend).items():
        want = expected[key].to(device)
        assert not x.isnan().any(), key
        assert torch.equal(x.isinf(), want.isinf()), key
        finite = want.isfinite()
        # Sums of cancelling terms: right to a few roundings of the largest.
        scale = float(want[finite].abs().max()) if finite.any() else 0.0
        assert_close(str(key), x[finite], want[finite], rtol=1e-5, atol=1e-6 * scale)


def test_one_group_of_both_ends(place):
    device, backend = place
    rewards, groups = torch.tensor([3e38, -3e38], device=device), torch.zeros(2, dtype=torch.int64, device=device)
    right = rewards.sign() * 0.5**0.5
    assert_close("std", group_advantages(rewards, groups, backend=backend), right, rtol=1e-6)
    assert_close("mean", group_advantages(rewards, groups, scale=None, backend=backend), rewards, rtol=1e-6)
