"""verl's actor worker with the memory that a reward swap needs: agent A, while the weights are agent B's."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_torch_device
from verl.workers.engine_workers import ActorRolloutRefWorker


@dataclass(frozen=True)
class Snapshot:
    """What training changes of an FSDP engine: this process's shards of the weights and of the optimiser's state, on
    the host, and the learning-rate schedule."""

    weights: list[Tensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    schedule: dict[str, Any]

    @classmethod
    def of(cls, engine: Any) -> Snapshot:
        """Of an engine outside of any forward or backward pass, wherever it keeps its weights at the moment."""
        parameters = _trained(engine)
        return cls(
            weights=[_copy(parameter) for parameter in parameters],
            states=[
                {name: _copy(value) for name, value in engine.optimizer.state.get(parameter, {}).items()}
                for parameter in parameters
            ],
            groups=[
                {name: deepcopy(value) for name, value in group.items() if name != "params"}
                for group in engine.optimizer.param_groups
            ],
            schedule=deepcopy(engine.lr_scheduler.state_dict()),
        )

    @torch.no_grad()
    def restore(self, engine: Any) -> None:
        """Give the engine back what it had, bit for bit."""
        optimizer = engine.optimizer
        for parameter, weight, state in zip(_trained(engine), self.weights, self.states, strict=True):
            _shard(parameter).copy_(weight)
            if not state:  # the optimiser had not made a step
                optimizer.state.pop(parameter, None)
            for name, value in state.items():
                if isinstance(value, Tensor):
                    _shard(optimizer.state[parameter][name]).copy_(value)
                else:
                    optimizer.state[parameter][name] = deepcopy(value)
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(deepcopy(values))
        engine.lr_scheduler.load_state_dict(deepcopy(self.schedule))


class SwapWorker(ActorRolloutRefWorker):
    """An actor whose agent can be put aside and taken back.

    The copy is in host memory, 12 bytes for each trained weight (float32 with Adam's two moments) shared out over the
    processes; it touches neither verl's checkpoints nor the disk. For FSDP and FSDP2.
    """

    _kept: Snapshot | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_agent(self, fresh_optimizer: bool = False) -> None:
        """Put agent A aside; what is there now is agent B, with a copy of A's optimiser or a fresh one."""
        engine = self.actor.engine
        get_torch_device().synchronize()  # verl moves weights to the host without waiting
        self._kept = Snapshot.of(engine)
        if fresh_optimizer:
            for state in engine.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        _shard(value).zero_()  # Adam's state before its first step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_agent(self) -> None:
        """Agent A again, and B is gone. Raises RuntimeError where none was put aside."""
        if self._kept is None:
            raise RuntimeError("restore_agent() needs a keep_agent() before it")
        self._kept.restore(self.actor.engine)
        self._kept = None


def _trained(engine: Any) -> list[Tensor]:
    """The weights that the optimiser changes; with LoRA the adapter's."""
    return [p for group in engine.optimizer.param_groups for p in group["params"] if p.requires_grad]


def _shard(tensor: Tensor) -> Tensor:
    """This process's part, sharing memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _copy(value: Any) -> Any:
    return _shard(value).to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)
