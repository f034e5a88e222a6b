"""Gradients made in the forward pass meet their upstream gradient in the backward pass: any factor, and more than once.

On Triton the first backward pass scales the gradient where it lies, by a kernel of its own.
"""

from __future__ import annotations

import pytest
import torch

from rspo_kernels import linear_policy_loss, logits_policy_loss

FACTORS = [1.0, -2.5, 0.0]


def problem(device, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    targets, old = torch.randint(0, 50, (6,), generator=rng), -4 + 0.3 * torch.randn(6, generator=rng)
    hidden, weight = torch.randn(6, 8, generator=rng), torch.randn(50, 8, generator=rng)
    logits = hidden @ weight.t()
    tensors = {"targets": targets, "advantages": torch.randn(6, generator=rng), "old_logp": old}
    leaves = [x.to(device, dtype).requires_grad_() for x in (logits, hidden, weight, torch.zeros(50))]
    return leaves, {name: x.to(device) for name, x in tensors.items()}


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("inplace", [False, True])
def test_upstream_factor_of_the_loss_from_logits(place, factor, dtype, inplace):
    device, backend = place
    (logits, *_), tokens = problem(device, dtype)
    (whole,) = torch.autograd.grad(logits_policy_loss(logits, **tokens, backend=backend)[0], logits)
    leaf = logits.detach().clone().requires_grad_()
    loss, _ = logits_policy_loss(leaf, **tokens, inplace=inplace, backend=backend)
    (grad,) = torch.autograd.grad(factor * loss, leaf)
    # The interpreter cuts bf16's last place off where a GPU rounds.
    torch.testing.assert_close(grad, whole * factor, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)


@pytest.mark.parametrize("factor", FACTORS)
def test_upstream_factor_of_the_loss_from_hidden_states(place, factor):
    device, backend = place
    (_, *leaves), tokens = problem(device)
    hidden, weight, bias = leaves

    def grads(factor):
        loss, _ = linear_policy_loss(hidden, weight, bias=bias, **tokens, chunk_rows=4, backend=backend)
        return torch.autograd.grad(factor * loss, leaves)

    for scaled, whole in zip(grads(factor), grads(1.0), strict=True):
        torch.testing.assert_close(scaled, whole * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fused", ["logits", "linear"])
def test_several_backward_passes_through_one_graph(place, fused):
    """The first pass may hand out the gradient itself; a later one must not change what was handed out."""
    device, backend = place
    (logits, hidden, weight, bias), tokens = problem(device)
    leaves = [logits] if fused == "logits" else [hidden, weight, bias]

    def loss():
        if fused == "logits":
            return logits_policy_loss(logits, **tokens, backend=backend)[0]
        return linear_policy_loss(hidden, weight, bias=bias, **tokens, backend=backend)[0]

    whole = torch.autograd.grad(loss(), leaves)
    graph = loss()
    passes = [torch.autograd.grad(factor * graph, leaves, retain_graph=True) for factor in (3.0, 1.0, -0.5)]
    for grads, factor in zip(passes, (3.0, 1.0, -0.5), strict=True):
        for grad, expected in zip(grads, whole, strict=True):
            torch.testing.assert_close(grad, expected * factor, rtol=1e-5, atol=0)


@pytest.mark.interpreter
def test_after_a_first_pass_with_factor_zero_nothing_is_left():
    """On Triton, where the first pass scales in place: an error, and no 0/0."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (logits, *_), tokens = problem(device)
    loss, _ = logits_policy_loss(logits, **tokens, backend="triton")
    (grad,) = torch.autograd.grad(0 * loss, logits, retain_graph=True)
    assert not grad.any()
    with pytest.raises(RuntimeError, match="upstream gradient of 0"):
        torch.autograd.grad(loss, logits)


def test_backward_passes_that_ask_for_one_gradient_each(place):
    device, backend = place
    (_, *leaves), tokens = problem(device)
    hidden, weight, bias = leaves

    def loss():
        return linear_policy_loss(hidden, weight, bias=bias, **tokens, backend=backend)[0]

    whole, graph = torch.autograd.grad(loss(), leaves), 3 * loss()
    for leaf, expected in zip(leaves, whole, strict=True):
        (grad,) = torch.autograd.grad(graph, leaf, retain_graph=True)
        torch.testing.assert_close(grad, 3 * expected, rtol=1e-5, atol=0)


def test_a_sliced_gradient_is_scaled_in_place(place):
    """logits[:, :-1] have rows of their own strides; what lies between them is not theirs."""
    device, backend = place
    (logits, *_), tokens = problem(device)
    whole = torch.autograd.grad(logits_policy_loss(logits, **tokens, backend=backend)[0], logits)[0]
    base = torch.full((2, 4, 50), 7.0, device=device)
    base[:, :3] = logits.detach().view(2, 3, 50)
    rows = base[:, :3].detach().requires_grad_()
    shaped = {name: x.view(2, 3) for name, x in tokens.items()}
    (grad,) = torch.autograd.grad(-2 * logits_policy_loss(rows, **shaped, inplace=True, backend=backend)[0], rows)
    torch.testing.assert_close(grad.reshape(6, 50), -2 * whole, rtol=1e-5, atol=1e-9)
    assert (base[:, 3] == 7).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("n", [1, 16, 64, 100, 128, 200])
def test_chunks_and_their_tail(n):
    scale = pytest.importorskip("rspo_kernels.backends.triton_impl.scale", reason="needs triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(n + 8, device=device)
    expected = torch.cat([x[:n] * -2.5, x[n:]])
    scale.scale_(x[:n], torch.tensor(-2.5, device=device), chunk=64, block=16)
    assert torch.equal(x, expected)
