"""What each command does, of the arguments that `parser` has read.

What needs torch or transformers is imported in the commands, after their settings have been checked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from ..config import Config, ConfigError
from ..config.files import CONFIG_FILE, load_config
from ..config.storage import StorageError, check_folder_place, new_folder, writing
from ..runs.file_names import METRICS_FILE, START, START_MARK, STATE_FILE, WARMUP_FILE
from ..runs.interruption import Interrupted
from .settings import check_names, settings_of
from .settings_help import describe_sections, describe_settings


def run_train(parsed: argparse.Namespace) -> int:
    """Train, or with `--dry-run` say what that needs. Returns 1 where something here would stop the run."""
    if parsed.resume and parsed.out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    stored = parsed.out / CONFIG_FILE if parsed.out is not None else None
    if parsed.resume and stored is not None and not stored.is_file():
        if (parsed.out / WARMUP_FILE).is_file():
            raise ConfigError(
                f"--resume: the run in {parsed.out} had not begun; its warm-up goes on with the command that began it,"
                " without --resume"
            )
        raise ConfigError(f"--resume: {parsed.out} holds no run ({CONFIG_FILE} is missing)")
    config = settings_of(parsed, load_config(stored) if parsed.resume and stored is not None else None)
    if parsed.out is not None and not parsed.dry_run:  # which lists it among its findings
        check_folder_place(parsed.out)
    if not parsed.dry_run:
        check_names(config)

    from ..engines import EngineError
    from ..envs.base import WorkerError
    from ..models.processes import leave
    from ..runs.summary import summary_table
    from ..start import default_folder, how_to_go_on, open_run, startable_again

    _without_loading_bars()
    folder = parsed.out or default_folder(config)
    if parsed.dry_run:
        from .dry_run import dry_run

        report = dry_run(config, folder, resume=parsed.resume)
        print(report.text)
        return 1 if report.problems else 0
    try:
        trainer = open_run(config, folder, resume=parsed.resume, progress=not parsed.quiet)
        try:
            with startable_again(trainer, parsed.resume):
                trainer.train()
        finally:
            trainer.close()
    except Interrupted as stop:
        raise Interrupted(stop.signal_number, how_to_go_on(folder)) from None
    except StorageError as error:
        raise StorageError(f"{error}; once it can be, {how_to_go_on(folder)}") from error
    except (WorkerError, EngineError) as error:
        raise type(error)(f"{error}; {how_to_go_on(folder)}") from error

    leave()
    if not trainer.ranks.is_main:
        return 0

    from ..runs.plots import plot_runs

    picture = folder / "learning_curve.png"
    with writing(picture):
        plot_runs([folder], picture)
    print(f"{summary_table([folder])}\n\nrun folder: {folder}")
    return 0


def _without_loading_bars() -> None:
    """Loading a tiny model many times would draw transformers' own bars over the run's."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _trained_model(parsed: argparse.Namespace) -> tuple[Path, Config]:
    """The folder of the model that a path means, a run's latest checkpoint or itself, and its settings."""
    if not parsed.path.is_dir():
        raise ConfigError(f"{parsed.path} is not a folder")
    is_run = _is_run(parsed.path)
    run = parsed.path if is_run else _run_of(parsed.path.resolve())
    config = settings_of(parsed, load_config(run / CONFIG_FILE) if run is not None else None)

    from ..start import latest_checkpoint

    return latest_checkpoint(parsed.path) if is_run else parsed.path, config


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it has settings, which in a model's folder without a run's records are someone
    else's file."""
    is_model = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
    return (folder / CONFIG_FILE).is_file() and (not is_model or (folder / METRICS_FILE).is_file())


def _run_of(model: Path) -> Path | None:
    """The run that has made a model folder, a checkpoint of it or its start policy; None for any other folder, above
    which a file of the settings' name may be someone else's."""
    is_checkpoint = model.parent.name == "checkpoints" and (model / STATE_FILE).is_file()
    is_start = model.name == START and (model / START_MARK).is_file()
    run = model.parent.parent if is_checkpoint else model.parent
    return run if (is_checkpoint or is_start) and (run / CONFIG_FILE).is_file() else None


def run_export(parsed: argparse.Namespace) -> None:
    """Write a trained model as a whole one."""
    if parsed.out.exists():
        raise ConfigError(f"{parsed.out} exists; choose another --out")
    check_folder_place(parsed.out)
    model, config = _trained_model(parsed)

    from ..config.lock import LOCK_FILE, FolderLock
    from ..models.policy import Policy

    _without_loading_bars()
    policy = Policy.load(model, config.policy)
    beside = parsed.out.with_name(f".{parsed.out.name}{LOCK_FILE}")
    with FolderLock(parsed.out, beside), new_folder(parsed.out) as folder:
        policy.save_whole(folder)
    kwargs = policy.chat_template_kwargs
    print(f"{parsed.out}: the model of {model}")
    if kwargs:
        print(f"it reads prompts made with policy.chat_template_kwargs={kwargs}, which its folder does not hold")


def run_eval(parsed: argparse.Namespace) -> None:
    """Measure a trained model."""
    model, config = _trained_model(parsed)

    from ..algorithm.evaluate import evaluate
    from ..engines import open_backend
    from ..models.policy import Policy
    from ..runs.setting import build_env, check_split, set_threads

    _without_loading_bars()
    set_threads(config)
    policy = Policy.load(model, config.policy)
    with closing(open_backend(config)) as backend, closing(build_env(config)) as env:
        check_split(env, config)
        evaluation = evaluate(policy, env, config, progress=True, backend=backend)
    print(json.dumps(evaluation.to_json()) if parsed.json else evaluation.table())


def run_collect(parsed: argparse.Namespace) -> None:
    """Write trajectories to a file."""
    stored = parsed.run / CONFIG_FILE if parsed.run is not None else None
    if stored is not None and not stored.is_file():
        raise ConfigError(f"--run: {parsed.run} holds no run ({CONFIG_FILE} is missing)")
    if parsed.trajectories < 1:
        raise ConfigError(f"--trajectories must be >= 1, got {parsed.trajectories}")
    if parsed.expert is not None and not 0 <= parsed.expert <= 1:
        raise ConfigError(f"--expert must be a probability in [0, 1], got {parsed.expert}")
    config = settings_of(parsed, load_config(stored) if stored is not None else None)
    check_folder_place(parsed.out)
    check_names(config)

    from ..algorithm.warmup import fresh_policy
    from ..engines import LOCAL, expert_of, open_backend
    from ..models.policy import Policy
    from ..runs.collect import NO_EXPERT, TRAJECTORIES_FILE, collect
    from ..runs.setting import build_env, set_threads
    from ..start import trained_policy

    _without_loading_bars()
    set_threads(config)
    backend = LOCAL if parsed.expert is not None else open_backend(config)
    with closing(backend), closing(build_env(config)) as env:
        if parsed.run is not None:
            policy = trained_policy(parsed.run, config)
        elif config.policy.path is not None:
            policy = Policy.load(config.policy.path, config.policy)
        else:
            expert_of(env, NO_EXPERT)
            policy = fresh_policy(env, config)
        try:
            summary = collect(
                env,
                policy,
                config,
                parsed.out,
                parsed.trajectories,
                expert_rate=parsed.expert,
                resume=parsed.resume,
                progress=not parsed.quiet,
                backend=backend,
            )
        except Interrupted as stop:
            raise Interrupted(stop.signal_number, f"--resume goes on after what {parsed.out} holds") from None
    print(f"{parsed.out / TRAJECTORIES_FILE}: {_listed(summary)}")


def run_reward_model(parsed: argparse.Namespace) -> None:
    """Train a process reward model."""
    if parsed.preset is None:
        parsed.preset = "default" if parsed.model is None else "paper"
    config = settings_of(parsed)
    folder = parsed.out or Path("runs") / f"reward-model-seed{config.run.seed}"
    check_folder_place(folder)
    for path in parsed.data:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; expected trajectories written by `rspo collect`")

    from ..models.reward_model import SETTINGS_FILE
    from ..runs.collect import load_trajectories
    from ..runs.reward_training import train_reward_model
    from ..runs.setting import set_threads

    _without_loading_bars()
    set_threads(config)
    if (folder / SETTINGS_FILE).exists():
        raise ConfigError(f"{folder} already holds a reward model; choose another --out")
    trajectories = load_trajectories(parsed.data)
    measured = train_reward_model(trajectories, config, folder, path=parsed.model, progress=not parsed.quiet)
    if measured:
        print(f"on held-out trajectories: {_listed(measured)}")
    print(f"use it: rspo train --dense-reward model:{folder}")


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:g}" if name == "trajectories" else f"{name} {value:.4f}" for name, value in values.items()
    )


def run_plot(parsed: argparse.Namespace) -> None:
    """Draw learning curves."""
    from ..runs.plots import plot_runs

    try:
        out = parsed.out or parsed.runs[0] / "learning_curve.png"
        written = plot_runs(parsed.runs, out, parsed.labels, parsed.panels)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(written)


def run_play(parsed: argparse.Namespace) -> None:
    """Let the user act, or the expert."""
    config = settings_of(parsed)
    check_names(config)

    from ..runs.setting import build_env
    from .play import Game, choose_task, play_game

    with closing(build_env(config)) as env:
        number, task, count = choose_task(env, parsed.split, parsed.task, config.run.seed)
        game = Game(env, task, config.run.seed, config.env.history_length)
        if not parsed.json:
            print(f"{config.env.name}: task {number} of {count} (split {parsed.split!r}), seed {config.run.seed}")
        play_game(game, expert=parsed.expert, as_json=parsed.json)


def run_summary(parsed: argparse.Namespace) -> None:
    """Print a table of runs."""
    from ..runs.summary import summary_table

    try:
        print(summary_table(parsed.runs, parsed.labels))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def run_settings(parsed: argparse.Namespace) -> None:
    """Say what settings mean."""
    print(describe_settings(parsed.names) if parsed.names else describe_sections())
