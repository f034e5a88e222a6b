"""Faults that were found in public libraries, as tests: none of them may be ours.

The numbers are the rows of the list in docs/kernels.md.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from numerics import assert_close, assert_rows_close

from rspo_kernels import (
    PolicyLossConfig,
    Segments,
    gae,
    group_advantages,
    linear_policy_loss,
    linear_token_logprobs,
    masked_whiten,
    policy_loss,
    reference,
    step_advantages,
    token_logprobs,
)


def logp_and_grad(logits, targets, backend, weights=None, **options):
    """Log-probs, entropies and the gradient of their sum (weighted by `weights`)."""
    logits = logits.detach().requires_grad_()
    logp, entropy = token_logprobs(logits, targets, with_entropy=True, backend=backend, **options)
    finite = torch.where(logp > -torch.inf, logp, 0.0)
    (finite if weights is None else finite * weights).sum().add(0.1 * entropy.sum()).backward()
    return logp, entropy, logits.grad


def test_01_vocabulary_that_is_no_multiple_of_the_block(place):
    """Padded lanes must not add exp(0) to the sum: logp <= 0 and right for peaked logits."""
    device, backend = place
    for vocab in (129_920, 50_257):
        logits = torch.full((2, vocab), -150.0, device=device)
        logits[:, vocab - 1] = torch.tensor([-27.0, -149.0])
        targets = torch.tensor([vocab - 1, 0], device=device)
        logp = token_logprobs(logits, targets, backend=backend)
        expected, _ = reference.token_logprobs(logits.double(), targets)
        assert (logp <= 0).all()
        assert_close("logp", logp, expected, rtol=1e-6, atol=1e-6)


def test_02_softcap_before_the_padding_is_masked(place):
    """Masking first would let padding lanes in with exp(-cap)."""
    device, backend = place
    torch.manual_seed(0)
    logits = torch.randn(3, 1003, device=device) - 3
    targets = torch.tensor([0, 501, 1002], device=device)
    logp, entropy, grad = logp_and_grad(logits, targets, backend, softcap=1.0)
    double = logits.double().requires_grad_()
    logp_64, entropy_64 = reference.token_logprobs(double, targets, softcap=1.0)
    (logp_64 + 0.1 * entropy_64).sum().backward()
    assert_close("logp", logp, logp_64, rtol=1e-6)
    assert_close("entropy", entropy, entropy_64, rtol=1e-6)
    assert_rows_close("gradient", grad, double.grad, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_03_whole_blocks_of_minus_infinity(place, dtype):
    """One finite logit at the end: logp = 0, not NaN from (-inf) - (-inf)."""
    device, backend = place
    logits = torch.full((2, 20_000), -torch.inf, device=device, dtype=dtype)
    logits[:, -1] = 3.0
    logp, entropy, grad = logp_and_grad(logits, torch.tensor([19_999, 5], device=device), backend)
    assert logp.tolist() == [0.0, -torch.inf]
    assert (entropy == 0).all()
    assert (grad == 0).all()


def test_04_entropy_with_impossible_tokens(place):
    """0·log 0 = 0, in value and in gradient."""
    device, backend = place
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf] * 3], device=device)
    logp, entropy, grad = logp_and_grad(logits, torch.tensor([0, 0], device=device), backend)
    p = torch.softmax(torch.tensor([0.0, 1.0]), 0)
    assert entropy.tolist() == pytest.approx([float(-(p * p.log()).sum()), 0.0], rel=1e-5)
    assert logp.tolist() == pytest.approx([float(p[0].log()), -torch.inf])
    assert grad.isfinite().all()
    assert grad[0, 1] == 0
    assert (grad[1] == 0).all()


def test_05_rows_beyond_two_to_the_31_elements(place):
    """Row times stride in 32 bits would wrap. Only the pages of the two rows are ever touched."""
    device, backend = place
    torch.manual_seed(9)
    memory = torch.empty(2**31 + 100, dtype=torch.bfloat16, device=device)
    logits = memory.as_strided((1, 2, 100), (0, 2**31, 1))
    logits.copy_(torch.randn(1, 2, 100))
    targets = torch.tensor([[3, 99]], device=device)
    near = logits.contiguous()
    transform = (1.0, None, 1.0, 100, -100, "", 0)
    ops = torch.ops.rspo_kernels
    results = []
    for x in (logits, near):
        logp, *saved = ops.token_logprobs(x, targets, None, *transform, True, False, None, backend)
        grad = ops.token_logprobs_backward(
            torch.ones_like(logp), None, x, targets, None, logp, *saved, *transform, backend
        )
        results.append((logp, grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_06_more_rows_than_a_second_grid_axis_has(place, monkeypatch):
    """65,536 rows and more: tokens lie on grid axis 0."""
    device, backend = place
    rows = 70_000
    logits = torch.randn(rows, 8, device=device, requires_grad=True)
    targets = torch.randint(0, 8, (rows,), device=device)
    if (device, backend) == ("cpu", "triton"):
        # The interpreter has no limit to run into: look at the grids.
        from rspo_kernels.backends.triton_impl import logprobs

        grids = []

        class Recorder:
            def __getitem__(self, grid):
                grids.append(grid)
                return lambda *args, **options: None

        monkeypatch.setattr(logprobs, "logprobs_forward_kernel", Recorder())
        monkeypatch.setattr(logprobs, "logprobs_backward_kernel", Recorder())
        token_logprobs(logits, targets, backend=backend).sum().backward()
        assert grids == [(rows,), (rows,)]
        return
    logp = token_logprobs(logits, targets, backend=backend)
    logp.sum().backward()
    assert_close("logp", logp, reference.token_logprobs(logits.double(), targets)[0], rtol=1e-5, atol=1e-6)
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("shape", ["expanded", "every_second"])
def test_07_upstream_gradients_with_odd_strides(place, shape):
    """.sum() gives a gradient of stride 0; a slice one of stride 2."""
    device, backend = place
    torch.manual_seed(1)
    logits = torch.randn(6, 40, device=device, requires_grad=True)
    targets = torch.randint(0, 40, (6,), device=device)
    logp = token_logprobs(logits, targets, backend=backend)
    (logp.sum() if shape == "expanded" else logp[::2].sum()).backward()
    double = logits.detach().double().requires_grad_()
    expected = reference.token_logprobs(double, targets)[0]
    (expected.sum() if shape == "expanded" else expected[::2].sum()).backward()
    assert_rows_close("gradient", logits.grad, double.grad, rtol=1e-5)
    upstream = torch.randn(12, device=device)[::2]
    assert upstream.stride() == (2,)
    logits.grad = double.grad = None
    token_logprobs(logits, targets, backend=backend).backward(upstream)
    reference.token_logprobs(double, targets)[0].backward(upstream.double())
    assert_rows_close("gradient", logits.grad, double.grad, rtol=1e-5)


def test_08_transposed_logits(place):
    device, backend = place
    torch.manual_seed(2)
    logits = torch.randn(40, 6, device=device).T
    targets = torch.randint(0, 40, (6,), device=device)
    logp, _, grad = logp_and_grad(logits, targets, backend)
    same, _, same_grad = logp_and_grad(logits.contiguous(), targets, backend)
    assert_close("logp", logp, same, rtol=1e-6)
    assert_close("gradient", grad, same_grad, rtol=1e-5, atol=1e-8)


def test_09_a_random_gradient_for_each_token(place):
    """Scaling everything by the first token's upstream gradient goes unnoticed under .sum()."""
    device, backend = place
    torch.manual_seed(3)
    logits = torch.randn(5, 30, device=device)
    targets = torch.randint(0, 30, (5,), device=device)
    weights = torch.randn(5, device=device)
    _, _, grad = logp_and_grad(logits, targets, backend, weights)
    double = logits.double().requires_grad_()
    logp, entropy = reference.token_logprobs(double, targets)
    ((logp * weights).sum() + 0.1 * entropy.sum()).backward()
    assert_rows_close("gradient", grad, double.grad, rtol=1e-4)


