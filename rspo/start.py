"""From a configuration to a run: its folder, environment, start policy and trainer.

A run's folder holds `config.yaml`, `metrics.jsonl`, `start/` (the start policy) or `base.json` (its fingerprint, where
`policy.path` names it), `checkpoints/` and plots.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .algorithm.estimators import make_estimator
from .algorithm.rewards import RewardFunction, training_rewards
from .algorithm.warmup import warm_up
from .config import Config, ConfigError
from .config.files import CONFIG_FILE, flat_settings, load_config, save_config
from .config.lock import FolderLock
from .config.storage import new_folder, prepare_folder, tidy, writing
from .engines import open_backend
from .envs import BatchedEnv
from .envs.base import EnvironmentValueError
from .envs.workers import WorkerEnv
from .models.agent import Agent
from .models.checks import check_device
from .models.lora import BASE_FILE, fingerprint, require_peft, require_whole_model
from .models.policy import Policy
from .models.processes import ALONE, Ranks, join, placed
from .models.randomness import named_seed
from .models.sharding import load_policy
from .models.tiny import check_small_dtype, check_small_targets, check_small_template
from .runs.checkpoint import (
    Checkpoint,
    drop_newer_checkpoints,
    incomplete_checkpoints,
    list_checkpoints,
    load_checkpoint,
    pass_over_incomplete,
)
from .runs.checks import check_length, check_run
from .runs.file_names import START, START_MARK, WARMUP_FILE
from .runs.fingerprint import check_fingerprint, has_fingerprint, store_fingerprint, stored_fingerprint
from .runs.observer import Observer
from .runs.records import Onlooker, Tracker
from .runs.reporters import Reporter, find_reporters
from .runs.setting import build_env, check_split, set_threads, try_reset
from .trainer import Trainer

MAY_CHANGE = (
    "run.", "parallel.", "evaluation.", "optimizer.", "critic.learning_rate", "env.workers", "env.worker_timeout",
    "policy.device", "policy.attention", "policy.packing", "policy.fused", "policy.gradient_checkpointing",
    "policy.allow_download", "rollout.max_batch", "warmup.", "reward_model.", "lora.learning_rate", "engine.name",
    "engine.server", "engine.url", "engine.model", "engine.api_key_env", "engine.timeout", "engine.retries",
    "engine.concurrency", "engine.push_weights", "engine.push_folder", "engine.tensor_parallel", "engine.gpu_memory",
    "engine.sleep", "engine.mismatch_limit",
)  # fmt: skip
"""Settings, or beginnings of their names, that a resumed run may have other than before; not its seed."""


def start_policy(
    config: Config,
    env: BatchedEnv,
    folder: Path,
    *,
    progress: bool,
    given: Policy | None = None,
    ranks: Ranks = ALONE,
) -> Policy:
    """The policy that training starts from: `given`, or that of `policy.path`, or the tiny model, warmed up. One that
    `policy.path` does not name is kept in `folder/start`."""
    if given is not None and config.parallel.shard != "none":
        raise ConfigError(
            f"parallel.shard={config.parallel.shard!r} needs a model that each process can load; save it, and give"
            " policy.path instead of a policy"
        )
    if config.policy.path is not None:
        require_whole_model(config.policy.path, "policy.path")
        return given or load_policy(config.policy.path, config)
    cached = folder / START

    def make() -> None:
        if not cached.is_dir():
            state = folder / WARMUP_FILE
            policy = given or fresh_start(config, env, progress=progress, state=state)
            with new_folder(cached) as partial:
                policy.save(partial)
                (partial / START_MARK).touch()
            state.unlink(missing_ok=True)

    ranks.from_main(make)
    if given is not None:
        if len(set(ranks.gather(lambda: fingerprint(given.model)))) > 1:
            raise ConfigError("the processes were given different models to start from; each must be given the same")
        given.model.name_or_path = str(cached)  # where the base of an adapter is looked for
        return given
    # Always through the file, so that a first and a resumed run start from the same numbers, and all processes.
    return load_policy(cached, config)


def fresh_start(config: Config, env: BatchedEnv, *, progress: bool, state: Path | None = None) -> Policy:
    """The tiny model, warmed up on the environment.

    state: the file that `warm_up` keeps.

    Raises ConfigError that `warm_up` raises, and for settings that it could not be trained with.
    """
    check_small_dtype(config.policy)
    check_small_template(config.policy)
    check_small_targets(config)
    return warm_up(env.local if isinstance(env, WorkerEnv) else env, config, progress=progress, state=state)[0]


def untrained_policy(config: Config, env: BatchedEnv, ranks: Ranks, *, progress: bool) -> Policy:
    """The policy that a run would start from, for all processes at once: that of `policy.path`, or the tiny model,
    which one of several processes warms up for all."""
    if config.policy.path is not None:
        return load_policy(config.policy.path, config)
    if ranks.size == 1:
        return fresh_start(config, env, progress=progress)

    def make() -> dict[str, bytes]:
        with TemporaryDirectory() as folder:
            fresh_start(config, env, progress=progress).save(folder)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    files = ranks.from_main(make)
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        return load_policy(folder, config)


def default_folder(config: Config) -> Path:
    """Where a run goes that was given no folder."""
    name = config.env.name.rpartition(":")[2]
    return Path("runs") / f"{config.title.lower()}-{name}-seed{config.run.seed}"


def open_run(
    config: Config,
    folder: Path,
    *,
    resume: bool | Path = False,
    progress: bool = True,
    env: BatchedEnv | None = None,
    policy: Policy | None = None,
    dense_reward: RewardFunction | None = None,
    observer: Observer | None = None,
) -> Trainer:
    """A trainer in a run folder: new, or going on from its latest checkpoint.

    Args:
        config: all settings.
        folder: the run's.
        resume: go on with the run that the folder holds; from one of its checkpoints where that is given, as if it were
            the latest.
        progress: show a bar.
        env: instead of one that is built from the settings.
        policy: to start a new run from, and changed by it, instead of one that is loaded or warmed up.
        dense_reward: what `config.rewards.dense` names, where that cannot be imported.
        observer: is told what happens.

    The folder is locked until the trainer's records are closed.

    Raises ConfigError where a new run's folder holds one already, another process writes into it (FolderInUseError),
    where the settings of a resumed run are not those it was started with, or where there are other processes or fewer
    devices than they ask for; StorageError where the folder cannot be written.
    """
    ranks = join(config)
    as_given, config = config, placed(config, ranks)
    with ExitStack() as opened:  # what was opened by the time that something fails is closed
        if ranks.is_main and not folder.exists():
            opened.callback(_remove_empty, folder)
        lock = _lock(as_given, folder, resume, ranks)
        opened.enter_context(lock)
        ranks.from_main(lambda: _take_folder(as_given, folder, resume))
        set_threads(config)
        check_device(config.policy)
        if env is None:
            env = opened.enter_context(closing(build_env(config)))
        check_split(env, config)
        if not resume:
            try_reset(env, config)
        # What cannot be trained on is found out before the start policy is made.
        estimator = make_estimator(config.estimator_name, config.estimator)
        training_rewards(config, env.has_dense_reward, np.random.default_rng(0), dense_reward)
        reporters = find_reporters(config.run.report_to)
        backend = opened.enter_context(closing(open_backend(config, folder, ranks)))
        if config.lora.rank > 0:
            require_peft(f"lora.rank={config.lora.rank}")
        ranks.from_main(lambda: _prepare(folder))
        start = start_policy(config, env, folder, progress=progress, given=policy, ranks=ranks)
        if resume and has_fingerprint(config):
            ranks.from_main(lambda: check_fingerprint(folder, start))
        with start.whole():
            check_run(start, config)
        checkpoint = _checkpoint(config, folder, resume, estimator.needs_critic, start, ranks) if resume else None
        state = checkpoint.state if checkpoint else {"step": 0, "records": 0}
        check_length(config, state["step"])
        if checkpoint:  # as their records are
            ranks.from_main(lambda: drop_newer_checkpoints(folder / "checkpoints", state["step"]))
        trained, reference = policy_and_reference(start, config)
        if not resume and ranks.is_main:
            opened.callback(_forget, folder)
        if not resume and policy is None and has_fingerprint(config):
            ranks.from_main(lambda: store_fingerprint(folder, start))
        ranks.from_main(lambda: save_config(as_given, folder / CONFIG_FILE))
        tracker = opened.enter_context(closing(_open_tracker(config, folder, state, progress, reporters, ranks)))
        agent = Agent(trained, config, estimator.needs_critic, ranks=ranks)
        trainer = Trainer(config, folder, env, agent, reference, tracker, observer, dense_reward, backend)
        trainer.lock = lock
        if checkpoint:
            trainer.load(checkpoint)
        opened.pop_all()
    return trainer


@contextmanager
def startable_again(trainer: Trainer, resume: bool | Path) -> Iterator[None]:
    """Around the training of a run. Where a setting turns out to be impossible (ConfigError) before a new run has
    trained anything, or an environment's values to be wrong, its folder can take a new run."""
    try:
        yield
    except (ConfigError, EnvironmentValueError):
        if not resume and nothing_trained(trainer) and trainer.ranks.is_main:
            _forget(trainer.folder)
        raise


