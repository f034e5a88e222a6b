"""verl's configuration as the trainer's own: where verl has a setting it holds, the others are the section `rspo`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...algorithm.estimators import make_estimator
from ...config import Config, ConfigError, default_config
from ...config.files import overlay
from ...envs import find_factory

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
VERL_SETTINGS = {
    "rollout.tasks": "data.train_batch_size",
    "rollout.group_size": f"{ROLLOUT}.n",
    "rollout.temperature": f"{ROLLOUT}.temperature",
    "rollout.max_prompt_tokens": f"{ROLLOUT}.prompt_length",
    "rollout.max_response_tokens": f"{ROLLOUT}.response_length",
    "loss.clip_low": f"{ACTOR}.clip_ratio_low",
    "loss.clip_high": f"{ACTOR}.clip_ratio_high",
    "loss.dual_clip": f"{ACTOR}.clip_ratio_c",
    "loss.kl_coef": f"{ACTOR}.kl_loss_coef",
    "loss.kl_estimator": f"{ACTOR}.kl_loss_type",
    "loss.entropy_coef": f"{ACTOR}.entropy_coeff",
    "loss.aggregation": f"{ACTOR}.loss_agg_mode",
    "loss.horizon": f"{ACTOR}.loss_scale_factor",
    "optimizer.learning_rate": f"{ACTOR}.optim.lr",
    "optimizer.weight_decay": f"{ACTOR}.optim.weight_decay",
    "optimizer.grad_clip": f"{ACTOR}.optim.clip_grad",
    "optimizer.epochs": f"{ACTOR}.ppo_epochs",
    "policy.chat_template_kwargs": "data.apply_chat_template_kwargs",
    "run.steps": "trainer.total_training_steps",
    "run.seed": "data.seed",
}
"""Settings of `rspo.config.Config` and where verl has them."""

OWN_SECTIONS = ("method", "base", "env", "estimator", "rewards", "swap", "loss", "optimizer")
"""What `rspo` may hold, as far as verl has no setting for it."""

KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def rspo_config(config: DictConfig) -> Config:
    """All settings of a run on verl, as the trainer's own configuration.

    config: verl's, with the section `rspo`.

    Raises ConfigError, naming the setting, for what is unknown, in the wrong place, or not possible on verl.
    """
    given = OmegaConf.to_container(config.rspo, resolve=True)
    assert isinstance(given, dict)
    _check_places(given)
    _check_verl(config)
    values = {str(name): value for name, value in given.items()}
    for name, place in VERL_SETTINGS.items():
        section, field = name.split(".")
        value = _of_verl(config, name, place)
        if value is not None:
            values.setdefault(section, {})[field] = value
    base = default_config(str(given.get("method", "rspo")), str(given.get("base", "grpo")))
    result = overlay(base, values, "rspo.")
    try:
        find_factory(result.env.name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"rspo.env.name={result.env.name!r}: {error}") from error
    if make_estimator(result.estimator_name, result.estimator).needs_critic:
        raise ConfigError(f"rspo.base={result.estimator_name!r} needs a critic, which RSPO on verl does not train")
    if result.env.style != "readable":
        raise ConfigError(
            f"rspo.env.style must be 'readable' on verl, got {result.env.style!r}: set rspo.env.options.prompt_style"
        )
    if result.swap.source == "history":
        raise ConfigError(
            "rspo.swap.source must be 'dense' or 'outcome' on verl, got 'history': its buffer would have to outlive"
            " verl's checkpoints"
        )
    return result


def _check_places(given: Mapping[Any, Any]) -> None:
    for name, value in given.items():
        if name not in OWN_SECTIONS:
            raise ConfigError(f"rspo.{name} is not a setting on verl; rspo may hold {', '.join(OWN_SECTIONS)}")
        for field in value if isinstance(value, Mapping) else ():
            place = VERL_SETTINGS.get(f"{name}.{field}")
            if place is not None:
                raise ConfigError(f"rspo.{name}.{field} is verl's setting {place}; set that")


def _check_verl(config: DictConfig) -> None:
    """Settings of verl that the loop cannot do without."""
    wanted = {
        f"{ROLLOUT}.agent.default_agent_loop": ("rspo_env",),
        f"{ACTOR}.strategy": ("fsdp", "fsdp2"),
        "algorithm.use_kl_in_reward": (False,),
        "reward.reward_model.enable": (False,),
    }
    for place, allowed in wanted.items():
        value = OmegaConf.select(config, place)
        if value not in allowed:
            raise ConfigError(f"{place} must be {' or '.join(map(repr, allowed))} with RSPO on verl, got {value!r}")
    if config.trainer.total_training_steps is None:
        raise ConfigError("trainer.total_training_steps must be given: the number of updates of agent A; got None")


def _of_verl(config: DictConfig, name: str, place: str) -> Any:
    """The value of a setting that verl has; None: the default stays."""
    value = OmegaConf.select(config, place)
    if name == "loss.kl_coef" and not config.actor_rollout_ref.actor.use_kl_loss:
        return 0.0
    if name in ("loss.clip_low", "loss.clip_high") and value is None:
        return config.actor_rollout_ref.actor.clip_ratio
    if name == "loss.kl_estimator":
        if value not in KL_ESTIMATORS:
            raise ConfigError(f"{place} must be one of {', '.join(KL_ESTIMATORS)} with RSPO on verl, got {value!r}")
        return KL_ESTIMATORS[value]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
