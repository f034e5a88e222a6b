"""RSPO inside verl (0.9): its loss, its advantages, its environments and its loop.

Importing this package registers with verl

    policy loss           "rspo"                  actor_rollout_ref.actor.policy_loss.loss_mode=rspo
    advantage estimators  "gigpo", "rspo_grpo"    algorithm.adv_estimator=gigpo
    agent loop            "rspo_env"              actor_rollout_ref.rollout.agent.default_agent_loop=rspo_env

in the process that imports it; `actor_rollout_ref.model.external_lib=rspo.integrations.verl` has all of verl's do so.
`python -m rspo.integrations.verl.main` runs Algorithm 1 on verl's Ray trainer.
"""

from __future__ import annotations

from verl.experimental.agent_loop.agent_loop import register as register_agent_loop
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from .advantages import compute_advantage, gigpo_advantages, grpo_advantages
from .agent_loop import EnvAgentLoop
from .losses import actor_loss, rspo_policy_loss

__all__ = [
    "EnvAgentLoop",
    "actor_loss",
    "compute_advantage",
    "gigpo_advantages",
    "grpo_advantages",
    "register",
    "rspo_policy_loss",
]


def register() -> None:
    """Enter all of it into verl's registries; once more does no harm."""
    register_policy_loss("rspo")(rspo_policy_loss)
    register_adv_est("gigpo")(gigpo_advantages)
    register_adv_est("rspo_grpo")(grpo_advantages)
    register_agent_loop("rspo_env")(EnvAgentLoop)


register()
