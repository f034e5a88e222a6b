"""What each command takes, and what its `--help` says."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import ESTIMATORS, METHODS, PRESETS
from ..envs.alfworld import commands as alfworld_commands
from ..envs.webshop import commands as webshop_commands
from .commands import (
    run_collect,
    run_eval,
    run_export,
    run_play,
    run_plot,
    run_reward_model,
    run_settings,
    run_summary,
    run_train,
)
from .settings_help import describe_settings

_Commands = Any  # argparse names the type of add_subparsers' result only privately


class _Parser(argparse.ArgumentParser):
    """A command whose `--help` ends with what settings mean: those of these names and sections."""

    settings: tuple[str, ...] = ()

    def format_help(self) -> str:
        text = super().format_help()
        if self.settings:
            text += "\nsettings, for --set or in the file of --config, as the default preset has them:\n"
            text += f"{describe_settings(self.settings)}\n\nrspo settings says what others there are.\n"
        return text


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What a command line asks for. Ends the program where it is wrong, as argparse does."""
    parser = make_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        settings = [text.lstrip("-") for text in unknown if re.match(r"-*[a-z_]+\.[a-z_]+=", text)]
        hint = " ".join(f"--set {text}" for text in settings) if hasattr(parsed, "set") else ""
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}" + (f"; a setting is given as {hint}" if hint else "")
        )
    return parsed


def make_parser() -> argparse.ArgumentParser:
    """All commands. Of the one that was given, the parsed `command` is its function, `work` a word for what it does."""
    parser = _Parser(prog="rspo", description="Reward-Swap Policy Optimization for multi-turn language-model agents.")
    parser.set_defaults(work="the command")
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
    _add_settings(train, training=True)
    train.set_defaults(command=run_train, work="training")

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
    _add_settings(
        evaluation, "evaluation", "policy.dtype", "policy.device", "policy.attention", "policy.allow_download"
    )
    evaluation.set_defaults(command=run_eval, work="evaluation")

    export = commands.add_parser(
        "export",
        help="write a model for use elsewhere",
        description="Write the latest checkpoint of a run, or an adapter or model folder, as a whole model that"
        " transformers loads, without what only training needs. A LoRA adapter is merged into its base.",
    )
    export.add_argument("path", type=Path, help="run folder, checkpoint, adapter or model folder")
    export.add_argument("--out", type=Path, required=True, help="folder of the model")
    _add_settings(export, "policy.dtype", "policy.device", "policy.allow_download", unused=("--env", "--seed"))
    export.set_defaults(command=run_export)

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
    plot.set_defaults(command=run_plot)

    summary = commands.add_parser(
        "summary",
        help="compare runs in a table",
        description="Held-out success of runs, before, after, best and mean, with what it cost.",
    )
    summary.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    summary.add_argument("--labels", nargs="+", help="one for each run, as for plot")
    summary.set_defaults(command=run_summary)

    _add_play(commands)
    _add_envs(commands)
    _add_settings_command(commands)
    return parser


def _add_collect(commands: _Commands) -> None:
    parser = commands.add_parser(
        "collect",
        help="write trajectories to a file",
        description="Play random training tasks, once each, and append the trajectories to trajectories.jsonl in a"
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
    _add_settings(parser, "env", "rollout")
    parser.set_defaults(command=run_collect, work="collection")


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
    _add_settings(parser, "reward_model", "policy.device", "policy.attention", unused=("--env",))
    parser.set_defaults(command=run_reward_model, work="training")


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
    _add_settings(parser, "env")
    parser.set_defaults(command=run_play)


def _add_envs(commands: _Commands) -> None:
    parser = commands.add_parser(
        "envs", help="data of the environments", description="What the environments need: games, products."
    )
    environments = parser.add_subparsers(required=True, metavar="ENVIRONMENT")
    for module in (alfworld_commands, webshop_commands):
        module.add_commands(environments)


def _add_settings_command(commands: _Commands) -> None:
    parser = commands.add_parser(
        "settings",
        help="say what the settings mean",
        description="Without a name: the sections of settings, and what each is about. With the name of a section or of"
        " a setting: full names, values in the default preset, and what they mean.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a section, e.g. swap, or a setting, e.g. swap.alpha")
    parser.set_defaults(command=run_settings)


def _add_settings(parser: _Parser, *settings: str, training: bool = False, unused: Sequence[str] = ()) -> None:
    """The flags that make a configuration.

    settings: sections and settings that the command's help explains.  training: it takes a start policy.
    unused: flags that mean nothing here, taken for the sake of a common command line, and not shown.
    """

    def add(flag: str, help: str, **options: Any) -> None:
        parser.add_argument(flag, help=argparse.SUPPRESS if flag in unused else help, **options)

    parser.settings = settings
    add(
        "--preset",
        "default, or paper: every setting as the paper's; replaces the one that --config names",
        choices=tuple(PRESETS),
    )
    add("--config", "YAML with any of the settings", type=Path, metavar="FILE")
    add("--env", "environment: a name or a class path", metavar="NAME")
    if training:
        add("--policy", "model folder to start from", metavar="PATH")
    add("--seed", "seed of everything random", type=int, metavar="S")
    add(
        "--set",
        "any setting, e.g. swap.alpha=0.25; may be repeated"
        + ("; rspo settings says which there are" if training else ""),
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
    )
