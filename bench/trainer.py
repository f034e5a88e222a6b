"""Where a GRPO update and an RSPO update spend their time, and how much of it is the trainer's own.

Two trainers at household's default sizes take turns in one run, from one start policy and on one thread: an RSPO loop
(k updates of agent B, its collection, k updates of agent A), then as many GRPO updates. The trainer runs as it is; a
stopwatch takes the place of its timer, and the calls that its blocks consist of are wrapped to report their own phase.

    model          generation (forward passes, its cache, sampling), forward passes for old log-probs and of the update,
                   backward
    environment    reset, step, prompts as text, projection of answers
    optimizer      gradient clipping and AdamW
    ours           all else: log-probs and loss with their gradients up to the logits, advantages, tokenisation, padding
                   and packing, replay, records, agent B's copy, checkpoints, and Python between them

A phase's seconds are the median over the measured updates, an update's seconds the sum of its phases. **Our share** is
the sum of our phases over the sum of all. Evaluations are no part of an update and are left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from rspo.algorithm.warmup import warm_up
from rspo.config import Config, default_config, measured_start
from rspo.config.files import apply_flags
from rspo.envs.household import VOCABULARY
from rspo.models.tiny import tiny_policy
from rspo.runs.setting import build_env, set_threads
from rspo.start import open_run

from .report import Report, environment, markdown
from .stopwatch import OWNERS, PHASES, measure

STAGES = {
    "grpo/update": "GRPO update",
    "rspo/dense": "RSPO B-update",
    "rspo/collect": "RSPO collection",
    "rspo/update": "RSPO A-update",
    "rspo/branch": "agent B's start, once a loop",
    "grpo/checkpoint": "checkpoint",
}
WHOLES = {"grpo": "GRPO, an update in all", "rspo": "RSPO, an A-update in all"}

SHORT_WARMUP = (
    "warmup.trajectories=600",
    "warmup.check_episodes=512",
    "warmup.band=[0.004, 1.0]",
    "warmup.held_out_band=[0.0, 1.0]",
    "evaluation.episodes=64",
)
"""Until a few episodes in a thousand succeed: answers are then words in the right order, as in training."""


def run(options: argparse.Namespace) -> Report:
    """Measure; `options.rounds` RSPO loops and as many times k GRPO updates, after some unmeasured ones."""
    config = apply_flags(measured_start(default_config("rspo")), [f"policy.device={options.device}", *options.set])
    transformers_logging.disable_progress_bar()
    set_threads(config)
    torch.manual_seed(config.run.seed)
    rounds = options.rounds or (1 if options.quick else 3)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start, how = _start(config, options, scratch)
        flags = [f"policy.path={start}", "run.steps=1000000", "run.save_every=0", "evaluation.every=0"]
        flags = [f"policy.device={options.device}", *options.set, *flags]
        trainers = {
            method: open_run(apply_flags(default_config(method), flags), scratch / method, progress=False)
            for method in WHOLES
        }
        for trainer in trainers.values():
            stack.callback(trainer.close)
        policy = trainers["grpo"].agent.policy
        stages = measure(trainers, rounds)
    rows = {name: stage_row(name, stages[key]) for key, name in STAGES.items() if key in stages}
    for method, parts in _parts(config).items():
        found = {part: weight for part, weight in parts.items() if part in rows}
        rows[WHOLES[method]] = whole_row(WHOLES[method], rows, found)
    settings = {
        "start": how,
        "parameters": policy.num_parameters,
        "rounds": rounds,
        "tasks": config.rollout.tasks,
        "group_size": config.rollout.group_size,
        "k": config.swap.k,
        "save_every": config.run.save_every,
        "phases": PHASES,
    }
    device = torch.device(options.device)
    return Report("trainer", device.type, environment(device), settings, [*rows.values()])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="RSPO loops, of k updates each; default: 3, quick: 1")
    parser.add_argument("--policy", type=Path, metavar="DIR", help="start from this saved policy, not a short warm-up")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="any setting")


def _parts(config: Config) -> dict[str, dict[str, float]]:
    """How often each stage happens for one update of agent A (B's k updates are as many as A's)."""
    saves = 1 / config.run.save_every if config.run.save_every else 0.0
    once = 1 / config.swap.k
    names = [STAGES[key] for key in ("rspo/dense", "rspo/update", "rspo/branch", "rspo/collect", "grpo/checkpoint")]
    return {
        "grpo": {STAGES["grpo/update"]: 1.0, STAGES["grpo/checkpoint"]: saves},
        "rspo": dict(zip(names, (1.0, 1.0, once, once, saves), strict=True)),
    }


def _start(config: Config, options: argparse.Namespace, scratch: Path) -> tuple[Path, str]:
    """The folder of the start policy, and what it is in words."""
    if options.policy is not None:
        return options.policy, str(options.policy)
    env, folder = build_env(config), scratch / "start"
    if options.quick:
        policy, how = tiny_policy(VOCABULARY, config.run.seed, config.policy), "untrained"
    else:
        policy, success = warm_up(env, apply_flags(config, list(SHORT_WARMUP)), progress=False)
        how = f"short warm-up, {success:.1%} success"
    policy.save(folder)
    return folder, how


def stage_row(name: str, times: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians over the times that a stage was run, and quantiles of its whole time."""

    def median(key: str) -> float:
        return statistics.median([time.get(key, 0.0) for time in times])

    wholes = torch.tensor([sum(time.get(f"seconds/{phase}", 0.0) for phase in PHASES) for time in times])
    low, high = wholes.quantile(torch.tensor([0.2, 0.8])).tolist()
    phases = {phase: median(f"seconds/{phase}") for phase in PHASES}
    return _row(name, len(times), phases, median("sampled"), median("read"), low, high)


