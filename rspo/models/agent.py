"""An agent: a policy, a critic where the method has one, and the optimisers that change them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config
from .critic import Critic
from .lora import has_adapter
from .optimizer import MasterAdamW
from .policy import Policy
from .processes import ALONE, Ranks
from .randomness import named_seed
from .sharded_tensors import whole


class Agent:
    """Agent A or B of the paper.

    Args:
        policy: its model; the agent owns the trained weights.
        config: its optimisers, AdamW on float32 weights, and its critic.
        has_critic: give it a critic, fresh.
        critic: the one it has already.
        ranks: the processes that train it together, each with an agent of its own that takes the same steps.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        has_critic: bool = False,
        critic: Critic | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.policy = policy
        self.config = config
        self.ranks = ranks
        self.critic = Critic(policy, config.critic) if has_critic and critic is None else critic
        shared = self.critic is not None and self.critic.body is None
        critic_parameters = _trained(self.critic) if self.critic is not None else []
        bodies = [policy.model] if self.critic is None or shared else [policy.model, self.critic.body]
        rounded = [p for body in bodies for p in body.parameters()] if policy.rounds else []
        self.optimizer = MasterAdamW([*_trained(policy.model), *(critic_parameters if shared else [])], rounded)
        self.critic_optimizer = MasterAdamW(critic_parameters, rounded) if critic_parameters and not shared else None
        self.set_learning_rates()

    def set_learning_rates(self, factor: float = 1.0) -> None:
        """The configured learning rates times a schedule's factor, and the optimisers' other settings, whatever their
        loaded state says of them."""
        settings, learning_rate = self.config.optimizer, self.config.optimizer.learning_rate
        if has_adapter(self.policy.model) and self.config.lora.learning_rate is not None:
            learning_rate = self.config.lora.learning_rate
        rates = [(self.optimizer, learning_rate)]
        if self.critic_optimizer is not None:
            rates.append((self.critic_optimizer, self.config.critic.learning_rate))
        for optimizer, rate in rates:
            for group in optimizer.param_groups:
                group["lr"], group["betas"] = rate * factor, settings.betas
                group["eps"], group["weight_decay"] = settings.eps, settings.weight_decay

    @property
    def optimizers(self) -> list[MasterAdamW]:
        """Of the policy, and of a critic with a body of its own."""
        return [self.optimizer, *([self.critic_optimizer] if self.critic_optimizer is not None else [])]

    @property
    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each optimiser now."""
        rates = {"learning_rate": self.optimizer.param_groups[0]["lr"]}
        if self.critic_optimizer is not None:
            rates["critic/learning_rate"] = self.critic_optimizer.param_groups[0]["lr"]
        return rates

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the policy, and of the critic as `critic....`."""
        yield from self.policy.model.named_parameters()
        if self.critic is not None:
            yield from self.critic.named_parameters(prefix="critic")

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self.optimizers:
            for weight in [*optimizer.parameters, *optimizer.masters]:
                weight.grad = None

    def clip_gradients(self) -> dict[str, Tensor]:
        """Sum the gradients over all processes and clip those of each optimiser's weights, where they are finite;
        their norms before that, 0-d."""
        limit = self.config.optimizer.grad_clip
        norms = {"gradient_norm": _clip(self.optimizer, limit, self.ranks)}
        if self.critic_optimizer is not None:
            norms["critic/gradient_norm"] = _clip(self.critic_optimizer, limit, self.ranks)
        return norms

    def step(self) -> None:
        """One step of each optimiser."""
        self.optimizer.step()
        if self.critic_optimizer is not None:
            self.critic_optimizer.step()
        self.policy.weights_changed()

    @contextmanager
    def branched(self) -> Iterator[Agent]:
        """Agent B for the length of a block, made as `swap.copy` says. This agent stands still meanwhile."""
        swap = self.config.swap
        if swap.copy == "offload":
            with in_place_of(self, swap.fresh_optimizer) as twin:
                yield twin
        else:
            yield self.branch(swap.fresh_optimizer)

    def branch(self, fresh_optimizer: bool = False) -> Agent:
        """Agent B beside this one: a copy with trained weights and (unless `fresh_optimizer`) optimiser state of its
        own, or with `swap.copy="adapter"` a fresh adapter over this one's weights."""
        self.zero_grad()  # those of the last step, which would only take up room
        if self.config.swap.copy == "adapter":
            settings, seed = self.config.lora, named_seed(self.config.run.seed, "adapter of B")
            critic = self.critic.adapted(settings, seed) if self.critic is not None else None
            return Agent(self.policy.adapted(settings, seed), self.config, critic=critic, ranks=self.ranks)
        twin = Agent(self.policy.copy(), self.config, self.critic is not None, ranks=self.ranks)
        if self.critic is not None and twin.critic is not None:
            twin.critic.load_trained_state(self.critic.trained_state())
        twin.load_optimizers(self.optimizer_states(), weights_only=fresh_optimizer)
        return twin

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        """States of the optimisers, tensors and plain values only."""
        states = {"policy": self.optimizer.state_dict()}
        if self.critic_optimizer is not None:
            states["critic"] = self.critic_optimizer.state_dict()
        return states

    def load_optimizers(self, states: dict[str, dict[str, Any]], weights_only: bool = False) -> None:
        """The inverse of `optimizer_states`; of them only the float32 weights with `weights_only`. Learning rates are
        the states' own until they are set again."""
        for name, optimizer in (("policy", self.optimizer), ("critic", self.critic_optimizer)):
            if optimizer is not None:
                load = optimizer.load_masters if weights_only else optimizer.load_state_dict
                load(states[name])


