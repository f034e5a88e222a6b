"""AdamW with float32 weights, whatever the model's own are.

bfloat16 has 8 bits of mantissa: a step of 1e-6 relative to a weight is lost in rounding, and with the learning rates of
RL hardly any weight would ever move. Weights of fewer bits are therefore copies of float32 ones, which the optimiser
changes; they cost 4 more bytes for each such weight. Weights in float32 are their own, and so are sharded ones
(`rspo.models.sharding`), which are float32 whatever is computed with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .sharded_tensors import assign, shared_out


class MasterAdamW:
    """torch.optim.AdamW on float32 masters of the given parameters.

    Args:
        parameters: of a model, in any float dtype; their values become the masters'.
        rounded: those in float32 that the model's own file holds in fewer bits.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], rounded: Iterable[nn.Parameter] = ()) -> None:
        self.parameters = list(parameters)
        self._rounded = {id(parameter) for parameter in rounded}
        self.masters = [_master(parameter) for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimiser's, with the masters as params."""
        return self.optimizer.param_groups

    @property
    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Parameters that are not their own masters, and these."""
        pairs = zip(self.parameters, self.masters, strict=True)
        return [(parameter, master) for parameter, master in pairs if master is not parameter]

    def take_gradients(self) -> None:
        """Bring the gradients to the masters."""
        for parameter, master in self.copies:
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def step(self) -> None:
        """A step of the masters, which the parameters follow."""
        self.optimizer.step()
        self.follow_masters()
        for _, master in self.copies:
            master.grad = None  # a copy of the parameter's, of twice its size or more

    @torch.no_grad()
    def follow_masters(self) -> None:
        """Bring the masters' values to the parameters."""
        for parameter, master in self.copies:
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state, and the masters of parameters that cannot stand for them, or not in a file."""
        masters = [master.detach() for master in self._saved_masters]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Learning rates are the state's own until they are set again."""
        # AdamW's load_state_dict may keep references to the tensors it is given.
        loaded = copy.deepcopy(state["optimizer"])
        for place, moments in loaded["state"].items():
            for name in moments.keys() - {"step"}:
                moments[name] = shared_out(moments[name], self.masters[place])
        self.optimizer.load_state_dict(loaded)
        self.load_masters(state)

    @torch.no_grad()
    def load_masters(self, state: dict[str, Any]) -> None:
        """Only the weights of a `state_dict`, for an optimiser that begins anew."""
        for master, saved in zip(self._saved_masters, state["masters"], strict=True):
            assign(master, saved)
        self.follow_masters()

    @property
    def _saved_masters(self) -> list[nn.Parameter]:
        pairs = zip(self.parameters, self.masters, strict=True)
        return [master for parameter, master in pairs if master is not parameter or id(parameter) in self._rounded]


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
