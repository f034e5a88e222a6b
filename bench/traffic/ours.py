"""Our ops on a case of the traffic suite, through the public functions."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import rspo_kernels
from rspo_kernels import PolicyLossConfig, Segments, reference

from .cases import CONFIG, ENTROPY_SLOPE, TEMPERATURE, Case, Results, Work


def logits_policy_loss(case: Case, *, inplace: bool = False) -> Work:
    logits = case.logits.clone().requires_grad_()
    given = _given(case) | {"inplace": inplace}

    def work() -> Results:
        loss, _ = rspo_kernels.logits_policy_loss(logits, case.targets, case.advantages, **given)
        (grad,) = torch.autograd.grad(loss, logits)
        return {"loss": loss, "grad": grad}

    return work


def token_logprobs(case: Case, *, gradient: bool, entropy: bool) -> Work:
    logits = case.logits.clone().requires_grad_(gradient)
    upstream = [case.expected["slope"].float(), torch.full(case.mask.shape, ENTROPY_SLOPE)][: 1 + entropy]
    given: dict[str, Any] = {"mask": case.mask, "temperature": TEMPERATURE, "with_entropy": entropy}

    def work() -> Results:
        found = rspo_kernels.token_logprobs(logits, case.targets, **given, backend="triton")
        outputs = found if isinstance(found, tuple) else (found,)
        results = dict(zip(("logp", "entropy"), outputs, strict=False))
        if gradient:
            (grad,) = torch.autograd.grad(outputs, logits, upstream)
            results["grad_with_entropy" if entropy else "grad"] = grad
        return results

    return work


def linear_token_logprobs(case: Case) -> Work:
    assert case.hidden is not None
    assert case.weight is not None
    hidden, weight = case.hidden, case.weight
    given: dict[str, Any] = {"mask": case.mask, "temperature": TEMPERATURE, "backend": "triton"}

    def work() -> Results:
        with torch.no_grad():
            logp = rspo_kernels.linear_token_logprobs(hidden, weight, case.targets, **given)
        return {"logp": cast(Tensor, logp)}

    return work


def linear_policy_loss(case: Case, *, chunk_rows: int) -> Work:
    assert case.hidden is not None
    assert case.weight is not None
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    given = _given(case) | {"chunk_rows": chunk_rows}

    def work() -> Results:
        loss, _ = rspo_kernels.linear_policy_loss(hidden, weight, case.targets, case.advantages, **given)
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
        return {"loss": loss, "grad_hidden": grad_hidden, "grad_weight": grad_weight}

    return work


def _given(case: Case) -> dict[str, Any]:
    return {
        "temperature": TEMPERATURE,
        "mask": case.mask,
        "old_logp": case.old_logp,
        "config": CONFIG,
        "backend": "triton",
    }


class TokenOp(NamedTuple):
    """An op on vectors of tokens, turns or trajectories: its work, what is right, and the bytes it cannot do without.

    inputs are read once, where the mask keeps them, and outputs written once; results of `work` are in the order of
    `expected`.
    """

    name: str
    work: Any
    expected: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    mask: Tensor | None = None

    @property
    def floor(self) -> int:
        """Bytes of inputs and (float32) outputs."""
        size, kept = 0, self.inputs[0].numel()
        if self.mask is not None:
            size, kept = self.mask.numel(), int(self.mask.sum())
        return size + kept * sum(x.element_size() for x in self.inputs) + 4 * sum(x.numel() for x in self.expected)

    def fault(self, results: tuple[Tensor, ...]) -> str:
        for got, want in zip(results, self.expected, strict=True):
            error = float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))
            if not error < 1e-4:
                return f"wrong by {error:.1e} of the largest"
        return ""


def token_ops(tokens: int) -> list[TokenOp]:
    rng = torch.Generator().manual_seed(0)
    x, y, logp, old, behavior = torch.randn(5, tokens, generator=rng)
    old, behavior = logp + 0.1 * old, logp + 0.1 * behavior
    mask = torch.rand(tokens, generator=rng) < 0.75
    ids = torch.arange(tokens)
    return [
        _policy_loss("policy_loss", CONFIG, logp, x, mask, old, behavior),
        _policy_loss("policy_loss, ratio of a sequence", PolicyLossConfig("gspo"), logp, x, mask, old, behavior),
        *_advantage_ops(x, y, mask, ids),
    ]


def _policy_loss(
    name: str, config: PolicyLossConfig, logp: Tensor, advantages: Tensor, mask: Tensor, old: Tensor, behavior: Tensor
) -> TokenOp:
    """On-policy and replayed tokens, an advantage for each; the gradient is the output."""
    length = 64
    sequences = torch.arange(logp.numel()) // length
    segments = (
        None if config.ratio_level == "token" else Segments.from_lengths(torch.full((logp.numel() // length,), length))
    )
    partners = {"mask": mask, "old_logp": old, "behavior_logp": behavior}
    right = logp.double().requires_grad_()
    double = {name: x if x.dtype == torch.bool else x.double() for name, x in partners.items()}
    members = {} if segments is None else {"member_ids": sequences, "sequence_ids": sequences}
    loss, _ = reference.policy_loss(right, advantages.double(), config, **double, **members)
    (grad,) = torch.autograd.grad(loss, right)
    logp = logp.clone().requires_grad_()

    def work() -> tuple[Tensor, ...]:
        loss, _ = rspo_kernels.policy_loss(
            logp, advantages, **partners, segments=segments, config=config, advantage_level="token", backend="triton"
        )
        return torch.autograd.grad(loss, logp)

    inputs = (logp.detach(), advantages, old, behavior, *([] if segments is None else [sequences]))
    return TokenOp(name, work, (grad,), inputs, mask)


def _advantage_ops(x: Tensor, y: Tensor, mask: Tensor, ids: Tensor) -> list[TokenOp]:
    """Groups of 8 trajectories of 4 turns that begin in 4 states; scans over rows of 64 tokens."""
    groups, turns, states = ids // 8, ids // 4, ids % 4
    x2, y2, mask2 = (v.view(-1, 64) for v in (x, y, mask))
    rows = ids // 64
    d, e = x.double(), y.double()
    triton: dict[str, Any] = {"backend": "triton"}
    steps = rspo_kernels.step_advantages
    right = reference.step_advantages(d, ids // 32, turns, states)
    return [
        TokenOp(
            "group_advantages",
            lambda: (rspo_kernels.group_advantages(x, groups, **triton),),
            (reference.group_advantages(d, groups),),
            (x, groups),
        ),
        TokenOp(
            "step_advantages",
            lambda: tuple(steps(x, ids // 32, turns, states, **triton)),
            tuple(right),
            (x, groups, turns, states),
        ),
        TokenOp(
            "gae",
            lambda: tuple(v.flatten() for v in rspo_kernels.gae(x2, y2, mask=mask2, **triton)),
            reference.gae(d, e, rows, mask=mask),
            (x, y),
            mask,
        ),
        TokenOp(
            "discounted_returns",
            lambda: (rspo_kernels.discounted_returns(x2, mask=mask2, **triton).flatten(),),
            (reference.discounted_returns(d, rows, mask=mask),),
            (x,),
            mask,
        ),
        TokenOp(
            "masked_whiten",
            lambda: (rspo_kernels.masked_whiten(x, mask, **triton),),
            (reference.masked_whiten(d, mask),),
            (x,),
            mask,
        ),
    ]
