"""The fused Triton kernels by themselves: the loss from logits in one kernel, and log-probs without logits.

As in test_triton_kernels.py the launch functions are called directly, with tiles so small that every loop, tail and
edge runs. The public ops are tested on both backends in test_fused_losses.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from numerics import assert_close, assert_rows_close

from rspo_kernels import linear_token_logprobs, reference
from rspo_kernels.backends import compose, torch_impl
from rspo_kernels.backends.common import LogitsTransform
from rspo_kernels.config import STATS, PolicyLossConfig

fused = pytest.importorskip("rspo_kernels.backends.triton_impl.fused", reason="needs triton")
from rspo_kernels.backends import triton_impl  # noqa: E402
from rspo_kernels.backends.triton_impl import linear_logprobs  # noqa: E402
from rspo_kernels.backends.triton_impl.linear_logprobs import MatmulTile  # noqa: E402
from rspo_kernels.backends.triton_impl.rows import RowTile  # noqa: E402

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter computes with numpy, which remarks on the infinities that the kernels compute with.
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The vector must be the real one on a GPU only; rows of 4·2·8 = 64 elements are cut into many tiles here.
SMALL = RowTile(4, 2, 8) if DEVICE == "cpu" else RowTile(4, 2, 64)
MATMUL = MatmulTile(16, 32, 16, 128, 2)
NAMES = ("advantages", "advantage_index", "mask", "weights", "old_logp", "behavior_logp", "ref_logp")


def transform(valid_vocab, *, scale=1.0, softcap=None, temperature=1.0):
    return LogitsTransform(scale, softcap, temperature, valid_vocab, -100)


def tokens(logits, targets, how, seed=0):
    """Partners of tokens [B·L]: some masked, clipped, without advantage or weight, and none too near a bound."""
    rng = torch.Generator().manual_seed(seed)
    n = targets.numel()
    logp = reference.token_logprobs(
        logits.double().cpu(), targets.cpu(), logit_scale=how.scale, softcap=how.softcap,
        temperature=how.temperature, valid_vocab=how.valid_vocab,
    )[0].flatten().nan_to_num(-1.0, neginf=-1.0)  # fmt: skip
    old = (logp + torch.tensor([0.0, 0.5, -0.5, 0.1, -0.1])[torch.randint(0, 5, (n,), generator=rng)]).float()
    partners = {
        "advantages": torch.randn(n, generator=rng) * (torch.rand(n, generator=rng) < 0.8),
        "mask": torch.rand(n, generator=rng) < 0.8,
        "weights": torch.rand(n, generator=rng) * (torch.rand(n, generator=rng) < 0.9),
        "old_logp": old,
        "behavior_logp": old + torch.randn(n, generator=rng) * 0.05,
        "ref_logp": old + torch.randn(n, generator=rng) * 0.3,
    }
    return {name: x.to(DEVICE) for name, x in partners.items()}


def fused_loss(logits, targets, partners, how, config, *, inplace=False, with_entropy=True, tile=SMALL):
    """Loss, statistics and gradient; out of place the gradient in float32, so that no rounding hides an error."""
    out = logits if inplace else torch.full(logits.shape, torch.nan, device=DEVICE)
    operands = tuple(partners.get(name) for name in NAMES)
    loss, stats = fused.logits_policy_loss(logits, targets, operands, how, config, with_entropy, out, tile=tile)
    return loss, stats, out


def reference_loss(logits, targets, partners, how, config):
    logits = logits.detach().double().requires_grad_()
    mask = partners["mask"].view(targets.shape) & (targets != how.ignore_index)
    logp, entropy = reference.token_logprobs(
        logits, targets, logit_scale=how.scale, softcap=how.softcap, temperature=how.temperature,
        valid_vocab=how.valid_vocab, mask=mask,
    )  # fmt: skip
    double = {name: x.double() for name, x in partners.items() if name != "mask"}
    loss, stats = reference.policy_loss(
        logp.flatten(), config=config, mask=mask.flatten(), entropy=entropy.flatten(), normalizer=1.0, **double
    )
    loss.backward()
    return loss, stats, logits.grad


def check(logits, targets, partners, how, config, **options):
    loss, stats, grad = fused_loss(logits, targets, partners, how, config, **options)
    loss_64, stats_64, grad_64 = reference_loss(logits, targets, partners, how, config)
    assert_close("loss", loss, loss_64, rtol=1e-5, atol=1e-5)
    assert_rows_close("gradient", grad, grad_64, rtol=2e-5, floor=1e-12)
    for name, value in zip(STATS, stats, strict=True):
        assert_close(name, value, stats_64[name], rtol=1e-5, atol=1e-6)
    return grad


FULL = PolicyLossConfig(
    center_cap=1.0, weight_cap=1.5, dual_clip=3.0, kl_coef=0.1, kl_weighted=True, entropy_coef=0.02
)  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 7, 129, 257, 1000])
def test_any_vocabulary(vocab):
    """Less than a vector, less than a tile, many tiles with every kind of rest, at every alignment of the rows."""
    torch.manual_seed(vocab)
    logits = (torch.randn(2, 4, vocab) * torch.tensor([1.0, 4.0, 10.0, 20.0])[:, None]).to(DEVICE)[:, 1:]
    for how in (transform(vocab), transform(max(1, vocab - 3), scale=1.3, softcap=5.0, temperature=0.7)):
        targets = torch.randint(0, how.valid_vocab, (2, 3), device=DEVICE)
        partners = tokens(logits, targets, how, seed=vocab)
        grad = check(logits, targets, partners, how, FULL)
        assert (grad[..., how.valid_vocab :] == 0).all()
    if vocab < 200:
        check(logits, targets, partners, how, PolicyLossConfig(), tile=None)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "cispo", "sapo"])
@pytest.mark.parametrize("center", ["shift", "none", "relative"])
def test_every_form_of_the_loss(loss, center):
    torch.manual_seed(1)
    logits = torch.randn(1, 12, 33, device=DEVICE) * 2
    targets = torch.randint(0, 33, (1, 12), device=DEVICE)
    partners = tokens(logits, targets, transform(33), seed=1)
    plain = PolicyLossConfig(loss, clip_low=0.2, clip_high=0.3, clip_center=center, aggregation="token-mean")
    more = {"center_cap": 1.0, "kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": -0.05}
    for config in (plain, dataclasses.replace(plain, **more)):
        check(logits, targets, partners, transform(33), config)


def test_partners_may_be_absent_and_indexed():
    torch.manual_seed(2)
    logits = torch.randn(2, 5, 20, device=DEVICE)
    targets = torch.randint(0, 20, (2, 5), device=DEVICE)
    partners = {"mask": torch.ones(10, dtype=torch.bool, device=DEVICE), "advantages": torch.randn(10, device=DEVICE)}
    check(logits, targets, partners, transform(20), PolicyLossConfig())
    of_rows = torch.randn(2, device=DEVICE)
    index = torch.arange(2, device=DEVICE).repeat_interleave(5)
    by_index = fused_loss(
        logits, targets, partners | {"advantages": of_rows, "advantage_index": index}, transform(20), PolicyLossConfig()
    )
    expected = fused_loss(logits, targets, partners | {"advantages": of_rows[index]}, transform(20), PolicyLossConfig())
    assert all(torch.equal(a, b) for a, b in zip(by_index, expected, strict=True))


def clipped_rows():
    """Rows 0 clipped, 1 active, 2 masked, 3 without advantage, 4 of weight 0, 5 ignored, 6 with nothing possible."""
    torch.manual_seed(3)
    logits = torch.randn(1, 7, 150, device=DEVICE)
    targets = torch.tensor([[1, 2, 10**9, 4, 5, -100, 7]], device=DEVICE)
    logits[0, 2] = torch.nan
    logits[0, 5] = torch.nan
    logits[0, 6] = -torch.inf
    logp = torch.log_softmax(logits[0, :2], -1)[[0, 1], [1, 2]]
    old = torch.full((7,), -3.0, device=DEVICE)
    old[:2] = logp - torch.tensor([1.0, 0.0], device=DEVICE)
    partners = {
        "advantages": torch.tensor([1.0, 1, torch.nan, 0, 1, torch.nan, 1], device=DEVICE),
        "mask": torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool, device=DEVICE),
        "weights": torch.tensor([1.0, 1, torch.nan, 1, 0, 1, 1], device=DEVICE),
        "old_logp": old,
    }
    return logits, targets, partners


def test_rows_without_gradient_are_exactly_zero():
    logits, targets, partners = clipped_rows()
    loss, _, grad = fused_loss(logits, targets, partners, transform(140), PolicyLossConfig())
    assert loss.isfinite()
    silent = [0, 2, 3, 4, 5, 6]
    assert (grad[0, silent] == 0).all()
    assert (grad[0, 1, :140] != 0).all()
    assert (grad[0, 1, 140:] == 0).all()
    in_place = logits.clone()
    _, _, moved = fused.loss_rows_(
        in_place, targets, tuple(partners.get(name) for name in NAMES), transform(140), PolicyLossConfig(), True
    )
    assert moved.tolist() == [False, True, False, False, False, False, False]
    assert (in_place[0, silent] == 0).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter reads")
def test_rows_without_gradient_are_not_read_twice(monkeypatch):
    """Elements read of each row: none of masked rows, V and a few of clipped ones, twice V of active ones."""
    from triton.runtime import interpreter

    logits, targets, partners = clipped_rows()
    begin, row_bytes = logits.data_ptr(), logits.stride(1) * logits.element_size()
    reads = torch.zeros(7, dtype=torch.int64)
    builder = type(interpreter.interpreter_builder)
    load = builder.create_masked_load

    def counted(self, pointers, mask, *arguments):
        rows = (
            torch.from_numpy(pointers.data[mask.data].astype("int64")).sub(begin).div(row_bytes, rounding_mode="floor")
        )
        reads.add_(torch.bincount(rows[(rows >= 0) & (rows < 7)], minlength=7))
        return load(self, pointers, mask, *arguments)

    monkeypatch.setattr(builder, "create_masked_load", counted)
    fused_loss(logits, targets, partners, transform(150), PolicyLossConfig(), inplace=True, with_entropy=False)
    # The lane of the top element is read once more (its share of the vectors and the edges), so is the target.
    once = 150 + 8
    assert reads[[2, 5]].tolist() == [0, 0]
    assert (reads[[0, 3, 4, 6]] >= 150).all()
    assert (reads[[0, 3, 4, 6]] <= once).all()
    assert 300 <= reads[1] <= once + 150


def test_in_place_equals_out_of_place_in_any_layout():
    torch.manual_seed(4)
    whole = torch.randn(2, 4, 77, device=DEVICE)
    targets = torch.randint(0, 70, (2, 3), device=DEVICE)
    targets[0, 1] = -100
    how = transform(70, softcap=4.0)
    partners = tokens(whole[:, 1:], targets.clamp(min=0), how)
    expected = fused_loss(whole[:, 1:], targets, partners, how, FULL)
    first = whole[:, 0].clone()
    transposed = torch.empty(77, 2, 3, device=DEVICE).permute(1, 2, 0)
    transposed.copy_(whole[:, 1:])
    other_phase = torch.empty(2, 3, 80, device=DEVICE)[..., 1:78]
    operands = tuple(partners.get(name) for name in NAMES)
    fused.logits_policy_loss(whole[:, 1:], targets, operands, how, FULL, True, other_phase, tile=SMALL)
    assert torch.equal(other_phase, expected[2])
    for logits in (whole[:, 1:], transposed):
        actual = fused_loss(logits, targets, partners, how, FULL, inplace=True)
        assert actual[2] is logits
        for a, b in zip(actual, expected, strict=True):
            # A copy of transposed logits has its vectors at other places: the sums have another order.
            assert torch.equal(a, b) if logits is not transposed else torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert torch.equal(first, whole[:, 0])


def test_infinities_and_impossible_targets():
    logits = torch.full((1, 4, 77), -torch.inf, device=DEVICE)
    logits[0, 0, -1] = 3.0  # one possible token, the target
    logits[0, 1, ::3] = torch.arange(26, device=DEVICE) / 10  # target impossible
    logits[0, 2, 5:30] = torch.arange(25, device=DEVICE) / 10
    targets = torch.tensor([[76, 1, 7, 0]], device=DEVICE)
    partners = {
        "mask": torch.ones(4, dtype=torch.bool, device=DEVICE),
        "advantages": torch.tensor([1.0, -1, 1, -1], device=DEVICE),
        "old_logp": torch.tensor([0.0, -1, -3, -1], device=DEVICE),
    }
    for config in (PolicyLossConfig(), PolicyLossConfig(entropy_coef=0.1)):
        loss, stats, grad = fused_loss(logits, targets, partners, transform(77), config)
        assert loss.isfinite()
        assert stats.isfinite().all()
        _, _, grad_64 = reference_loss(logits, targets, partners, transform(77), config)
        assert_rows_close("gradient", grad, grad_64, rtol=1e-5)


def test_the_hook_of_the_linear_loss_equals_its_composition():
    torch.manual_seed(5)
    logits = torch.randn(1, 20, 40, device=DEVICE)
    targets = torch.randint(0, 40, (1, 20), device=DEVICE)
    partners = tokens(logits, targets, transform(40))
    operands = tuple(partners.get(name) for name in NAMES)
    results = []
    for impl in (triton_impl, torch_impl):
        chunk = logits.clone()
        results.append((*compose.loss_rows_(impl, chunk, targets, operands, transform(40), FULL, True), chunk))
    for name, ours, theirs in zip(("logp", "entropy", "moved", "gradient"), *results, strict=True):
        assert_close(name, ours, theirs, rtol=1e-4, atol=1e-7)


def head(n, width, vocab, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*shape, generator=rng) for shape in ((n, width), (vocab, width), (vocab,))]
    targets, keep = torch.randint(0, vocab, (n,), generator=rng), torch.rand(n, generator=rng) < 0.7
    return *(x.to(DEVICE, dtype) for x in tensors), targets.to(DEVICE), keep.to(DEVICE)


def check_linear(hidden, weight, bias, targets, keep, how, *, tile=MATMUL, splits=None, rtol=1e-5):
    """A GPU rounds half-precision logits as a matmul that writes them does; the interpreter does not, nor the CPU."""
    rounded = hidden.dtype if DEVICE == "cuda" else torch.float64
    state = linear_logprobs.linear_token_logprobs(
        hidden, weight, bias, targets, keep, how, True, tile=tile, splits=splits
    )
    logits = (hidden.double() @ weight.double().T).to(rounded)
    logits = (logits if bias is None else (logits.double() + bias.double()).to(rounded)).double()
    logp, entropy = reference.token_logprobs(
        logits, targets, logit_scale=how.scale, softcap=how.softcap, temperature=how.temperature, mask=keep
    )
    assert_close("logp", state[0], logp, rtol=rtol, atol=rtol)
    assert_close("entropy", state[1], entropy, rtol=rtol, atol=rtol)
    # The state must serve the backward pass over logits as that of the row kernel does.
    saved = torch_impl.token_logprobs_forward(logits.float()[None], targets[None], keep[None], how, True)
    assert_close("row_max", state[2], saved[2][0], rtol=rtol, atol=rtol)
    assert_close("log_sum", state[3], saved[3][0], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize(
    ("n", "width", "vocab"),
    # Less than a tile; one row, column and step too many; exactly filled; more splits than blocks of columns.
    [(3, 4, 5), (17, 20, 129), (32, 32, 128), (5, 48, 257), (1, 16, 1)],
)
def test_log_probs_without_logits(n, width, vocab, splits):
    hidden, weight, bias, targets, keep = head(n, width, vocab, seed=n)
    check_linear(hidden, weight, None, targets, keep | True, transform(vocab), splits=splits)
    how = transform(vocab, scale=0.7, softcap=4.0, temperature=0.6)
    check_linear(hidden, weight, bias, targets, keep, how, splits=splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_from_half_precision(dtype):
    hidden, weight, bias, targets, keep = head(20, 64, 100, dtype)
    # A sum that lies between two numbers of half precision may be rounded either way.
    rtol = 1e-5 if DEVICE == "cpu" else 1e-2
    check_linear(hidden, weight, bias, targets, keep, transform(100), splits=2, rtol=rtol)


def test_log_probs_with_the_tile_of_a_launch():
    hidden, weight, bias, targets, keep = head(70, 40, 300)
    check_linear(hidden, weight, bias, targets, keep, transform(300), tile=None)
    tile = MatmulTile.choose(torch.bfloat16, "sm_90") if DEVICE == "cpu" else None
    check_linear(hidden, weight, bias, targets, keep, transform(300), tile=tile)


def test_masked_rows_may_hold_anything():
    hidden, weight, bias, targets, keep = head(40, 16, 50)
    hidden[~keep] = torch.nan
    targets[~keep] = 10**9
    results = linear_logprobs.linear_token_logprobs(
        hidden, weight, bias, targets, keep, transform(50), True, tile=MATMUL
    )
    assert all((x[~keep] == 0).all() for x in results)
    assert all(x.isfinite().all() for x in results)
    nothing = linear_logprobs.linear_token_logprobs(hidden, weight, bias, targets, keep & False, transform(50), True)
    assert all((x == 0).all() for x in nothing)


@pytest.mark.parametrize("splits", [1, 2])
def test_infinite_and_broken_logits_without_logits(splits):
    """A bias makes blocks of -inf, an impossible target, a row of nothing, and NaN where the head is broken."""
    hidden, weight, bias, targets, _ = head(4, 16, 100)
    keep = torch.ones(4, dtype=torch.bool, device=DEVICE)
    bias[:-1] = -torch.inf
    bias[-1] = 0.0
    targets[:] = torch.tensor([99, 0, 99, 100])
    run = linear_logprobs.linear_token_logprobs
    logp, entropy, _, log_sum = run(
        hidden, weight, bias, targets, keep, transform(100), True, tile=MATMUL, splits=splits
    )
    assert logp[:3].tolist() == [0.0, -torch.inf, 0.0]
    assert logp[3].isnan(), "out of range"
    assert (entropy == 0).all()
    bias[:] = -torch.inf
    logp, entropy, row_max, log_sum = run(
        hidden, weight, bias, targets, keep, transform(100), True, tile=MATMUL, splits=splits
    )
    assert (logp[:3] == -torch.inf).all()
    assert (entropy == 0).all()
    assert (row_max == 0).all()
    assert (log_sum == -torch.inf).all()
    for bad in (torch.nan, torch.inf):
        bias[:] = 0.0
        bias[40] = bad
        logp = run(hidden, weight, bias, targets, keep, transform(100), True, tile=MATMUL, splits=splits)[0]
        assert logp.isnan().all()


def test_peaked_rows_keep_their_digits_without_logits():
    """1 - p of the top token is below float32's resolution of 1."""
    weight = torch.zeros(100, 4, device=DEVICE)
    weight[60, 0] = 1.0
    hidden = torch.tensor([[20.0, 0, 0, 0], [5.0, 0, 0, 0], [-20.0, 0, 0, 0]], device=DEVICE)
    targets = torch.full((3,), 60, device=DEVICE)
    keep = targets > 0
    for splits in (1, 2, 3):
        logp, *_ = linear_logprobs.linear_token_logprobs(
            hidden, weight, None, targets, keep, transform(100), False, tile=MATMUL, splits=splits
        )
        exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)[:, 60]
        rest = 99 * torch.exp(-hidden[:, 0].double())
        assert_close("logp", logp, torch.where(hidden[:, 0] > 0, -torch.log1p(rest), exact), rtol=1e-5)