def whole_row(name: str, rows: Mapping[str, Mapping[str, Any]], parts: Mapping[str, float]) -> dict[str, Any]:
    """A method's update in all, with its share of what happens less often: the sum of `parts`, stages and weights."""

    def add_up(key: str) -> float:
        return sum(weight * rows[part][key] for part, weight in parts.items())

    phases = {phase: add_up(f"seconds/{phase}") for phase in PHASES}
    times = min(rows[part]["times"] for part in parts)
    return _row(name, times, phases, *(add_up(key) for key in ("sampled", "read", "seconds_q20", "seconds_q80")))


def _row(
    name: str, times: int, phases: Mapping[str, float], sampled: float, read: float, low: float, high: float
) -> dict[str, Any]:
    whole = sum(phases.values())
    shares = {whose: sum(s for p, s in phases.items() if PHASES[p] == whose) / whole for whose in OWNERS}
    return {
        "stage": name,
        "times": times,
        "seconds": round(whole, 6),
        "seconds_q20": round(low, 6),
        "seconds_q80": round(high, 6),
        **{f"share/{whose}": round(share, 5) for whose, share in shares.items()},
        "sampled": round(sampled),
        "read": round(read),
        "sampled_per_s": round(sampled / whole),
        "tokens_per_s": round((sampled + read) / whole),
        **{f"seconds/{phase}": round(seconds, 6) for phase, seconds in phases.items()},
    }


def table(report: Report) -> str:
    """Two tables: stages with shares and rates, and the phases of the two methods' updates."""
    percent = "{:.1%}".format
    head = ["stage", "ms", "20 to 80 % of them", *OWNERS, "response tokens/s", "with prompts"]
    lines = [
        [
            row["stage"],
            f"{1e3 * row['seconds']:,.0f}",
            f"{1e3 * row['seconds_q20']:,.0f} to {1e3 * row['seconds_q80']:,.0f}",
            *(percent(row[f"share/{whose}"]) for whose in OWNERS),
            *(f"{row[rate]:,}" if row[rate] else "" for rate in ("sampled_per_s", "tokens_per_s")),
        ]
        for row in report.rows
    ]
    wholes = [row for row in report.rows if row["stage"] in WHOLES.values()]
    phases = [
        [phase, whose]
        + [
            cell
            for row in wholes
            for cell in (f"{1e3 * row[f'seconds/{phase}']:,.1f}", percent(row[f"seconds/{phase}"] / row["seconds"]))
        ]
        for phase, whose in PHASES.items()
    ]
    settings = report.settings
    names = [cell for row in wholes for cell in (f"{row['stage']}, ms", "share")]
    return "\n\n".join([
        "# Where a training step's time goes",
        f"Household at the default sizes ({settings['tasks']} tasks of {settings['group_size']}, k ="
        f" {settings['k']}), a model of {settings['parameters']:,} weights (start: {settings['start']}),"
        f" {report.environment['threads']} thread; medians over {settings['rounds'] * settings['k']} updates of each"
        " method, which took turns. Ours is all that is neither a pass of the model (forward, sampling, backward), nor"
        f" the environment, nor the optimiser. A checkpoint is written every {settings['save_every']} updates;"
        " evaluations are left out.",
        markdown(head, lines),
        markdown(["phase", "whose", *names], phases),
        report.caption,
    ])  # fmt: skip


def plot(report: Report, path: Path) -> None:
    """A stacked bar for each stage, phases in the colours of whom they belong to."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in report.rows if row["sampled"]]
    tints = {"model": "Blues_r", "optimizer": "Purples_r", "environment": "Greens_r", "ours": "Oranges_r"}
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(rows) + 2.4), layout="constrained")
    left = [0.0] * len(rows)
    for whose in OWNERS:
        phases = [phase for phase, owner in PHASES.items() if owner == whose and any(_ms(r, phase) > 0.5 for r in rows)]
        for phase, tint in zip(phases, torch.linspace(0.15, 0.75, len(phases)).tolist(), strict=True):
            widths = [_ms(row, phase) for row in rows]
            colour = matplotlib.colormaps[tints[whose]](tint)
            axes.barh([row["stage"] for row in rows], widths, left=left, label=phase, color=colour)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, row in enumerate(rows):
        axes.text(left[i], i, f"  ours {row['share/ours']:.0%}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel("ms, median")
    axes.set_title("Where a training step's time goes (orange: ours)")
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.4, -0.16), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _ms(row: Mapping[str, Any], phase: str) -> float:
    return 1e3 * float(row[f"seconds/{phase}"])