def test_10_two_losses_on_one_logits_tensor(place):
    device, backend = place
    torch.manual_seed(4)
    logits = torch.randn(4, 25, device=device, requires_grad=True)
    first, second = torch.randint(0, 25, (2, 4), device=device)
    before = logits.detach().clone()
    loss = token_logprobs(logits, first, backend=backend).sum() - token_logprobs(logits, second, backend=backend).sum()
    loss.backward()
    assert torch.equal(logits.detach(), before)
    onehot = torch.nn.functional.one_hot
    assert_close("gradient", logits.grad, (onehot(first, 25) - onehot(second, 25)).float(), rtol=0, atol=1e-6)


def test_11_the_gradient_of_the_entropy_output(place):
    device, backend = place
    torch.manual_seed(5)
    logits = torch.randn(4, 25, device=device)
    targets = torch.randint(0, 25, (4,), device=device)
    grads = []
    for op, x in ((token_logprobs, logits), (reference.token_logprobs, logits.double())):
        x = x.detach().requires_grad_()
        options = {"with_entropy": True, "backend": backend} if op is token_logprobs else {}
        logp, entropy = op(x, targets, **options)
        (0.3 * logp.sum() - 2 * (entropy * torch.arange(4, device=device)).sum()).backward()
        grads.append(x.grad)
    assert_rows_close("gradient", *grads, rtol=1e-5)


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e5, float("inf")])
def test_12_ratios_that_overflow(place, gap):
    """logp - old of ±100: a finite loss and a gradient of 0, never inf·0."""
    device, backend = place
    old = torch.full((4,), -1.0, device=device)
    logp = torch.tensor([gap, -gap, gap, -gap], device=device).add(old).clamp(max=1e30).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], device=device)
    loss, stats = policy_loss(logp, advantages, old_logp=old, backend=backend)
    loss.backward()
    assert loss.isfinite()
    assert (logp.grad == 0).all()
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_13_kl_far_from_the_reference(place, estimator):
    """The difference is clamped before exp, so that the gradient is finite too."""
    device, backend = place
    logp = torch.tensor([-200.0, -0.1, -1e5], device=device, requires_grad=True)
    ref = torch.tensor([-0.1, -200.0, -1.0], device=device)
    config = PolicyLossConfig(kl_coef=1.0, kl_estimator=estimator)
    loss, stats = policy_loss(logp, torch.zeros(3, device=device), ref_logp=ref, config=config, backend=backend)
    loss.backward()
    assert loss.isfinite()
    assert stats["kl_ref"].isfinite()
    assert (logp.grad == 0).all()


