"""group_advantages against its float64 reference, and the cases that other libraries got wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import assert_close

from rspo_kernels import group_advantages, reference

OPTIONS = st.fixed_dictionaries({
    "baseline": st.sampled_from(["mean", "leave_one_out"]),
    "scale": st.sampled_from(["std", None]),
    "singleton": st.sampled_from(["zero", "raw"]),
})  # fmt: skip


@given(
    ids=st.lists(st.integers(-3, 6), min_size=0, max_size=40),
    kind=st.sampled_from(["binary", "normal", "offset", "constant", "huge"]),
    options=OPTIONS,
    seed=st.integers(0, 2**31),
)
def test_agrees_with_the_float64_reference(place, ids, kind, options, seed):
    device, backend = place
    rng = torch.Generator().manual_seed(seed)
    n = len(ids)
    noise = torch.randn(n, generator=rng)
    rewards = {
        "binary": (noise > 0).float() * 10,
        "normal": noise,
        "offset": 1000 + 0.01 * noise,
        "constant": torch.full((n,), 0.1),
        "huge": 1e18 * noise,
    }[kind]
    groups = torch.tensor(ids, dtype=torch.int64) * 10_000_000_000  # ids need not be small
    actual = group_advantages(rewards.to(device), groups.to(device), backend=backend, **options)
    expected = reference.group_advantages(rewards.double(), groups, **options)
    size = float(expected.abs().max()) if n else 0.0
    assert actual.dtype == torch.float32
    assert_close("advantages", actual, expected, rtol=1e-5, atol=2e-6 * size)
    if kind == "constant" and options["singleton"] == "zero":
        assert (actual == 0).all()


def test_hand_values(place):
    device, backend = place
    rewards = torch.tensor([10.0, 0.0, 0.0, 5.0, 7.0], device=device)
    groups = torch.tensor([1, 0, 1, 0, 2], device=device)

    def call(**options):
        return group_advantages(rewards, groups, backend=backend, **options).tolist()

    half = 0.5**0.5
    assert call() == pytest.approx([half, -half, -half, half, 0.0], rel=1e-5)
    assert call(scale=None) == [5.0, -2.5, -5.0, 2.5, 0.0]
    assert call(scale=None, baseline="leave_one_out") == [10.0, -5.0, -10.0, 5.0, 0.0]
    assert call(scale=None, singleton="raw")[4] == 7.0


def test_identical_rewards_give_exactly_zero(place):
    """E[x²] - E[x]² in float32 has made advantages of thousands of this."""
    device, backend = place
    for value in (0.1, 1000.01, 1e-20, -3e30):
        rewards = torch.full((129,), value, device=device)
        for baseline in ("mean", "leave_one_out"):
            advantages = group_advantages(
                rewards, torch.zeros(129, dtype=torch.int32, device=device), baseline=baseline, backend=backend
            )
            assert (advantages == 0).all()
    tenths = torch.full((3,), 0.1, dtype=torch.float64)
    assert (group_advantages(tenths, torch.zeros(3, dtype=torch.int64), backend="torch") == 0).all()


def test_a_reward_that_is_not_finite_is_named(place):
    device, backend = place
    rewards = torch.tensor([0.0, 1.0, float("nan"), 1.0], device=device)
    groups = torch.tensor([0, 0, 1, 1], device=device)
    with pytest.raises(ValueError, match=r"rewards must be finite, got nan at position 2 \(group 1\)"):
        group_advantages(rewards, groups, backend=backend)
    unchecked = group_advantages(rewards, groups, validate=False, backend=backend)
    assert unchecked[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5), "the other group is not touched"


def test_more_rows_than_a_block(place):
    device, backend = place
    torch.manual_seed(0)
    rewards, groups = torch.randn(700), torch.randint(0, 50, (700,))
    actual = group_advantages(rewards.to(device), groups.to(device), backend=backend)
    assert_close("advantages", actual, reference.group_advantages(rewards.double(), groups), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rewards": torch.zeros(2, 2)}, ValueError, r"rewards must be \[n\], got \[2, 2\]"),
        ({"rewards": torch.zeros(3, dtype=torch.long)}, TypeError, "rewards must be float32"),
        ({"groups": torch.zeros(3)}, TypeError, "groups must be int32 or int64, got torch.float32"),
        ({"groups": torch.zeros(4, dtype=torch.long)}, ValueError, r"groups must have the shape of rewards, \[3\]"),
        ({"baseline": "median"}, ValueError, "baseline must be one of 'mean', 'leave_one_out', got 'median'"),
        ({"scale": "range"}, ValueError, "scale must be one of 'std', None, got 'range'"),
        ({"singleton": "one"}, ValueError, "singleton must be one of 'zero', 'raw', got 'one'"),
        ({"eps": 0.0}, ValueError, "eps must be a finite number > 0, got 0.0"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {"rewards": torch.zeros(3), "groups": torch.zeros(3, dtype=torch.long)} | change
    with pytest.raises(error, match=message):
        group_advantages(**arguments)
