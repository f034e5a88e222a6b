"""An op gives under autocast what it gives outside, forward and backward: dtypes inside it are chosen by hand."""

from __future__ import annotations

import pytest
import torch
from numerics import assert_close

from rspo_kernels import (
    PolicyLossConfig,
    Segments,
    discounted_returns,
    gae,
    group_advantages,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    masked_whiten,
    policy_loss,
    step_advantages,
    token_logprobs,
)

N, WIDTH, VOCAB = 12, 8, 33
CONFIG = PolicyLossConfig(kl_coef=0.1, entropy_coef=0.01, center_cap=1.0, dual_clip=3.0)
SEQUENCES = PolicyLossConfig(loss="gspo", kl_coef=0.1, kl_weighted=True, entropy_coef=0.01)


def problem(device):
    torch.manual_seed(3)
    old, behavior, ref = (-torch.rand(3, N) * 3).to(device).unbind()
    return {
        "logits": 30 * torch.randn(N, VOCAB, device=device),
        "hidden": torch.randn(N, WIDTH, device=device),
        "weight": torch.randn(VOCAB, WIDTH, device=device),
        "bias": torch.randn(VOCAB, device=device),
        "targets": torch.randint(0, VOCAB, (N,), device=device),
        "logp": -torch.rand(N, device=device) * 3,
        "entropy": torch.rand(N, device=device),
        "advantages": torch.randn(N, device=device),
        "partners": {"old_logp": old, "behavior_logp": behavior, "ref_logp": ref},
        "segments": Segments.from_lengths(torch.tensor([5, 0, 4, 3], device=device)),
        "groups": torch.arange(N, device=device) % 3,
    }


def of_logits(p, backend):
    return token_logprobs(p["logits"], p["targets"], with_entropy=True, backend=backend)


def of_logits_inplace(p, backend):
    return token_logprobs(p["logits"] * 1.0, p["targets"], with_entropy=True, inplace=True, backend=backend)


def of_hidden(p, backend):
    return linear_token_logprobs(
        p["hidden"], p["weight"], p["targets"], bias=p["bias"], with_entropy=True, chunk_rows=4, backend=backend
    )


def loss(p, backend, config=CONFIG):
    options = {"entropy": p["entropy"], "segments": p["segments"], "config": config, "backend": backend}
    return flat(policy_loss(p["logp"], p["advantages"], **p["partners"], **options))


def loss_of_sequences(p, backend):
    return loss(p, backend, SEQUENCES)


def loss_of_logits(p, backend, config=CONFIG, inplace=False):
    options = {"segments": p["segments"], "config": config, "inplace": inplace, "backend": backend}
    logits = p["logits"] * 1.0 if inplace else p["logits"]
    return flat(logits_policy_loss(logits, p["targets"], p["advantages"], **p["partners"], **options))


def loss_of_logits_inplace(p, backend):
    return loss_of_logits(p, backend, inplace=True)


def loss_of_logits_of_sequences(p, backend):
    return loss_of_logits(p, backend, SEQUENCES)


def loss_of_hidden(p, backend, config=CONFIG):
    options = {"segments": p["segments"], "config": config, "chunk_rows": 4, "backend": backend}
    head = (p["hidden"], p["weight"], p["targets"], p["advantages"])
    return flat(linear_policy_loss(*head, bias=p["bias"], **p["partners"], **options))


def loss_of_hidden_of_sequences(p, backend):
    return loss_of_hidden(p, backend, SEQUENCES)


def advantages(p, backend):
    a = group_advantages(p["advantages"], p["groups"], backend=backend)
    b = step_advantages(p["advantages"], p["groups"], p["groups"], p["targets"] % 2, backend=backend)
    c = masked_whiten(p["advantages"], backend=backend)
    d = gae(p["advantages"], p["logp"], segments=p["segments"], backend=backend)
    return a, *b, c, *d, discounted_returns(p["advantages"], segments=p["segments"], gamma=0.9, backend=backend)


def flat(result):
    return result[0], *result[1].values()


LEAVES = ("logits", "hidden", "weight", "bias", "logp", "entropy")
FROM_HIDDEN = (of_hidden, loss_of_hidden, loss_of_hidden_of_sequences)
OPS = (
    of_logits, of_logits_inplace, loss, loss_of_sequences, loss_of_logits, loss_of_logits_inplace,
    loss_of_logits_of_sequences, *FROM_HIDDEN, advantages,
)  # fmt: skip


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
