"""rspo_kernels, by its public functions and with the backend that they choose themselves."""

from __future__ import annotations

import rspo_kernels as ours

from ..workloads import CONFIG, EPS, GAMMA, LAM, Inputs
from . import OURS, Function, provider


@provider("token_logprobs", OURS, OURS)
def _token_logprobs() -> Function:
    return lambda x: {"logp": ours.token_logprobs(x.logits, x.targets)}


@provider("token_logprobs + entropy", OURS, OURS)
def _token_logprobs_entropy() -> Function:
    def run(x: Inputs) -> dict:
        logp, entropy = ours.token_logprobs(x.logits, x.targets, with_entropy=True)
        return {"logp": logp, "entropy": entropy}

    return run


@provider("linear_token_logprobs", OURS, OURS)
def _linear_token_logprobs() -> Function:
    return lambda x: {"logp": ours.linear_token_logprobs(x.hidden, x.weight, x.targets)}


@provider("linear_token_logprobs + entropy", OURS, OURS)
def _linear_token_logprobs_entropy() -> Function:
    def run(x: Inputs) -> dict:
        logp, entropy = ours.linear_token_logprobs(x.hidden, x.weight, x.targets, with_entropy=True)
        return {"logp": logp, "entropy": entropy}

    return run


@provider("policy_loss", OURS, OURS, note="13 statistics besides")
def _policy_loss() -> Function:
    def run(x: Inputs) -> dict:
        loss, _ = ours.policy_loss(x.logp, x.advantages, mask=x.mask, old_logp=x.old_logp, config=CONFIG)
        return {"loss": loss}

    return run


@provider("logits_policy_loss", OURS, OURS, note="13 statistics besides")
def _logits_policy_loss() -> Function:
    def run(x: Inputs) -> dict:
        loss, _ = ours.logits_policy_loss(
            x.logits, x.targets, x.advantages, mask=x.mask, old_logp=x.old_logp, config=CONFIG
        )
        return {"loss": loss}

    return run


@provider("linear_policy_loss", OURS, OURS, note="13 statistics besides")
def _linear_policy_loss() -> Function:
    def run(x: Inputs) -> dict:
        loss, _ = ours.linear_policy_loss(
            x.hidden, x.weight, x.targets, x.advantages, mask=x.mask, old_logp=x.old_logp, config=CONFIG
        )
        return {"loss": loss}

    return run


@provider("group_advantages", OURS, OURS, note="groups of any size in any order; refuses non-finite rewards")
def _group_advantages() -> Function:
    return lambda x: {"advantages": ours.group_advantages(x.numbers["rewards"], x.numbers["groups"], eps=EPS)}


@provider("step_advantages", OURS, OURS, note="groups of any size in any order; refuses non-finite rewards")
def _step_advantages() -> Function:
    def run(x: Inputs) -> dict:
        ids = (x.numbers[name] for name in ("groups", "trajectories", "anchors"))
        return {"advantages": ours.step_advantages(x.numbers["rewards"], *ids, gamma=GAMMA, eps=EPS).advantages}

    return run


@provider("gae", OURS, OURS, note="gae, then masked_whiten")
def _gae() -> Function:
    def run(x: Inputs) -> dict:
        mask = x.view(x.mask)
        rewards, values = x.view(x.numbers["rewards"]), x.view(x.numbers["values"])
        advantages, _ = ours.gae(rewards, values, gamma=1.0, lam=LAM, mask=mask)
        return {"advantages": ours.masked_whiten(advantages, mask)}

    return run


@provider("discounted_returns", OURS, OURS)
def _discounted_returns() -> Function:
    return lambda x: {"returns": ours.discounted_returns(x.view(x.numbers["rewards"]), gamma=GAMMA)}


@provider("masked_whiten", OURS, OURS)
def _masked_whiten() -> Function:
    return lambda x: {"white": ours.masked_whiten(x.numbers["rewards"], x.mask)}
