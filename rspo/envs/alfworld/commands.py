"""The command line for ALFWorld: `rspo envs alfworld generate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .games import TASK_TYPES


def add_commands(subparsers: Any) -> None:
    """Add the command `alfworld` to what `add_subparsers` gave; its function is the parsed `command`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "alfworld", help="games of the ALFWorld environment", description="Games of the ALFWorld environment."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="make games without any download",
        description="Make games from the alfworld package's files, as dense as the official ones, each played to its"
        " end before it is kept. The folder can then be the environment's data:"
        " rspo train --env alfworld --set env.options='{data: DIR}', or ALFWORLD_DATA=DIR.",
    )
    generate.add_argument("--n", type=int, default=1000, metavar="N", help="number of games (default: 1000)")
    generate.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder, or one to go on with")
    generate.add_argument("--seed", type=int, default=0, help="the same seed makes the same games (default: 0)")
    generate.add_argument(
        "--eval-share",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the games in each of valid_seen and valid_unseen (default: 0.1)",
    )
    generate.add_argument(
        "--types",
        nargs="+",
        choices=TASK_TYPES,
        default=list(TASK_TYPES),
        metavar="TYPE",
        help=f"task types, taken in turn: some of {', '.join(TASK_TYPES)} (default: all)",
    )
    generate.add_argument("--quiet", action="store_true", help="no progress bar")
    generate.set_defaults(command=_generate)


def _generate(parsed: argparse.Namespace) -> None:
    """Write games and say which. Raises ConfigError where that is not possible."""
    from ...config import ConfigError
    from .generator import generate_games

    if parsed.n < 3:
        raise ConfigError(f"--n must be at least 3, one game for each split; got {parsed.n}")
    try:
        result = generate_games(
            parsed.out,
            parsed.n,
            parsed.seed,
            eval_share=parsed.eval_share,
            task_types=parsed.types,
            progress=not parsed.quiet,
        )
    except (ImportError, RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    made = ", ".join(f"{count} {split}" for split, count in result.made.items())
    earlier = f", {result.earlier} of them there before" if result.earlier else ""
    print(
        f"{parsed.out}: {made}{earlier}; {result.unsolvable} that could not be won were thrown away"
        f" ({result.seconds:.0f} s)"
    )
    for task_type, count in result.by_type.items():
        print(f"  {task_type:<32}{count:>6}")
