"""What callers in Python give for settings: objects in place of names. Each becomes the name that a run's
`config.yaml` keeps, and the object itself where its name cannot be imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..algorithm.rewards import RewardFunction
from ..config import ATTENTION, DTYPES, Config, ConfigError
from ..config.files import config_from, load_config
from ..envs import BatchedEnv
from ..models.gradient_checkpointing import recompute_layers
from ..models.policy import Policy
from .setting import build_env, env_arguments


def as_config(args: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """A configuration: as it is, from a mapping as in a YAML file laid over the default preset, from a YAML file, or
    the default. Raises ConfigError that names the setting; TypeError for anything else."""
    if args is None or isinstance(args, Config):
        return args or Config()
    if isinstance(args, Mapping):
        return config_from(args)
    if not isinstance(args, (str, os.PathLike)):
        raise TypeError(
            f"args must be a Config, a dictionary of sections, or the path of a YAML file, got {type(args).__name__}"
        )
    if not Path(args).is_file():
        raise ConfigError(f"args={os.fspath(args)!r} is not a file")
    return load_config(Path(args))


def as_env(config: Config, env: str | BatchedEnv | type[BatchedEnv] | None) -> tuple[Config, BatchedEnv]:
    """The environment, with its name in the configuration. A class is called with `env.options`.

    Raises ConfigError where it cannot be made, or where it cannot go to the worker processes that `env.workers` asks
    for; TypeError for what is no environment.
    """
    if env is None or isinstance(env, str):
        config = config if env is None else replace(config, env=replace(config.env, name=env))
        return config, build_env(config)
    is_class = isinstance(env, type)
    if not (issubclass(env, BatchedEnv) if isinstance(env, type) else isinstance(env, BatchedEnv)):
        raise TypeError(f"env must be a name, or an rspo.envs.BatchedEnv or a subclass of it, got {env!r}")
    config = replace(config, env=replace(config.env, name=class_path(env)))
    if is_class and can_import(env):
        return config, build_env(config)
    if config.env.workers > 0:
        raise ConfigError(
            f"env.workers={config.env.workers} needs an environment that other processes can make: its name, or a class"
            f" that can be imported, got {env!r}"
        )
    if isinstance(env, BatchedEnv):
        return config, env
    try:
        return config, env(**env_arguments(config.env, env))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env={env!r} with env.options={config.env.options}: {error}") from error


def as_dense_reward(config: Config, dense_reward: str | RewardFunction | None) -> tuple[Config, RewardFunction | None]:
    """The dense reward's name in the configuration, and the function where it is one. Raises TypeError for anything
    but a setting of `rewards.dense` or a function."""
    if dense_reward is None:
        return config, None
    if not isinstance(dense_reward, str) and not callable(dense_reward):
        raise TypeError(
            "dense_reward must be a function of a Trajectory to one number per turn, or a setting of rewards.dense, got"
            f" {dense_reward!r}"
        )
    name = dense_reward if isinstance(dense_reward, str) else class_path(dense_reward)
    config = replace(config, rewards=replace(config.rewards, dense=name))
    return config, None if isinstance(dense_reward, str) else dense_reward


def as_policy(
    config: Config,
    model: str | os.PathLike[str] | PreTrainedModel | Policy | None,
    processing_class: PreTrainedTokenizerBase | None,
) -> tuple[Config, Policy | None]:
    """The settings that go with a start policy, and the policy where it is an object.

    A path goes into `policy.path`. A model object brings its dtype, device and attention, a
    Policy also how it packs, what it does with a chat template, and its path to the loss.

    Raises ConfigError where there is nothing at the path, or an object's dtype or tokenizer does not fit; TypeError for
    anything else.
    """
    if processing_class is not None and not isinstance(model, PreTrainedModel):
        raise TypeError("processing_class goes with a transformers model object; a path or Policy has a tokenizer")
    if isinstance(model, PreTrainedModel):
        if not isinstance(processing_class, PreTrainedTokenizerBase):
            raise TypeError(f"processing_class must be the tokenizer of the model object, got {processing_class!r}")
        settings = config.policy
        chat, kwargs = settings.chat != "off", settings.chat_template_kwargs
        model = Policy(model, processing_class, settings.packs, settings.fused, chat, kwargs)
    if isinstance(model, Policy):
        if config.policy.gradient_checkpointing:
            recompute_layers(model.model)
        return _settings_of(config, model), model
    if model is None:
        return config, None
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            "model must be a path, a transformers PreTrainedModel or an rspo.models.policy.Policy,"
            f" got {type(model).__name__}"
        )
    if not config.policy.allow_download and not Path(model).is_dir():
        raise ConfigError(
            f"model={os.fspath(model)!r} is not a folder (names on a hub need policy.allow_download=true)"
        )
    return replace(config, policy=replace(config.policy, path=os.fspath(model))), None


def _settings_of(config: Config, policy: Policy) -> Config:
    """The configuration with what a given policy is."""
    dtype = str(policy.model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"model must have weights of type {', '.join(DTYPES)}, got {dtype}")
    tokens, rows = len(policy.tokenizer), policy.model.get_input_embeddings().num_embeddings
    if tokens > rows:
        raise ConfigError(f"processing_class has {tokens} tokens, more than the {rows} that the model embeds")
    if config.policy.chat == "on" and policy.tokenizer.chat_template is None:
        raise ConfigError("policy.chat='on', but the model's tokenizer has no chat template")
    kwargs = policy.chat_template_kwargs
    wanted = config.policy.chat_template_kwargs
    if wanted not in ({}, kwargs):
        raise ConfigError(f"policy.chat_template_kwargs={wanted}, but the model is a Policy with {kwargs}")
    attention = policy.model.config._attn_implementation
    same_packing = config.policy.packs == policy.packs
    same_chat = (config.policy.chat != "off") == policy.chat
    settings = replace(
        config.policy,
        path=None,  # a run keeps the model in its own folder
        dtype=dtype,
        device=str(policy.device),
        attention=attention if attention in ATTENTION else config.policy.attention,
        packing=config.policy.packing if same_packing else "on" if policy.packs else "off",
        chat=config.policy.chat if same_chat else "auto" if policy.chat else "off",
        chat_template_kwargs=kwargs,
        fused=policy.fused,
    )
    return replace(config, policy=settings)


def class_path(thing: Any) -> str:
    """ "package.module:Name" of a class or function, or of an object's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"


def can_import(thing: Any) -> bool:
    """Whether the class path of a class or function leads back to it in another process too."""
    module, _, name = class_path(thing).partition(":")
    return module != "__main__" and getattr(import_module(module), name, None) is thing
