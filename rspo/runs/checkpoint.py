"""Checkpoints: everything that a run needs to go on to the same result.

A checkpoint is a folder that transformers can load as it stands (model and tokenizer; under LoRA the adapter, which
names its base), plus `optimizer.pt` (tensors and plain values, read back with `weights_only=True`),
`critic.safetensors` where there is a critic, `state.json` (counters, random streams, and the names and sizes of all
other files) and, where the replay buffer outlives a loop, `buffer.jsonl`. A folder of that name is always complete
(`rspo.config.storage`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..config import Config, ConfigError
from ..config.storage import DamagedFileError, new_folder, reading, remove_folder
from ..data.trajectory import Trajectory, trajectory_from_json, trajectory_to_json
from ..models.agent import Agent
from ..models.critic import Critic
from ..models.lora import is_adapter
from ..models.policy import Policy
from ..models.processes import ALONE, Ranks
from ..models.sharded_tensors import gathered
from ..models.sharding import load_policy
from .file_names import STATE_FILE

PREFIX = "step-"
FILES = "files"
"""In the state: sizes of the other files, by name."""
INCOMPLETE = ".incomplete"
WITHOUT_IT = "without that folder the run goes on from the checkpoint before it"


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` found."""

    agent: Agent
    state: dict[str, Any]
    buffer: list[Trajectory]


def save_checkpoint(path: Path, agent: Agent, state: dict[str, Any], buffer: Sequence[Trajectory] = ()) -> None:
    """Write a checkpoint folder, by the main process for all; `state` holds plain values only. Raises StorageError;
    earlier checkpoints remain."""
    state = {**state, "method": agent.config.method, "estimator": agent.config.estimator_name}
    ranks = agent.ranks
    weights = agent.policy.gathered_weights()
    critic = gathered(agent.critic.trained_state(), ranks.is_main) if agent.critic is not None else None
    optimizers = gathered(agent.optimizer_states(), ranks.is_main)

    def save() -> None:
        with new_folder(path) as folder:
            agent.policy.save(folder, weights)
            if critic is not None:
                save_file(critic, folder / "critic.safetensors")
            with open(folder / "optimizer.pt", "wb") as binary:  # through Python, whose errors say what went wrong
                torch.save(optimizers, binary)
            if buffer:
                with open(folder / "buffer.jsonl", "w", encoding="utf-8") as file:
                    file.writelines(json.dumps(trajectory_to_json(trajectory)) + "\n" for trajectory in buffer)
            files = {path.name: path.stat().st_size for path in folder.iterdir()}
            (folder / STATE_FILE).write_text(json.dumps({**state, FILES: files}), encoding="utf-8")

    ranks.from_main(save)


def load_checkpoint(
    path: Path, config: Config, has_critic: bool, base: Policy | None = None, ranks: Ranks = ALONE
) -> Checkpoint:
    """Read a checkpoint folder; nothing in it is unpickled as code.

    has_critic: whether the method's agents have a critic.
    base: what an adapter in it stands on; None: loaded from where the adapter says.
    ranks: the processes that train the agent.

    Raises ConfigError where the folder is incomplete, damaged, or of a run with another method or critic.
    """
    try:
        return _load(path, config, has_critic, base, ranks)
    except DamagedFileError as error:
        raise ConfigError(f"{error}; {WITHOUT_IT}") from error
    except ConfigError:
        raise
    except Exception as error:  # torch and json each have their own words for a damaged file
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error}); {WITHOUT_IT}") from error


def _load(path: Path, config: Config, has_critic: bool, base: Policy | None, ranks: Ranks) -> Checkpoint:
    missing = [name for name in ("optimizer.pt", STATE_FILE) if not (path / name).is_file()]
    if missing:
        raise ConfigError(f"{path} is not a checkpoint: {', '.join(missing)} missing")
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    _check_kind(path, state, config, has_critic)
    base = base if is_adapter(path) else None
    policy = load_policy(path, config) if base is None else base.with_adapter_of(path)
    agent = Agent(policy, config, has_critic, ranks=ranks)
    if agent.critic is not None:
        _load_critic(path, agent.critic, config)
    # Through the CPU: the optimisers bring their moments to the weights' device, and keep their step counts off it.
    agent.load_optimizers(torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu"))
    agent.set_learning_rates()
    buffer = []
    if (path / "buffer.jsonl").is_file():
        with open(path / "buffer.jsonl", encoding="utf-8") as file:
            buffer = [trajectory_from_json(json.loads(line)) for line in file]
    return Checkpoint(agent, state, buffer)


def _check_kind(path: Path, state: dict[str, Any], config: Config, has_critic: bool) -> None:
    for name, now in (("method", config.method), ("estimator", config.estimator_name)):
        if state[name] != now:
            raise ConfigError(f"{path} was made with {name} {state[name]!r}, this run has {now!r}")
    if (path / "critic.safetensors").is_file() != has_critic:
        has, needs = ("a", "has none") if not has_critic else ("no", "needs one")
        raise ConfigError(f"{path} has {has} critic, but {config.estimator_name!r} {needs}")


def _load_critic(path: Path, critic: Critic, config: Config) -> None:
    """Raises ConfigError that names the weights which do not fit."""
    with reading(f"the critic in {path}"):
        saved = load_file(path / "critic.safetensors")
    wanted = critic.trained_state()
    shapes = {name: (_shape(saved.get(name)), _shape(wanted.get(name))) for name in sorted({*saved, *wanted})}
    wrong = [f"{name} is {has}, expected {needs}" for name, (has, needs) in shapes.items() if has != needs]
    if wrong:
        raise ConfigError(
            f"the critic in {path} is not one with critic.backbone={config.critic.backbone!r}: {'; '.join(wrong[:3])}"
            + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        )
    critic.load_trained_state(saved)


def _shape(weight: Tensor | None) -> str:
    return "missing" if weight is None else str(list(weight.shape))


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first. One called `failed` (see `Trainer.train`) is not among them."""
    return [path for path in _checkpoint_folders(folder) if _is_whole(path)]


def incomplete_checkpoints(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name in which something is missing or cut off, oldest first."""
    return [path for path in _checkpoint_folders(folder) if path.is_dir() and not _is_whole(path)]


def pass_over_incomplete(folder: Path, *, rename: bool) -> None:
    """Warn of checkpoints that cannot be gone on from.

    rename: give them another name (`step-000006.incomplete`), so that the run can write that checkpoint again. Only for
        the process that writes into the folder.
    """
    for path in incomplete_checkpoints(folder):
        said = f"{path} is incomplete and is passed over"
        if rename:
            aside = path.with_name(f"{path.name}{INCOMPLETE}")
            if aside.exists():
                remove_folder(aside)
            path.rename(aside)
            said += f"; it is {aside.name} now, and can be deleted"
        warnings.warn(said, stacklevel=3)


def _checkpoint_folders(folder: Path) -> list[Path]:
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint's files are all there, in the sizes that they were written in."""
    try:
        sizes = json.loads((path / STATE_FILE).read_text(encoding="utf-8")).get(FILES, {})
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after a step goes."""
    return folder / f"{PREFIX}{step:06d}"


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep`."""
    for path in list_checkpoints(folder)[:-keep]:
        remove_folder(path)


def drop_newer_checkpoints(folder: Path, step: int) -> None:
    """Delete those after a step."""
    for path in list_checkpoints(folder):
        if path > checkpoint_path(folder, step):
            remove_folder(path)
