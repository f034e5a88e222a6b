"""Fused policy-optimisation ops for language-model agents: Triton kernels, a lean PyTorch path, a plain reference.

The ops, and with them torch, are imported when the first of them is asked for; settings need none of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .config import STATS, PolicyLossConfig

if TYPE_CHECKING:
    from .advantages import (
        StepAdvantages,
        anchor_ids,
        discounted_returns,
        gae,
        group_advantages,
        masked_whiten,
        step_advantages,
    )
    from .logprobs import linear_token_logprobs, token_logprobs
    from .policy_loss import linear_policy_loss, logits_policy_loss, policy_loss
    from .segments import Segments

__all__ = [
    "STATS",
    "PolicyLossConfig",
    "Segments",
    "StepAdvantages",
    "anchor_ids",
    "discounted_returns",
    "gae",
    "group_advantages",
    "linear_policy_loss",
    "linear_token_logprobs",
    "logits_policy_loss",
    "masked_whiten",
    "policy_loss",
    "step_advantages",
    "token_logprobs",
]

_MODULES = {
    "advantages": (
        "StepAdvantages",
        "anchor_ids",
        "discounted_returns",
        "gae",
        "group_advantages",
        "masked_whiten",
        "step_advantages",
    ),
    "logprobs": ("linear_token_logprobs", "token_logprobs"),
    "policy_loss": ("linear_policy_loss", "logits_policy_loss", "policy_loss"),
    "segments": ("Segments",),
}


class _Package(ModuleType):
    """Keeps `policy_loss` the function: importing a module sets the package's attribute of the module's name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "policy_loss" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module, names in _MODULES.items():
        found = import_module(f"{__name__}.{module}")
        globals().update({each: getattr(found, each) for each in names})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
