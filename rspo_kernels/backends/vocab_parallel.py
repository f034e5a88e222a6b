"""A vocabulary spread over processes: each has the logits of its own slice, and the softmax is over all of them.

With M_k, L_k, H_k the maximum, log-sum and entropy of slice k, (M, L, H) those of the whole, and T the temperature:

    M = max_k M_k          L = log Σ_k exp(L_k + (M_k - M)/T)          w_k = exp(L_k + (M_k - M)/T - L)
    logp = logp_k + L_k + (M_k - M)/T - L      on the process whose slice has the target
    H = L - Σ_k w_k·((M_k - M)/T + L_k - H_k)

so that forward costs one maximum and one sum over a few numbers a row. The gradient of a slice's logits needs nothing
from the others; that of hidden states is a sum over the processes (`add_up`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import Implementation
from .common import LogitsTransform, kept
from .torch_impl.logprobs import MIN_EXPONENT, softcap_slope


class VocabParallel:
    """A backend's functions over a vocabulary that is spread over the processes of `transform.vocab_group`."""

    def __init__(self, impl: Implementation) -> None:
        self.impl = impl
        self.policy_loss_forward = impl.policy_loss_forward

    def token_logprobs_forward(
        self, logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitsTransform, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logits [B, L, V of this process], global targets [B, L] -> logp, entropy, row_max, log_sum of the whole."""
        group = _group(transform)
        keep, owned = kept(targets, mask, transform), _owned(targets, transform)
        local = torch.where(owned & keep, targets - transform.vocab_start, 0)
        own_logp, own_entropy, own_max, own_sum = self.impl.token_logprobs_forward(
            logits, local, keep, _slice_only(transform), with_entropy
        )
        empty = own_sum == -torch.inf
        row_max = torch.where(empty, torch.finfo(own_max.dtype).min, own_max)
        dist.all_reduce(row_max, dist.ReduceOp.MAX, group)
        # Where every slice is empty there is no maximum to be relative to.
        row_max = torch.where(row_max == torch.finfo(row_max.dtype).min, 0.0, row_max)
        shift = torch.where(empty, -torch.inf, own_sum + (own_max - row_max) * transform.factor)
        mass = shift.exp()
        target = torch.where(owned & keep & (own_logp > -torch.inf), own_logp + shift, 0.0)
        spread = mass * (shift - own_entropy if with_entropy else shift)
        spread = torch.where(mass == 0, 0.0, spread)
        impossible = owned & keep & (own_logp == -torch.inf)
        parts = torch.stack([mass, target, spread, impossible.to(mass.dtype), owned.to(mass.dtype)])
        dist.all_reduce(parts, dist.ReduceOp.SUM, group)
        total, target, spread, impossible_sum, owners = parts
        log_sum = total.log()
        logp = (target - log_sum).clamp(min=torch.finfo(log_sum.dtype).min)
        logp = torch.where((impossible_sum > 0) & ~total.isnan(), -torch.inf, logp)
        # No process has a target outside the vocabulary.
        logp = torch.where(owners == 1, logp, torch.nan)
        logp = torch.where(keep, logp, 0.0)
        row_max, log_sum = torch.where(keep, row_max, 0.0), torch.where(keep, log_sum, 0.0)
        entropy = own_entropy
        if with_entropy:
            entropy = torch.where(keep & (total > 0), (log_sum - spread / total).clamp(min=0), 0.0)
        return logp, entropy, row_max, log_sum

    def token_logprobs_backward(
        self,
        grad_logp: Tensor,
        grad_entropy: Tensor | None,
        logits: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        logp: Tensor,
        entropy: Tensor,
        row_max: Tensor,
        log_sum: Tensor,
        transform: LogitsTransform,
        out: Tensor,
    ) -> None:
        """Write d(loss)/d(logits of this process) into out, which may be the logits themselves."""
        keep = kept(targets, mask, transform)
        here = keep & _owned(targets, transform)
        column = torch.where(here, targets - transform.vocab_start, 0).long().unsqueeze(-1)
        g = torch.where((logp == -torch.inf) & ~grad_logp.isnan(), 0.0, grad_logp)
        slope = softcap_slope(logits.gather(-1, column).to(logp.dtype), transform).squeeze(-1)
        # The target's own gradient, g·(1 - p) - h·p·(log p + H), over what its slice makes of it.
        at_target = -torch.expm1(logp) * g
        if grad_entropy is not None:
            h = torch.where(log_sum == -torch.inf, 0.0, grad_entropy)
            at_target = at_target - logp.exp() * (logp.clamp(min=MIN_EXPONENT) + entropy) * h
        at_target = (at_target * slope * transform.factor).unsqueeze(-1)
        state = (logp, entropy, row_max, log_sum)
        self.impl.token_logprobs_backward(
            grad_logp, grad_entropy, logits, None, keep, *state, _slice_only(transform), out
        )
        moved = g != 0 if grad_entropy is None else (g != 0) | (grad_entropy != 0)
        here = (here & moved).unsqueeze(-1)
        out.scatter_(-1, column, torch.where(here, at_target.to(out.dtype), out.gather(-1, column)))


def add_up(partial: Tensor, transform: LogitsTransform) -> None:
    """Sum a gradient to which every slice contributed over the processes; nothing where there is one slice."""
    if transform.vocab_group and partial.numel():
        dist.all_reduce(partial, dist.ReduceOp.SUM, _group(transform))


def _group(transform: LogitsTransform) -> dist.ProcessGroup:
    # Operators take strings, not groups; torch's own functional collectives find theirs in the same way.
    name: Any = transform.vocab_group
    return dist.distributed_c10d._resolve_process_group(name)


def _owned(targets: Tensor, transform: LogitsTransform) -> Tensor:
    """Targets in this process's slice."""
    return (targets >= transform.vocab_start) & (targets < transform.vocab_start + transform.valid_vocab)


def _slice_only(transform: LogitsTransform) -> LogitsTransform:
    """The transform for the backend, which knows the slice alone; the mask has all there is to ignore."""
    return transform._replace(vocab_group="", vocab_start=0, ignore_index=-(2**62))
