"""One update of an agent: mini-batches, micro-batches, the losses, the gradient's norm, the optimiser's steps.

Eq. 1 of the paper, J = (1 - α)·J_on + α·J_off, weights two means. A mean over all of an update's on-policy (or
replayed) terms becomes a sum over micro-batches with one common divisor, so that the gradient depends neither on how
rows fall into micro-batches nor on the padding, nor on which process computes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rspo_kernels import PolicyLossConfig

from ..config import Config, OptimizerConfig
from ..data.batch import Batch
from ..data.trajectory import Trajectory
from ..models.agent import Agent
from ..models.critic import score_values, value_loss
from ..models.forward import Part, Predictions
from ..models.policy import Policy, score
from ..models.processes import ALONE, Ranks
from ..models.sharded_tensors import local
from .mismatch import importance_weights
from .rewards import NonFiniteError
from .timing import PhaseTimer

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
        self, predictions: Predictions, temperature: float, config: PolicyLossConfig
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """-J of a micro-batch (0-d, with a graph) and the loss's statistics of either part."""
        batch = predictions.batch
        parts = {
            "on_policy": Part(~batch.is_replay, self.on_policy),
            "replay": Part(batch.is_replay, self.replay),
        }
        counted = {name: part for name, part in parts.items() if part.divisor > 0}
        return predictions.policy_loss(counted, batch.segments(), temperature, config)


def rescore(policy: Policy, trajectories: Sequence[Trajectory], config: Config, ranks: Ranks = ALONE) -> None:
    """Set the responses' behaviour log-probs to those of training forward passes under the policy that wrote them."""
    batch = Batch.from_trajectories(trajectories, config.env.layout).to(policy.device)
    logp = score(policy, batch, config.rollout.temperature, config.optimizer.micro_batch_tokens, ranks)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    for turn, part in zip(turns, logp.split(batch.turn_lengths.tolist()), strict=True):
        if config.engine.name == "transformers":  # whose log-probs at generation are those of its rollout
            turn.engine_logp = turn.behavior_logp
        turn.behavior_logp = part.cpu().numpy()


def prepare(
    agent: Agent, batch: Batch, trajectories: Sequence[Trajectory], config: Config, reference: Policy | None
) -> Batch:
    """The batch with what one update holds fixed: log-probs of replayed rows under the policy as it is now (old
    log-probs; those of on-policy rows are the rollout's), those under the reference where the loss asks for them, the
    importance weights of an engine that is not the training model, and the critic's values, where there is a critic."""
    temperature, max_tokens, ranks = config.rollout.temperature, config.optimizer.micro_batch_tokens, agent.ranks
    if config.engine.importance_cap is not None:
        weights = importance_weights(trajectories, config.engine.importance_cap)
        batch = replace(batch, weights=torch.from_numpy(weights).to(batch.targets.device))
    if batch.is_replay.any():
        rows = batch.token_row[batch.is_replay].unique()
        old_logp = batch.old_logp.clone()
        old_logp[batch.is_replay] = score(agent.policy, batch.select(rows), temperature, max_tokens, ranks)
        batch = replace(batch, old_logp=old_logp)
        if config.swap.ignore_behavior:
            batch = replace(batch, behavior_logp=old_logp)
    if config.loss.kl_coef > 0:
        if reference is None:
            raise ValueError(f"loss.kl_coef={config.loss.kl_coef} needs a reference policy, got None")
        batch = replace(batch, ref_logp=score(reference, batch, temperature, max_tokens, ranks))
    if agent.critic is not None:
        values = score_values(agent.critic, agent.policy, batch, max_tokens, ranks)
        bootstrap = torch.zeros_like(values)
        cut_off = [i for i, trajectory in enumerate(trajectories) if trajectory.final_prompt_ids is not None]
        if cut_off and config.estimator.bootstrap:
            states = Batch.from_prompts([_final_prompt(trajectories[i]) for i in cut_off]).to(values.device)
            after = score_values(agent.critic, agent.policy, states, max_tokens, ranks)
            bootstrap[batch.last_tokens(cut_off)] = after
        batch = replace(batch, values=values, bootstrap=bootstrap)
    return batch