def test_14_fully_masked_batch(place):
    device, backend = place
    logits = torch.randn(3, 9, device=device, requires_grad=True)
    targets = torch.full((3,), -100, device=device)
    logp, entropy = token_logprobs(logits, targets, with_entropy=True, backend=backend)
    config = PolicyLossConfig(entropy_coef=0.1)
    loss, _ = policy_loss(
        logp, torch.ones(3, device=device), mask=targets != -100, entropy=entropy, config=config, backend=backend
    )
    loss.backward()
    assert loss == 0
    assert loss.requires_grad
    assert (logits.grad == 0).all()


def test_15_numerator_and_denominator_use_one_mask(place):
    device, backend = place
    mask = torch.tensor([1, 0, 1, 0, 0], device=device)
    logp = torch.zeros(5, device=device)
    loss, stats = policy_loss(logp, torch.full((5,), 2.0, device=device), mask=mask, backend=backend)
    assert float(loss) == -2.0
    assert stats["num_tokens"] == 2


def test_16_four_ragged_micro_batches_are_one_batch(place):
    """From hidden states, with the global normalizer: the gradient of the whole batch."""
    device, backend = place
    torch.manual_seed(10)
    hidden, weight = torch.randn(20, 8, device=device), torch.randn(30, 8, device=device)
    targets, mask = torch.randint(0, 30, (20,), device=device), torch.rand(20, device=device) < 0.6
    advantages = torch.randn(20, device=device)
    grads = []
    for cuts in ((0, 20), (0, 1, 4, 13, 20)):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        for start, stop in itertools.pairwise(cuts):
            part = slice(start, stop)
            loss, _ = linear_policy_loss(
                leaves[0][part], leaves[1], targets[part], advantages[part], mask=mask[part], normalizer=mask.sum(),
                backend=backend,
            )  # fmt: skip
            loss.backward()
        grads.append([x.grad for x in leaves])
    for whole, parts in zip(*grads, strict=True):
        assert_close("gradient", parts, whole, rtol=1e-5, atol=1e-6)


def test_18_ratio_is_one_before_any_update(place):
    device, backend = place
    torch.manual_seed(6)
    logits = torch.randn(20, 50, device=device)
    targets = torch.randint(0, 50, (20,), device=device)
    old = token_logprobs(logits, targets, temperature=0.7, backend=backend)
    logp = token_logprobs(logits.requires_grad_(), targets, temperature=0.7, backend=backend)
    _, stats = policy_loss(logp, torch.randn(20, device=device), old_logp=old, backend=backend)
    assert stats["ratio_mean"] == stats["ratio_max"] == stats["ess"] == 1
    assert stats["clip_frac_low"] == stats["clip_frac_high"] == stats["approx_kl_k3"] == 0


