"""What the three losses divide by is one thing, whichever of them is asked."""

from __future__ import annotations

import math

import pytest
import torch
from numerics import assert_close

from rspo_kernels import PolicyLossConfig, Segments, linear_policy_loss, logits_policy_loss, policy_loss

N, WIDTH, VOCAB = 6, 4, 9
LEVELS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def run(start, device, backend, mask, normalizer, aggregation="token-mean", compiled=False, advantages=None):
    """The loss and the gradients of its inputs, from log-probs, logits or hidden states."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, WIDTH, device=device), torch.randn(VOCAB, WIDTH, device=device)
    targets = torch.arange(N, device=device)
    config = PolicyLossConfig(aggregation=aggregation, horizon=5)
    advantages = torch.randn(N, device=device) if advantages is None else advantages
    segments = None if aggregation == "token-mean" else Segments.from_lengths(torch.tensor([4, 2], device=device))
    leaves = {
        "logp": [(hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]],
        "logits": [hidden @ weight.T],
        "hidden": [hidden, weight],
    }[start]
    leaves = [x.detach().requires_grad_() for x in leaves]

    def call(leaves, mask, normalizer):
        common = {"normalizer": normalizer, "config": config, "backend": backend}
        common |= {"mask": mask, "segments": segments, "old_logp": torch.full((N,), -2.0, device=device)}
        if start == "logp":
            return policy_loss(leaves[0], advantages, **common)[0]
        if start == "logits":
            return logits_policy_loss(leaves[0], targets, advantages, **common)[0]
        return linear_policy_loss(*leaves, targets, advantages, **common)[0]

    loss = (torch.compile(call, backend="aot_eager") if compiled else call)(leaves, mask, normalizer)
    assert loss.requires_grad
    return loss, torch.autograd.grad(loss * 3, leaves)


STARTS = pytest.mark.parametrize("start", ["logp", "logits", "hidden"])


@STARTS
@pytest.mark.parametrize("aggregation", LEVELS)
def test_nothing_unmasked_is_a_loss_of_0(place, start, aggregation):
    device, backend = place
    mask = torch.zeros(N, dtype=torch.bool, device=device)
    zero = torch.zeros((), device=device)
    for normalizer in (None, mask.sum(), mask.float().sum(), zero.double(), zero + 7, 7, 0.5):
        loss, grads = run(start, device, backend, mask, normalizer, aggregation)
        assert loss == 0
        assert all((grad == 0).all() for grad in grads)


@STARTS
def test_tensors_and_numbers_give_the_same(place, start):
    device, backend = place
    mask = torch.arange(N, device=device) % 3 != 0
    expected = run(start, device, backend, mask, None)
    for normalizer in (4, 4.0, mask.sum(), mask.sum().int(), mask.float().sum().double(), mask.half().sum()):
        loss, grads = run(start, device, backend, mask, normalizer)
        assert loss.dtype == torch.float32
        assert_close("loss", loss, expected[0], rtol=1e-6)
        for grad, want in zip(grads, expected[1], strict=True):
            assert_close("gradient", grad, want, rtol=1e-6, atol=1e-9)


@STARTS
@pytest.mark.parametrize("value", [0, -1, 0.0, -2.5, math.nan, math.inf, -math.inf, True, "2"])
def test_a_number_that_is_no_denominator_is_named(place, start, value):
    for unmasked in (0, N):
        mask = torch.arange(N, device=place[0]) < unmasked
        with pytest.raises(ValueError, match="normalizer must be a finite number > 0, got"):
            run(start, *place, mask, value)


@STARTS
@pytest.mark.parametrize("value", [1e-60, 1e-39, 1e39, 10**400])
def test_what_float32_cannot_hold_or_invert_is_named(place, start, value):
    for unmasked in (0, N):
        mask = torch.arange(N, device=place[0]) < unmasked
        with pytest.raises(ValueError, match="normalizer must"):
            run(start, *place, mask, value)


@STARTS
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-42])
def test_a_tensor_that_is_no_denominator_never_gives_a_number(place, start, value):
    """Named on the CPU; NaN where a look would cost a synchronisation, also where all that it divides is 0."""
    device, backend = place
    mask = torch.arange(N, device=device) < 4
    normalizer = torch.tensor(value, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match="normalizer must be finite and > 0"):
            run(start, device, backend, mask, normalizer)
    else:
        assert run(start, device, backend, mask, normalizer)[0].isnan()
    if backend == "torch":
        torch._dynamo.reset()
        loss, grads = run(start, device, backend, mask, normalizer, compiled=True)
        assert loss.isnan()
        assert all(grad.isnan().any() for grad in grads)
        torch._dynamo.reset()
        silent = torch.zeros(N, device=device)
        assert run(start, device, backend, mask, normalizer, compiled=True, advantages=silent)[0].isnan()


@STARTS
def test_a_tensor_of_another_kind_is_named(place, start):
    device, backend = place
    mask = torch.ones(N, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="normalizer must be a number or a 0-d tensor, got \\[1\\]"):
        run(start, device, backend, mask, torch.ones(1, device=device))
    for normalizer in (mask.any(), torch.tensor(1 + 0j, device=device)):
        with pytest.raises(TypeError, match="normalizer must be a real number, got"):
            run(start, device, backend, mask, normalizer)