def nothing_trained(trainer: Trainer) -> bool:
    """Whether neither agent has made an update."""
    # The first record is the start policy's evaluation; agent B's first update would be the second.
    return trainer.books.step == 0 and trainer.books.tracker.records <= 1


def _forget(folder: Path) -> None:
    """Take away `config.yaml`, by which a folder holds a run, and what the run knew its start by."""
    for name in (CONFIG_FILE, BASE_FILE):
        (folder / name).unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    """Take away a folder that a start has made, if it has come to nothing."""
    with suppress(OSError):  # it holds something, or was never made
        folder.rmdir()


def check_folder(config: Config, folder: Path, resume: bool | Path) -> None:
    """Raises ConfigError where a new run's folder holds one already, or a resumed one is not that of `config`."""
    if resume:
        _check_resumable(config, folder)
    elif (folder / CONFIG_FILE).exists():
        begun = bool(list_checkpoints(folder / "checkpoints"))
        raise ConfigError(
            f"{folder} already holds a run; choose another --out (output_dir), or go on with --resume"
            " (resume_from_checkpoint=True)" + ("" if begun else "; it has no checkpoint yet, and can be deleted")
        )
    elif (folder / START).exists() and not (folder / START / START_MARK).exists():
        raise ConfigError(
            f"{folder / START} is where a run keeps the policy that it starts from, and holds something else; choose"
            " another --out (output_dir)"
        )