def test_19_python_floats_reach_the_kernel_as_they_are(place):
    """A third is no float32: the result is that of its float32 rounding, eager and compiled."""
    device, backend = place
    torch.manual_seed(11)
    logits, targets = torch.randn(4, 50, device=device), torch.randint(0, 50, (4,), device=device)

    def call(x):
        logp = token_logprobs(x, targets, temperature=1 / 3, softcap=10 / 3, backend=backend)
        config = PolicyLossConfig(clip_low=1 / 7, clip_high=2 / 7, log_ratio_clamp=7 / 3)
        return policy_loss(logp, torch.ones_like(logp), old_logp=logp.detach() - 0.1, config=config, backend=backend)[0]

    expected, _ = reference.token_logprobs(logits.double(), targets, temperature=1 / 3, softcap=10 / 3)
    logp = token_logprobs(logits, targets, temperature=1 / 3, softcap=10 / 3, backend=backend)
    assert_close("logp", logp, expected, rtol=1e-5, atol=1e-5)
    eager = call(logits)
    assert_close("loss", eager, torch.tensor(-0.1).exp().reciprocal().neg(), rtol=1e-5)
    torch._dynamo.reset()
    assert_close("compiled", torch.compile(call, fullgraph=True)(logits), eager, rtol=1e-6)


def test_20_autocast(place):
    """float32 parameters and bfloat16 activations meet in the fused head."""
    device, backend = place
    torch.manual_seed(12)
    hidden = torch.randn(6, 8, device=device, requires_grad=True)
    weight = torch.randn(20, 8, device=device, requires_grad=True)
    targets, advantages = torch.randint(0, 20, (6,), device=device), torch.randn(6, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        activations = hidden * 1.0
        loss, _ = linear_policy_loss(activations.bfloat16(), weight, targets, advantages, backend=backend)
        logp = linear_token_logprobs(activations, weight, targets, backend=backend)
    (loss + 0 * logp.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert hidden.grad.isfinite().all()
    assert (weight.grad != 0).any()


def test_21_identical_rewards(place):
    device, backend = place
    rewards = torch.full((64,), 0.7, device=device)
    groups = torch.arange(64, device=device) % 5
    assert (group_advantages(rewards, groups, backend=backend) == 0).all()


def test_22_a_group_of_one(place):
    device, backend = place
    rewards, groups = torch.tensor([3.0, 1.0, 2.0], device=device), torch.tensor([7, 8, 8], device=device)
    advantages = group_advantages(rewards, groups, backend=backend)
    assert advantages[0] == 0
    assert advantages.isfinite().all()


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "set"])
@pytest.mark.parametrize("loss", ["grpo", "ppo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"])
def test_23_every_loss_at_every_ratio_level(place, loss, level):
    """The gradient of each against autograd through the float64 reference, with a random upstream gradient."""
    if (loss, level) == ("gspo", "token"):
        return  # refused by the config; see test_policy_loss
    device, backend = place
    torch.manual_seed(13)
    lengths, owners, sets = torch.tensor([3, 2, 4, 1, 5]), torch.tensor([0, 1, 0, 2, 3]), torch.tensor([1, 0, 1, 0])
    segments = Segments.from_lengths(lengths, owners, sets)
    old, behavior = (-torch.rand(2, 15) * 2).unbind()
    logp, advantages, mask = old + 0.4 * torch.randn(15), torch.randn(15), torch.rand(15) < 0.8
    for reduction in ("mean", "sum"):
        config = PolicyLossConfig(
            loss=loss, ratio_level=level, ratio_reduction=reduction, clip_low=0.3, clip_high=0.3, horizon=6
        )
        leaf = logp.clone().to(device).requires_grad_()
        on_device = Segments.from_lengths(*(x.to(device) for x in (lengths, owners, sets)))
        ours, _ = policy_loss(
            leaf, advantages.to(device), mask=mask.to(device), old_logp=old.to(device),
            behavior_logp=behavior.to(device), segments=on_device, config=config, backend=backend,
        )  # fmt: skip
        (ours * -1.7).backward()
        double = logp.double().requires_grad_()
        expected, _ = reference.policy_loss(
            double, advantages.double(), config, mask=mask, old_logp=old.double(), behavior_logp=behavior.double(),
            sequence_ids=segments.token_sequence,
            member_ids=segments.token_turn if level == "turn" else segments.token_sequence,
            set_ids=segments.token_set if level == "set" else None,
        )  # fmt: skip
        (expected * -1.7).backward()
        assert (double.grad != 0).any()
        assert_close("loss", ours, expected, rtol=1e-5, atol=1e-6)
        assert_close("gradient", leaf.grad, double.grad, rtol=1e-4, atol=1e-7)


