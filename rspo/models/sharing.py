"""Copies of modules that share weights: several policies, one copy of what none of them changes.

Each copy has modules of its own, which cost next to nothing beside the weights. So a policy is its own model, whatever
another one is doing: there is no adapter to be switched on before a forward pass, and none that a backward pass with
gradient checkpointing, which computes states anew, could find switched.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def copy_module(module: ModuleT) -> ModuleT:
    """A copy with trained parameters of its own; the frozen ones are the same objects."""
    return _copy(module, {id(p): p for p in module.parameters() if not p.requires_grad})


def frozen_view(module: ModuleT) -> ModuleT:
    """A copy whose parameters are frozen and lie in the memory of the module's own, which stay as trainable as they
    are."""
    return _copy(module, {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()})


def _copy(module: ModuleT, parameters: dict[int, Any]) -> ModuleT:
    """A deep copy in which the given parameters, by identity, are taken to be copied already."""
    return copy.deepcopy(module, memo=parameters)
