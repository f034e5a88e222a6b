"""The command line: `rspo train`, `eval`, `export`, `collect`, `reward-model`, `plot`, `summary`, `play`, `envs`,
`settings`.

`parser` says what each takes, `commands` does it; `settings` makes a configuration of flags, and `settings_help`
explains them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from transformers.utils import logging as transformers_logging

from ..config import ConfigError
from ..distributed import is_first
from ..engines import EngineError
from ..envs.base import WorkerError
from ..interruption import Interrupted, interruptible
from ..rewards import NonFiniteError
from .parser import parse

SILENCE = 20.0
"""Seconds after which an error of a process other than the first is printed, if it still runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, or 2 for a wrong setting or what cannot be read or written, 1 for a run that
    failed or a dry run that found what would stop it, 130 or 143 for one that was stopped by Ctrl-C or SIGTERM."""
    parsed = parse(arguments)
    # Class paths of one's own are found where the command is given; last, so that nothing installed is shadowed.
    sys.path.append(os.getcwd())
    # Loading a tiny model many times would draw its own bars over the run's.
    transformers_logging.disable_progress_bar()
    try:
        with interruptible():
            return parsed.command(parsed) or 0
    except (ConfigError, OSError) as error:
        _say(f"error: {error}")
        return 2
    except (NonFiniteError, WorkerError, EngineError) as error:
        _say(f"{parsed.work} stopped: {error}")
        return 1
    except Interrupted as stop:
        print(f"\nrspo: {stop}", file=sys.stderr)
        return stop.exit_status


def _say(text: str) -> None:
    """Print what has ended this process. Where several were launched, most errors end them all: the first one speaks,
    and the others wait for the launcher, which stops all when one has ended, so that a text is read once."""
    if not is_first("RANK"):
        time.sleep(SILENCE)
    print(f"rspo: {text}", file=sys.stderr)