def _lock(config: Config, folder: Path, resume: bool | Path, ranks: Ranks) -> AbstractContextManager[Any]:
    """The folder's lock, which the main process holds for all."""
    locks: list[FolderLock] = []

    def make() -> None:
        check_folder(config, folder, resume)  # nothing is made where the run could not begin
        with writing(folder):
            locks.append(FolderLock(folder))

    ranks.from_main(make)
    return locks[0] if locks else nullcontext()


def _take_folder(config: Config, folder: Path, resume: bool | Path) -> None:
    check_folder(config, folder, resume)
    if not resume:  # left by a start that broke off, of whatever settings
        shutil.rmtree(folder / START, ignore_errors=True)
        with suppress(OSError):  # of a folder that cannot be written, `_prepare` says what is wrong
            (folder / BASE_FILE).unlink()


def _prepare(folder: Path) -> None:
    prepare_folder(folder)
    for leftovers in (CONFIG_FILE, BASE_FILE, START, WARMUP_FILE):
        tidy(folder, leftovers)
    tidy(folder / "checkpoints")


def _open_tracker(
    config: Config,
    folder: Path,
    state: Mapping[str, Any],
    progress: bool,
    reporters: Sequence[type[Reporter]],
    ranks: Ranks,
) -> Tracker:
    """The main process's, once it is open: records of a resumed run are then cut to those of its checkpoint."""
    opened: list[Tracker] = []

    def make() -> None:
        opened.append(Tracker(folder, config.run.steps, state["step"], state["records"], progress, reporters))

    ranks.from_main(make)
    return opened[0] if opened else Onlooker(folder, state["records"])


