"""Trajectories as a file, e.g. to train a reward model on: played on training tasks, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from tqdm import tqdm

from ..algorithm.rollout import rollout
from ..config import Config, ConfigError
from ..config.lock import FolderLock
from ..config.storage import writing
from ..data.layouts import make_layout
from ..data.trajectory import Trajectory, intact, trajectory_from_json, trajectory_to_json
from ..engines import LOCAL, Backend, Engine, ScriptedEngine, expert_of
from ..envs.base import BatchedEnv
from ..models.policy import Policy
from ..models.randomness import named_generator, named_seed

TRAJECTORIES_FILE = "trajectories.jsonl"
NO_EXPERT = "without --expert, --policy or --run say who acts"


def collect(
    env: BatchedEnv,
    policy: Policy,
    config: Config,
    folder: Path,
    count: int,
    *,
    expert_rate: float | None = None,
    resume: bool = False,
    progress: bool = True,
    backend: Backend = LOCAL,
) -> dict[str, float]:
    """Play random training tasks until `folder/trajectories.jsonl` holds `count` trajectories; a summary of the file.

    Each task is played once. Trajectories are appended as many at a time as an update samples; a line that was not
    finished, of a process that was killed, is dropped on `resume`. What is played then depends on the seed and on how
    many trajectories are there already.

    policy: acts at the rollout temperature; with an `expert_rate` the environment's expert acts instead (its step with
        that probability, else a random one), and the policy's tokenizer makes the ids.
    backend: generates the policy's responses.

    Raises ConfigError where the file is there and `resume` is not given, another process writes into the folder
    (FolderInUseError), or the environment has no expert.
    """
    if expert_rate is not None:
        expert_of(env, NO_EXPERT)
    path = folder / TRAJECTORIES_FILE
    with _unmade_if_empty(path):
        with writing(path):
            lock = FolderLock(folder)
        with lock:
            return _collect(env, policy, config, path, count, expert_rate, resume, progress, backend)


def _collect(
    env: BatchedEnv,
    policy: Policy,
    config: Config,
    path: Path,
    count: int,
    expert_rate: float | None,
    resume: bool,
    progress: bool,
    backend: Backend,
) -> dict[str, float]:
    if path.exists() and not resume:
        raise ConfigError(f"{path} exists; choose another --out, or add to it with --resume")
    with writing(path):
        path.touch()
        _drop_unfinished(path)
    summary = Summary()
    for trajectory in read_trajectories(path):
        summary.add(trajectory)
    size = config.rollout.tasks * config.rollout.group_size
    with tqdm(total=count, initial=summary.count, desc="collecting", unit="episode", disable=not progress) as bar:
        while (done := summary.count) < count:
            played = _play(env, policy, config, done, min(size, count - done), expert_rate, backend)
            with writing(path), open(path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(trajectory_to_json(trajectory)) + "\n" for trajectory in played))
                file.flush()
                os.fsync(file.fileno())
            for trajectory in played:
                summary.add(trajectory)
            bar.update(len(played))
            bar.set_postfix(success=f"{summary.won / summary.count:.1%}", refresh=False)
    return summary.values()


@contextmanager
def _unmade_if_empty(path: Path) -> Iterator[None]:
    """What fails before anything is played, such as an environment that cannot start, leaves no file and no folder that
    only `resume` would take."""
    made = [made for made in (path, path.parent) if not made.exists()]
    try:
        yield
    finally:
        with suppress(OSError):
            if path in made and path.stat().st_size == 0:
                path.unlink()
            if path.parent in made:
                path.parent.rmdir()


def _play(
    env: BatchedEnv,
    policy: Policy,
    config: Config,
    first: int,
    count: int,
    expert_rate: float | None,
    backend: Backend,
) -> list[Trajectory]:
    """`count` trajectories, of groups `first` and on."""
    rng = named_generator(config.run.seed, f"collect {first}")
    acting: AbstractContextManager[Engine]
    if expert_rate is not None:
        acting = nullcontext(ScriptedEngine(expert_of(env, NO_EXPERT), policy, config.rollout, expert_rate, rng))
    else:
        generator = torch.Generator(policy.device)
        generator.manual_seed(named_seed(config.run.seed, f"collect {first} sampling"))
        acting = backend.engine(policy, config.rollout, generator)
    tasks = env.tasks("train")
    chosen = [tasks[i] for i in rng.integers(len(tasks), size=count)]
    seeds = rng.integers(2**31, size=count).tolist()
    layout, history_length = make_layout(config.env.layout, policy, env), config.env.history_length
    with acting as engine:
        trajectories = rollout(env, engine, layout, chosen, seeds, group_size=1, history_length=history_length)
    kept = intact(trajectories)
    for number, trajectory in enumerate(kept, start=first):
        trajectory.group = number
    return kept


class Summary:
    """Counts over trajectories, which need not be kept for it."""

    def __init__(self) -> None:
        self.count = self.won = self.turns = self.invalid = 0
        self.score = 0.0

    def add(self, trajectory: Trajectory) -> None:
        """Count one more."""
        self.count += 1
        self.won += trajectory.won
        self.score += trajectory.task_score
        self.turns += len(trajectory)
        self.invalid += sum(not turn.is_action_valid for turn in trajectory.turns)

    def values(self) -> dict[str, float]:
        """Their number, success rate, mean task score and turns, share of invalid actions."""
        n = max(self.count, 1)
        return {
            "trajectories": self.count,
            "success": self.won / n,
            "task_score": self.score / n,
            "turns": self.turns / n,
            "invalid_actions": self.invalid / max(self.turns, 1),
        }


def load_trajectories(paths: Sequence[Path]) -> list[Trajectory]:
    """The trajectories of files, or of folders with a `trajectories.jsonl`.

    Raises ConfigError for a file that is missing or empty, and that names a line which is no trajectory.
    """
    trajectories: list[Trajectory] = []
    for path in paths:
        file = path / TRAJECTORIES_FILE if path.is_dir() else path
        if not file.exists():
            raise ConfigError(f"{file} does not exist; expected trajectories written by `rspo collect`")
        found = list(read_trajectories(file))
        if not found:
            raise ConfigError(f"{file} is empty; expected trajectories written by `rspo collect`")
        trajectories += found
    return trajectories


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file, one after the other. Raises ConfigError that names a malformed line."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield trajectory_from_json(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f"line {number} of {path} is not a trajectory ({type(error).__name__}: {error})"
                ) from error


def _drop_unfinished(path: Path) -> None:
    """Cut off a last line without its end."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                end += len(line)
    os.truncate(path, end)
