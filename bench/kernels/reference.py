"""What is right: rspo_kernels.reference in float64 on the inputs as they are, a few rows at a time.

The reference's gradient goes through autograd, so it shares no formula with any op; its rows are independent (one ratio
a token, a known number of tokens), so that chunks change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rspo_kernels import reference

from .workloads import CONFIG, EPS, GAMMA, LAM, LOSS_OPS, SCAN_OPS, Inputs

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
"""Largest relative error of a provider that counts as right, ‖result - reference‖/‖reference‖.

About ten times what plain PyTorch in that dtype has: a wrong formula is far beyond it, a rounding is not."""

CHUNK_ELEMENTS = 1 << 22
"""Scores handled at once; a GPU takes 64 times as many."""


@dataclass
class Expected:
    """Outputs and gradients by name. scales: what a sum's error is relative to, if not the sum (terms may cancel).

    where: entries that count, for outputs [N] that are anything where masked.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    where: Tensor | None = None


def expect(inputs: Inputs) -> Expected:
    """Outputs and gradients of the workload's op in float64. Sets inputs.old_logp where that is still to be made."""
    op = inputs.workload.op
    if op in SCAN_OPS:
        return _scans(inputs)
    if op == "policy_loss":
        assert inputs.logp is not None
        if inputs.old_logp is None:
            inputs.old_logp = inputs.logp.detach() - inputs.log_ratio
        logp = inputs.logp.detach().double().requires_grad_()
        terms = _loss_terms(logp, inputs, slice(None))
        (gradient,) = torch.autograd.grad(terms.sum(), logp)
        terms = terms.detach()
        return Expected({"loss": terms.sum()}, {"logp": gradient}, {"loss": float(terms.abs().sum())})
    return _rows(inputs)


def _loss_terms(logp: Tensor, inputs: Inputs, rows: Tensor | slice) -> Tensor:
    """Each row's part of the loss, in float64."""
    assert inputs.old_logp is not None
    terms = reference.policy_loss_terms(
        logp,
        inputs.advantages[rows].double(),
        CONFIG,
        mask=inputs.mask[rows],
        old_logp=inputs.old_logp[rows].double(),
    )
    return terms["loss"] / inputs.mask.sum().clamp(min=1)


def _rows(inputs: Inputs) -> Expected:
    """From logits or from hidden states; rows that are masked have no part in anything."""
    n, is_loss = inputs.workload.rows, inputs.workload.op in LOSS_OPS
    device = inputs.targets.device
    if is_loss and inputs.old_logp is None:
        inputs.old_logp = torch.full((n,), -5.0, device=device)
        made = False
    else:
        made = True
    logp_all, entropy_all = (torch.zeros(n, dtype=torch.float64, device=device) for _ in range(2))
    loss, size = torch.zeros((2,), dtype=torch.float64, device=device).unbind()
    gradients = {name: torch.zeros_like(x, dtype=_kept(name)) for name, x in inputs.leaves.items()}
    weight = None if inputs.weight is None else inputs.weight.detach().double()
    active = inputs.mask.nonzero().flatten() if is_loss else torch.arange(n, device=device)
    step = max(1, CHUNK_ELEMENTS * (64 if device.type == "cuda" else 1) // inputs.workload.vocab)
    for rows in active.split(step):
        logits = _logits(inputs, rows, weight).requires_grad_()
        logp, entropy = reference.token_logprobs(logits, inputs.targets[rows])
        logp_all[rows], entropy_all[rows] = logp.detach(), entropy.detach()
        if is_loss:
            assert inputs.old_logp is not None
            if not made:
                inputs.old_logp[rows] = (logp.detach() - inputs.log_ratio[rows]).float()
            terms = _loss_terms(logp, inputs, rows)
            objective = terms.sum()
            loss, size = loss + objective.detach(), size + terms.detach().abs().sum()
        else:
            objective = logp @ inputs.upstream["logp"][rows].double()
            if inputs.workload.op.endswith("entropy"):
                objective = objective + entropy @ inputs.upstream["entropy"][rows].double()
        (slope,) = torch.autograd.grad(objective, logits)
        if weight is None:
            gradients["logits"][rows] = slope.to(gradients["logits"].dtype)
        else:
            assert inputs.hidden is not None
            gradients["hidden"][rows] = slope @ weight
            gradients["weight"].addmm_(slope.t(), inputs.hidden.detach()[rows].double())
    if is_loss:
        return Expected({"loss": loss}, gradients, {"loss": float(size)})
    outputs = {"logp": logp_all}
    if inputs.workload.op.endswith("entropy"):
        outputs["entropy"] = entropy_all
    return Expected(outputs, gradients)


def _kept(leaf: str) -> torch.dtype:
    """[N, V] is kept in float32: rounding at the end is far below every tolerance."""
    return torch.float32 if leaf == "logits" else torch.float64


def _logits(inputs: Inputs, rows: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        assert inputs.logits is not None
        return inputs.logits.detach()[rows].double()
    assert inputs.hidden is not None
    return inputs.hidden.detach()[rows].double() @ weight.t()


def _scans(inputs: Inputs) -> Expected:
    """The advantages, on the CPU: their definitions are loops."""
    op, length = inputs.workload.op, inputs.workload.length
    numbers = {name: x.cpu() for name, x in inputs.numbers.items()}
    rewards, mask = numbers["rewards"].double(), inputs.mask.cpu()
    segments = torch.arange(rewards.numel()) // length
    if op == "group_advantages":
        outputs = {"advantages": reference.group_advantages(rewards, numbers["groups"], eps=EPS)}
    elif op == "step_advantages":
        ids = (numbers[name] for name in ("groups", "trajectories", "anchors"))
        outputs = {"advantages": reference.step_advantages(rewards, *ids, gamma=GAMMA, eps=EPS)[0]}
    elif op == "gae":
        values = numbers["values"].double()
        advantages, _ = reference.gae(rewards, values, segments, gamma=1.0, lam=LAM, mask=mask)
        outputs = {"advantages": reference.masked_whiten(advantages, mask)}
    elif op == "discounted_returns":
        outputs = {"returns": reference.discounted_returns(rewards, segments, gamma=GAMMA)}
    else:
        outputs = {"white": reference.masked_whiten(rewards, mask)}
    where = inputs.mask if op in ("gae", "masked_whiten") else None
    return Expected({name: x.to(inputs.mask.device) for name, x in outputs.items()}, where=where)


def relative_error(result: Tensor, expected: Tensor, scale: float | None = None, where: Tensor | None = None) -> float:
    """‖result - expected‖/‖expected‖ (or over `scale`), infinite where the result is not finite."""
    result, expected = result.detach(), expected.detach()
    if result.shape != expected.shape:
        result = result.reshape(expected.shape)
    if where is not None:
        result, expected = result[where], expected[where]
    rows = max(1, CHUNK_ELEMENTS // max(1, expected[0].numel())) if expected.dim() else 1
    off, size = 0.0, 0.0
    parts = zip(result.split(rows), expected.split(rows), strict=True) if expected.dim() else [(result, expected)]
    for a, b in parts:
        off += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    if off != off or off == float("inf"):
        return float("inf")
    return off**0.5 / max(scale if scale is not None else size**0.5, 1e-300)
