"""FSDP2: each process holds its share of a model's weights, gradients and optimiser states.

The shares are float32, so that they are their own masters (`rspo.models.optimizer`). For a forward or backward pass
each decoder layer is brought together when it is needed, in the policy's dtype, and let go again; the embeddings and
the output head belong to the outermost module. Gradients are summed in float32. All processes must make the same passes
(`Ranks.micro_batches`); to generate, each has the whole model for a while (`ShardedPolicy.whole`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..config import Config, PolicyConfig
from ..data.batch import Batch
from .checks import check_attention_device
from .policy import Module, Policy
from .sharded_tensors import gathered


def load_policy(path: str | Path, config: Config) -> Policy:
    """The policy of a model folder, as `Policy.load`; sharded where the configuration says so."""
    if config.parallel.shard == "none":
        return Policy.load(path, config.policy)
    settings = config.policy
    check_attention_device(settings)
    # Whole on the CPU, from where each process takes its share; not with an attention that only a GPU has.
    attention = "eager" if settings.attention == "flash_attention_2" else settings.attention
    packing = "on" if settings.packs else "off"
    loaded = replace(settings, device="cpu", dtype="float32", attention=attention, packing=packing)
    policy = Policy.load(path, loaded)
    if attention != settings.attention:
        policy.model.set_attn_implementation(settings.attention)
    return ShardedPolicy(policy, settings)


class ShardedPolicy(Policy):
    """A policy of which each process has its share of the weights. All methods that touch them are for all processes at
    once.

    Args:
        policy: whole, float32, on the CPU, the same in all processes; its model is taken over.
        config: the dtype to compute in, and the device.
    """

    def __init__(self, policy: Policy, config: PolicyConfig) -> None:
        vars(self).update(vars(policy))
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.rounds = self.dtype != torch.float32
        self.mesh = init_device_mesh(torch.device(config.device).type, (torch.distributed.get_world_size(),))
        self.template = _without_weights(self.module)
        self._shard(self.module)

    def copy(self) -> ShardedPolicy:
        """A policy with weights of its own, sharded in the same way."""
        twin = copy.copy(self)
        twin.module = _with_room(self.template)
        twin.model = twin.module.model
        self._shard(twin.module)
        _copy_weights(self.module, twin.module)
        return twin

    def copy_body(self) -> nn.Module:
        """The model without its head, with weights of its own, sharded in the same way."""
        body = _with_room(self.template.model.base_model)
        self._shard(body)
        _copy_weights(self.model.base_model, body)
        return body

    def place(self, module: Module) -> Module:
        """A module that is trained beside the model: sharded as a whole, computed in float32."""
        self._shard_one(module, MixedPrecisionPolicy())
        return module

    def gathered_weights(self) -> dict[str, Tensor]:
        keep = torch.distributed.get_rank() == 0
        weights = gathered(dict(self.model.state_dict()), keep)
        return {name: self._rounded(value) for name, value in weights.items() if value is not None}

    def save(self, path: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        # The template is a model of the class that transformers knows, and of the dtype that was asked for.
        model = copy.deepcopy(self.template.model).to(self.dtype)
        model.save_pretrained(str(path), state_dict=weights, safe_serialization=True)
        self.tokenizer.save_pretrained(str(path))

    def _rounded(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While the block runs, each process has the whole model in the policy's dtype, and can run it by itself."""
        sharded = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
        with torch.no_grad():  # a pass brings all of it together, which then stays
            self.logprobs(Batch.from_prompts([np.zeros(1, dtype=np.int64)]).to(self.device), 1.0)
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()
                module.set_reshard_after_forward(True, recurse=False)

    def _shard(self, module: nn.Module) -> None:
        """Shard a model's decoder layers one by one, and the rest of it together."""
        dtype = None if self.dtype == torch.float32 else self.dtype
        names = set(self.template.model._no_split_modules or ())
        inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in [part for part in module.modules() if type(part).__name__ in names]:
            self._shard_one(layer, inner)
        # What comes in from outside, such as log-probs, must not be rounded.
        self._shard_one(module, replace(inner, cast_forward_inputs=False))

    def _shard_one(self, module: nn.Module, precision: MixedPrecisionPolicy) -> None:
        # Also the outermost module lets go after each forward pass: what is whole hides its shares from whoever looks
        # for parameters and their gradients.
        sharded = fully_shard(module, mesh=self.mesh, mp_policy=precision, reshard_after_forward=True)
        # The losses' divisors are those of all processes: a sum, not a mean.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _without_weights(module: Module) -> Module:
    """A copy whose parameters have shapes only."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def _with_room(template: Module) -> Module:
    """A copy of what `_without_weights` made, with parameters of any value; tied ones are tied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad) for p in template.parameters()
    }
    return copy.deepcopy(template, memo)


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    weights = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(weights[name])
