"""What users build on: public names and signatures, settings with both presets, commands with their flags.

It stands in contract.txt. A change of it is meant: `python -m pytest tests/rspo/test_contract.py` then shows the
difference, and writing what `contract()` gives into that file accepts it.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rspo_kernels
from rspo import RSPOTrainer
from rspo.cli.parser import make_parser
from rspo.config import default_config, paper_config
from rspo.config.files import flat_settings

STORED = Path(__file__).with_name("contract.txt")


def contract() -> str:
    """All of it, a line each."""
    return "\n".join([*kernels(), "", *trainer(), "", *settings(), "", *commands()]) + "\n"


def signature(thing: Callable[..., Any]) -> inspect.Signature:
    """Names, order and defaults; how Python writes annotations differs between its versions."""
    plain = inspect.signature(thing).replace(return_annotation=inspect.Signature.empty)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in plain.parameters.values()]
    return plain.replace(parameters=bare)


def kernels() -> Iterator[str]:
    for name in sorted(rspo_kernels.__all__):
        thing = getattr(rspo_kernels, name)
        yield f"rspo_kernels.{name}{signature(thing) if callable(thing) else f' = {thing}'}"


def trainer() -> Iterator[str]:
    for name, thing in sorted(vars(RSPOTrainer).items()):
        if callable(thing) and (name == "__init__" or not name.startswith("_")):
            yield f"RSPOTrainer.{name}{signature(thing)}"
        elif isinstance(thing, property) and not name.startswith("_"):
            yield f"RSPOTrainer.{name}"


def settings() -> Iterator[str]:
    default, paper = flat_settings(default_config()), flat_settings(paper_config())
    for name in sorted(default.keys() | paper.keys()):
        yield f"{name} = {default.get(name)!r}; paper: {paper.get(name)!r}"


def commands(parser: argparse.ArgumentParser | None = None, name: str = "rspo") -> Iterator[str]:
    for action in (parser or make_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, inner in sorted(action.choices.items()):
                yield from commands(inner, f"{name} {command}")
        elif not isinstance(action, argparse._HelpAction):
            flags = " ".join(action.option_strings) or action.dest
            yield f"{name}: {flags} nargs={action.nargs} default={action.default!r} required={action.required}"


def test_the_contract_is_kept() -> None:
    assert contract().splitlines() == STORED.read_text(encoding="utf-8").splitlines()
