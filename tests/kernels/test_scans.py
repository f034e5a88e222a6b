"""gae, discounted_returns and masked_whiten against their float64 references."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import EPS, assert_close

from rspo_kernels import Segments, discounted_returns, gae, masked_whiten, reference

pytestmark = pytest.mark.usefixtures("small_blocks")

DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
# Turns that are empty, of one token, shorter and longer than a block of 8; some sequences may have no turn.
TURNS = st.lists(st.tuples(st.integers(0, 19), st.integers(0, 3)), min_size=0, max_size=5)
MASKS = st.sampled_from(["none", "random", "edges", "all"])
GARBAGE = torch.tensor([torch.nan, torch.inf, -3e4, 6e4])


def make_mask(kind, n, rng):
    """None, or bool [n]: scattered, a stretch in the middle kept, nothing kept."""
    if kind == "none":
        return None
    if kind == "random":
        return torch.rand(n, generator=rng) < 0.6
    return torch.zeros(n, dtype=torch.bool) if kind == "all" else (torch.arange(n) - n // 2).abs() <= n // 4


def with_garbage(x, mask):
    """x with something harmful wherever the mask drops it, and 0 there for the reference."""
    if mask is None:
        return x, x.double()
    return torch.where(mask, x, GARBAGE.repeat(len(x))[: len(x)].to(x.dtype)), torch.where(mask, x, 0).double()


def runnable(backend, dtype):
    return torch.float32 if backend == "triton" and dtype == torch.float64 else dtype


@given(turns=TURNS, kind=MASKS, gamma=DISCOUNTS, lam=DISCOUNTS, dtype=DTYPES,
       level=st.sampled_from(["token", "turn", "sequence", "trajectory"]), truncated=st.booleans(),
       seed=st.integers(0, 2**31))  # fmt: skip
def test_packed_agrees_with_the_float64_reference(place, turns, kind, gamma, lam, dtype, level, truncated, seed):
    device, backend = place
    dtype = runnable(backend, dtype)
    rng = torch.Generator().manual_seed(seed)
    lengths, sequences = torch.tensor(turns, dtype=torch.int64).reshape(-1, 2).unbind(1)
    n = int(lengths.sum())
    mask = make_mask(kind, n, rng)
    rewards, rewards_64 = with_garbage(torch.randn(n, generator=rng).to(dtype), mask)
    values, values_64 = with_garbage((3 * torch.randn(n, generator=rng)).to(dtype), mask)
    segments = Segments.from_lengths(lengths.to(device), sequences.to(device))
    ids, count = Segments.from_lengths(lengths, sequences).level("turn" if level in ("token", "turn") else "sequence")
    bootstrap = torch.randn(count, generator=rng) if truncated else None
    # What the sums are made of: rounding errors grow with it, not with a result in which it cancels.
    parts = rewards_64.abs() + 2 * values_64.abs() + (0 if bootstrap is None else bootstrap.double()[ids].abs())
    size = max([1.0, *reference.discounted_returns(parts, ids, gamma=gamma, mask=mask).tolist()])
    atol = 4 * EPS[torch.float64 if dtype == torch.float64 else torch.float32] * size

    def there(x):
        return None if x is None else x.to(device)

    actual = gae(
        there(rewards), there(values), gamma=gamma, lam=lam, mask=there(mask), segments=segments, level=level,
        bootstrap=there(bootstrap), backend=backend,
    )  # fmt: skip
    start = None if bootstrap is None else bootstrap.double()
    expected = reference.gae(rewards_64, values_64, ids, gamma=gamma, lam=lam, mask=mask, bootstrap=start)
    for name, a, e in zip(("advantages", "returns"), actual, expected, strict=True):
        assert a.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(name, a, e, rtol=0, atol=atol)
        assert mask is None or (a.cpu()[~mask] == 0).all()

    discounted = discounted_returns(
        there(rewards), gamma=gamma, mask=there(mask), segments=segments, level=level, backend=backend
    )
    expected = reference.discounted_returns(rewards_64, ids, gamma=gamma, mask=mask)
    assert_close("returns", discounted, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["none", "random", "edges", "all"])
def test_padded_rows_are_sequences(place, kind):
    """[B, L], the same rows packed, and rows that are cut out of something wider."""
    device, backend = place
    rng = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 3, 21, generator=rng).to(device)
    mask = make_mask(kind, 63, rng)
    mask = None if mask is None else mask.view(3, 21).to(device)
    bootstrap = torch.randn(3, generator=rng).to(device)
    padded = gae(rewards, values, mask=mask, bootstrap=bootstrap, backend=backend)
    segments = Segments.from_lengths(torch.tensor([21, 21, 21], device=device))
    flat = None if mask is None else mask.flatten()
    options = {"mask": flat, "segments": segments, "backend": backend}
    packed = gae(rewards.flatten(), values.flatten(), bootstrap=bootstrap, **options)
    wide = torch.stack([rewards, torch.full_like(rewards, torch.nan)], -1)[..., 0]
    strided = gae(wide, values, mask=mask, bootstrap=bootstrap, backend=backend)
    for p, q, s in zip(padded, packed, strided, strict=True):
        assert torch.equal(p.flatten(), q)
        assert torch.equal(p, s)
    rows = discounted_returns(rewards, mask=mask, backend=backend)
    assert torch.equal(rows.flatten(), discounted_returns(rewards.flatten(), **options))


def test_shuffled_turns_give_what_ordered_ones_give(place):
    """The turns of a sequence may stand anywhere, in order; sequence 2 has no turn, one turn is empty."""
    device, backend = place
    torch.manual_seed(2)
    lengths, sequences = torch.tensor([3, 9, 0, 12, 1, 5]), torch.tensor([1, 0, 3, 1, 0, 3])
    rewards, values = torch.randn(2, 30)
    order = torch.argsort(sequences, stable=True)
    token_order = torch.cat([torch.arange(30).split(lengths.tolist())[i] for i in order])

    def run(x, v, n, s):
        segments = Segments.from_lengths(n.to(device), s.to(device, torch.int32))
        boot = torch.arange(4.0, device=device)
        return [y.cpu() for y in gae(x.to(device), v.to(device), segments=segments, bootstrap=boot, backend=backend)]

    shuffled = run(rewards, values, lengths, sequences)
    ordered = run(rewards[token_order], values[token_order], lengths[order], sequences[order])
    for s, o in zip(shuffled, ordered, strict=True):
        assert torch.equal(s[token_order], o)


def test_hand_values(place):
    device, backend = place
    rewards = torch.tensor([1.0, 9.0, 0.0, 2.0, 4.0], device=device)
    values = torch.tensor([0.5, 9.0, 1.0, 3.0, 2.0], device=device)
    mask = torch.tensor([1, 0, 1, 1, 1], device=device)
    segments = Segments.from_lengths(torch.tensor([4, 1], device=device), torch.tensor([0, 0], device=device))

    def call(**options):
        advantages, returns = gae(
            rewards, values, gamma=0.5, lam=0.5, mask=mask, segments=segments, backend=backend, **options
        )
        return advantages.tolist(), returns.tolist()

    # The last turn: 4 - 2 = 2. Before it 2 - 3 + 0.5·2 + 0.25·2 = 0.5 where stitched, 2 - 3 = -1 where not.
    assert call() == ([1.15625, 0.0, 0.625, 0.5, 2.0], [1.65625, 0.0, 1.625, 3.5, 4.0])
    assert call(level="token") == ([1.0625, 0.0, 0.25, -1.0, 2.0], [1.5625, 0.0, 1.25, 2.0, 4.0])
    truncated = call(bootstrap=torch.tensor([8.0], device=device))
    assert truncated[0][3:] == [1.5, 6.0]
    returns = discounted_returns(rewards, gamma=0.5, mask=mask, segments=segments, backend=backend)
    assert returns.tolist() == [2.0, 0.0, 2.0, 4.0, 4.0]
    whole = discounted_returns(rewards[2:], gamma=0.5, backend=backend)
    assert whole.tolist() == [2.0, 4.0, 4.0], "packed entries without segments are one sequence"


def test_one_entry_a_turn(place):
    """GiGPO's use: a step reward for each turn of interleaved trajectories."""
    device, backend = place
    trajectories = torch.tensor([4, 0, 4, 0, 4], device=device)
    segments = Segments.from_lengths(torch.ones(5, dtype=torch.int64, device=device), trajectories)
    rewards = torch.tensor([1.0, 1.0, 2.0, 4.0, 8.0], device=device)
    assert discounted_returns(rewards, gamma=0.5, segments=segments, backend=backend).tolist() == [4, 3, 6, 4, 8]


