"""One update of an agent: mini-batches, micro-batches, the loss, the gradient's norm, the optimiser's steps.

Eq. 1 of the paper, J = (1 - α)·J_on + α·J_off, weights two means. A mean over all of an update's on-policy (or
replayed) terms becomes a sum over micro-batches with one common divisor, so that the gradient depends neither on how
rows fall into micro-batches nor on the padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rspo_kernels import PolicyLossConfig, policy_loss

from .agent import Agent
from .config import Config, OptimizerConfig
from .models import Policy, score
from .rewards import NonFiniteError
from .timing import PhaseTimer
from .trajectory import Batch, Trajectory

LOG_CENTER_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Mixture:
    """What the sums over on-policy and over replayed terms are divided by; 0 where there are none."""

    on_policy: float
    replay: float

    @classmethod
    def of(cls, batch: Batch, loss: PolicyLossConfig, alpha: float, pooled: bool) -> Mixture:
        """Divisors that make eq. 1 of the sums over a whole batch.

        Terms are tokens under "token-mean" and rows under the aggregations over sequences. A batch without replay has
        J = J_on.
        """
        if loss.aggregation == "token-mean":
            replayed = batch.is_replay
        else:
            replayed = torch.zeros(batch.num_rows, dtype=torch.bool, device=batch.targets.device)
            replayed[batch.token_row[batch.is_replay]] = True
        total, n_off = replayed.numel(), int(replayed.sum())
        n_on = total - n_off
        if n_off == 0 or n_on == 0 or pooled:
            return cls(total if n_on else 0, total if n_off else 0)
        return cls(n_on / (1 - alpha), n_off / alpha if alpha > 0 else 0)

    def loss(
        self, batch: Batch, logp: Tensor, entropy: Tensor, config: PolicyLossConfig
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """-J of a micro-batch (0-d, with a graph) and the loss's statistics of either part."""
        segments = batch.segments()
        losses: list[Tensor] = []
        stats: dict[str, dict[str, Tensor]] = {}
        if config.entropy_coef == 0:
            entropy = entropy.detach()  # a statistic only
        for part, divisor, mask in (
            ("on_policy", self.on_policy, ~batch.is_replay),
            ("replay", self.replay, batch.is_replay),
        ):
            if divisor > 0:
                loss, stats[part] = policy_loss(
                    logp,
                    batch.advantages,
                    mask=mask,
                    normalizer=divisor,
                    old_logp=batch.old_logp,
                    behavior_logp=batch.behavior_logp,
                    ref_logp=batch.ref_logp,
                    entropy=entropy,
                    segments=segments,
                    config=config,
                )
                losses.append(loss)
        return torch.stack(losses).sum(), stats


def prepare(policy: Policy, batch: Batch, config: Config, reference: Policy | None) -> Batch:
    """The batch with what one update holds fixed: log-probs of replayed rows under the policy as it is now (old
    log-probs; those of on-policy rows are the rollout's), and under the reference where the loss asks for them."""
    temperature, max_tokens = config.rollout.temperature, config.optimizer.micro_batch_tokens
    if batch.is_replay.any():
        rows = batch.token_row[batch.is_replay].unique()
        old_logp = batch.old_logp.clone()
        old_logp[batch.is_replay] = score(policy, batch.select(rows), temperature, max_tokens)
        batch = replace(batch, old_logp=old_logp)
    if config.loss.kl_coef > 0:
        if reference is None:
            raise ValueError(f"loss.kl_coef={config.loss.kl_coef} needs a reference policy, got None")
        batch = replace(batch, ref_logp=score(reference, batch, temperature, max_tokens))
    return batch