def _trained(module: nn.Module) -> list[nn.Parameter]:
    """All weights but those of a frozen base."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _clip(optimizer: MasterAdamW, limit: float, ranks: Ranks) -> Tensor:
    optimizer.take_gradients()
    ranks.sum_gradients(optimizer.masters)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    # Gradients with a norm that is not finite stay as they are, so that it can be seen which of them are to blame.
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, torch.where(torch.isfinite(norm), norm, 0.0))
    return norm


@contextmanager
def in_place_of(agent: Agent, fresh_optimizer: bool = False) -> Iterator[Agent]:
    """An agent that begins as the given one and takes over its memory. When the block ends, however it ends, the given
    agent is there again, bit for bit; until then it is not to be used.

    fresh_optimizer: it begins with new optimisers instead.
    """
    agent.zero_grad()
    twin = copy.copy(agent)
    twin.policy = copy.copy(agent.policy)
    waiting = [_Waiting(optimizer) for optimizer in agent.optimizers]
    if fresh_optimizer:
        for optimizer in agent.optimizers:
            optimizer.optimizer.state.clear()
    try:
        yield twin
    finally:
        agent.zero_grad()
        for saved in waiting:
            saved.come_back()


class _Waiting:
    """Weights and state of an optimiser in CPU memory."""

    def __init__(self, optimizer: MasterAdamW) -> None:
        self.optimizer = optimizer
        self.weights = [_to_host(master) for master in optimizer.masters]
        self.state = {
            master: {name: (_to_host(value), value.device) for name, value in values.items()}
            for master, values in optimizer.optimizer.state.items()
        }

    @torch.no_grad()
    def come_back(self) -> None:
        for weight, saved in zip(self.optimizer.masters, self.weights, strict=True):
            weight.copy_(saved)
        self.optimizer.follow_masters()
        state = self.optimizer.optimizer.state
        state.clear()  # first, so that the device has room for what returns
        for master, values in self.state.items():
            state[master] = {name: value.to(device) for name, (value, device) in values.items()}


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in CPU memory, pinned where it comes from a GPU and will go back there."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor.detach())