def test_lambda_one_is_the_return_less_the_value(place):
    device, backend = place
    torch.manual_seed(3)
    rewards, values = torch.randn(2, 40, device=device)
    advantages, returns = gae(rewards, values, gamma=1.0, lam=1.0, backend=backend)
    ahead = rewards.double().flip(0).cumsum(0).flip(0)
    assert_close("returns", returns, ahead, rtol=0, atol=1e-5)
    assert_close("advantages", advantages, ahead - values.double(), rtol=0, atol=1e-5)


def test_longer_than_the_block_of_a_launch(place, monkeypatch):
    device, backend = place
    if backend == "triton":
        monkeypatch.setattr("rspo_kernels.backends.triton_impl.scans.BLOCK", 1024)
    torch.manual_seed(4)
    rewards, values = torch.randn(2, 1100)
    mask = torch.rand(1100) < 0.7
    actual = gae(rewards.to(device), values.to(device), gamma=0.99, mask=mask.to(device), backend=backend)
    ids = torch.zeros(1100, dtype=torch.int64)
    expected = reference.gae(rewards.double(), values.double(), ids, gamma=0.99, mask=mask)
    for a, e in zip(actual, expected, strict=True):
        assert_close("gae", a, e, rtol=0, atol=2e-6 * float(e.abs().max()))


