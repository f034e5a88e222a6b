"""What is put aside of agent A while B learns with its model, and what tells the two apart in TRL's trainer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer


class Snapshot:
    """Trainable weights, optimiser state and the optimiser's settings (learning rates among them), to be restored bit
    for bit; of sharded ones (FSDP2) this process's.

    Args:
        model: whose weights.
        optimizer: whose state.
        device: where the copy lies; None: where the weights are.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: str | None = None) -> None:
        self.optimizer = optimizer
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.weights = [(parameter, _copied(parameter.detach(), device)) for parameter in trained]
        self.state = [
            (parameter, {name: _copied(value, device) for name, value in values.items()})
            for parameter, values in optimizer.state.items()
        ]
        self.settings = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; the snapshot is used up."""
        for weight, kept in self.weights:
            weight.copy_(kept)
        now = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for parameter, values in self.state:
            # Into the tensors that are there, on whatever device they are.
            places = now.get(parameter, {})
            self.optimizer.state[parameter] = {name: _put_back(x, places.get(name)) for name, x in values.items()}
        for group, settings in zip(self.optimizer.param_groups, self.settings, strict=True):
            group.update({name: _put_back(value, group.get(name)) for name, value in settings.items()})


def _copied(value: Any, device: str | None) -> Any:
    return value.to(device=device, copy=True) if isinstance(value, Tensor) else value


def _put_back(value: Any, place: Any) -> Any:
    return place.copy_(value) if isinstance(value, Tensor) and isinstance(place, Tensor) else value


@dataclass(frozen=True)
class RewardColumns:
    """Some of a trainer's reward functions, with all that TRL keeps beside each of them."""

    reward_funcs: list[Any]
    reward_func_names: list[str]
    reward_processing_classes: list[Any]
    reward_weights: Tensor

    @classmethod
    def of(cls, trainer: GRPOTrainer, chosen: Sequence[int]) -> RewardColumns:
        """Those at the given positions."""
        lists = (trainer.reward_funcs, trainer.reward_func_names, trainer.reward_processing_classes)
        functions, names, classes = ([column[i] for i in chosen] for column in lists)
        return cls(functions, names, classes, trainer.reward_weights[list(chosen)])

    def use(self, trainer: GRPOTrainer) -> None:
        """Score completions by these from now on."""
        for field in fields(self):
            setattr(trainer, field.name, getattr(self, field.name))


@contextmanager
def metrics_under(trainer: GRPOTrainer, prefix: str) -> Iterator[None]:
    """Record what happens inside as `prefix...`; completions that are made inside are in no table."""
    metrics, logs = trainer._metrics["train"], trainer._logs
    trainer._metrics["train"], trainer._logs = defaultdict(list), copy.deepcopy(logs)
    try:
        yield
    finally:
        for name, values in trainer._metrics["train"].items():
            if name != "num_tokens":  # is a running total, of A's and B's together
                metrics[prefix + name] += values
        trainer._metrics["train"], trainer._logs = metrics, logs
