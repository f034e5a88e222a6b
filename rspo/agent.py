"""An agent: a policy and the optimiser that changes it."""

from __future__ import annotations

import copy

import torch

from .config import OptimizerConfig
from .models import Policy


class Agent:
    """Agent A or B of the paper.

    Args:
        policy: its model; the agent owns the weights.
        config: its optimiser, AdamW.
    """

    def __init__(self, policy: Policy, config: OptimizerConfig) -> None:
        self.policy = policy
        self.config = config
        self.optimizer = torch.optim.AdamW(policy.model.parameters())
        self.apply_settings()

    def apply_settings(self) -> None:
        """The configured learning rate and its companions, whatever the optimiser's loaded state says of them."""
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = self.config.learning_rate, self.config.betas
            group["eps"], group["weight_decay"] = self.config.eps, self.config.weight_decay

    def branch(self, fresh_optimizer: bool = False) -> Agent:
        """Agent B: a copy with weights and (unless `fresh_optimizer`) optimiser state of its own."""
        twin = Agent(self.policy.copy(), self.config)
        if not fresh_optimizer:
            # load_state_dict may keep references to the tensors it is given.
            twin.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return twin
