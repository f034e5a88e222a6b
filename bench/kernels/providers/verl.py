"""verl: log-probs and entropy from logits, the fused linear ones (PyTorch and Triton), loss and advantages."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

from torch import Tensor

from ..imports import load_verl
from ..workloads import CLIP, EPS, LAM, Inputs
from . import Function, provider

NO_DUAL_CLIP = 1e9
"""verl always bounds the ratio of negative advantages too; ours is measured without, so the bound is out of reach."""


def _functional() -> ModuleType:
    return load_verl("verl.utils.torch_functional")


def _from_logits() -> Callable[[Inputs], Tensor]:
    """logprobs_from_logits of logits [B, L, V]: without flash-attn its loop goes over the first dimension."""
    function = _functional().logprobs_from_logits
    return lambda x: function(x.view(x.logits), x.view(x.targets), inplace_backward=False).flatten()


def _algorithms() -> ModuleType:
    return load_verl("verl.trainer.ppo.core_algos")


class _Config(SimpleNamespace):
    """What compute_policy_loss_vanilla reads of the actor's configuration."""

    def get(self, name: str, default: float) -> float:
        return getattr(self, name, default)


def _policy_loss(logp: Tensor, x: Inputs) -> Tensor:
    """verl's loss of log-probs [N]."""
    assert x.old_logp is not None
    config = _Config(
        clip_ratio=CLIP, clip_ratio_low=CLIP, clip_ratio_high=CLIP, clip_ratio_c=NO_DUAL_CLIP, global_batch_info={}
    )
    arguments = (x.view(y) for y in (x.old_logp, logp, x.advantages, x.keep))
    return _algorithms().compute_policy_loss_vanilla(*arguments, config=config)[0]


@provider("token_logprobs", "verl logprobs_from_logits", "verl")
def _logprobs() -> Function:
    logprobs = _from_logits()
    return lambda x: {"logp": logprobs(x)}


@provider("token_logprobs", "verl logprobs_from_logits_naive", "verl")
def _logprobs_naive() -> Function:
    function = _functional().logprobs_from_logits_naive
    return lambda x: {"logp": function(x.logits, x.targets)}


@provider("token_logprobs + entropy", "verl logprobs_from_logits, entropy_from_logits", "verl")
def _logprobs_entropy() -> Function:
    logprobs, entropy = _from_logits(), _functional().entropy_from_logits
    return lambda x: {"logp": logprobs(x), "entropy": entropy(x.logits)}


@provider("policy_loss", "verl compute_policy_loss_vanilla", "verl", note="3 statistics besides, read on the host")
def _vanilla() -> Function:
    _algorithms()

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.logp is not None
        return {"loss": _policy_loss(x.logp, x)}

    return run


@provider("logits_policy_loss", "verl logprobs_from_logits", "verl")
def _logits_loss() -> Function:
    logprobs, _ = _from_logits(), _algorithms()
    return lambda x: {"loss": _policy_loss(logprobs(x), x)}


def _torch_linear() -> Function:
    """verl's chunked PyTorch log-probs; the entropy cannot be turned off."""
    module = load_verl("verl.utils.experimental.torch_functional").FusedLinearForPPO()

    def run(x: Inputs) -> dict[str, Tensor]:
        logp, entropy = module(x.hidden, x.weight, x.targets)
        return {"logp": logp, "entropy": entropy}

    return run


def _triton_linear() -> Function:
    """verl's Triton kernel; the entropy cannot be turned off."""
    function = load_verl("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def run(x: Inputs) -> dict[str, Tensor]:
        logp, entropy = function(x.hidden, x.weight, x.targets, 1.0, "none")
        return {"logp": logp, "entropy": entropy}

    return run


for _op in ("linear_token_logprobs", "linear_token_logprobs + entropy"):
    _note = "" if _op.endswith("entropy") else "computes the entropy besides"
    provider(_op, "verl FusedLinearForPPO", "verl", note=_note)(_torch_linear)
    provider(_op, "verl linear_cross_entropy", "verl", devices=("cuda",), note=_note)(_triton_linear)


@provider("linear_policy_loss", "verl FusedLinearForPPO", "verl", note="computes the entropy besides")
def _linear_loss() -> Function:
    linear, _ = _torch_linear(), _algorithms()
    return lambda x: {"loss": _policy_loss(linear(x)["logp"], x)}


@provider(
    "linear_policy_loss",
    "verl linear_cross_entropy",
    "verl",
    devices=("cuda",),
    note="computes the entropy besides",
)
def _linear_loss_triton() -> Function:
    linear, _ = _triton_linear(), _algorithms()
    return lambda x: {"loss": _policy_loss(linear(x)["logp"], x)}


def _group_advantages(function_name: str) -> Function:
    function = getattr(_algorithms(), function_name)

    def run(x: Inputs) -> dict[str, Tensor]:
        rewards = x.numbers["rewards"].clone().unsqueeze(-1)  # the loop writes into its input
        advantages, _ = function(rewards, x.numbers["ones"], x.numbers["index"], epsilon=EPS)
        return {"advantages": advantages}

    return run


def _with_index(x: Inputs) -> Inputs:
    """Group ids as the NumPy array that verl takes, and a mask of ones [n, 1]."""
    rewards = x.numbers["rewards"]
    index = x.numbers["groups"].cpu().numpy()
    x.numbers = x.numbers | {"ones": rewards.new_ones(rewards.numel(), 1), "index": index}
    return x


@provider("group_advantages", "verl compute_grpo_outcome_advantage", "verl", prepare=_with_index)
def _grpo() -> Function:
    return _group_advantages("compute_grpo_outcome_advantage")


@provider("group_advantages", "verl compute_grpo_vectorized_outcome_advantage", "verl", prepare=_with_index)
def _grpo_vectorized() -> Function:
    return _group_advantages("compute_grpo_vectorized_outcome_advantage")


@provider("gae", "verl compute_gae_advantage_return", "verl")
def _gae() -> Function:
    function = _algorithms().compute_gae_advantage_return

    def run(x: Inputs) -> dict[str, Tensor]:
        rewards, values, keep = (x.view(y) for y in (x.numbers["rewards"], x.numbers["values"], x.keep))
        return {"advantages": function(rewards, values, keep, 1.0, LAM)[0]}

    return run


@provider("masked_whiten", "verl masked_whiten", "verl")
def _masked_whiten() -> Function:
    function = _functional().masked_whiten
    return lambda x: {"white": function(x.numbers["rewards"], x.keep)}
