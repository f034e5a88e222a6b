"""What a run takes place in: its environment, and PyTorch's threads."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import torch

from ..config import Config, ConfigError, EnvConfig
from ..envs import BatchedEnv, EnvFactory, find_factory, make_env
from ..envs.returned import reset_checked
from ..envs.workers import WorkerEnv
from ..models.reproducible import reproducible_products


def build_env(config: Config) -> BatchedEnv:
    """The configured environment. Raises ConfigError with what is allowed."""
    settings = config.env
    try:
        if settings.workers > 0:
            return WorkerEnv(settings.name, env_arguments(settings), settings.workers, settings.worker_timeout)
        return make_env(settings.name, **env_arguments(settings))
    except (ImportError, OSError, TypeError, ValueError) as error:
        about = f"env.name={settings.name!r} with env.options={settings.options}"
        raise ConfigError(f"{about}: {_unknown_options(settings) or error}") from error


def env_arguments(settings: EnvConfig, factory: EnvFactory | None = None) -> dict[str, Any]:
    """What the environment (`factory`, or the one of that name) is made with: `env.options`, and as `prompt_style` what
    `env.style` asks for, where the environment has that and the options name none. Raises as `find_factory`."""
    if settings.style == "readable" or "prompt_style" in settings.options:
        return settings.options
    has_style = getattr(factory or find_factory(settings.name), "verl_agent", None) is not None
    return {"prompt_style": settings.style, **settings.options} if has_style else settings.options


def _unknown_options(settings: EnvConfig) -> str:
    """What to say of options that the environment's constructor does not take; empty where there are none."""
    try:
        taken = signature(find_factory(settings.name)).parameters
    except (ImportError, TypeError, ValueError):
        return ""
    unknown = [name for name in settings.options if name not in taken]
    if not unknown or any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values()):
        return ""
    return f"unknown option {unknown[0]!r}; the environment takes {', '.join(taken) or 'none'}"


def check_split(env: BatchedEnv, config: Config) -> None:
    """Raises ConfigError where the environment has no tasks of the split that evaluations take."""
    try:
        tasks = env.tasks(config.evaluation.split)
    except ValueError as error:
        raise ConfigError(f"evaluation.split={config.evaluation.split!r}: {error}") from error
    if not tasks:
        raise ConfigError(f"evaluation.split={config.evaluation.split!r}: {config.env.name} has no tasks of it")


def try_reset(env: BatchedEnv, config: Config) -> None:
    """Begin an episode of a training task, so that an environment which cannot is found out before anything is made.

    Raises ConfigError where there are no tasks, EnvironmentValueError, and what the environment raises.
    """
    tasks = env.tasks("train")
    if not len(tasks):
        raise ConfigError(f"{config.env.name} has no tasks to train on (split 'train')")
    reset_checked(env, [tasks[0]], [0])


def set_threads(config: Config) -> None:
    """Give PyTorch the configured number of CPU threads and, with one, results that repeat bit for bit; for the whole
    process, and before it multiplies matrices."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.threads == 1 and config.run.reproducible:
        reproducible_products()
