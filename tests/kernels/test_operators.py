"""The torch.library operators: opcheck, torch.compile, recompilations, backend choice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from numerics import assert_close
from torch._dynamo.testing import CompileCounter

from rspo_kernels import (
    PolicyLossConfig,
    Segments,
    group_advantages,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    policy_loss,
    token_logprobs,
)
from rspo_kernels.backends import operators, resolve

ops = torch.ops.rspo_kernels
CONFIG = PolicyLossConfig(kl_coef=0.1, entropy_coef=0.01, center_cap=1.0, dual_clip=3.0)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_inputs(n, device):
    torch.manual_seed(n)
    return [x.requires_grad_(i == 0) for i, x in enumerate((-torch.rand(4, n, device=device)).unbind())] + [
        torch.randn(n, device=device)
    ]


def test_opcheck_token_logprobs(place):
    device, backend = place
    logits = torch.randn(2, 3, 9, device=device, requires_grad=True)
    targets = torch.tensor([[0, 8, -100], [3, 2, 1]], device=device)
    mask = torch.tensor([[True, True, True], [True, False, True]], device=device)
    for with_mask, with_entropy, softcap in ((None, False, None), (mask, True, 2.0)):
        torch.library.opcheck(
            ops.token_logprobs,
            (logits, targets, with_mask, 1.0, softcap, 0.7, 9, -100, "", 0, with_entropy, False, None, backend),
        )
    with torch.no_grad():
        logp, entropy, row_max, log_sum = ops.token_logprobs(
            logits, targets, None, 1.0, None, 0.7, 9, -100, "", 0, True, False, None, backend
        )
        upstream = torch.randn_like(logp)
        saved = (targets, None, logp, entropy, row_max, log_sum, 1.0, None, 0.7, 9, -100, "", 0, backend)
        plain = logits.detach()
        torch.library.opcheck(ops.token_logprobs_backward, (upstream, upstream, plain, *saved))
        torch.library.opcheck(ops.token_logprobs_backward_, (upstream, None, plain.clone(), *saved))


def test_opcheck_policy_loss(place):
    device, backend = place
    logp, old, behavior, ref, advantages = loss_inputs(12, device)
    entropy = torch.rand(12, device=device, requires_grad=True)
    mask = torch.arange(12, device=device) > 2
    settings = operators.config_arguments(CONFIG) | {"backend": backend}
    torch.library.opcheck(
        ops.policy_loss, (logp, advantages, None, mask, None, old, behavior, ref, None, None, 0, entropy), settings
    )
    index = torch.zeros(12, dtype=torch.int64, device=device)
    torch.library.opcheck(
        ops.policy_loss, (logp, advantages[:1], index, None, None, None, None, ref, None, None, 0, entropy), settings
    )


def fused_operands(n, device):
    """The token operands of the fused losses: advantages, index, mask, weights, old, behaviour, ref, no segments."""
    _, old, behavior, ref, advantages = (x.detach() for x in loss_inputs(n, device))
    mask = torch.arange(n, device=device) > 2
    return (advantages, None, mask, torch.full((n,), 1.0 / n, device=device), old, behavior, ref, None, None, 0)


def test_opcheck_fused_losses(place):
    device, backend = place
    transform, settings = (1.0, None, 0.7, 9, -100, "", 0), tuple(operators.config_arguments(CONFIG).values())
    targets = torch.tensor([[0, 8, -100], [3, 2, 1]], device=device)
    logits = torch.randn(2, 3, 9, device=device, requires_grad=True)
    rows = (targets, *fused_operands(6, device), *transform, *settings, True)
    torch.library.opcheck(ops.logits_policy_loss, (logits, *rows, True, None, backend))
    torch.library.opcheck(ops.logits_policy_loss_, (logits.detach().clone(), *rows, True, None, backend))
    hidden = torch.randn(6, 4, device=device, requires_grad=True)
    weight = torch.randn(9, 4, device=device, requires_grad=True)
    bias = torch.randn(9, device=device, requires_grad=True)
    wanted = (True, True, True, True, 4, backend)
    rows = (targets.flatten(), *rows[1:])
    for parts in (None, torch.rand(2, 6, device=device) < 0.5):
        torch.library.opcheck(ops.linear_policy_loss, (hidden, weight, bias, *rows, False, parts, None, *wanted))
    head = (hidden, weight, bias, targets.flatten(), None)
    torch.library.opcheck(ops.linear_token_logprobs, (*head, *transform, True, True, None, 4, backend))
    with torch.no_grad():
        state = ops.linear_token_logprobs(*head, *transform, True, True, None, 4, backend)
        upstream, head = torch.randn(2, 6, device=device).unbind(), [x if x is None else x.detach() for x in head]
        torch.library.opcheck(ops.linear_token_logprobs_backward, (*upstream, *head, *state, *transform, *wanted))


def test_opcheck_group_advantages(place):
    device, backend = place
    rewards, groups = torch.randn(6, device=device), torch.tensor([0, 1, 1, 0, 2, 1], device=device)
    torch.library.opcheck(ops.group_advantages, (rewards, groups, "mean", "std", "zero", 1e-6, True, backend))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(place, dynamic):
    """From logits to loss in one graph, with the eager result."""
    device, backend = place

    def training_loss(logits, targets, old, behavior, ref, rewards, groups):
        advantages = group_advantages(rewards, groups, backend=backend)
        logp, entropy = token_logprobs(logits, targets, with_entropy=True, temperature=0.9, backend=backend)
        loss, stats = policy_loss(
            logp, advantages, mask=targets != -100, old_logp=old, behavior_logp=behavior, ref_logp=ref,
            entropy=entropy, config=CONFIG, backend=backend,
        )  # fmt: skip
        return loss, stats["kl_ref"]

    torch.manual_seed(0)
    compiled = torch.compile(training_loss, fullgraph=True, dynamic=dynamic)
    for length in (5, 8):
        logits = torch.randn(3, length, 17, device=device, requires_grad=True)
        targets = torch.randint(0, 17, (3, length), device=device)
        targets[0, 0] = -100
        old, behavior, ref = (-torch.rand(3, 3, length, device=device) * 3).unbind()
        rewards = torch.tensor([1.0, 0.0, 0.0], device=device)
        groups = torch.zeros(3, dtype=torch.int64, device=device)
        results = []
        for function in (training_loss, compiled):
            logits.grad = None
            loss, kl = function(logits, targets, old, behavior, ref, rewards, groups)
            loss.backward()
            results.append((loss, kl, logits.grad))
        for eager, graph in zip(*results, strict=True):
            assert_close("compiled", graph, eager, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fused_losses_compile_whole(place, dynamic):
    device, backend = place

    def from_hidden(hidden, weight, targets, advantages, old):
        return linear_policy_loss(hidden, weight, targets, advantages, old_logp=old, backend=backend)[0]

    def from_logits(hidden, weight, targets, advantages, old):
        return logits_policy_loss(hidden @ weight.T, targets, advantages, old_logp=old, backend=backend)[0]

    def by_logprobs(hidden, weight, targets, advantages, old):
        logp = linear_token_logprobs(hidden, weight, targets, backend=backend)
        return policy_loss(logp, advantages, old_logp=old, backend=backend)[0]

    for function in (from_hidden, from_logits, by_logprobs):
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for n in (6, 9):
            hidden = torch.randn(n, 4, device=device, requires_grad=True)
            weight = torch.randn(11, 4, device=device, requires_grad=True)
            rest = (torch.randint(0, 11, (n,), device=device), *(torch.randn(2, n, device=device)).unbind())
            results = []
            for call in (function, compiled):
                loss = call(hidden, weight, *rest)
                results.append((loss, *torch.autograd.grad(loss * 2, (hidden, weight))))
            for eager, graph in zip(*results, strict=True):
                assert_close("compiled", graph, eager, rtol=1e-5, atol=1e-7)


def test_compiles_with_packed_segments(place):
    device, backend = place
    config = PolicyLossConfig(aggregation="seq-mean-token-mean")

    def loss_of(logp, advantages, old, segments):
        return policy_loss(logp, advantages, old_logp=old, segments=segments, config=config, backend=backend)[0]

    segments = Segments.from_lengths(torch.tensor([5, 7], device=device))
    logp, old, *_ = loss_inputs(12, device)
    advantages = torch.randn(2, device=device)
    compiled = torch.compile(loss_of)(logp, advantages, old, segments)
    assert_close("loss", compiled, loss_of(logp, advantages, old, segments), rtol=1e-6)


def test_no_recompilation_when_only_the_number_of_tokens_changes(place):
    device, backend = place
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def loss_of(logits, targets, advantages):
        logp = token_logprobs(logits, targets, backend=backend)
        return policy_loss(logp, advantages, backend=backend)[0]

    for n in (5, 17, 64, 130):
        targets = torch.randint(0, 11, (n,), device=device)
        loss_of(torch.randn(n, 11, device=device), targets, torch.randn(n, device=device))
    assert counter.frame_count == 1


def test_no_recompilation_of_the_fused_loss(place):
    device, backend = place
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def loss_of(hidden, weight, targets, advantages):
        return linear_policy_loss(hidden, weight, targets, advantages, backend=backend)[0]

    weight = torch.randn(11, 4, device=device)
    for n in (5, 17, 64, 130):
        loss_of(
            torch.randn(n, 4, device=device),
            weight,
            torch.randint(0, 11, (n,), device=device),
            torch.randn(n, device=device),
        )
    assert counter.frame_count == 1


def test_works_under_autocast(place):
    device, backend = place
    hidden = torch.randn(6, 8, device=device, requires_grad=True)
    weight = torch.randn(20, 8, device=device, requires_grad=True)
    targets = torch.randint(0, 20, (6,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = torch.nn.functional.linear(hidden, weight)
        logp = token_logprobs(logits, targets, backend=backend)
        loss, _ = policy_loss(logp, torch.ones(6, device=device), backend=backend)
        fused, _ = linear_policy_loss(hidden, weight, targets, torch.ones(6, device=device), backend=backend)
    fused.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert_close("loss", fused, loss, rtol=1e-5)
    hidden.grad = weight.grad = None
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert logp.dtype == loss.dtype == torch.float32
    assert hidden.grad.isfinite().all()
    assert (hidden.grad != 0).any()


def test_backend_choice(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve("auto", cpu) == "torch"
    assert resolve("auto", cuda) == "triton"
    assert resolve("auto", cuda, torch.float64) == "torch"
    assert resolve("torch", cuda) == "torch"
    with pytest.raises(RuntimeError, match="take no float64 input"):
        resolve("triton", cuda, torch.float64)
    with pytest.raises(RuntimeError, match="no Triton kernels for device type 'mps'"):
        resolve("triton", torch.device("mps"))
    monkeypatch.setenv("RSPO_KERNELS_BACKEND", "torch")
    assert resolve("auto", cuda) == "torch"
    assert resolve("triton", cuda) == "triton", "the variable replaces 'auto' only"
    monkeypatch.setenv("RSPO_KERNELS_BACKEND", "tritn")
    with pytest.raises(ValueError, match="RSPO_KERNELS_BACKEND must be one of 'auto', 'torch', 'triton', got 'tritn'"):
        resolve("auto", cpu)


def test_triton_on_cpu_tensors_without_the_interpreter_is_an_error():
    """In a process of its own: the variable counts when triton is imported."""
    code = (
        "import torch, rspo_kernels as k\n"
        "k.token_logprobs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), backend='triton')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "backend='triton' cannot run here: CPU tensors need TRITON_INTERPRET=1" in run.stderr
    assert "backend='torch' runs on any device" in run.stderr