def test_two_runs_give_the_same_bits():
    hidden, weight, bias, targets, keep = head(10, 16, 100)
    runs = [
        linear_logprobs.linear_token_logprobs(
            hidden, weight, bias, targets, keep, transform(100), True, tile=MATMUL, splits=3
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    logits = (hidden @ weight.T)[None]
    partners = tokens(logits, targets[None], transform(100))
    runs = [fused_loss(logits, targets[None], partners, transform(100), FULL) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_splits_fill_the_processors():
    """One tile of rows on 132 processors: as many parts as blocks of columns; enough tiles: no parts."""
    assert linear_logprobs.choose_splits(1, 40, 132) == 40
    assert linear_logprobs.choose_splits(132, 500, 132) == 1
    assert linear_logprobs.choose_splits(64, 500, 132) == 2
    assert linear_logprobs.choose_splits(1, 1, 132) == 1
    assert linear_logprobs.choose_splits(7, 500, 1) == 1


def test_which_path_the_public_op_takes(monkeypatch):
    """Without gradient the kernel where descriptors fit, else chunks; with gradient chunks; the same values always."""
    calls = []
    kernel = triton_impl.linear_token_logprobs
    monkeypatch.setattr(triton_impl, "linear_token_logprobs", lambda *a: calls.append(1) or kernel(*a))
    hidden, weight, bias, targets, keep = head(12, 16, 30)

    def run(hidden, weight):
        calls.clear()
        logp = linear_token_logprobs(hidden, weight, targets, bias=bias, mask=keep, backend="triton")
        return logp.detach(), len(calls)

    expected, used = run(hidden, weight)
    assert used == 1
    odd = torch.empty(30, 17, device=DEVICE)[:, :16]
    late = torch.empty(30 * 16 + 1, device=DEVICE)[1:].view(30, 16)
    for h, w, wanted in (
        (hidden.T.contiguous().T, weight, 1),
        (hidden[:, :13], weight[:, :13], 0),
        (hidden, weight.T.contiguous().T, 0),
        (hidden, odd.copy_(weight), 0),
        (hidden, late.copy_(weight), 0),
        (hidden.clone().requires_grad_(), weight, 0),
    ):
        logp, used = run(h, w)
        assert used == wanted
        if h.shape == hidden.shape:
            assert_close("logp", logp, expected, rtol=1e-5, atol=1e-5)  # tf32x3 and float32 products


@pytest.mark.skipif(DEVICE != "cpu", reason="would need a process of its own")
def test_a_users_allocator_stays():
    from triton.runtime import _allocation

    token = _allocation._allocator.set(_allocation.NullAllocator())
    try:
        linear_logprobs.provide_scratch()
        assert _allocation._allocator.get() is linear_logprobs._scratch
        mine = lambda size, alignment, stream: None  # noqa: E731
        _allocation._allocator.set(mine)
        linear_logprobs.provide_scratch()
        assert _allocation._allocator.get() is mine
    finally:
        _allocation._allocator.reset(token)
