"""The Triton kernels by themselves, at block sizes so small that every loop, tail and edge of them runs.

test_token_logprobs.py and its siblings test the public ops on both backends; here the launch functions are called
directly, with tiles that a launch would never choose. Without a GPU the interpreter runs them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from numerics import EPS, assert_close, assert_rows_close

from rspo_kernels import reference
from rspo_kernels.backends.common import LogitsTransform, RatioSegments
from rspo_kernels.config import STATS, PolicyLossConfig

logprobs = pytest.importorskip("rspo_kernels.backends.triton_impl.logprobs", reason="needs triton")
from rspo_kernels.backends.triton_impl import group_advantages, policy_loss, segment_ratios  # noqa: E402
from rspo_kernels.backends.triton_impl.rows import RowTile  # noqa: E402

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter computes with numpy, which remarks on the infinities that the kernels compute with.
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One row of lanes, several rows, and the tile that a launch takes. The vector must be the real one on a GPU only.
TILES = [RowTile(2, 1, 4), RowTile(4, 2, 8), None] if DEVICE == "cpu" else [RowTile(4, 2, 64), None]
# 1 and 7 are less than a vector or a tile, 64 = 16·4 = 1·64 fills tiles exactly, 257 and 1000 leave every kind of rest.
VOCABS = (1, 7, 64, 257, 1000)
# Rows of many tiles cost the interpreter seconds each: one size of tile is enough there.
CASES = [(v, tile) for v in VOCABS for tile in TILES if v < 257 or tile is not TILES[0]]


def transform(valid_vocab, *, scale=1.0, softcap=None, temperature=1.0):
    return LogitsTransform(scale, softcap, temperature, valid_vocab, -100)


def forward_backward(logits, targets, how, grad_logp, grad_entropy=None, *, mask=None, tile=None, inplace=False):
    """logp, entropy and gradient; out-of-place gradients in float32, so that no rounding hides an error."""
    saved = logprobs.token_logprobs_forward(logits, targets, mask, how, True, tile=tile)
    logp, entropy, row_max, log_sum = saved
    out = logits if inplace else torch.full(logits.shape, torch.nan, device=logits.device)
    logprobs.token_logprobs_backward(
        grad_logp, grad_entropy, logits, targets, mask, logp, entropy, row_max, log_sum, how, out, tile=tile
    )
    return logp, entropy, out


def reference_64(logits, targets, how, grad_logp, grad_entropy=None, *, mask=None):
    logits = logits.detach().double().requires_grad_()
    logp, entropy = reference.token_logprobs(
        logits, targets, logit_scale=how.scale, softcap=how.softcap, temperature=how.temperature,
        valid_vocab=how.valid_vocab, mask=mask,
    )  # fmt: skip
    total = (torch.where(logp == -torch.inf, 0.0, logp) * grad_logp).sum()
    if grad_entropy is not None:
        total = total + (entropy * grad_entropy).sum()
    total.backward()
    return logp.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize(("vocab", "tile"), CASES)
def test_values_and_gradients(vocab, tile):
    """Rows from flat to peaked, at every alignment that the slice and an odd vocabulary give."""
    torch.manual_seed(vocab)
    logits = (torch.randn(2, 4, vocab) * torch.tensor([1.0, 4.0, 10.0, 20.0])[:, None]).to(DEVICE)[:, 1:]
    valid = max(1, vocab - 3)
    grad_logp, grad_entropy = torch.randn(2, 2, 3, device=DEVICE)
    for how in (transform(vocab), transform(valid, scale=1.3, softcap=5.0, temperature=0.7)):
        targets = torch.randint(0, how.valid_vocab, (2, 3), device=DEVICE)
        for h in (None, grad_entropy):
            actual = forward_backward(logits, targets, how, grad_logp, h, tile=tile)
            expected = reference_64(logits, targets, how, grad_logp, h)
            # The reference knows 1 - p to 2^-52 only.
            assert_close("logp", actual[0], expected[0], rtol=1e-6, atol=1e-14)
            assert_close("entropy", actual[1], expected[1], rtol=1e-5, atol=1e-14)
            assert_rows_close("gradient", actual[2], expected[2], rtol=1e-5, floor=1e-14)
            assert (actual[2][..., how.valid_vocab :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_computed_in_float32(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(1, 4, 257) * 5).to(DEVICE, dtype)
    targets = torch.randint(0, 257, (1, 4), device=DEVICE)
    g = torch.randn(1, 4, device=DEVICE)
    actual = forward_backward(logits, targets, transform(257), g, g)
    expected = reference_64(logits, targets, transform(257), g, g)
    assert_close("logp", actual[0], expected[0], rtol=1e-6)
    assert_rows_close("gradient", actual[2], expected[2], rtol=1e-5)
    in_place = forward_backward(logits.clone(), targets, transform(257), g, g, inplace=True)[2]
    # The interpreter truncates where the hardware rounds: a whole unit in the last place.
    assert in_place.dtype == dtype
    assert_close("in place", in_place, expected[2], rtol=EPS[dtype], atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("top", [10, 20, 80])
@pytest.mark.parametrize("tile", TILES[1:])
def test_peaked_rows_keep_their_digits(top, tile):
    """The probability of all but the top token, Σ exp(x - top), is below float32's resolution of the whole."""
    torch.manual_seed(top)
    for place in (0, 1, 100, 255, 256):
        logits = torch.rand(1, 1, 257, device=DEVICE)
        logits[..., place] = top
        others = logits.double().clone()
        others[..., place] = -torch.inf
        rest = (others - top).exp().sum()
        one = torch.ones(1, 1, device=DEVICE)
        target = torch.full((1, 1), place, device=DEVICE)
        logp, entropy, grad = forward_backward(logits, target, transform(257), one, tile=tile)
        assert_close("logp", logp, -torch.log1p(rest).reshape(1, 1), rtol=1e-5, atol=1e-38)
        spread = torch.where(others > -torch.inf, (others - top).exp() * (others - top), 0.0).sum()
        exact = torch.log1p(rest) - spread / (1 + rest)
        assert_close("entropy", entropy, exact.reshape(1, 1), rtol=1e-5, atol=1e-38)
        assert_close("target's gradient", grad[0, 0, place], rest / (1 + rest), rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("tile", TILES)
def test_infinities(tile):
    """Blocks of -inf, rows of nothing else, impossible targets: no (-inf) - (-inf), no 0·inf."""
    vocab = 77
    logits = torch.full((1, 5, vocab), -torch.inf, device=DEVICE)
    logits[0, 0, -1] = 3.0  # one possible token, the target
    logits[0, 1, 40] = 3.0  # one possible token, not the target
    logits[0, 2, ::3] = torch.randn(26, device=DEVICE)  # target impossible
    logits[0, 3, 5:30] = torch.randn(25, device=DEVICE)  # target possible
    targets = torch.tensor([[vocab - 1, 0, 1, 7, 0]], device=DEVICE)
    one = torch.ones(1, 5, device=DEVICE)
    logp, entropy, grad = forward_backward(logits, targets, transform(vocab), one, one, tile=tile)
    _, entropy_64, grad_64 = reference_64(logits, targets, transform(vocab), one, one)
    assert logp[0, [0, 1, 2, 4]].tolist() == [0.0, -torch.inf, -torch.inf, -torch.inf]
    assert_close("entropy", entropy, entropy_64, rtol=1e-6, atol=1e-12)
    # The entropy of a row with an impossible target still has its gradient.
    assert (grad[0, 2] != 0).any()
    assert_rows_close("gradient", grad, grad_64, rtol=1e-5)
    alone = forward_backward(logits, targets, transform(vocab), one, tile=tile)[2]
    assert (alone[0, [0, 1, 2, 4]] == 0).all()


@pytest.mark.parametrize("tile", TILES)
def test_extremes_of_float32(tile):
    logits = torch.zeros(1, 4, 50, device=DEVICE)
    logits[0, 0, 3], logits[0, 0, 4] = 3e38, -3e38
    logits[0, 1] = torch.finfo(torch.float32).min
    logits[0, 2] = torch.finfo(torch.float32).max
    logits[0, 3, ::2] = -3e38
    targets = torch.tensor([[4, 0, 0, 0]], device=DEVICE)
    one = torch.ones(1, 4, device=DEVICE)
    for how in (transform(50), transform(50, temperature=0.1), transform(50, scale=2.0, softcap=30.0)):
        logp, entropy, grad = forward_backward(logits, targets, how, one, one, tile=tile)
        assert logp.isfinite().all()
        assert entropy.isfinite().all()
        assert grad.isfinite().all()
        assert logp[0, 1:3].tolist() == pytest.approx([-math.log(50)] * 2, rel=1e-6)
        assert entropy[0, 1:3].tolist() == pytest.approx([math.log(50)] * 2, rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("tile", TILES)
def test_broken_rows_say_so(bad, tile):
    """A NaN or +inf logit is a fault upstream: NaN, wherever it stands, never a plausible number."""
    for place in (0, 20, 49):
        logits = torch.randn(1, 1, 50, device=DEVICE)
        logits[..., place] = bad
        logp = logprobs.token_logprobs_forward(
            logits, torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), None, transform(50), True, tile=tile
        )[0]
        assert logp.isnan().all()


def test_rows_without_gradient_are_only_written():
    """Masked, ignored, zero upstream: exact zeros everywhere, whatever stands in the logits."""
    logits = torch.full((1, 5, 77), torch.nan, device=DEVICE)
    logits[0, 3:] = torch.randn(2, 77, device=DEVICE)
    targets = torch.tensor([[1, -100, 10**9, 2, 3]], dtype=torch.int32, device=DEVICE)
    mask = torch.tensor([[False, True, False, True, True]], device=DEVICE)
    g = torch.tensor([[1.0, 1.0, 1.0, 0.0, 2.0]], device=DEVICE)
    for tile, h in itertools.product(TILES, (None, torch.zeros(1, 5, device=DEVICE))):
        logp, entropy, grad = forward_backward(logits, targets, transform(70), g, h, mask=mask, tile=tile)
        assert (logp[0, :3] == 0).all()
        assert (entropy[0, :3] == 0).all()
        assert (grad[0, :4] == 0).all()
        assert (grad[0, 4, :70] != 0).all()
        assert (grad[0, 4, 70:] == 0).all()


def test_out_of_range_targets_are_nan_and_read_nothing():
    logits = torch.randn(1, 4, 20, device=DEVICE)
    targets = torch.tensor([[18, 20, -1, 2**40]], device=DEVICE)
    one = torch.ones(1, 4, device=DEVICE)
    logp, _, grad = forward_backward(logits, targets, transform(18), one, one)
    assert logp.isnan().all()
    assert (grad == 0).all()


@pytest.mark.parametrize("tile", TILES)
def test_in_place_equals_out_of_place(tile):
    torch.manual_seed(4)
    whole = torch.randn(2, 4, 77, device=DEVICE)
    targets = torch.randint(0, 70, (2, 3), device=DEVICE)
    targets[0, 1] = -100
    g, h = torch.randn(2, 2, 3, device=DEVICE)
    how = transform(70, softcap=4.0)
    apart = forward_backward(whole[:, 1:], targets, how, g, h, tile=tile)[2]
    first = whole[:, 0].clone()
    within = forward_backward(whole[:, 1:], targets, how, g, h, tile=tile, inplace=True)[2]
    assert torch.equal(apart, within)
    assert torch.equal(first, whole[:, 0])


def test_layouts():
    """Odd offsets, sliced and transposed logits, expanded and stepped gradients, int32: all as if contiguous."""
    torch.manual_seed(5)
    labels = torch.randint(0, 33, (2, 5), device=DEVICE, dtype=torch.int32)
    mask = torch.rand(2, 10, device=DEVICE) < 0.7
    gradients = torch.randn(2, 8, device=DEVICE)
    how = transform(33)
    for logits in (
        torch.randn(2, 5, 33, device=DEVICE)[:, :-1],
        torch.randn(33, 2, 4, device=DEVICE).permute(1, 2, 0),
        torch.randn(2, 4, 66, device=DEVICE)[..., ::2],
        torch.randn(4, 33, device=DEVICE).expand(2, 4, 33),
        torch.randn(2, 4, 40, device=DEVICE)[..., 3:36],
    ):
        strided = (labels[:, 1:], mask[:, 2::2], gradients[:, ::2], torch.tensor(0.3, device=DEVICE).expand(2, 4))
        targets, kept, g, h = strided
        actual = forward_backward(logits, targets, how, g, h, mask=kept)
        plain = (x.contiguous() for x in (targets, kept, g, h))
        targets, kept, g, h = plain
        expected = forward_backward(logits.contiguous(), targets, how, g, h, mask=kept)
        for a, b in zip(actual, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def test_the_gradient_may_go_to_any_strides():
    torch.manual_seed(6)
    logits = torch.randn(2, 3, 33, device=DEVICE)
    targets = torch.randint(0, 33, (2, 3), device=DEVICE)
    g = torch.randn(2, 3, device=DEVICE)
    logp, entropy, row_max, log_sum = logprobs.token_logprobs_forward(logits, targets, None, transform(33), False)
    expected = forward_backward(logits, targets, transform(33), g)[2]
    for out in (torch.empty(33, 2, 3, device=DEVICE).permute(1, 2, 0), torch.empty(2, 3, 36, device=DEVICE)[..., :33]):
        saved = (logits, targets, None, logp, entropy, row_max, log_sum)
        logprobs.token_logprobs_backward(g, None, *saved, transform(33), out)
        assert torch.allclose(out, expected, rtol=1e-6, atol=1e-7)


def test_offsets_beyond_32_bits():
    """Strides that fit 32 bits and rows times strides that do not; only a few pages of the memory are touched."""
    memory = torch.empty(3 * 2**30 + 64, dtype=torch.bfloat16, device=DEVICE)
    logits = memory.as_strided((4, 1, 33), (2**30, 33, 1))
    torch.manual_seed(7)
    logits.copy_(torch.randn(4, 1, 33))
    targets = torch.randint(0, 33, (4, 1), device=DEVICE)
    g = torch.randn(4, 1, device=DEVICE)
    compact = logits.clone(memory_format=torch.contiguous_format)
    expected = forward_backward(compact, targets, transform(33), g, inplace=True)
    actual = forward_backward(logits, targets, transform(33), g, inplace=True)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


PARTNERS = ("old_logp", "behavior_logp", "ref_logp", "entropy")


def loss_problem(n, seed=0):
    """Tokens with everything a token can have, NaN where masked."""
    rng = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return torch.randn(n, generator=rng) * scale

    logp = -5 * torch.rand(n, generator=rng)
    old = logp + normal(0.3)
    problem = {
        "logp": logp,
        "advantages": normal(),
        "mask": torch.rand(n, generator=rng) < 0.8,
        "weights": torch.rand(n, generator=rng),
        "old_logp": old,
        "behavior_logp": old + normal(0.5),
        "ref_logp": logp + normal(),
        "entropy": 3 * torch.rand(n, generator=rng),
    }
    problem["advantages"][::5] = 0
    problem["weights"][::7] = 0
    problem["behavior_logp"][::11] += 60
    problem["behavior_logp"][1::11] -= 60
    problem["logp"][3::13] = -torch.inf
    for name in ("logp", *PARTNERS):
        problem[name][~problem["mask"]] = torch.nan
    return {name: x.to(DEVICE) for name, x in problem.items()}


def run_loss(problem, config, segments=None):
    inputs = [problem.get(name) for name in ("logp", "advantages", "index", "mask", "weights", *PARTNERS)]
    return policy_loss.policy_loss_forward(*inputs, segments, config, block=16)


def check_loss(problem, config, member_ids=None):
    """Loss, gradients and statistics against the float64 reference."""
    segments = None
    if member_ids is not None:
        # Means over the kept tokens of a member; the last two segments are empty.
        kept = problem["mask"].float()
        sizes = torch.zeros(int(member_ids.max()) + 3, device=DEVICE).index_add(0, member_ids, kept)
        segments = RatioSegments(member_ids, kept / sizes[member_ids].clamp(min=1), sizes.numel())
    loss, grad_logp, grad_entropy, stats = run_loss(problem, config, segments)
    double = {name: x.double() if x.is_floating_point() else x for name, x in problem.items()}
    leaves = [double[name].requires_grad_() for name in ("logp", "entropy") if name in double]
    index = double.pop("index", None)
    advantages = double.pop("advantages")
    double["member_ids"] = member_ids
    loss_64, stats_64 = reference.policy_loss(
        advantages=advantages if index is None else advantages[index], config=config, normalizer=1.0, **double
    )
    grads_64 = torch.autograd.grad(loss_64, leaves)
    size = grads_64[0].abs().max().item()
    assert_close("loss", loss, loss_64, rtol=1e-5, atol=1e-6 * size * grad_logp.numel())
    # A segment's gradient is a sum in which terms cancel.
    assert_close("gradient of logp", grad_logp, grads_64[0], rtol=1e-5, atol=1e-6 * size if segments else 0.0)
    if "entropy" in problem:
        assert_close("gradient of entropy", grad_entropy, grads_64[1], rtol=1e-6)
    for name, value in zip(STATS, stats, strict=True):
        assert_close(name, value, stats_64[name], rtol=1e-5, atol=1e-6)


CONFIGS = [
    PolicyLossConfig(
        loss, clip_low=0.2, clip_high=0.3, clip_center=center, center_cap=cap, weight_cap=weight_cap,
        dual_clip=dual if loss == "grpo" else None, dual_clip_replay=cap is None,
        kl_coef=0.1, kl_estimator=estimator, kl_weighted=weighted, entropy_coef=0.01, sapo_tau_positive=0.5,
        aggregation="token-mean",
    )
    for loss, center, (cap, weight_cap), (dual, estimator, weighted) in [
        *itertools.product(
            ("grpo",),
            ("shift", "none", "relative"),
            ((None, None), (1.0, 1.5)),
            ((None, "k1", False), (3.0, "k2", True), (2.0, "k3", False), (None, "k3", True)),
        ),
        *itertools.product(
            ("cispo", "sapo"),
            ("shift", "none", "relative"),
            ((None, None), (1.0, 1.5)),
            ((None, "k3", True),),
        ),
    ]
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_every_option_of_the_loss(config):
    check_loss(loss_problem(100), config)


@pytest.mark.parametrize("config", CONFIGS[::3], ids=range(len(CONFIGS[::3])))
def test_tokens_that_share_a_ratio(config, monkeypatch):
    """Segments that stand anywhere, longer than a block of their kernels, and empty ones."""
    monkeypatch.setattr(segment_ratios, "BLOCK", 8)
    problem = loss_problem(150)
    # A sum with the extremes of both signs is no longer exact: here they would hide all other tokens of a segment.
    for name in ("logp", "behavior_logp"):
        noise = torch.randn(150, device=DEVICE) * 0.5
        problem[name] = torch.where(problem["mask"], problem["old_logp"] + noise, torch.nan)
    problem["logp"][100] = -torch.inf
    problem["mask"][100] = True
    for name in PARTNERS:
        problem[name][100] = -1.0
    config = dataclasses.replace(config, ratio_level="turn")
    member_ids = torch.randint(0, 6, (150,), generator=torch.Generator().manual_seed(1))
    check_loss(problem, config, member_ids=member_ids.to(DEVICE))


@pytest.mark.parametrize("absent", list(itertools.product((False, True), repeat=5))[::3])
def test_every_partner_may_be_absent(absent):
    problem = loss_problem(40)
    for name, gone in zip(("mask", "old_logp", "behavior_logp", "ref_logp", "entropy"), absent, strict=True):
        if gone:
            del problem[name]
    if "mask" not in problem:
        problem = {name: x.nan_to_num(-1.0) for name, x in problem.items()}
    check_loss(problem, PolicyLossConfig(center_cap=1.0, dual_clip=3.0, kl_coef=0.1, entropy_coef=0.1))


def test_advantages_of_trajectories():
    problem = loss_problem(50)
    problem["index"] = torch.randint(0, 50, (50,), device=DEVICE)
    check_loss(problem, PolicyLossConfig())


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 65, 150])
def test_any_number_of_blocks(n, monkeypatch):
    """The last program adds up 4 blocks at once; one more starts its loop again."""
    monkeypatch.setattr(policy_loss, "PARTIALS", 4)
    check_loss(loss_problem(n), PolicyLossConfig(kl_coef=0.1))


def test_two_runs_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(policy_loss, "PARTIALS", 4)
    problem = loss_problem(150)
    runs = [run_loss(problem, PolicyLossConfig(kl_coef=0.1, entropy_coef=0.1)) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_silent_tokens_have_a_gradient_of_exactly_zero():
    """Clipped, clamped, masked, impossible, A = 0, weight 0, alone or with NaN beside them."""
    n = 8
    problem = {
        "logp": torch.tensor([0.5, 60.0, torch.nan, -torch.inf, 0.1, torch.nan, -60.0, -0.5], device=DEVICE),
        "old_logp": torch.zeros(n, device=DEVICE),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0, 1.0, -1.0, -1.0], device=DEVICE),
        "mask": torch.tensor([1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool, device=DEVICE),
        "weights": torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 1], device=DEVICE),
    }
    loss, grad, _, _ = run_loss(problem, PolicyLossConfig())
    assert loss.isfinite()
    assert (grad == 0).all()


