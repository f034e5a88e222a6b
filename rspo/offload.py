"""Agent B in agent A's place: A waits in CPU memory, so that no device ever holds two agents."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .agent import Agent
    from .mixed_precision import MasterAdamW


@contextmanager
def in_place_of(agent: Agent, fresh_optimizer: bool = False) -> Iterator[Agent]:
    """An agent that begins as the given one and takes over its memory. When the block ends, however it ends, the given
    agent is there again, bit for bit; until then it is not to be used.

    fresh_optimizer: it begins with new optimisers instead.
    """
    agent.zero_grad()
    twin = copy.copy(agent)
    twin.policy = copy.copy(agent.policy)
    waiting = [_Waiting(optimizer) for optimizer in agent.optimizers]
    if fresh_optimizer:
        for optimizer in agent.optimizers:
            optimizer.optimizer.state.clear()
    try:
        yield twin
    finally:
        agent.zero_grad()
        for saved in waiting:
            saved.come_back()


class _Waiting:
    """Weights and state of an optimiser in CPU memory."""

    def __init__(self, optimizer: MasterAdamW) -> None:
        self.optimizer = optimizer
        self.weights = [_to_host(master) for master in optimizer.masters]
        self.state = {
            master: {name: (_to_host(value), value.device) for name, value in values.items()}
            for master, values in optimizer.optimizer.state.items()
        }

    @torch.no_grad()
    def come_back(self) -> None:
        for weight, saved in zip(self.optimizer.masters, self.weights, strict=True):
            weight.copy_(saved)
        self.optimizer.follow_masters()
        state = self.optimizer.optimizer.state
        state.clear()  # first, so that the device has room for what returns
        for master, values in self.state.items():
            state[master] = {name: value.to(device) for name, (value, device) in values.items()}


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in CPU memory, pinned where it comes from a GPU and will go back there."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor.detach())
