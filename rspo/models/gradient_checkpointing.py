"""Gradient checkpointing of a model that stays in eval mode.

transformers checkpoints its layers in training mode only, where dropout is on as well. A policy's log-probs must be a
function of its weights, so its layers are given a forward of their own instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import ConfigError


def recompute_layers(model: PreTrainedModel) -> None:
    """Make the layers of a model keep only their inputs for the backward pass, in which they compute the rest anew.

    Passes without a gradient, as in generation, are what they were. The layers are those that transformers marks as fit
    for it; copies of the model (`copy.deepcopy`) have it too. Raises ConfigError where there are none.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"policy.gradient_checkpointing must be false for {type(model).__name__}, whose layers cannot be computed"
            " twice, got true"
        )
    inner = {module for layer in layers for module in layer.modules() if module is not layer}
    for layer in layers:
        made_before = getattr(vars(layer).get("forward"), "func", None) is _recomputed
        if layer not in inner and not made_before:
            # The instance's forward, not __call__: hooks around it, such as FSDP's, run once.
            layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    # No dropout, so no random state to bring back.
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)
