"""The command line: `rspo train`, `eval`, `export`, `collect`, `reward-model`, `plot`, `summary`, `play`, `envs`,
`settings`.

`parser` says what each takes, `commands` does it; `settings` makes a configuration of flags, and `settings_help`
explains them. None of these imports torch or transformers, which takes seconds, before flags and settings have been
read and checked: a mistake in them is answered at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from ..config import ConfigError
from ..runs.interruption import Interrupted, interruptible
from .parser import parse

SILENCE = 20.0
"""Seconds after which an error of a process other than the first is printed, if it still runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, or 2 for a wrong setting or what cannot be read or written, 1 for a run that
    failed or a dry run that found what would stop it, 130 or 143 for one that was stopped by Ctrl-C or SIGTERM."""
    parsed = parse(arguments)
    # Class paths of one's own are found where the command is given; last, so that nothing installed is shadowed.
    sys.path.append(os.getcwd())
    try:
        with interruptible():
            return parsed.command(parsed) or 0
    except (ConfigError, OSError) as error:
        _say(f"error: {error}")
        return 2
    except Interrupted as stop:
        print(f"\nrspo: {stop}", file=sys.stderr)
        return stop.exit_status
    except Exception as error:
        if not isinstance(error, _failures()):
            raise
        _say(f"{parsed.work} stopped: {error}")
        return 1


def _failures() -> tuple[type[Exception], ...]:
    """Errors that end a run which had begun. Their modules import torch, which a wrong flag must not wait for."""
    from ..algorithm.rewards import NonFiniteError
    from ..engines import EngineError
    from ..envs.base import WorkerError

    return NonFiniteError, WorkerError, EngineError


def _say(text: str) -> None:
    """Print what has ended this process. Where several were launched, most errors end them all: the first one speaks,
    and the others wait for the launcher, which stops all when one has ended, so that a text is read once."""
    if "LOCAL_RANK" in os.environ and os.environ.get("RANK", "0") != "0":
        time.sleep(SILENCE)
    print(f"rspo: {text}", file=sys.stderr)