def test_a_broken_reward_stays_in_its_segment(place):
    device, backend = place
    rewards = torch.ones(3, 10, device=device)
    rewards[1, 4] = torch.nan
    advantages, returns = gae(rewards, torch.ones_like(rewards), backend=backend)
    for x in (advantages, returns, discounted_returns(rewards, backend=backend)):
        assert x[[0, 2]].isfinite().all()
        assert x[1].isfinite().tolist() == [False] * 5 + [True] * 5


def test_nothing_to_scan(place):
    device, backend = place
    for shape in ((0,), (3, 0), (0, 4)):
        empty = torch.zeros(shape, device=device)
        assert [x.shape for x in gae(empty, empty, backend=backend)] == [torch.Size(shape)] * 2
        assert discounted_returns(empty, backend=backend).shape == shape
        assert masked_whiten(empty, backend=backend).shape == shape


def test_no_gradient_flows(place):
    device, backend = place
    rewards, values = torch.randn(2, 6, device=device, requires_grad=True)
    outputs = [*gae(rewards, values, backend=backend), discounted_returns(rewards, backend=backend)]
    assert not any(x.requires_grad for x in [*outputs, masked_whiten(values, backend=backend)])


def test_the_pytorch_path_has_no_loop_over_time():
    """10^5 tokens: a loop of that many steps would take half a minute."""
    rewards, values = torch.randn(2, 100_000)
    mask = torch.rand(100_000) < 0.5
    start = time.process_time()
    gae(rewards, values, mask=mask, lam=1.0, backend="torch")
    assert time.process_time() - start < 2.0


@given(n=st.integers(0, 150), kind=MASKS, dtype=DTYPES, shift=st.booleans(), eps=st.sampled_from([1e-8, 0.5]),
       data=st.sampled_from(["normal", "offset", "huge", "tiny", "outlier"]), seed=st.integers(0, 2**31))  # fmt: skip
def test_whitening_agrees_with_the_float64_reference(place, n, kind, dtype, shift, eps, data, seed):
    device, backend = place
    dtype = runnable(backend, dtype)
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, generator=rng)
    x = {
        "normal": noise,
        "offset": 1000 + 0.01 * noise,
        "huge": 1e18 * noise,
        "tiny": 1e-5 * noise,  # a variance of the size of eps
        "outlier": torch.where(torch.arange(n) == n // 2, 1e4, noise),
    }[data]
    if dtype == torch.float16:
        x = x.clamp(-6e4, 6e4)
    x = x.to(dtype)
    mask = make_mask(kind, n, rng)
    dirty, clean = with_garbage(x, mask)
    there = None if mask is None else mask.to(device)
    actual = masked_whiten(dirty.to(device), there, shift_mean=shift, eps=eps, backend=backend)
    expected = reference.masked_whiten(clean, mask, shift_mean=shift, eps=eps)
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # Added again, the mean brings the rounding of what it is the mean of.
    parts = [expected] if shift else [expected, clean]
    size = max(float(x.abs().max()) for x in parts) if n else 0.0
    assert_close("whitened", actual, expected, rtol=0, atol=32 * EPS[actual.dtype] * size)


def test_whitening_by_hand(place):
    device, backend = place
    x = torch.tensor([[1.0, torch.nan], [3.0, 5.0]], device=device)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]], device=device)
    white = masked_whiten(x, mask, backend=backend)
    assert_close("whitened", white, torch.tensor([[-1.0, 0.0], [0.0, 1.0]]), rtol=1e-6)
    unshifted = masked_whiten(x, mask, shift_mean=False, backend=backend)
    assert_close("unshifted", unshifted, torch.tensor([[2.0, 0.0], [3.0, 4.0]]), rtol=1e-6)


