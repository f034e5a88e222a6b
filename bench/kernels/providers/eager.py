"""Plain PyTorch as people write it, and torch.compile of the same functions.

bf16 logits become float32 before the softmax, as careful code has it. `dynamic=False`: the compiler may use every size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from ..workloads import CLIP, EPS, GAMMA, GROUP_SIZE, LAM, Inputs
from . import COMPILE, EAGER, Function, provider


def logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log_softmax and gather."""
    return torch.log_softmax(logits.float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The same through PyTorch's own fused op."""
    return -torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def logprobs_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(logits.float(), -1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def clipped_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, keep: Tensor) -> Tensor:
    """PPO's clipped surrogate, the mean over unmasked tokens; keep is a mask of 0 and 1."""
    ratio = torch.exp(logp - old_logp)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(objective * keep).sum() / keep.sum().clamp(min=1)


def _logits_loss(logits: Tensor, targets: Tensor, old: Tensor, advantages: Tensor, keep: Tensor) -> Tensor:
    return clipped_loss(logprobs(logits, targets), old, advantages, keep)


def _logits_loss_ce(logits: Tensor, targets: Tensor, old: Tensor, advantages: Tensor, keep: Tensor) -> Tensor:
    return clipped_loss(cross_entropy(logits, targets), old, advantages, keep)


def _linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, old: Tensor, advantages: Tensor, keep: Tensor
) -> Tensor:
    return clipped_loss(logprobs(hidden @ weight.t(), targets), old, advantages, keep)


def _linear_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return logprobs(hidden @ weight.t(), targets)


def _linear_both(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logprobs_and_entropy(hidden @ weight.t(), targets)


def _partners(x: Inputs) -> tuple[Tensor, ...]:
    assert x.old_logp is not None
    return x.old_logp, x.advantages, x.keep


def _named(function: Callable[..., Tensor | tuple[Tensor, ...]], op: str) -> Function:
    """A function of tensors as one of Inputs."""

    def run(x: Inputs) -> dict[str, Tensor]:
        if op == "policy_loss":
            results = function(x.logp, *_partners(x))
        elif op == "logits_policy_loss":
            results = function(x.logits, x.targets, *_partners(x))
        elif op == "linear_policy_loss":
            results = function(x.hidden, x.weight, x.targets, *_partners(x))
        elif op.startswith("linear"):
            results = function(x.hidden, x.weight, x.targets)
        else:
            results = function(x.logits, x.targets)
        if isinstance(results, tuple):
            return {"logp": results[0], "entropy": results[1]}
        return {"loss" if op.endswith("loss") else "logp": results}

    return run


FORMULATIONS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "token_logprobs": logprobs,
    "token_logprobs + entropy": logprobs_and_entropy,
    "linear_token_logprobs": _linear_logprobs,
    "linear_token_logprobs + entropy": _linear_both,
    "policy_loss": clipped_loss,
    "logits_policy_loss": _logits_loss,
    "linear_policy_loss": _linear_loss,
}

for _op, _function in FORMULATIONS.items():
    provider(_op, "torch", EAGER)(lambda op=_op, function=_function: _named(function, op))
    provider(_op, "torch.compile", COMPILE, compiled=True)(
        lambda op=_op, function=_function: _named(torch.compile(function, dynamic=False), op)
    )


@provider("token_logprobs", "torch cross_entropy", EAGER)
def _token_logprobs_ce() -> Function:
    return _named(cross_entropy, "token_logprobs")


@provider("logits_policy_loss", "torch cross_entropy", EAGER)
def _logits_policy_loss_ce() -> Function:
    return _named(_logits_loss_ce, "logits_policy_loss")


@provider("linear_policy_loss", "torch, rows selected", EAGER, note="masked rows taken out by hand")
def _linear_rows_selected() -> Function:
    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.hidden is not None
        assert x.weight is not None
        rows = x.mask.nonzero().squeeze(-1)
        old, advantages, keep = (y[rows] for y in _partners(x))
        return {"loss": _linear_loss(x.hidden[rows], x.weight, x.targets[rows], old, advantages, keep)}

    return run


@provider("group_advantages", "torch", EAGER, note="only for sorted groups of one size")
def _group_advantages() -> Function:
    def run(x: Inputs) -> dict[str, Tensor]:
        rewards = x.numbers["rewards"].view(-1, GROUP_SIZE)
        centered = rewards - rewards.mean(1, keepdim=True)
        return {"advantages": (centered / (rewards.std(1, keepdim=True) + EPS)).flatten()}

    return run


@provider("step_advantages", "torch", EAGER, note="loops over trajectories and anchors, as GiGPO's code")
def _step_advantages() -> Function:
    def normalize(out: Tensor, members: dict[tuple, list[int]], scores: Tensor) -> None:
        for rows in members.values():
            r = scores[rows]
            if len(rows) > 1:
                out[rows] = (r - r.mean()) / (r.std() + EPS)

    def run(x: Inputs) -> dict[str, Tensor]:
        rewards = x.numbers["rewards"]
        groups, trajectories, anchors = (x.numbers[k].tolist() for k in ("groups", "trajectories", "anchors"))
        turns, states = defaultdict(list), defaultdict(list)
        for t, key in enumerate(zip(groups, trajectories, strict=True)):
            turns[key].append(t)
            states[groups[t], anchors[t]].append(t)
        returns, step, tasks = torch.zeros_like(rewards), torch.zeros_like(rewards), defaultdict(list)
        totals, per_turn = rewards.new_zeros(len(turns)), torch.zeros_like(rewards, dtype=torch.long)
        for i, ((group, _), rows) in enumerate(turns.items()):
            following = rewards.new_zeros(())
            for t in reversed(rows):
                returns[t] = following = rewards[t] + GAMMA * following
            totals[i], per_turn[rows] = rewards[rows].sum(), i
            tasks[group].append(i)
        normalize(step, states, returns)
        episode = torch.zeros_like(totals)
        normalize(episode, tasks, totals)
        return {"advantages": episode[per_turn] + step}

    return run


@provider("gae", "torch", EAGER, note="loop over time, as trainers write it")
def _gae() -> Function:
    def run(x: Inputs) -> dict[str, Tensor]:
        rewards, values, keep = x.view(x.numbers["rewards"]), x.view(x.numbers["values"]), x.view(x.keep)
        following = last = rewards.new_zeros(rewards.shape[0])
        columns = []
        for t in reversed(range(rewards.shape[1])):
            advantage = rewards[:, t] + following - values[:, t] + LAM * last
            last = torch.where(keep[:, t] > 0, advantage, last)
            following = torch.where(keep[:, t] > 0, values[:, t], following)
            columns.append(last)
        return {"advantages": _whiten(torch.stack(columns[::-1], 1), keep)}

    return run


@provider("discounted_returns", "torch", EAGER, note="loop over time, as trainers write it")
def _discounted_returns() -> Function:
    def run(x: Inputs) -> dict[str, Tensor]:
        rewards = x.view(x.numbers["rewards"])
        following, columns = rewards.new_zeros(rewards.shape[0]), []
        for t in reversed(range(rewards.shape[1])):
            following = rewards[:, t] + GAMMA * following
            columns.append(following)
        return {"returns": torch.stack(columns[::-1], 1)}

    return run


@provider("masked_whiten", "torch", EAGER)
def _masked_whiten() -> Function:
    return lambda x: {"white": _whiten(x.numbers["rewards"], x.keep)}


def _whiten(x: Tensor, keep: Tensor) -> Tensor:
    n = keep.sum()
    mean = (x * keep).sum() / n
    variance = ((x - mean).square() * keep).sum() / (n - 1)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * keep
