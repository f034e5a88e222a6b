"""CPU time of an episode's start and of its steps, one episode at a time, in process.

ALFWorld with the fast layer and with TextWorld's own environment, on a few games (ALFWORLD_DATA, else generated ones);
WebShop on the data of WEBSHOP_DATA, else on the catalogue of our own; household. Experts act. Medians of CPU time, so
that what else runs on the machine matters little.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from rspo.envs import make_env

from .report import Report, environment, markdown

GAMES, QUICK_GAMES = 12, 2
PLAIN_GAMES = 3
VISITS, QUICK_VISITS = 200, 10


def run(options: argparse.Namespace) -> Report:
    """Play and measure."""
    games = QUICK_GAMES if options.quick else GAMES
    report = Report("envspeed", "cpu", environment("cpu"), {"games": games})
    with tempfile.TemporaryDirectory() as folder:
        data, what = _alfworld_data(Path(folder), games)
        report.rows += _rows("household", "", _play("household", games * 8, prompt_style="chat"))
        report.rows += _rows("alfworld", f"{what}, fast layer", _play("alfworld", games, data=data))
        plain = _play("alfworld", min(games, PLAIN_GAMES), data=data, fast=False)
        report.rows += _rows("alfworld", f"{what}, TextWorld's environment", plain)
    webshop = os.environ.get("WEBSHOP_DATA") or "own"
    visits = _play("webshop", QUICK_VISITS if options.quick else VISITS, data=webshop)
    what = "own catalogue" if webshop == "own" else "WebShop's products"
    report.rows += _rows("webshop", what, visits)
    return report


def _alfworld_data(folder: Path, count: int) -> tuple[str, str]:
    """A data folder and what is in it."""
    given = os.environ.get("ALFWORLD_DATA")
    if given:
        return given, "official games"
    from rspo.envs.alfworld.generator import generate_games

    generate_games(folder / "games", max(2 * count, 12))
    return str(folder / "games"), "generated games"


def _play(name: str, tasks: int, **options: Any) -> dict[str, list[float]]:
    """CPU seconds of each operation, over as many tasks, each played twice by the expert."""
    found: dict[str, list[float]] = defaultdict(list)
    env: Any = make_env(name, **options)
    chosen = env.tasks("train")
    chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, min(tasks, len(chosen))).astype(int)]
    _timed(env.tasks, "train")  # what the first call of a process loads is not an episode's
    found["first reset"], found["repeated reset"] = [], []  # in this order
    for again in (False, True):
        for task in chosen:
            seconds, _ = _timed(env.reset, [task], [0])
            found["repeated reset" if again else "first reset"].append(seconds)
            ended = False
            while not ended:
                (action,) = env.expert_actions()
                seconds, (_, _, terminated, truncated, _) = _timed(env.step, [action])
                found[_kind(action) if name == "webshop" else "step"].append(seconds)
                ended = bool(terminated[0] or truncated[0])
    env.close()
    return found


def _kind(action: str) -> str:
    return "buy" if action == "click[buy now]" else action.partition("[")[0]


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    began = process_time()
    result = function(*arguments)
    return process_time() - began, result


def _rows(env: str, variant: str, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "env": env,
            "variant": variant,
            "operation": operation,
            "count": len(times),
            "median_ms": round(1000 * float(np.median(times)), 4),
            "p95_ms": round(1000 * float(np.quantile(times, 0.95)), 4),
        }
        for operation, times in found.items()
    ]


def table(report: Report) -> str:
    """All operations."""
    lines = [
        (row["env"], row["variant"], row["operation"], row["count"], f"{row['median_ms']:.3g}", f"{row['p95_ms']:.3g}")
        for row in report.rows
    ]
    header = ("environment", "on", "operation", "count", "median, ms", "95th percentile, ms")
    return f"# CPU time of the environments\n\n{markdown(header, lines)}\n\n{report.caption}"
