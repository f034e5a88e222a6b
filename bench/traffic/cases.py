"""What is counted: inputs with given shares of active and clipped tokens, what is right for them, and the floors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rspo_kernels import PolicyLossConfig, reference

SEQUENCES = 2
TEMPERATURE = 0.9
CONFIG = PolicyLossConfig()
ENTROPY_SLOPE = 0.01
"""Upstream gradient of the entropies where they have one."""

Results = dict[str, Tensor]
Work = Callable[[], Results]
"""A provider's work on a case, ready to run: what it needs before is not counted."""


class Shares(NamedTuple):
    """Share of all tokens that are not masked, and share of those that are clipped."""

    active: float
    clipped: float


ALL, QUARTER, CLIPPED = Shares(1.0, 0.0), Shares(0.25, 0.0), Shares(1.0, 0.5)


@dataclass(frozen=True)
class Case:
    """Tokens [B, L] of two sequences, one good and one bad, with their logits [B, L, V].

    The logits come from hidden [B, L, H] and weight [V, H], or by themselves (hidden and weight are None then).
    """

    shares: Shares
    logits: Tensor
    targets: Tensor
    mask: Tensor
    advantages: Tensor
    hidden: Tensor | None = None
    weight: Tensor | None = None

    @classmethod
    def of_logits(cls, shares: Shares, tokens: int, vocab: int, dtype: torch.dtype) -> Case:
        rng = torch.Generator().manual_seed(0)
        shape = (SEQUENCES, tokens // SEQUENCES)
        logits = (2 * torch.randn(*shape, vocab, generator=rng)).to(dtype)
        return cls(shares, logits, *_tokens(shares, shape, vocab, rng))

    @classmethod
    def of_hidden(cls, shares: Shares, tokens: int, vocab: int, width: int, dtype: torch.dtype) -> Case:
        rng = torch.Generator().manual_seed(0)
        shape = (SEQUENCES, tokens // SEQUENCES)
        hidden = torch.randn(*shape, width, generator=rng).to(dtype)
        weight = (torch.randn(vocab, width, generator=rng) * 2 / width**0.5).to(dtype)
        logits = hidden.double() @ weight.double().t()
        return cls(shares, logits, *_tokens(shares, shape, vocab, rng), hidden, weight)

    @property
    def tokens(self) -> int:
        return self.targets.numel()

    @property
    def vocab(self) -> int:
        return self.logits.shape[-1]

    @property
    def moving(self) -> float:
        """Share of all tokens that have a gradient."""
        return self.shares.active * (1 - self.shares.clipped)

    @cached_property
    def logp(self) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every token, float64."""
        return reference.token_logprobs(self.logits.double(), self.targets, temperature=TEMPERATURE)

    @cached_property
    def old_logp(self) -> Tensor:
        """Such that the ratio is exp(±0.05), or on the side that its advantage pushes it to, exp(±0.5)."""
        clipped = torch.zeros_like(self.mask).flatten()
        if self.shares.clipped:
            clipped[self.mask.flatten().nonzero().squeeze(-1)[:: round(1 / self.shares.clipped)]] = True
        clipped = clipped.view_as(self.mask)
        return (self.logp[0] - self.advantages.sign()[:, None] * torch.where(clipped, 0.5, 0.05)).float()

    @cached_property
    def expected(self) -> Results:
        """Everything that the ops give, by the reference in float64."""
        logits = self.logits.double().requires_grad_()
        logp, entropy = reference.token_logprobs(logits, self.targets, temperature=TEMPERATURE, mask=self.mask)
        flat = {"mask": self.mask.flatten(), "old_logp": self.old_logp.double().flatten()}
        advantages = self.advantages.double().repeat_interleave(self.mask.shape[1])
        loss, stats = reference.policy_loss(logp.flatten(), advantages, CONFIG, **flat)
        share = float(stats["clip_frac_low"] + stats["clip_frac_high"])
        assert share == self.shares.clipped, f"{share} of the tokens are clipped, {self.shares.clipped} should be"
        (slope,) = torch.autograd.grad(loss, logp, retain_graph=True)
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (bent,) = torch.autograd.grad(loss + (ENTROPY_SLOPE * entropy).sum(), logits)
        found = {
            "logp": logp,
            "entropy": entropy,
            "loss": loss,
            "slope": slope,
            "grad": grad,
            "grad_with_entropy": bent,
        }
        if self.hidden is not None and self.weight is not None:
            found["grad_hidden"] = grad @ self.weight.double()
            found["grad_weight"] = grad.flatten(0, 1).t() @ self.hidden.double().flatten(0, 1)
        return {name: x.detach() for name, x in found.items()}

    def fault(self, results: Results) -> str:
        """What is wrong with a provider's results, or nothing."""
        for name, x in results.items():
            want = self.expected[name]
            scale = float(want.abs().max())
            error = float((x.detach().double().reshape(want.shape) - want).abs().max()) / scale
            # Of bf16's last place the interpreter makes nothing; where a row has no gradient, it must be exactly 0.
            if not error < (0.01 if name.startswith("grad") else 1e-4):
                return f"{name} is wrong by {error:.1e} of the largest"
            if name == "grad" and x.view_as(want)[(want == 0).all(-1)].any():
                return f"{name} is not 0 where it should be"
        return ""


def _tokens(shares: Shares, shape: tuple[int, int], vocab: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, mask and the advantages of the sequences."""
    targets = torch.randint(0, vocab, shape, generator=rng)
    every = round(1 / shares.active)
    mask = (torch.arange(targets.numel()) % every == 0).view(shape)
    return targets, mask, torch.tensor([1.5, -0.5])


LOSS, LOGPROBS, LOGPROBS_ENTROPY = "logits_policy_loss", "token_logprobs", "token_logprobs with entropy"
LINEAR_LOSS, LINEAR_LOGPROBS = "linear_policy_loss", "linear_token_logprobs"
FORWARD, BOTH = "forward", "forward+backward"

FLOORS: dict[tuple[str, str], Callable[[Case], float]] = {
    (LOSS, BOTH): lambda case: case.shares.active + 1,
    (LOGPROBS, FORWARD): lambda case: case.shares.active,
    (LOGPROBS_ENTROPY, FORWARD): lambda case: case.shares.active,
    (LOGPROBS, BOTH): lambda case: case.shares.active + case.moving + 1,
    (LOGPROBS_ENTROPY, BOTH): lambda case: 2 * case.shares.active + 1,
    (LINEAR_LOSS, BOTH): lambda case: 2 * case.shares.active + 3 * case.moving,
    (LINEAR_LOGPROBS, FORWARD): lambda case: 0,
}
"""Least passes over [N, V]; the caption of the suite's table has them in words."""
