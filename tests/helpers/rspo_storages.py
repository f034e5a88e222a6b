"""What agents hold in memory, counted by storages: what is shared is counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from rspo.models.agent import Agent
from rspo.models.policy import Policy


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage, by its address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def tensors_of(*holders: Agent | Policy | None) -> Iterator[Tensor]:
    """Weights, masters, gradients and optimiser states; step counts, which lie in CPU memory anyway, are left out."""
    for holder in holders:
        if isinstance(holder, Policy):
            yield from holder.model.parameters()
        elif holder is not None:
            for _, parameter in holder.named_parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
            for optimizer in holder.optimizers:
                yield from optimizer.masters
                yield from (master.grad for master in optimizer.masters if master.grad is not None)
                for state in optimizer.optimizer.state.values():
                    yield from (value for name, value in state.items() if name != "step")


def held_bytes(*holders: Agent | Policy | None) -> int:
    """Bytes of all of it."""
    return sum(storages(tensors_of(*holders)).values())