def update(
    agent: Agent,
    batch: Batch,
    trajectories: Sequence[Trajectory],
    config: Config,
    alpha: float,
    rng: np.random.Generator,
    timer: PhaseTimer,
) -> dict[str, float]:
    """One pass over a prepared batch in mini-batches of rows, one optimiser step each.

    Args:
        batch: made from `trajectories`, with old (and reference) log-probs set by `prepare`.
        alpha: the weight of replay in eq. 1.
        rng: deals the rows to mini-batches.

    Returns:
        Statistics over the whole update, `replay/...` over its replayed tokens only.

    Raises:
        NonFiniteError: names the trajectory or parameter; the weights are still those before the failing step.
    """
    mixture = Mixture.of(batch, config.loss, alpha, config.swap.mixture == "pooled")
    statistics = UpdateStatistics()
    minibatches = deal(batch, config.optimizer, rng)
    for rows in minibatches:
        minibatch = batch.select(rows)
        with timer("loss_backward"):
            agent.optimizer.zero_grad(set_to_none=True)
            finite = torch.ones((), dtype=torch.bool, device=batch.targets.device)
            for micro_rows in minibatch.micro_batches(config.optimizer.micro_batch_tokens):
                micro = minibatch.select(micro_rows)
                logp, entropy = agent.policy.logprobs(micro, config.rollout.temperature)
                loss, stats = mixture.loss(micro, logp, entropy, config.loss)
                # The divisors are those of the whole update, of which a mini-batch is one part.
                (loss * len(minibatches)).backward()
                statistics.add(stats, loss.detach())
                finite &= torch.isfinite(loss.detach())
        with timer("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(agent.policy.model.parameters(), config.optimizer.grad_clip)
            if not finite & torch.isfinite(norm):
                raise NonFiniteError(_diagnosis(agent, minibatch, trajectories, config))
            agent.optimizer.step()
        statistics.gradient_norms.append(float(norm))
    return statistics.result() | _log_center_quantiles(batch)


def deal(batch: Batch, config: OptimizerConfig, rng: np.random.Generator) -> list[Tensor]:
    """The rows of each mini-batch, int64, at random; sizes differ by one row at most."""
    count = config.minibatches
    if config.minibatch_rows is not None:
        count = -(-batch.num_rows // config.minibatch_rows)
    parts = np.array_split(rng.permutation(batch.num_rows), min(count, batch.num_rows))
    return [torch.from_numpy(np.sort(rows)).to(batch.targets.device) for rows in parts]


class UpdateStatistics:
    """Means and maxima over the micro-batches of an update, kept on the device until the end."""

    def __init__(self) -> None:
        self.parts: dict[str, list[dict[str, Tensor]]] = defaultdict(list)
        self.losses: list[Tensor] = []
        self.gradient_norms: list[float] = []

    def add(self, stats: dict[str, dict[str, Tensor]], loss: Tensor) -> None:
        """Add a micro-batch."""
        for part, values in stats.items():
            self.parts[part].append(values)
        self.losses.append(loss)

    def result(self) -> dict[str, float]:
        """Over all tokens under plain names, over replayed tokens as `replay/...`."""
        everything = [values for part in self.parts.values() for values in part]
        merged = _merge(everything)
        merged |= {f"replay/{name}": value for name, value in _merge(self.parts["replay"]).items()}
        merged["loss"] = float(torch.stack(self.losses).sum())
        merged["gradient_norm"] = float(np.mean(self.gradient_norms))
        return merged


def _merge(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Statistics of all parts together: maxima of maxima, means weighted by the number of tokens."""
    if not parts:
        return {}
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name].float() for name in names]) for part in parts]).cpu().double()
    tokens = table[:, names.index("num_tokens")]
    merged = {}
    for column, name in enumerate(names):
        values = table[:, column]
        if name == "num_tokens":
            merged[name] = float(values.sum())
        elif name.endswith("_max"):
            merged[name] = float(values.max())
        else:
            merged[name] = float((values * tokens).sum() / tokens.sum().clamp(min=1))
    return merged


def _log_center_quantiles(batch: Batch) -> dict[str, float]:
    """Quantiles of log c = log π_old - log π_B over replayed tokens: how far B has gone from A."""
    if not batch.is_replay.any():
        return {}
    log_center = (batch.old_logp - batch.behavior_logp)[batch.is_replay].cpu().numpy()
    values = np.quantile(log_center, LOG_CENTER_QUANTILES)
    return {f"replay/log_center_q{100 * q:02.0f}": float(v) for q, v in zip(LOG_CENTER_QUANTILES, values, strict=True)}


def _diagnosis(agent: Agent, batch: Batch, trajectories: Sequence[Trajectory], config: Config) -> str:
    """Where a gradient that is not finite comes from."""
    logp = score(agent.policy, batch, config.rollout.temperature, config.optimizer.micro_batch_tokens)
    inputs = torch.stack([logp, batch.old_logp, batch.behavior_logp, batch.advantages])
    bad = (~torch.isfinite(inputs).all(0)).nonzero().squeeze(-1)
    if len(bad):
        row = int(batch.token_row[bad[0]])
        culprit = trajectories[int(batch.row_trajectory[row])]
        names = ("log-prob", "old log-prob", "behaviour log-prob", "advantage")
        values = ", ".join(f"{name} {float(x):g}" for name, x in zip(names, inputs[:, bad[0]], strict=True))
        return f"turn {int(batch.row_turn[row])} of {culprit} has {values}"
    for name, parameter in agent.policy.model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the gradient of parameter {name!r} is not finite"
    return "the loss or the gradient's norm is not finite"
