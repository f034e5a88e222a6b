"""The plain way to the loss of an update and its gradients, for comparison: the transformers model's own forward pass,
one row at a time, its logits in full, and the reference of the loss in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numerics import assert_close
from rspo_toys import small_config
from tiny_models import VOCAB
from torch import Tensor

from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import Mixture, prepare, update
from rspo.config import Config
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY, Trajectory, Turn
from rspo.models.agent import Agent
from rspo.models.policy import Policy, score
from rspo_kernels import reference

ALPHA = 0.25
TEMPERATURE = 0.7


def talk(
    index: int, *, turns: int, advantage: float, source: str = "on_policy", vocab: int = VOCAB, length: int = 3
) -> Trajectory:
    """A trajectory of random tokens whose prompts each continue the turn before, so that it fits both layouts.

    length: of what is new in a prompt, in tokens; up to 2 more by turns.
    """
    rng = np.random.default_rng(index)
    said = np.zeros(0, dtype=np.int64)
    made = []
    for turn in range(turns):
        prompt = np.concatenate([said, rng.integers(3, vocab, size=length + (index + turn) % 3)])
        response = rng.integers(3, vocab, size=1 + (index + turn) % 4)
        logp = rng.normal(-4.0, 0.5, size=len(response)).astype(np.float32)
        made.append(Turn(prompt, response, logp, 0.0, 0.0, "", "", True))
        said = np.concatenate([prompt, response])
    trajectory = Trajectory(task="", group=index // 4, index=index, turns=made)
    trajectory.advantages = np.full(turns, advantage, dtype=np.float32)
    trajectory.source = source
    return trajectory


def talks(vocab: int = VOCAB, length: int = 3) -> list[Trajectory]:
    """Six of A's own, two of which teach nothing, and two that are replayed."""
    of = functools.partial(talk, vocab=vocab, length=length)
    on_policy = [of(i, turns=2 + i % 2, advantage=(1.0, -1.5, 0.0)[i % 3]) for i in range(6)]
    return [*on_policy, *(of(6 + i, turns=2, advantage=1.0 - 2 * i, source=REPLAY) for i in range(2))]


def settings(*flags: str, layout: str = "per_turn") -> Config:
    """One mini-batch of several micro-batches, whose gradient is left as it is."""
    fixed = ["optimizer.minibatches=1", "optimizer.grad_clip=1e9", f"rollout.temperature={TEMPERATURE}"]
    full = ["loss.kl_coef=0.1", "loss.entropy_coef=0.05", "loss.center_cap=1.0", "optimizer.micro_batch_tokens=40"]
    return apply_flags(small_config(f"env.layout={layout}"), [*fixed, *full, *flags])


def prepared(policy: Policy, config: Config, made: Sequence[Trajectory]) -> Batch:
    """A batch as the trainer makes it, for a policy that has moved a little since its own rows were written."""
    agent, base = Agent(policy, config), policy.copy()
    with torch.no_grad():
        for parameter in base.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    batch = Batch.from_trajectories(made, config.env.layout)
    logp = score(base, batch, TEMPERATURE, 64)
    logp = torch.where(batch.is_replay, batch.behavior_logp, logp)
    return prepare(agent, replace(batch, behavior_logp=logp, old_logp=logp), made, config, base)


def trained(
    policy: Policy, config: Config, batch: Batch, made: Sequence[Trajectory]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Statistics and gradients of one update, whose step is left out."""
    agent = Agent(policy, config)
    agent.step = lambda: None  # type: ignore[method-assign]
    stats = update(agent, batch, made, config, ALPHA, np.random.default_rng(0), PhaseTimer())
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return stats, {name: gradient.clone() for name, gradient in gradients.items()}


class Loss(NamedTuple):
    """A loss and what it would be if all advantages had one sign, so that its terms did not cancel: the errors of its
    terms follow the latter."""

    value: float
    size: float

    def assert_close(self, actual: float, rtol: float = 1e-5) -> None:
        """rtol: of the size; float32 holds the log-probs of these models to 1e-6."""
        assert abs(actual - self.value) <= rtol * self.size, (actual, self)


def plain(
    policy: Policy, config: Config, batch: Batch, dtype: torch.dtype = torch.float64
) -> tuple[Loss, dict[str, Tensor]]:
    """Loss and gradients by the transformers model's own forward pass over one row at a time, in a dtype; the loss of
    its logits is the reference's in float64."""
    model = copy.deepcopy(policy.model).to(dtype)
    logits = []
    for row in range(batch.num_rows):
        ids = batch.input_ids[row : row + 1, : int(batch.row_lengths[row])]
        logits.append(model(input_ids=ids, use_cache=False).logits[0, batch.token_column[batch.token_row == row]])
    logp, entropy = reference.token_logprobs(torch.cat(logits).double(), batch.targets, temperature=TEMPERATURE)
    mixture = Mixture.of(batch, config.loss, ALPHA, pooled=False)
    loss, size = torch.zeros((), dtype=torch.float64), 0.0
    for mask, divisor in ((~batch.is_replay, mixture.on_policy), (batch.is_replay, mixture.replay)):
        of = functools.partial(
            reference.policy_loss,
            logp,
            config=config.loss,
            mask=mask,
            normalizer=divisor,
            sequence_ids=batch.token_row,
            member_ids=batch.token_turn if config.loss.ratio_level == "turn" else batch.token_row,
            old_logp=batch.old_logp.double(),
            behavior_logp=batch.behavior_logp.double(),
            ref_logp=None if batch.ref_logp is None else batch.ref_logp.double(),
            entropy=entropy,
        )
        loss = loss + of(advantages=batch.advantages.double())[0]
        size += abs(of(advantages=batch.advantages.double().abs())[0].item())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Loss(loss.item(), size), gradients


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-4) -> None:
    """Every parameter's, against the largest entry of each."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        size = float(gradient.abs().max())
        assert size > 0, name
        assert_close(f"gradient of {name}", actual[name], gradient, rtol=0, atol=rtol * size)
