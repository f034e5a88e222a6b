"""Training of a process reward model on collected trajectories and their final rewards.

A run writes `metrics.jsonl` as it goes (records "update" and "validation") and the model at its end. It is meant to be
short, by default one pass over the data, and begins anew when it was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..algorithm.rewards import NonFiniteError
from ..config import Config, ConfigError, RewardModelConfig
from ..config.lock import FolderLock
from ..data.conversations import Reading
from ..data.trajectory import Trajectory
from ..models.lora import require_whole_model
from ..models.policy import Policy
from ..models.randomness import named_generator, named_seed
from ..models.reward_model import RewardModel, micro_batches
from ..models.tiny import tiny_policy
from .records import Tracker

VALIDATIONS = 10
"""Measurements on held-out trajectories during training, besides the one before it."""


def train_reward_model(
    trajectories: Sequence[Trajectory], config: Config, folder: Path, *, path: str | None = None, progress: bool = True
) -> dict[str, float]:
    """Train on trajectories and save to a folder; what the model measures on those held out (`measure`).

    path: folder of the causal LM to start from; None: a fresh tiny one over the trajectories' words.

    Raises ConfigError for too few trajectories or a target outside [0, 1], NonFiniteError that names a trajectory.
    """
    settings = config.reward_model
    targets = final_rewards(trajectories, settings.target)
    # Adam's steps at these learning rates are smaller than bfloat16 can tell apart.
    policy_config = replace(config.policy, dtype="float32", fused="off", chat="auto", chat_template_kwargs={})
    if path is not None:
        require_whole_model(path, "--model")
        policy = Policy.load(path, policy_config, needs_head=False)
    else:
        policy = tiny_policy(_words(trajectories), named_seed(config.run.seed, "reward model"), policy_config, 2048)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(named_seed(config.run.seed, "reward model head"))
        model = RewardModel(policy, settings.head_width, settings.max_tokens, settings.micro_batch_tokens)
    with FolderLock(folder):
        trainer = RewardTrainer(model, trajectories, targets, config, folder, progress)
        try:
            measured = trainer.train()
        finally:
            trainer.tracker.close()
        about = {"held_out": measured, "trajectories": len(trajectories), "settings": asdict(settings), "base": path}
        model.save(folder, about)
    return measured


class RewardTrainer:
    """Fits a reward model.

    Args:
        model: is trained in place.
        trajectories: a share of them is held out.
        targets: float32 [trajectories], R.
        config: `reward_model`, and the seed.
        folder: gets the records.
    """

    def __init__(
        self,
        model: RewardModel,
        trajectories: Sequence[Trajectory],
        targets: np.ndarray,
        config: Config,
        folder: Path,
        progress: bool,
    ) -> None:
        self.model = model
        self.trajectories = trajectories
        self.settings = config.reward_model
        self.rng = named_generator(config.run.seed, "reward model batches")
        self.readings = model.read(trajectories)
        self.targets = torch.from_numpy(targets).to(model.policy.device)
        order = self.rng.permutation(len(trajectories))
        held_out = round(self.settings.held_out * len(trajectories))
        if held_out == len(trajectories) or (held_out < 2 and self.settings.held_out > 0):
            raise ConfigError(
                f"reward_model.held_out={self.settings.held_out} of {len(trajectories)} trajectories leaves"
                f" {len(trajectories) - held_out} to train on and {held_out} to measure (at least 1 and 2 are needed);"
                " collect more"
            )
        self.held_out, self.train_set = order[:held_out], order[held_out:]
        self.batches = -(-len(self.train_set) // self.settings.batch_size)
        self.updates = self.settings.epochs * self.batches
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay
        )
        self.tracker = Tracker(folder, self.updates, progress=progress)

    def train(self) -> dict[str, float]:
        """All epochs; the last measurement on the held-out trajectories ({} without any)."""
        tracker, every = self.tracker, max(1, self.updates // VALIDATIONS)
        tracker.bar.set_description("reward model")
        if self.updates <= self.settings.warmup_updates:
            tracker.say(
                f"note: {self.updates} updates end inside the {self.settings.warmup_updates} of"
                " reward_model.warmup_updates; the learning rate stays below reward_model.learning_rate"
            )
        measured = self._validate(0)
        step = 0
        for _ in range(self.settings.epochs):
            order = self.rng.permutation(self.train_set)
            for batch in np.array_split(order, self.batches):
                loss = self._update(batch, step)
                step += 1
                tracker.record("update", step, {"loss": loss, "learning_rate": self._learning_rate(step - 1)})
                if step % every == 0 or step == self.updates:
                    measured = self._validate(step)
                tracker.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                tracker.bar.update()
        return measured

    def _update(self, batch: np.ndarray, step: int) -> float:
        """One step of AdamW towards mean (R̂ - R)² of a batch, which is returned."""
        total = torch.zeros((), device=self.targets.device)
        self.optimizer.zero_grad(set_to_none=True)
        for piece in micro_batches([self.readings[i] for i in batch], self.settings.micro_batch_tokens):
            chosen = batch[piece]
            losses = (self._totals(chosen) - self.targets[chosen]).square()
            self._check(losses, chosen)
            loss = losses.sum() / len(batch)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        if not torch.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm {norm.item()} of the reward model at update {step + 1}, in whose batch is"
                f" {self.trajectories[batch[0]]}"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.step()
        return total.item()

    def _learning_rate(self, step: int) -> float:
        """At an update counted from 0."""
        return self.settings.learning_rate * min(1.0, (step + 1) / (self.settings.warmup_updates + 1))

    def _totals(self, indices: np.ndarray) -> Tensor:
        """R̂ of trajectories, float32 [indices]."""
        with autocast(self.settings, self.targets.device):
            return self.model.totals([self.readings[i] for i in indices])

    def _check(self, losses: Tensor, indices: np.ndarray) -> None:
        """Raises NonFiniteError that names the first trajectory whose loss is not a number."""
        if not torch.isfinite(losses).all():
            bad = int((~torch.isfinite(losses)).nonzero()[0])
            raise NonFiniteError(f"loss {losses[bad].item()} of the reward model on {self.trajectories[indices[bad]]}")

    @torch.no_grad()
    def _validate(self, step: int) -> dict[str, float]:
        """Measure on the held-out trajectories, and record it."""
        if not len(self.held_out):
            return {}
        predicted = torch.zeros(len(self.held_out), device=self.targets.device)
        readings: list[Reading] = [self.readings[i] for i in self.held_out]
        for piece in micro_batches(readings, self.settings.micro_batch_tokens):
            predicted[piece] = self._totals(self.held_out[piece])
        targets = self.targets[self.held_out]
        self._check((predicted - targets).square(), self.held_out)
        measured = measure(predicted.cpu().numpy(), targets.cpu().numpy())
        self.tracker.record("validation", step, measured)
        return measured


def measure(predicted: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Of predicted totals R̂ and final rewards R, float [n] each.

    loss: mean (R̂ - R)².  variance: that of R, the loss of the best constant.  correlation: Pearson's, 0 where one of
    them is constant.  accuracy: share of trajectories for which R̂ ≥ 0.5 tells whether R ≥ 0.5.  majority: that of
    always giving the commoner answer.
    """
    predicted, targets = predicted.astype(np.float64), targets.astype(np.float64)
    spread = predicted.std() * targets.std()
    covariance = ((predicted - predicted.mean()) * (targets - targets.mean())).mean()
    success = targets >= 0.5
    return {
        "loss": float(np.square(predicted - targets).mean()),
        "variance": float(targets.var()),
        "correlation": float(covariance / spread) if spread > 0 else 0.0,
        "accuracy": float(((predicted >= 0.5) == success).mean()),
        "majority": float(max(success.mean(), 1 - success.mean())),
    }


def final_rewards(trajectories: Sequence[Trajectory], target: str) -> np.ndarray:
    """R of each trajectory, float32 [trajectories]: its attribute `target`. Raises ConfigError where one is not in
    [0, 1]."""
    values = np.array([float(getattr(trajectory, target)) for trajectory in trajectories], dtype=np.float32)
    for trajectory, value in zip(trajectories, values, strict=True):
        if not 0 <= value <= 1:
            raise ConfigError(f"the {target} of {trajectory} must be in [0, 1], got {value}; see reward_model.target")
    return values


def autocast(settings: RewardModelConfig, device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 where it is asked for and the device is a GPU that computes in it."""
    able = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.bf16 and able)


def _words(trajectories: Sequence[Trajectory]) -> list[str]:
    """All words of the trajectories' texts."""
    words: set[str] = set()
    for trajectory in trajectories:
        for turn in trajectory.turns:
            words.update(f"{turn.message or ''} {turn.response or ''}".split())
    return sorted(words)