def _final_prompt(trajectory: Trajectory) -> np.ndarray:
    assert trajectory.final_prompt_ids is not None
    return trajectory.final_prompt_ids


def update(
    agent: Agent,
    batch: Batch,
    trajectories: Sequence[Trajectory],
    config: Config,
    alpha: float,
    rng: np.random.Generator,
    timer: PhaseTimer,
) -> dict[str, float]:
    """`optimizer.epochs` passes over a prepared batch in mini-batches of rows, one optimiser step each.

    Args:
        batch: made from `trajectories`, complete after `prepare` and the estimator.
        alpha: the weight of replay in eq. 1.
        rng: deals the rows to mini-batches.

    Returns:
        Statistics over the whole update, `replay/...` over its replayed tokens only, `critic/...` of the critic.

    Raises:
        NonFiniteError: names the trajectory or parameter; the weights are still those before the failing step.
    """
    ranks, settings = agent.ranks, config.optimizer
    mixture = Mixture.of(batch, config.loss, alpha, config.swap.mixture == "pooled")
    statistics = UpdateStatistics()
    for _ in range(settings.epochs):
        minibatches = deal(batch, settings, rng)
        for rows in minibatches:
            minibatch = batch.select(rows)
            with timer("loss_backward"):
                agent.zero_grad()
                finite = torch.ones((), dtype=torch.bool, device=batch.targets.device)
                pieces = ranks.micro_batches(minibatch, settings.micro_batch_tokens, agent.policy.packs)
                for micro_rows, counts in pieces:
                    loss, stats = _losses(agent, minibatch.select(micro_rows), batch.num_tokens, mixture, config)
                    # The divisors are those of the whole update, of which a mini-batch is one part.
                    (loss * len(minibatches) * counts).backward()
                    if counts:
                        statistics.add(stats, loss.detach())
                        finite &= torch.isfinite(loss.detach())
            with timer("optimizer"):
                norms = agent.clip_gradients()
                finite &= torch.isfinite(torch.stack(list(norms.values()))).all()
                if ranks.sum((~finite).float()):
                    raise NonFiniteError(_diagnosis(agent, batch, trajectories, config))
                agent.step()
            statistics.add_norms(norms)
    return statistics.over(ranks).result(settings.epochs) | log_center_quantiles(batch) | _critic_quality(batch)