def policy_and_reference(start: Policy, config: Config) -> tuple[Policy, Policy | None]:
    """Agent A's policy and, where a KL term asks for it, the frozen start policy. Under LoRA the start policy is the
    base of the one and the other itself."""
    pulls = config.loss.kl_coef > 0
    if config.adapts_both:
        policy = start.adapted(config.lora, named_seed(config.run.seed, "adapter"))
        return policy, start if pulls else None
    if config.lora.rank > 0:
        start.adapted(config.lora, 0)  # what agent B cannot be is said now, and not in the first loop
    return start, start.copy() if pulls else None


def _checkpoint(
    config: Config, folder: Path, resume: bool | Path, has_critic: bool, start: Policy, ranks: Ranks
) -> Checkpoint | None:
    """The checkpoint that a run goes on from; None where it has none yet. start: what adapters stand on."""

    def whole() -> list[Path]:
        found = list_checkpoints(folder / "checkpoints")
        if not found:  # of what is not whole it is said what is missing, rather than begun anew
            return incomplete_checkpoints(folder / "checkpoints")
        if resume is True or resume in found:
            pass_over_incomplete(folder / "checkpoints", rename=True)
        return found

    checkpoints = ranks.from_main(whole)
    if not isinstance(resume, Path):
        return load_checkpoint(checkpoints[-1], config, has_critic, start, ranks) if checkpoints else None
    if resume not in checkpoints:
        raise ConfigError(
            f"{resume} is not a checkpoint of the run in {folder}, which has"
            f" {', '.join(path.name for path in checkpoints) or 'none'}"
        )
    return load_checkpoint(resume, config, has_critic, start, ranks)


def _check_resumable(config: Config, folder: Path) -> None:
    """A run goes on as what it is; what `MAY_CHANGE` names may change."""
    before, now = (flat_settings(c) for c in (load_config(folder / CONFIG_FILE), config))
    for name, old in before.items():
        may_change = name != "run.seed" and name.startswith(MAY_CHANGE)
        if name == "policy.path":
            may_change = None not in (old, now[name]) and _start_may_move(config, folder)
        if name == "swap.copy":
            may_change = "adapter" not in (old, now[name])  # the others differ in where things lie
        if old != now[name] and not may_change:
            raise ConfigError(
                f"{name} of the run in {folder} is {old!r} and cannot change on --resume, got {now[name]!r}"
            )


def _start_may_move(config: Config, folder: Path) -> bool:
    """Whether a run can go on with its start at another place: it, or an adapter on it, knows it by its fingerprint, or
    after the first checkpoint nothing comes from there but the reference of a KL term."""
    is_known = stored_fingerprint(folder) is not None and has_fingerprint(config)
    return is_known or config.loss.kl_coef == 0 or config.adapts_both


def how_to_go_on(folder: Path) -> str:
    """What is safe of a run that has stopped early, and how it goes on."""
    if not (folder / CONFIG_FILE).is_file():
        goes_on = "; its warm-up goes on from the last measurement" if (folder / WARMUP_FILE).is_file() else ""
        return f"start the run again, which had not begun{goes_on}"
    checkpoints = list_checkpoints(folder / "checkpoints")
    where = f"checkpoint {checkpoints[-1].name}" if checkpoints else "its start, as there is no checkpoint yet"
    return f"the run can go on from {where}: rspo train --resume --out {folder}"


def latest_checkpoint(folder: Path) -> Path:
    """The latest complete checkpoint of a run, a folder that `Policy.load` takes; warns of others that it passes over.
    Raises ConfigError where there is none."""
    pass_over_incomplete(folder / "checkpoints", rename=False)
    checkpoints = list_checkpoints(folder / "checkpoints")
    if not checkpoints:
        raise ConfigError(f"{folder} has no checkpoints yet")
    return checkpoints[-1]


def trained_policy(folder: Path, config: Config) -> Policy:
    """The policy of a run's latest checkpoint. Raises ConfigError where there is none."""
    return Policy.load(latest_checkpoint(folder), config.policy)