def test_a_nan_that_counts_reaches_the_loss():
    """The hardware's min and max would turn it into a bound."""
    for name in ("logp", "behavior_logp", "ref_logp", "advantages"):
        problem = loss_problem(20)
        problem["mask"][:] = True
        problem["logp"] = torch.full((20,), -1.0, device=DEVICE)
        for partner in PARTNERS:
            problem[partner] = torch.full((20,), -1.1, device=DEVICE)
        problem[name][4] = torch.nan
        assert run_loss(problem, PolicyLossConfig(kl_coef=0.1))[0].isnan(), name


def test_nothing_to_learn_from():
    for n, mask in ((0, None), (30, torch.zeros(30, dtype=torch.bool, device=DEVICE))):
        problem = loss_problem(n) | {"mask": mask}
        loss, grad_logp, grad_entropy, stats = run_loss(problem, PolicyLossConfig(entropy_coef=0.1))
        assert loss == 0
        assert (grad_logp == 0).all()
        assert (grad_entropy == 0).all()
        assert (stats == 0).all()


def test_loss_inputs_of_any_dtype_and_stride():
    wide = {name: torch.stack([x, x], 1).flatten() for name, x in loss_problem(60).items()}
    strided = {name: x[::2] for name, x in wide.items()}
    strided |= {name: wide[name].bfloat16()[::2] for name in ("advantages", "weights", "old_logp")}
    problem = {name: x.float() if x.is_floating_point() else x for name, x in strided.items()}
    config = PolicyLossConfig(kl_coef=0.1)
    for actual, expected in zip(run_loss(strided, config), run_loss(problem, config), strict=True):
        assert torch.equal(actual, expected)


