"""An op gives under autocast what it gives outside, forward and backward: dtypes inside it are chosen by hand."""

from __future__ import annotations

import pytest
import torch
from numerics import assert_close
from op_calls import (
    FROM_HIDDEN,
    LEAVES,
    OPS,
    loss,
    loss_of_logits,
    of_logits,
    problem,
)

from rspo_kernels import (
    token_logprobs,
)


def results(op, device, backend, autocast, head_dtype=torch.float32, backward_too=True):
    """What the op returns, and the gradients of the inputs that have one."""
    p = problem(device)
    for name in LEAVES:
        p[name].requires_grad_()
    given = p | {name: p[name].to(head_dtype) for name in ("hidden", "weight", "bias")}
    with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        outputs = op(given, backend)
        total = sum((x * (i + 1)).sum() for i, x in enumerate(outputs) if x.requires_grad)
        if backward_too and isinstance(total, torch.Tensor):
            total.backward()
    if not backward_too and isinstance(total, torch.Tensor):
        total.backward()
    return [*(x.detach() for x in outputs), *(p[name].grad for name in LEAVES if p[name].grad is not None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_an_op_is_the_same_under_autocast(place, op, dtype):
    """Bit for bit. From hidden states, as torch.nn.functional.linear: in autocast's dtype."""
    device, backend = place
    expected = results(op, device, backend, None, dtype if op in FROM_HIDDEN else torch.float32)
    for backward_too in (True, False):
        actual = results(op, device, backend, dtype, backward_too=backward_too)
        assert len(actual) == len(expected)
        for x, y in zip(actual, expected, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_compiled_under_autocast(place, dtype):
    device, backend = place
    torch._dynamo.reset()
    p = problem(device)

    def call(logits, logp):
        with torch.autocast(device, dtype=dtype):
            given = p | {"logits": logits, "logp": logp}
            return (*of_logits(given, backend), *loss(given, backend), *loss_of_logits(given, backend))

    arguments = (p["logits"], p["logp"])
    for x, y in zip(torch.compile(call)(*arguments), call(*arguments), strict=True):
        assert x.dtype == y.dtype
        assert_close("compiled", x, y, rtol=1e-6)


def test_entropy_of_a_large_vocabulary_under_autocast(place):
    """262,144 exponents do not sum up in half precision."""
    device, backend = place
    logits = torch.full((1, 262_144), -1.0, device=device)
    logits[0, 0] = 0.0
    targets = torch.zeros(1, dtype=torch.int64, device=device)
    _, expected = token_logprobs(logits, targets, with_entropy=True, backend=backend)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            _, entropy = token_logprobs(logits, targets, with_entropy=True, backend=backend)
        assert torch.equal(entropy, expected)


def test_a_float64_head_is_not_cast(place):
    """As in torch.nn.functional.linear: autocast leaves float64 alone, and mixing it with others is an error."""
    device, backend = place
    p = problem(device)
    p["weight"], p["bias"] = p["weight"].double(), p["bias"].double()
    for op in FROM_HIDDEN:
        with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(TypeError, match="weight must have the dtype"):
            op(p, backend)
