"""From a configuration to a run: its folder, environment, start policy and trainer.

A run's folder holds `config.yaml`, `metrics.jsonl`, `start/` (the start policy), `checkpoints/` and plots.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from .agent import Agent
from .checkpoint import list_checkpoints, load_checkpoint
from .config import Config, ConfigError
from .config_io import save_config
from .envs import BatchedEnv, make_env
from .models import Policy
from .tracking import Tracker
from .trainer import Trainer
from .warmup import warm_up

CONFIG_FILE = "config.yaml"


def build_env(config: Config) -> BatchedEnv:
    """The configured environment. Raises ConfigError with what is allowed."""
    try:
        return make_env(config.env.name, **config.env.options)
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"env.name={config.env.name!r} with env.options={config.env.options}: {error}") from error


def set_threads(config: Config) -> None:
    """Give PyTorch the configured number of CPU threads, for the whole process."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)


def start_policy(config: Config, env: BatchedEnv, folder: Path, *, progress: bool) -> Policy:
    """The policy that training starts from: `policy.path`, or the tiny model, warmed up once and kept in
    `folder/start`."""
    if config.policy.path is not None:
        return Policy.load(config.policy.path, config.policy)
    cached = folder / "start"
    if not cached.is_dir():
        policy, _ = warm_up(env, config, progress=progress)
        partial = folder / ".start.partial"
        shutil.rmtree(partial, ignore_errors=True)
        policy.save(partial)
        partial.rename(cached)
    # Always through the file, so that a first and a resumed run start from the same numbers.
    return Policy.load(cached, config.policy)


def open_run(config: Config, folder: Path, *, resume: bool = False, progress: bool = True) -> Trainer:
    """A trainer in a run folder: new, or going on from its latest checkpoint.

    Raises ConfigError where a new run's folder holds one already, or where there is nothing to resume.
    """
    if (folder / CONFIG_FILE).exists() and not resume:
        raise ConfigError(f"{folder} already holds a run; choose another --out, or go on with --resume")
    set_threads(config)
    env = build_env(config)
    folder.mkdir(parents=True, exist_ok=True)
    policy = start_policy(config, env, folder, progress=progress)
    save_config(config, folder / CONFIG_FILE)
    checkpoints = list_checkpoints(folder / "checkpoints") if resume else []
    checkpoint = load_checkpoint(checkpoints[-1], config) if checkpoints else None
    start = checkpoint.state["step"] if checkpoint else 0
    reference = policy.copy() if config.loss.kl_coef > 0 else None
    tracker = Tracker(folder, config.run.steps, start=start, progress=progress)
    trainer = Trainer(config, folder, env, Agent(policy, config.optimizer), reference, tracker)
    if checkpoint:
        trainer.load(checkpoint)
    return trainer


def trained_policy(folder: Path, config: Config) -> Policy:
    """The policy of a run's latest checkpoint. Raises ConfigError where there is none."""
    checkpoints = list_checkpoints(folder / "checkpoints")
    if not checkpoints:
        raise ConfigError(f"{folder} has no checkpoints yet")
    return Policy.load(checkpoints[-1], config.policy)
