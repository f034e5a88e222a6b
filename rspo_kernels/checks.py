"""Argument checks: every message names the argument, the value and what was expected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def floating(name: str, x: Any) -> None:
    """A floating-point tensor of 16 to 64 bits."""
    allowed = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in allowed:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")


def integer(name: str, x: Any) -> None:
    """An int32 or int64 tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")


def same_shape(name: str, x: Tensor, shape: torch.Size | tuple[int, ...], like: str) -> None:
    """x has exactly the shape of `like`."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape of {like}, {list(shape)}, got {list(x.shape)}")


def same_device(name: str, x: Tensor, device: torch.device, like: str) -> None:
    """x lives where `like` lives."""
    if x.device != device:
        raise ValueError(f"{name} must be on the device of {like}, {device}, got {x.device}")


def positive(name: str, value: float) -> float:
    """A finite Python number > 0, as a float."""
    # Comparisons rather than math.isfinite: they also trace under torch.compile.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """One of the listed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def as_mask(name: str, mask: Tensor, shape: torch.Size | tuple[int, ...], device: torch.device, like: str) -> Tensor:
    """bool, int or float mask (non-zero keeps) of the shape of `like`, as bool."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    same_shape(name, mask, shape, like)
    same_device(name, mask, device, like)
    return mask if mask.dtype == torch.bool else mask != 0