def advantages(rewards, groups, baseline="mean", scale="std", singleton="zero", eps=1e-6, **blocks):
    rewards, groups = torch.as_tensor(rewards, device=DEVICE), torch.as_tensor(groups, device=DEVICE)
    return group_advantages(rewards, groups, baseline, scale, singleton, eps, **blocks)


@pytest.mark.parametrize("blocks", [{"rows": 4, "cols": 8}, {}])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 20])
def test_advantages_of_ragged_unsorted_groups(n, blocks):
    torch.manual_seed(n)
    groups = torch.tensor([7, -3, 2**40, 0, 2**33 + 7])[torch.randint(0, 5, (n,))]
    rewards = torch.randn(n) * 3
    for baseline, scale, singleton in itertools.product(("mean", "leave_one_out"), ("std", None), ("zero", "raw")):
        options = {"baseline": baseline, "scale": scale, "singleton": singleton}
        expected = reference.group_advantages(rewards.double(), groups, **options)
        assert_close("advantages", advantages(rewards, groups, **options, **blocks), expected, rtol=1e-5, atol=1e-6)


def test_identical_rewards_have_no_advantage():
    """Exactly 0, never residue divided by epsilon, also with epsilon 0."""
    for reward in (0.0, 0.1, 1e18, -3e38):
        result = advantages(torch.full((19,), reward), torch.zeros(19, dtype=torch.int64), eps=0.0, rows=4, cols=8)
        assert (result == 0).all()


def test_rewards_far_from_zero_and_far_apart():
    groups = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    close = 1000 + torch.tensor([0.01, 1e18, -0.01, -1e18, 0.02, 3e18, 0.0, 0.0])
    close[1::2] = torch.tensor([1e18, -1e18, 3e18, 0.0])
    expected = reference.group_advantages(close.double(), groups)
    assert_close("advantages", advantages(close, groups), expected, rtol=1e-5, atol=1e-6)


def test_no_rewards():
    assert advantages(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)
