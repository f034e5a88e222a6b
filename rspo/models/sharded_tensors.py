"""Tensors of which each process has a share (DTensor), and ordinary ones, treated alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(value: Tensor) -> Tensor:
    """A tensor, or of a sharded one what this process has of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Tensor) -> Tensor:
    """A tensor, or all of a sharded one, for which all processes must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered(value: Any, keep: bool) -> Any:
    """Dicts and lists with their tensors as they are, sharded ones as whole ones on the CPU; for all processes
    at once, of which those that do not `keep` get None in their place, and no memory is filled."""
    if isinstance(value, dict):
        return {name: gathered(part, keep) for name, part in value.items()}
    if isinstance(value, list):
        return [gathered(part, keep) for part in value]
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full.cpu() if keep else None
    return value


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, which all processes have, or one that is sharded alike; of a whole one into a sharded one,
    each process its share."""
    target.copy_(shared_out(value, target))


def shared_out(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which all processes have, sharded as another is; itself where that is not sharded."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