def test_24_softcap_then_temperature(place):
    """cap·tanh(x/cap), then divided by the temperature."""
    device, backend = place
    logits = torch.tensor([[3.0, -1.0, 0.5]], device=device)
    targets = torch.tensor([0], device=device)
    logp = token_logprobs(logits, targets, softcap=2.0, temperature=0.5, backend=backend)
    expected = torch.log_softmax(2.0 * torch.tanh(logits.double() / 2.0) / 0.5, -1)[:, 0]
    assert_close("logp", logp, expected, rtol=1e-5)


def test_25_targets_at_an_odd_offset(place):
    """labels[1:] starts 8 bytes (int32: 4 bytes) into its storage."""
    device, backend = place
    torch.manual_seed(7)
    for dtype in (torch.int64, torch.int32):
        labels = torch.randint(0, 30, (7,), device=device, dtype=dtype)
        logits = torch.randn(6, 30, device=device)
        logp = token_logprobs(logits, labels[1:], backend=backend)
        assert_close("logp", logp, reference.token_logprobs(logits.double(), labels[1:])[0], rtol=1e-6, atol=1e-6)


def test_27_masked_tokens_are_not_trained_on(place):
    """Environment tokens of a conversation get no gradient, whatever their advantages and log-probs."""
    device, backend = place
    torch.manual_seed(8)
    logits = torch.randn(2, 6, 15, device=device, requires_grad=True)
    targets = torch.randint(0, 15, (2, 6), device=device)
    response = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]], device=device)
    logp = token_logprobs(logits, targets, mask=response, backend=backend)
    loss, _ = policy_loss(logp, torch.ones(2, device=device), mask=response, backend=backend)
    loss.backward()
    touched = (logits.grad != 0).any(-1)
    assert torch.equal(touched, response.bool())


def test_22_one_valid_entry_and_one_broken_reward(place, small_blocks):
    """Whitened, a single entry is 0 and not 0/0; a step nobody shares is 0; a broken reward is named."""
    device, backend = place
    x, mask = torch.tensor([torch.nan, 3.0, torch.inf], device=device), torch.tensor([0, 1, 0], device=device)
    assert masked_whiten(x, mask, backend=backend).tolist() == [0.0, 0.0, 0.0]
    assert masked_whiten(x, torch.zeros_like(mask), backend=backend).tolist() == [0.0, 0.0, 0.0]
    ids = torch.arange(3, device=device)
    assert (step_advantages(torch.ones(3, device=device), ids, ids, ids, backend=backend).advantages == 0).all()
    with pytest.raises(ValueError, match="step_rewards must be finite, got nan at position 0"):
        step_advantages(x, ids, ids, ids, backend=backend)


def test_26_masked_values_do_not_leak_into_gae(place, small_blocks):
    """Stepping through masked tokens at the end of a row would add γ(1 - λ)V to its last advantage."""
    device, backend = place
    torch.manual_seed(9)
    rewards, values = torch.randn(2, 2, 12)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    for garbage in (0.0, 7.0, 1e30, torch.inf, torch.nan):
        dirty = [torch.where(mask, x, garbage).to(device) for x in (rewards, values)]
        actual = gae(*dirty, gamma=0.9, lam=0.5, mask=mask.to(device), backend=backend)
        for row in range(2):
            kept = [x[row, mask[row]].double() for x in (rewards, values)]
            alone = torch.zeros(len(kept[0]), dtype=torch.int64)
            for a, e in zip(actual, reference.gae(*kept, alone, gamma=0.9, lam=0.5), strict=True):
                assert_close("gae", a[row].cpu()[mask[row]], e, rtol=1e-5, atol=1e-6)
                assert (a[row].cpu()[~mask[row]] == 0).all()
