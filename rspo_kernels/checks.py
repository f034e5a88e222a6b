"""Argument checks: every message names the argument, the value and what was expected."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .choices import one_of as one_of

LARGEST = sys.float_info.max


def plain_tensor(name: str, x: Any) -> None:
    """A tensor whose numbers the kernels can read: not spread over a mesh, without a forward-mode tangent."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if hasattr(x, "full_tensor"):  # a DTensor: to import the class costs half a second
        raise TypeError(
            f"{name} must be an ordinary tensor, got a DTensor; pass {name}.full_tensor(), or the local slices with "
            "vocab_group where an op has it"
        )
    if torch.compiler.is_compiling():
        return  # a tracer has its own way with tangents, and none to find out here
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise RuntimeError(f"{name} has a forward-mode tangent; the ops of rspo_kernels know reverse mode only")


def floating(name: str, x: Any) -> None:
    """A floating-point tensor of 16 to 64 bits."""
    allowed = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    plain_tensor(name, x)
    if x.dtype not in allowed:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")


def integer(name: str, x: Any) -> None:
    """An int32 or int64 tensor."""
    plain_tensor(name, x)
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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def fraction(name: str, value: float) -> float:
    """A Python number in [0, 1], as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")
    return float(value)


def finite(name: str, value: float) -> float:
    """A finite Python number, as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def as_mask(name: str, mask: Tensor, shape: torch.Size | tuple[int, ...], device: torch.device, like: str) -> Tensor:
    """bool, int or float mask (non-zero keeps) of the shape of `like`, as bool."""
    plain_tensor(name, mask)
    same_shape(name, mask, shape, like)
    same_device(name, mask, device, like)
    return mask if mask.dtype == torch.bool else mask != 0


def lm_head(
    hidden: Any, weight: Any, bias: Any | None, targets: Any
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """hidden [..., H], weight [V, H], bias [V] and targets [...]: hidden as [N, H], weight, bias, and the shape [...].

    Under autocast hidden and the head get its dtype, as torch.nn.functional.linear would give them.
    """
    floating("hidden", hidden)
    floating("weight", weight)
    integer("targets", targets)
    if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[0] < 1:
        raise ValueError(
            f"hidden must be [..., H] and weight [V, H], got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"weight must be [V, H] with the H = {hidden.shape[-1]} of hidden, got {list(weight.shape)}")
    same_shape("targets", targets, hidden.shape[:-1], "hidden without the last dimension")
    others = {"weight": weight, "targets": targets}
    if bias is not None:
        floating("bias", bias)
        same_shape("bias", bias, weight.shape[:1], "the vocabulary of weight")
        others["bias"] = bias
    for name, x in others.items():
        same_device(name, x, hidden.device, "hidden")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = (
            x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in (hidden, weight, bias)
        )
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            raise TypeError(f"{name} must have the dtype of hidden, {hidden.dtype}, got {x.dtype}")
    return hidden.reshape(-1, hidden.shape[-1]), weight, bias, tuple(hidden.shape[:-1])


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def transform(
    vocab: int,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    valid_vocab: int | None,
    ignore_index: int,
    vocab_group: Any | None,
    vocab_start: int | None,
    device: torch.device,
) -> tuple[float, float | None, float, int, int, str, int]:
    """The fields of LogitsTransform, checked, as the operators take them."""
    if valid_vocab is not None and (not _whole(valid_vocab) or not 1 <= valid_vocab <= vocab):
        raise ValueError(f"valid_vocab must be an int in 1 .. V = {vocab}, got {valid_vocab!r}")
    if not _whole(ignore_index):
        raise ValueError(f"ignore_index must be an int, got {ignore_index!r}")
    if vocab_group is None and vocab_start is not None:
        raise ValueError(f"vocab_start must be None without vocab_group, got {vocab_start}")
    group = ""
    if vocab_group is not None:
        if not isinstance(vocab_group, torch.distributed.ProcessGroup):
            raise TypeError(f"vocab_group must be a torch.distributed ProcessGroup, got {type(vocab_group).__name__}")
        group = vocab_group.group_name
        vocab_start = _first_column(vocab, vocab_group, device) if vocab_start is None else vocab_start
    return (
        positive("logit_scale", logit_scale),
        None if softcap is None else positive("softcap", softcap),
        positive("temperature", temperature),
        vocab if valid_vocab is None else valid_vocab,
        ignore_index,
        group,
        vocab_start or 0,
    )


def _first_column(vocab: int, group: torch.distributed.ProcessGroup, device: torch.device) -> int:
    """How many columns the ranks before this one have: slices need not be equal (17 columns are 9 and 8)."""
    if torch.compiler.is_compiling():
        raise ValueError("vocab_start must be given under torch.compile, got None")
    widths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    widths[group.rank()] = vocab
    torch.distributed.all_reduce(widths, group=group)
    return int(widths[: group.rank()].sum())


def chunk_rows(value: int | None) -> None:
    """None or a positive int."""
    if value is not None and (not _whole(value) or value < 1):
        raise ValueError(f"chunk_rows must be a positive int or None, got {value!r}")
