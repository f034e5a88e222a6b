"""The critic of PPO: one number for each state that a response token is chosen in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import AdapterConfig, CriticConfig
from ..data.batch import Batch
from .forward import run_body
from .lora import add_adapter
from .policy import Policy
from .processes import ALONE, Ranks, of_tokens
from .sharded_tensors import assign
from .sharing import copy_module, frozen_view


class Critic(nn.Module):
    """A linear head, which starts at 0, on the hidden states of a body of its own or of the policy's.

    Args:
        policy: the policy whose states are valued; a body of its own starts as a copy of this one's. Where that is an
            adapter on a frozen base, so is the copy, on the same base.
        config: `backbone` says which.
    """

    def __init__(self, policy: Policy, config: CriticConfig) -> None:
        super().__init__()
        self.body = policy.copy_body() if config.backbone == "own" else None
        head = nn.Linear(policy.model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.head = policy.place(head)

    def adapted(self, settings: AdapterConfig, seed: int) -> Critic:
        """A critic that begins as this one, with a head of its own; a body is a fresh adapter over this one's body."""
        twin = frozen_view(self)
        twin.head = copy_module(self.head)
        if twin.body is not None:
            add_adapter(twin.body, settings, seed)
        return twin

    def trained_state(self) -> dict[str, Tensor]:
        """The part of `state_dict` that is the critic's own: all but a frozen base."""
        frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in self.state_dict().items() if name not in frozen}

    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `trained_state`."""
        for name, weight in self.trained_state().items():
            assign(weight, state[name])

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """Values float32 [N] of hidden states [N, H]."""
        return self.head(hidden.float()).squeeze(-1)

    def values(self, policy: Policy, batch: Batch) -> Tensor:
        """Values float32 [N] of the states in which a batch's response tokens were chosen, with a graph where grad is
        enabled."""
        hidden = policy.hidden(batch) if self.body is None else run_body(self.body, batch, policy.packs)
        return self.of_hidden(hidden)


def score_values(critic: Critic, policy: Policy, batch: Batch, max_tokens: int, ranks: Ranks = ALONE) -> Tensor:
    """Values without a graph, float32 [N], in micro-batches of `max_tokens`."""
    return of_tokens(batch, max_tokens, policy.packs, lambda part: critic.values(policy, part), ranks)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """½·max((v - R)², (clip(v, v_old ± clip) - R)²) of each token, float32 [N].

    A value that has moved further than `clip` since before the update is pulled on only where that raises the loss.
    """
    loss = (values - returns).square()
    if clip is not None:
        clipped = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss
