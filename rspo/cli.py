"""The command line: `rspo train`, `eval`, `export`, `collect`, `reward-model`, `plot`, `summary`, `play`, `envs`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from .collect import NO_EXPERT, TRAJECTORIES_FILE, collect, load_trajectories
from .config import ESTIMATORS, METHODS, PRESETS, Config, ConfigError
from .config_io import apply_flags, load_config, method_names, preset, preset_name
from .dry_run import dry_run
from .engines import expert_of
from .envs.alfworld import commands as alfworld_commands
from .envs.base import WorkerError
from .envs.webshop import commands as webshop_commands
from .evaluate import evaluate
from .interruption import Interrupted, interruptible
from .models import Policy
from .play import Game, choose_task, play_game
from .reward_model import SETTINGS_FILE
from .reward_training import train_reward_model
from .rewards import NonFiniteError
from .runs import (
    CONFIG_FILE,
    build_env,
    check_split,
    default_folder,
    how_to_go_on,
    latest_checkpoint,
    open_run,
    set_threads,
    trained_policy,
)
from .storage import StorageError, new_folder, writing
from .summary import summary_table
from .warmup import fresh_policy

_Commands = Any  # argparse names the type of add_subparsers' result only privately


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, or 2 for a wrong setting or what cannot be read or written, 1 for a run that
    failed, 130 or 143 for one that was stopped by Ctrl-C or SIGTERM."""
    parsed = _parser().parse_args(arguments)
    # Class paths of one's own are found where the command is given; last, so that nothing installed is shadowed.
    sys.path.append(os.getcwd())
    # Loading a tiny model many times would draw its own bars over the run's.
    transformers_logging.disable_progress_bar()
    try:
        with interruptible():
            parsed.command(parsed)
    except (ConfigError, OSError) as error:
        print(f"rspo: error: {error}", file=sys.stderr)
        return 2
    except (NonFiniteError, WorkerError) as error:
        print(f"rspo: training stopped: {error}", file=sys.stderr)
        return 1
    except Interrupted as stop:
        print(f"\nrspo: {stop}", file=sys.stderr)
        return stop.exit_status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rspo", description="Reward-Swap Policy Optimization for multi-turn language-model agents."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train an agent",
        description="Train an agent into a run folder. Settings come from the preset, then --config, then the other"
        " flags, then --set, each laid over the ones before.",
    )
    train.add_argument("--method", choices=METHODS, help="rspo (default), or a base method alone")
    train.add_argument("--base", choices=ESTIMATORS, help="the method that both agents of rspo use (default: grpo)")
    train.add_argument("--out", type=Path, help="run folder (default: runs/METHOD-ENV-seedSEED)")
    train.add_argument(
        "--dense-reward",
        metavar="SOURCE",
        help="what agent B learns from: environment (default), model:FOLDER of a reward model, or"
        " package.module:function of a trajectory",
    )
    train.add_argument("--steps", type=int, metavar="N", help="updates of agent A")
    train.add_argument("--save-every", type=int, metavar="N", help="updates of agent A between checkpoints")
    train.add_argument("--keep", type=int, metavar="N", help="newest checkpoints that are kept")
    train.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --out")
    train.add_argument("--quiet", action="store_true", help="no progress bar")
    train.add_argument(
        "--dry-run", action="store_true", help="say what the run needs and does, and what is missing here, and stop"
    )
    _add_settings(train)
    train.set_defaults(command=_train)

    evaluation = commands.add_parser(
        "eval",
        help="measure the success of a run or model",
        description="Play fixed episodes with the latest checkpoint of a run folder, or with a model folder.",
    )
    evaluation.add_argument("path", type=Path, help="run folder, checkpoint, or model folder")
    evaluation.add_argument("--episodes", type=int, metavar="N", help="number of episodes")
    evaluation.add_argument(
        "--temperature", type=float, action="append", metavar="T", help="sampling temperature; may be repeated"
    )
    evaluation.add_argument(
        "--split",
        metavar="NAME",
        help="of the environment's tasks: eval, held-out ones (default), train, or another it has",
    )
    evaluation.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_settings(evaluation, training=False)
    evaluation.set_defaults(command=_eval)

    export = commands.add_parser(
        "export",
        help="write a model for use elsewhere",
        description="Write the latest checkpoint of a run, or an adapter or model folder, as a whole model that"
        " transformers loads, without what only training needs. A LoRA adapter is merged into its base.",
    )
    export.add_argument("path", type=Path, help="run folder, checkpoint, adapter or model folder")
    export.add_argument("--out", type=Path, required=True, help="folder of the model")
    _add_settings(export, training=False)
    export.set_defaults(command=_export)

    _add_collect(commands)
    _add_reward_model(commands)

    plot = commands.add_parser(
        "plot",
        help="draw learning curves",
        description="Draw the learning curves of runs, finished or not. Runs that differ only in their seed become one"
        " curve: their mean, and a band from the lowest to the highest.",
    )
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    plot.add_argument("--out", type=Path, help="picture (default: learning_curve.png in the first run's folder)")
    plot.add_argument(
        "--labels",
        nargs="+",
        help="one for each run; equal ones become one curve (default: method and the settings that differ)",
    )
    plot.add_argument("--panels", nargs="+", metavar="PANEL", help="what to draw, e.g. success cost kl (default: all)")
    plot.set_defaults(command=_plot)

    summary = commands.add_parser(
        "summary",
        help="compare runs in a table",
        description="Held-out success of runs, before, after, best and mean, with what it cost.",
    )
    summary.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    summary.add_argument("--labels", nargs="+", help="one for each run, as for plot")
    summary.set_defaults(command=_summary)

    _add_play(commands)
    _add_envs(commands)
    return parser


def _add_collect(commands: _Commands) -> None:
    parser = commands.add_parser(
        "collect",
        help="write trajectories to a file",
        description=f"Play random training tasks, once each, and append the trajectories to {TRAJECTORIES_FILE} in a"
        " folder, one JSON object a line; e.g. to train a reward model on. A summary is printed.",
    )
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--policy", metavar="PATH", help="a model folder acts")
    who.add_argument("--run", type=Path, metavar="DIR", help="the latest checkpoint of a run acts, with its settings")
    who.add_argument(
        "--expert",
        type=float,
        metavar="RATE",
        help="the environment's scripted expert acts: a step is the expert's with this probability, else random",
    )
    parser.add_argument(
        "--trajectories",
        type=int,
        default=2000,
        metavar="N",
        help="trajectories in the file at the end (default: 2000)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the file")
    parser.add_argument(
        "--resume", action="store_true", help="add to the file that --out holds, whoever played that, until it holds N"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    _add_settings(parser, training=False)
    parser.set_defaults(command=_collect)


def _add_reward_model(commands: _Commands) -> None:
    parser = commands.add_parser(
        "reward-model",
        help="train a process reward model",
        description="Train a model that gives each turn a reward, such that a trajectory's rewards add up to its final"
        " score. Its folder is a dense reward: rspo train --dense-reward model:FOLDER. Without --model, a tiny one is"
        " trained from nothing with the default preset's settings; with --model, a causal language model is"
        " fine-tuned with the paper preset's, unless --preset says otherwise.",
    )
    parser.add_argument(
        "data", type=Path, nargs="+", metavar="DATA", help="files of `rspo collect`, or the folders that hold them"
    )
    parser.add_argument("--model", metavar="PATH", help="folder of a causal language model to start from")
    parser.add_argument("--out", type=Path, help="folder of the reward model (default: runs/reward-model-seedSEED)")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the trajectories")
    parser.add_argument("--batch-size", type=int, metavar="N", help="trajectories of an update")
    parser.add_argument("--learning-rate", type=float, metavar="LR", help="learning rate of AdamW")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    _add_settings(parser, training=False)
    parser.set_defaults(command=_reward_model)


def _add_play(commands: _Commands) -> None:
    parser = commands.add_parser(
        "play",
        help="act in an environment oneself",
        description="One episode at the terminal: shows what the agent sees and takes actions from the keyboard, or"
        " from a script's lines; with --expert the environment's scripted expert acts.",
    )
    parser.add_argument("--expert", action="store_true", help="the expert acts")
    parser.add_argument("--split", default="train", metavar="NAME", help="of the tasks (default: train)")
    parser.add_argument("--task", type=int, metavar="N", help="number of the task in its split (default: a random one)")
    parser.add_argument("--json", action="store_true", help="one JSON object a turn, for scripts")
    _add_settings(parser, training=False)
    parser.set_defaults(command=_play)


def _add_envs(commands: _Commands) -> None:
    parser = commands.add_parser(
        "envs", help="data of the environments", description="What the environments need: games, products."
    )
    environments = parser.add_subparsers(required=True, metavar="ENVIRONMENT")
    for module in (alfworld_commands, webshop_commands):
        module.add_commands(environments)


def _add_settings(parser: argparse.ArgumentParser, training: bool = True) -> None:
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        help="default, or paper: every setting as the paper's; replaces the one that --config names",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with any of the settings")
    parser.add_argument("--env", metavar="NAME", help="environment: a name or a class path")
    if training:
        parser.add_argument("--policy", metavar="PATH", help="model folder to start from")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of everything random")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="any setting, e.g. swap.alpha=0.25; may be repeated",
    )


def _settings(parsed: argparse.Namespace, base: Config | None = None) -> Config:
    """The configuration that the flags describe, laid over `base` instead of a preset where given."""
    method = getattr(parsed, "method", None)
    if base is None or parsed.preset is not None:
        named = method_names(parsed.config) if parsed.config else {}
        chosen = {"method": method, "base": getattr(parsed, "base", None)}
        chosen |= {name: value for name, _, value in (flag.partition("=") for flag in parsed.set) if name in chosen}
        named |= {name: value for name, value in chosen.items() if value is not None}
        stated = preset_name(parsed.config) if parsed.config else "default"
        base = preset(parsed.preset or stated, **named)
    config = load_config(parsed.config, base) if parsed.config else base
    flags = {
        "method": method,
        "base": getattr(parsed, "base", None),
        "env.name": parsed.env,
        "policy.path": getattr(parsed, "policy", None),
        "rewards.dense": getattr(parsed, "dense_reward", None),
        "reward_model.epochs": getattr(parsed, "epochs", None),
        "reward_model.batch_size": getattr(parsed, "batch_size", None),
        "reward_model.learning_rate": getattr(parsed, "learning_rate", None),
        "run.seed": parsed.seed,
        "run.steps": getattr(parsed, "steps", None),
        "run.save_every": getattr(parsed, "save_every", None),
        "run.keep": getattr(parsed, "keep", None),
        "evaluation.episodes": getattr(parsed, "episodes", None),
        "evaluation.temperatures": getattr(parsed, "temperature", None),
        "evaluation.split": getattr(parsed, "split", None),
    }
    given = [f"{name}={json.dumps(value)}" for name, value in flags.items() if value is not None]
    return apply_flags(config, [*given, *parsed.set])


def _train(parsed: argparse.Namespace) -> None:
    if parsed.resume and parsed.out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    stored = parsed.out / CONFIG_FILE if parsed.out is not None else None
    if parsed.resume and stored is not None and not stored.is_file():
        raise ConfigError(f"--resume: {parsed.out} holds no run ({CONFIG_FILE} is missing)")
    config = _settings(parsed, load_config(stored) if parsed.resume and stored is not None else None)
    if parsed.dry_run:
        print(dry_run(config))
        return
    folder = parsed.out or default_folder(config)
    try:
        trainer = open_run(config, folder, resume=parsed.resume, progress=not parsed.quiet)
        try:
            trainer.train()
        finally:
            trainer.close()
    except Interrupted as stop:
        raise Interrupted(stop.signal_number, how_to_go_on(folder)) from None
    except StorageError as error:
        raise StorageError(f"{error}; once it can be, {how_to_go_on(folder)}") from error
    except WorkerError as error:
        raise WorkerError(f"{error}; {how_to_go_on(folder)}") from error

    from .plotting import plot_runs

    picture = folder / "learning_curve.png"
    with writing(picture):
        plot_runs([folder], picture)
    print(f"{summary_table([folder])}\n\nrun folder: {folder}")


def _trained_model(parsed: argparse.Namespace) -> tuple[Path, Config]:
    """The folder of the model that a path means, a run's latest checkpoint or itself, and its settings."""
    if not parsed.path.is_dir():
        raise ConfigError(f"{parsed.path} is not a folder")
    is_run = (parsed.path / CONFIG_FILE).is_file()
    # A checkpoint lies two folders below the settings it was made with.
    stored = parsed.path / CONFIG_FILE if is_run else parsed.path.resolve().parent.parent / CONFIG_FILE
    config = _settings(parsed, load_config(stored) if stored.is_file() else None)
    return latest_checkpoint(parsed.path) if is_run else parsed.path, config


def _export(parsed: argparse.Namespace) -> None:
    model, config = _trained_model(parsed)
    if parsed.out.exists():
        raise ConfigError(f"{parsed.out} exists; choose another --out")
    policy = Policy.load(model, config.policy)
    with new_folder(parsed.out) as folder:
        policy.save_whole(folder)
    print(f"{parsed.out}: the model of {model}")


def _eval(parsed: argparse.Namespace) -> None:
    model, config = _trained_model(parsed)
    set_threads(config)
    policy = Policy.load(model, config.policy)
    with closing(build_env(config)) as env:
        check_split(env, config)
        evaluation = evaluate(policy, env, config, progress=True)
    print(json.dumps(evaluation.to_json()) if parsed.json else evaluation.table())


def _collect(parsed: argparse.Namespace) -> None:
    stored = parsed.run / CONFIG_FILE if parsed.run is not None else None
    if stored is not None and not stored.is_file():
        raise ConfigError(f"--run: {parsed.run} holds no run ({CONFIG_FILE} is missing)")
    if parsed.trajectories < 1:
        raise ConfigError(f"--trajectories must be >= 1, got {parsed.trajectories}")
    if parsed.expert is not None and not 0 <= parsed.expert <= 1:
        raise ConfigError(f"--expert must be a probability in [0, 1], got {parsed.expert}")
    config = _settings(parsed, load_config(stored) if stored is not None else None)
    set_threads(config)
    env = build_env(config)
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
        )
    except Interrupted as stop:
        raise Interrupted(stop.signal_number, f"--resume goes on after what {parsed.out} holds") from None
    finally:
        env.close()
    print(f"{parsed.out / TRAJECTORIES_FILE}: {_listed(summary)}")


def _reward_model(parsed: argparse.Namespace) -> None:
    if parsed.preset is None:
        parsed.preset = "default" if parsed.model is None else "paper"
    config = _settings(parsed)
    set_threads(config)
    folder = parsed.out or Path("runs") / f"reward-model-seed{config.run.seed}"
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


def _plot(parsed: argparse.Namespace) -> None:
    from .plotting import plot_runs

    try:
        out = parsed.out or parsed.runs[0] / "learning_curve.png"
        written = plot_runs(parsed.runs, out, parsed.labels, parsed.panels)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(written)


def _play(parsed: argparse.Namespace) -> None:
    config = _settings(parsed)
    with closing(build_env(config)) as env:
        number, task, count = choose_task(env, parsed.split, parsed.task, config.run.seed)
        game = Game(env, task, config.run.seed, config.env.history_length)
        if not parsed.json:
            print(f"{config.env.name}: task {number} of {count} (split {parsed.split!r}), seed {config.run.seed}")
        play_game(game, expert=parsed.expert, as_json=parsed.json)


def _summary(parsed: argparse.Namespace) -> None:
    try:
        print(summary_table(parsed.runs, parsed.labels))
    except ValueError as error:
        raise ConfigError(str(error)) from error