def test_identical_entries_whiten_to_exactly_zero(place):
    """Residue of the mean, divided by sqrt(1e-8), would be of the size of an advantage."""
    device, backend = place
    for value in (0.1, -1000.01, 1e-20, 3e30):
        x = torch.full((129,), value, device=device)
        mask = torch.arange(129, device=device) != 0
        assert (masked_whiten(x, mask, backend=backend) == 0).all()
        assert (masked_whiten(x, shift_mean=False, backend=backend) == x).all()


def test_whitening_more_blocks_than_programs(place):
    device, backend = place
    torch.manual_seed(5)
    x, mask = torch.randn(700) * 2 + 5, torch.arange(700) >= 100  # no unmasked entry in the first blocks
    actual = masked_whiten(x.to(device), mask.to(device), backend=backend)
    assert_close("whitened", actual, reference.masked_whiten(x.double(), mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rewards": torch.zeros(1, 2, 3)}, ValueError, r"rewards must be \[N\] or \[B, L\], got \[1, 2, 3\]"),
        ({"rewards": torch.zeros(6, dtype=torch.long)}, TypeError, "rewards must be float32"),
        ({"values": torch.zeros(5)}, ValueError, r"values must have the shape of rewards, \[6\], got \[5\]"),
        ({"values": [0.0] * 6}, TypeError, "values must be a tensor, got list"),
        ({"mask": torch.ones(5)}, ValueError, r"mask must have the shape of rewards, \[6\], got \[5\]"),
        ({"gamma": 1.5}, ValueError, r"gamma must be a number in \[0, 1\], got 1.5"),
        ({"lam": torch.tensor(0.5)}, ValueError, r"lam must be a number in \[0, 1\], got tensor"),
        ({"level": "episode"}, ValueError, "level must be one of 'token', 'turn', 'sequence', 'trajectory', got 'epi"),
        ({"bootstrap": torch.zeros(6)}, ValueError, r"bootstrap must be \[segments\] = \[1\], got \[6\]"),
        ({"level": "token", "bootstrap": torch.zeros(1)}, ValueError, r"bootstrap must be \[segments\] = \[2\], got"),
        ({"segments": Segments(torch.tensor([0, 5]))}, ValueError, "segments must cover the N = 6 entries of rewards"),
        ({"rewards": torch.zeros(2, 3)}, ValueError, r"segments describe packed tokens: rewards must be \[N\], got"),
        ({"backend": "numpy"}, ValueError, "backend must be one of 'auto', 'torch', 'triton', got 'numpy'"),
    ],
)
def test_wrong_arguments_of_gae_are_named(change, error, message):
    two_turns = Segments.from_lengths(torch.tensor([2, 4]), torch.tensor([0, 0]))
    arguments = {"rewards": torch.zeros(6), "values": torch.zeros(6), "segments": two_turns} | change
    with pytest.raises(error, match=message):
        gae(**arguments)


def test_other_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"gamma must be a number in \[0, 1\], got -0.1"):
        discounted_returns(torch.zeros(3), gamma=-0.1)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        masked_whiten([1.0, 2.0])
    with pytest.raises(ValueError, match=r"mask must have the shape of x, \[3\], got \[1\]"):
        masked_whiten(torch.zeros(3), torch.ones(1))
    with pytest.raises(ValueError, match=r"eps must be a finite number > 0, got 0"):
        masked_whiten(torch.zeros(3), eps=0)
