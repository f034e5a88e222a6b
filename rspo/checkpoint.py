"""Checkpoints: everything that a run needs to go on to the same result.

A checkpoint is a folder that transformers can load as it stands (model and tokenizer), plus `optimizer.pt` (tensors
and plain values, read back with `weights_only=True`), `critic.safetensors` where there is a critic, `state.json`
(counters and random streams) and, where the replay buffer outlives a loop, `buffer.jsonl`. It is written beside its
place and renamed into it, so that a folder of that name is always complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .agent import Agent
from .config import Config, ConfigError
from .models import Policy
from .trajectory import Trajectory, trajectory_from_json, trajectory_to_json

PREFIX = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` found."""

    agent: Agent
    state: dict[str, Any]
    buffer: list[Trajectory]


def save_checkpoint(path: Path, agent: Agent, state: dict[str, Any], buffer: Sequence[Trajectory] = ()) -> None:
    """Write a checkpoint folder, atomically; `state` holds plain values only."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    agent.policy.save(partial)
    if agent.critic is not None:
        save_file(agent.critic.state_dict(), partial / "critic.safetensors")
    torch.save(agent.optimizer_states(), partial / "optimizer.pt")
    (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
    if buffer:
        with open(partial / "buffer.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(trajectory_to_json(trajectory)) + "\n" for trajectory in buffer)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)


def load_checkpoint(path: Path, config: Config) -> Checkpoint:
    """Read a checkpoint folder; nothing in it is unpickled as code. Raises ConfigError where it is incomplete."""
    try:
        return _load(path, config)
    except ConfigError:
        raise
    except Exception as error:  # torch, safetensors and json each have their own words for a damaged file
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}: {error}); without that folder the run goes on from the"
            " checkpoint before it"
        ) from error


def _load(path: Path, config: Config) -> Checkpoint:
    missing = [name for name in ("optimizer.pt", "state.json") if not (path / name).is_file()]
    if missing:
        raise ConfigError(f"{path} is not a checkpoint: {', '.join(missing)} missing")
    agent = Agent(Policy.load(path, config.policy), config, has_critic=(path / "critic.safetensors").is_file())
    if agent.critic is not None:
        agent.critic.load_state_dict(load_file(path / "critic.safetensors", device=config.policy.device))
    agent.load_optimizers(torch.load(path / "optimizer.pt", weights_only=True, map_location=config.policy.device))
    agent.set_learning_rates()
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    buffer = []
    if (path / "buffer.jsonl").is_file():
        with open(path / "buffer.jsonl", encoding="utf-8") as file:
            buffer = [trajectory_from_json(json.loads(line)) for line in file]
    return Checkpoint(agent, state, buffer)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after a step goes."""
    return folder / f"{PREFIX}{step:06d}"


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep`."""
    for path in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(path)
