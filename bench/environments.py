"""A small model trained on ALFWorld and on WebShop, with GRPO and with RSPO, as far as a CPU gets in about an hour.

Settings are those of recipes/<environment>-small.yaml. Both methods start from the same policy, and GRPO goes on until
it has sampled about as many trajectories as RSPO, B's included. Data: ALFWorld's games are generated (`rspo envs
alfworld generate`, which needs no download) unless ALFWORLD_DATA names some; WebShop's products come from WEBSHOP_DATA,
else from the catalogue of our own. Runs may be stopped at any time and started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rspo.config import Config, default_config
from rspo.config.files import apply_flags, load_config

from .execute import execute
from .report import RESULTS, Report, environment, markdown

RECIPES = Path(__file__).parent.parent / "recipes"
ENVIRONMENTS = ("alfworld", "webshop")
STEPS = {"alfworld": {"rspo": 126, "grpo": 315}, "webshop": {"rspo": 54, "grpo": 135}}
"""Updates of A: RSPO's takes 7 tasks, B's as many, and 14/3 are collected; GRPO's takes 8: 7 % more in all."""
TITLES = {"grpo": "GRPO", "rspo": "RSPO+GRPO"}
SEEDS = (0,)
GAMES = 1200
QUICK = (
    "warmup.trajectories=24", "warmup.max_updates=20", "warmup.check_every=10", "warmup.check_episodes=8",
    "warmup.band=[0.0,1.0]", "warmup.held_out_band=[0.0,1.0]", "warmup.width=32", "evaluation.episodes=8",
    "env.options={prompt_style: compact, max_turns: 4}", "rollout.group_size=2",
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One run: a method on an environment.

    flags: laid over the recipe's settings, for the start policy too.
    """

    env: str
    method: str
    seed: int
    steps: int
    flags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        text = (RECIPES / f"{self.env}-small.yaml").read_text(encoding="utf-8")
        digest = hashlib.sha256(json.dumps([text, self.steps, self.flags]).encode()).hexdigest()[:8]
        return f"{self.env}_{self.method}_seed{self.seed}_{digest}"

    @property
    def start_name(self) -> str:
        return f"{self.env}-{self.seed}"

    @property
    def start_config(self) -> Config:
        base = load_config(RECIPES / f"{self.env}-small.yaml", default_config(self.method))
        return apply_flags(base, [f"run.seed={self.seed}", f"run.steps={self.steps}", *self.flags])

    def config(self, start: Path) -> Config:
        return apply_flags(self.start_config, [f"policy.path={start}"])

    @property
    def columns(self) -> tuple[str, ...]:
        return ("success_low", "success_high", "task_score", "invalid_actions")

    def head(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "flags"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once (default: cores)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="run folders are made in it")
    parser.add_argument("--envs", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS), help="default: both")


def run(options: argparse.Namespace) -> Report:
    """Make what is missing."""
    name = "environments-quick" if options.quick else "environments"
    folder = options.runs / name
    data = {env: _data(env, folder, options.quick) for env in options.envs}
    report = Report("environments", "cpu", environment("cpu"), {"data": data})
    path = (options.out or RESULTS / "cpu") / "environments.json"
    done = Report.read(path).rows if path.is_file() else []
    specs = [
        Spec(env, method, seed, 3 if options.quick else steps, QUICK if options.quick else ())
        for env in ENVIRONMENTS
        for seed in SEEDS
        for method, steps in STEPS[env].items()
    ]
    others = [row for row in done if row["env"] not in options.envs]

    def save(rows: list[dict[str, Any]]) -> None:
        report.rows = sorted([*others, *rows], key=lambda row: ENVIRONMENTS.index(row["env"]))
        report.write(path)

    save(execute([spec for spec in specs if spec.env in options.envs], done, folder, options.jobs, save))
    return report


def _data(env: str, folder: Path, quick: bool) -> str:
    """Where an environment's data comes from, in words; puts it into the variable that the environment looks at."""
    variable = f"{env.upper()}_DATA"
    if os.environ.get(variable):
        return "own" if os.environ[variable] == "own" else f"${variable}"
    if env == "webshop":
        os.environ[variable] = "own"
        return "own"
    from rspo.envs.alfworld.generator import generate_games

    count = 24 if quick else GAMES
    task_types = load_config(RECIPES / "alfworld-small.yaml").env.options["task_types"]
    games = folder / f"alfworld-games-{count}-{'-'.join(task_types)}"
    generate_games(games, count, task_types=task_types, progress=True)
    os.environ[variable] = str(games.resolve())
    return f"{count} generated games of {', '.join(task_types)}"


def table(report: Report) -> str:
    """Success by evaluation and what it cost."""
    parts = [f"# A small model on ALFWorld and WebShop\n\n{report.caption}"]
    for env in ENVIRONMENTS:
        rows = [row for row in report.rows if row["env"] == env]
        if rows:
            parts.append(f"## {env}\n\n{_table(rows)}")
    return "\n\n".join(parts)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        success = 100 * np.array(row["success"])
        interval = f"{100 * row['success_low'][-1]:.0f} to {100 * row['success_high'][-1]:.0f}"
        lines.append(
            (
                TITLES[row["method"]],
                row["seed"],
                row["steps"],
                f"{row['trajectories'][-1]:,}",
                f"{success[0]:.1f}",
                f"{success[1:].mean():.1f}",
                f"{success[-1]:.1f}",
                interval,
                f"{row['task_score'][0]:.2f} → {row['task_score'][-1]:.2f}",
                f"{row['seconds'] / 60:.0f}",
            )
        )
    header = (
        "method", "seed", "updates of A", "trajectories", "start, %", "mean, %", "end, %", "95 % interval", "score",
        "minutes",
    )  # fmt: skip
    return markdown(header, lines)


def plot(report: Report, path: Path) -> None:
    """Success against updates and against trajectories, a row for each environment."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    envs = [env for env in ENVIRONMENTS if any(row["env"] == env for row in report.rows)]
    figure, axes = plt.subplots(len(envs), 2, figsize=(9, 3.2 * len(envs)), layout="constrained", squeeze=False)
    for line, env in zip(axes, envs, strict=True):
        for row in (row for row in report.rows if row["env"] == env):
            low, high = (100 * np.array(row[name], dtype=float) for name in ("success_low", "success_high"))
            color, dashes = ("C1", "-") if row["method"] == "rspo" else ("C0", "--")
            for ax, x in zip(line, ("step", "trajectories"), strict=True):
                success = 100 * np.array(row["success"])
                ax.plot(row[x], success, dashes, color=color, label=f"{TITLES[row['method']]}, seed {row['seed']}")
                ax.fill_between(row[x], low, high, color=color, alpha=0.12, linewidth=0)
        line[0].set(xlabel="updates of agent A", ylabel="success, %", title=f"{env}: held-out success", ylim=(0, None))
        line[1].set(xlabel="sampled trajectories, agent B's included", title="The same, by cost", ylim=(0, None))
        line[0].legend(fontsize=8)
        for ax in line:
            ax.grid(alpha=0.3)
            ax.locator_params(axis="x", nbins=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)
