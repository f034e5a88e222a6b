"""The critic of PPO: one number for each state that a response token is chosen in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .batch import Batch
from .config import CriticConfig
from .distributed import ALONE, Ranks, of_tokens
from .models import Policy
from .policy_module import run_body


class Critic(nn.Module):
    """A linear head, which starts at 0, on the hidden states of a body of its own or of the policy's.

    Args:
        policy: the policy whose states are valued; a body of its own starts as a copy of this one's.
        config: `backbone` says which.
    """

    def __init__(self, policy: Policy, config: CriticConfig) -> None:
        super().__init__()
        self.body = policy.copy_body() if config.backbone == "own" else None
        head = nn.Linear(policy.model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.head = policy.place(head)

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
