"""What the ops cannot do right they refuse, by name, rather than do wrong."""

from __future__ import annotations

import pytest
import torch
from numerics import assert_close
from op_calls import LEAVES, OPS, advantages, problem
from torch.autograd import forward_ad

from rspo_kernels import PolicyLossConfig, logits_policy_loss, policy_loss, token_logprobs

DIFFERENTIABLE = [op for op in OPS if op is not advantages]


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.__name__)
def test_second_derivatives_are_refused(place, op):
    """create_graph=True gives the gradient; what is made of it cannot be differentiated again."""
    device, backend = place
    gradients = []
    for create_graph in (False, True):
        p = problem(device)
        leaves = [p[name].requires_grad_() for name in LEAVES]
        total = sum((x * x).sum() for x in op(p, backend) if x.requires_grad)
        gradients.append(torch.autograd.grad(total, leaves, create_graph=create_graph, allow_unused=True))
    assert any(x is not None for x in gradients[0])
    for i, (x, y) in enumerate(zip(*gradients, strict=True)):
        if x is None:
            assert y is None
            continue
        assert torch.equal(x, y)
        with pytest.raises(RuntimeError, match="the ops of rspo_kernels are differentiable once"):
            torch.autograd.grad((y * y).sum(), leaves[i], retain_graph=True)


def test_hessians_are_refused(place):
    device, backend = place
    p = problem(device)

    def loss(logp):
        return policy_loss(logp, p["advantages"], backend=backend)[0]

    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.functional.hessian(loss, p["logp"])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_forward_mode_is_refused(place, op):
    device, backend = place
    for name in (*LEAVES, "advantages"):
        p = problem(device)
        result = op(p, backend)
        with forward_ad.dual_level():
            p[name] = forward_ad.make_dual(p[name], torch.ones_like(p[name]))
            if not same(op, name, result, p, backend):
                with pytest.raises(RuntimeError, match="has a forward-mode tangent"):
                    op(p, backend)


def same(op, name, result, p, backend):
    """Whether the op reads nothing of that name."""
    changed = p | {name: forward_ad.unpack_dual(p[name]).primal + 1}
    return all(torch.equal(x, y) for x, y in zip(result, op(changed, backend), strict=True))


def test_jvp_is_refused(place):
    device, backend = place
    p = problem(device)
    with pytest.raises(RuntimeError, match="logits has a forward-mode tangent"):
        torch.func.jvp(
            lambda x: token_logprobs(x, p["targets"], backend=backend), (p["logits"],), (torch.ones_like(p["logits"]),)
        )


def overlapping(device):
    base = torch.randn(400, device=device)
    return {
        "expanded": torch.randn(4, 1, 5, device=device).expand(4, 3, 5),
        "expanded columns": torch.randn(4, 3, 1, device=device).expand(4, 3, 5),
        "windows": base.as_strided((4, 3, 5), (15, 1, 1)),
        "unfolded": base[:20].unfold(0, 5, 2),
        "rows that overlap": base.as_strided((3, 5), (4, 1)),
        "one number": base.as_strided((3, 5), (0, 0)),
    }


@pytest.mark.parametrize("name", list(overlapping("cpu")))
def test_in_place_of_shared_memory_is_refused(place, name):
    device, backend = place
    logits = overlapping(device)[name].requires_grad_()
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device)
    weights = torch.ones(targets.shape, device=device)
    with pytest.raises(ValueError, match="inplace=True needs logits whose elements each have memory of their own"):
        token_logprobs(logits, targets, inplace=True, backend=backend)
    with pytest.raises(ValueError, match="inplace=True needs logits whose elements each have memory of their own"):
        logits_policy_loss(logits, targets, weights, inplace=True, backend=backend)
    token_logprobs(logits, targets, backend=backend).sum().backward()


def test_in_place_of_any_other_memory(place):
    """Gaps and transposed dimensions are no overlap."""
    device, backend = place
    base = torch.randn(4, 6, 9, device=device)
    views = {
        "whole": base, "columns": base[..., 2:7], "shifted": base[:, :-1], "one row": base[:1, :1],
        "turned": base.permute(0, 2, 1), "every other": base[::2, :, ::2], "flat": base[0], "none": base[:0],
    }  # fmt: skip
    for name, view in views.items():
        targets = torch.zeros(view.shape[:-1], dtype=torch.int64, device=device)
        grads = []
        for inplace in (False, True):
            leaf = base.clone().requires_grad_()
            logits = (leaf * 1.0).as_strided(view.shape, view.stride(), view.storage_offset())
            token_logprobs(logits, targets, inplace=inplace, backend=backend).sum().backward()
            grads.append(leaf.grad)
        assert_close(name, grads[1], grads[0], rtol=1e-6, atol=1e-9)


def test_in_place_twice_is_refused(place):
    """The second loss is over the gradient of the first, and overwrites it."""
    device, backend = place
    logits = torch.randn(4, 5, device=device, requires_grad=True) * 1.0
    targets, weights = torch.zeros(4, dtype=torch.int64, device=device), torch.ones(4, device=device)
    losses = [logits_policy_loss(logits, targets, weights, inplace=True, backend=backend)[0] for _ in range(2)]
    with pytest.raises(RuntimeError, match="something has been written there since"):
        sum(losses).backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_place_compiles_whole(place, dynamic):
    device, backend = place
    torch._dynamo.reset()

    def of_tokens(logits, targets, weights):
        logp, entropy = token_logprobs(logits * 2, targets, with_entropy=True, inplace=True, backend=backend)
        return (logp * weights).sum() + entropy.sum()

    def of_loss(logits, targets, weights):
        return logits_policy_loss(logits * 2, targets, weights, inplace=True, config=config, backend=backend)[0]

    config = PolicyLossConfig(entropy_coef=0.01)
    for function in (of_tokens, of_loss):
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for n in (5, 8):
            targets, weights = torch.randint(0, 11, (2, n), device=device), torch.randn(2, n, device=device)
            logits = torch.randn(2, n, 11, device=device, requires_grad=True)
            results = []
            for call in (function, compiled):
                loss = call(logits, targets, weights)
                results.append((loss, *torch.autograd.grad(loss * 3, logits)))
            for eager, graph in zip(*results, strict=True):
                assert_close("compiled", graph, eager, rtol=1e-5, atol=1e-7)
    torch._dynamo.reset()
