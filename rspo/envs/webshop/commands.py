"""The command line's part for WebShop: `webshop check DIR`."""

from __future__ import annotations

import argparse
from typing import Any

_Commands = Any  # argparse names the type of add_subparsers' result only privately


def add_commands(commands: _Commands) -> None:
    """Add the command `webshop` to the result of an `add_subparsers`; its function is the parsed `command`."""
    webshop = commands.add_parser("webshop", help="WebShop's data", description="What concerns WebShop's data.")
    parts = webshop.add_subparsers(required=True, metavar="COMMAND")
    check = parts.add_parser(
        "check",
        help="check a data directory",
        description="Load a directory with WebShop's data and say what is in it: products, goals, and what was left"
        " out. Fails with what to do where it cannot be used.",
    )
    check.add_argument("dir", metavar="DIR", help="data directory or product file; own: the catalogue that is built in")
    check.set_defaults(command=check_command)


def check_command(parsed: argparse.Namespace) -> None:
    """Print the summary of `parsed.dir`. Raises ConfigError or OSError where it cannot be used."""
    from ...config import ConfigError
    from .check import check_data

    try:
        summary = check_data(parsed.dir)
    except (ImportError, ValueError) as error:
        raise ConfigError(str(error)) from error
    print("\n".join(summary.lines()))
