"""RSPO's worker for verl in Ray's processes on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import verl_platform
from verl.single_controller.base.decorator import Dispatch, register

from rspo.integrations.verl.worker import SwapWorker


class CpuSwapWorker(SwapWorker):
    """A SwapWorker over gloo that shows its weights."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        torch.set_num_threads(1)
        verl_platform.prepare_engines()
        torch.distributed.init_process_group("gloo")
        super().__init__(*arguments, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def full_weights(self) -> dict[str, torch.Tensor]:
        """The weights, gathered from all processes."""
        state = self.actor.engine.module.state_dict()
        return {name: value.full_tensor().clone() for name, value in state.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shard_size(self) -> int:
        """Numbers that this process holds of the weights."""
        return sum(p.to_local().numel() for p in self.actor.engine.module.parameters())