def _losses(
    agent: Agent, batch: Batch, num_tokens: int, mixture: Mixture, config: Config
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Policy and value loss of a micro-batch, 0-d with a graph, and the statistics of their parts.

    The value loss is a mean over all `num_tokens` of the update, replayed ones like the others.
    """
    critic, shared = agent.critic, agent.critic is not None and agent.critic.body is None

    def read(predictions: Predictions) -> tuple[Tensor, dict[str, dict[str, Tensor]], Tensor | None]:
        loss, stats = mixture.loss(predictions, config.rollout.temperature, config.loss)
        return loss, stats, predictions.hidden if shared else None

    loss, stats, hidden = agent.policy.module(batch, read, with_hidden=shared)
    if critic is not None:
        assert batch.values is not None  # `prepare` has seen to it,
        assert batch.returns is not None  # and the estimator
        values = critic.of_hidden(hidden) if shared and hidden is not None else critic.values(agent.policy, batch)
        errors = value_loss(values, batch.values, batch.returns, config.critic.value_clip)
        critic_loss = errors.sum() / num_tokens
        loss = loss + (config.critic.coef if shared else 1.0) * critic_loss
        stats["critic"] = {"loss": critic_loss.detach()}
    return loss, stats


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
        self.norms: dict[str, list[float]] = defaultdict(list)

    def add(self, stats: dict[str, dict[str, Tensor]], loss: Tensor) -> None:
        """Add a micro-batch."""
        for part, values in stats.items():
            self.parts[part].append(values)
        self.losses.append(loss)

    def add_norms(self, norms: dict[str, Tensor]) -> None:
        """Add the gradients' norms of a mini-batch."""
        for name, norm in norms.items():
            self.norms[name].append(float(norm))

    def over(self, ranks: Ranks) -> UpdateStatistics:
        """The statistics of all processes, whose norms are the same."""
        whole = UpdateStatistics()
        whole.norms = self.norms
        for parts, losses in ranks.gather(lambda: (dict(self.parts), self.losses)):
            for part, values in parts.items():
                whole.parts[part] += values
            whole.losses += losses
        return whole

    def result(self, epochs: int) -> dict[str, float]:
        """Over all tokens under plain names, over replayed tokens as `replay/...`; losses are means over epochs."""
        critic = [values["loss"] for values in self.parts.pop("critic", [])]
        everything = [values for part in self.parts.values() for values in part]
        merged = _merge(everything)
        merged |= {f"replay/{name}": value for name, value in _merge(self.parts["replay"]).items()}
        merged["loss"] = float(torch.stack(self.losses).sum()) / epochs
        if critic:
            merged["critic/loss"] = float(torch.stack(critic).sum()) / epochs
        return merged | {name: float(np.mean(norms)) for name, norms in self.norms.items()}


def _critic_quality(batch: Batch) -> dict[str, float]:
    """How well the critic knew the returns before the update."""
    if batch.values is None or batch.returns is None:
        return {}
    error, spread = (batch.returns - batch.values).var(), batch.returns.var()
    return {
        "critic/value_mean": float(batch.values.mean()),
        "critic/return_mean": float(batch.returns.mean()),
        "critic/explained_variance": 1.0 - float(error / spread) if spread > 0 else 0.0,
    }


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


def log_center_quantiles(batch: Batch) -> dict[str, float]:
    """Quantiles (`LOG_CENTER_QUANTILES`) of log c = log π_old - log π_B over replayed tokens, in nats: how far agent B,
    which sampled them, has gone from A.

    Args:
        batch: complete after `prepare`, so that the old log-probs of replayed tokens are those before the update.

    Returns:
        `replay/log_center_q05` and so on by their percentages; empty without replayed tokens.
    """
    if not batch.is_replay.any():
        return {}
    log_center = (batch.old_logp - batch.behavior_logp)[batch.is_replay].cpu().numpy()
    values = np.quantile(log_center, LOG_CENTER_QUANTILES)
    return {f"replay/log_center_q{100 * q:02.0f}": float(v) for q, v in zip(LOG_CENTER_QUANTILES, values, strict=True)}


def _diagnosis(agent: Agent, batch: Batch, trajectories: Sequence[Trajectory], config: Config) -> str:
    """Where a gradient that is not finite comes from. Advantages come last: whitening spreads one bad value over all
    of them."""
    settings = config.optimizer
    logp = score(agent.policy, batch, config.rollout.temperature, settings.micro_batch_tokens, agent.ranks)
    named = {
        "log-prob": logp,
        "old log-prob": batch.old_logp,
        "behaviour log-prob": batch.behavior_logp,
    }
    if batch.ref_logp is not None:
        named["reference log-prob"] = batch.ref_logp
    if batch.values is not None and batch.returns is not None:
        named |= {"value": batch.values, "return": batch.returns}
    named["advantage"] = batch.advantages
    inputs = torch.stack(list(named.values()))
    is_finite = torch.isfinite(inputs)
    bad = (~is_finite[:-1].all(0)).nonzero().squeeze(-1)
    if not len(bad):
        bad = (~is_finite[-1]).nonzero().squeeze(-1)
    if len(bad):
        turn = int(batch.token_turn[bad[0]])
        culprit = trajectories[int(batch.turn_trajectory[turn])]
        values = ", ".join(f"{name} {float(x):g}" for name, x in zip(named, inputs[:, bad[0]], strict=True))
        return f"turn {int(batch.turn_index[turn])} of {culprit} has {values}"
    found = next((names for names in agent.ranks.gather(lambda: _bad_gradients(agent)) if names), None)
    if found:
        return f"the gradient of parameter {found[0]!r} is not finite"
    return "the loss or the gradient's norm is not finite"


def _bad_gradients(agent: Agent) -> list[str]:
    """Names of the parameters whose gradient, or this process's part of it, is not finite."""
    named = ((name, local(p.grad)) for name, p in agent.named_parameters() if p.grad is not None)
    return [name for name, gradient in named if not torch.isfinite(gradient).all()]
