"""`make demo`: a small agent learns household tasks by RSPO, from hardly any success, in a few minutes on a CPU."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from ..algorithm.evaluate import play
from ..config import Config, default_config, measured_start
from ..config.files import apply_flags
from ..envs.base import BatchedEnv
from ..models.policy import Policy
from ..runs.plots import plot_runs
from ..runs.records import read_metrics
from ..runs.setting import build_env
from ..start import CONFIG_FILE, open_run, trained_policy

METHOD_NAMES = {"rspo": "RSPO+GRPO", "grpo": "GRPO"}
PANELS = ("success", "cost", "dense", "kl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, then say what was learned and what it cost."""
    parser = argparse.ArgumentParser(prog="rspo.cli.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="run folder, started over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=54, help="updates of agent A")
    parser.add_argument("--baseline", action="store_true", help="also train GRPO alone, from the same start")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="any setting")
    parsed = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()

    began = time.perf_counter()
    flags = [f"run.seed={parsed.seed}", f"run.steps={parsed.steps}", *parsed.set]
    config = apply_flags(measured_start(default_config("rspo")), flags)
    print("First a start policy is cloned that hardly ever succeeds (minutes), then RSPO+GRPO trains it.")
    folders = [_run(config, parsed.out)]
    if parsed.baseline:
        start = config.policy.path or parsed.out / "start"
        baseline = apply_flags(default_config("grpo"), [*flags, f"policy.path={start}"])
        folders.append(_run(baseline, parsed.out / "grpo"))

    labels = [METHOD_NAMES["rspo"], METHOD_NAMES["grpo"]][: len(folders)]
    picture = plot_runs(folders, parsed.out / "learning_curve.png", labels, PANELS)
    print(f"\nSuccess on {config.evaluation.episodes} episodes of held-out household tasks:\n")
    print(_table(folders, labels))
    print(f"\n{_example(trained_policy(parsed.out, config), build_env(config), config)}")
    print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes in all. Run folder: {parsed.out}; curves: {picture}")
    return 0


def _run(config: Config, folder: Path) -> Path:
    if (folder / CONFIG_FILE).is_file():
        shutil.rmtree(folder)
    trainer = open_run(config, folder)
    try:
        trainer.train()
    finally:
        trainer.close()
    return folder


def _table(folders: Sequence[Path], labels: Sequence[str]) -> str:
    """Held-out success before and after, with the cost: agent B's samples included."""
    lines = [f"{'':<12}{'A-updates':>10}{'success':>10}{'turns':>8}{'trajectories':>14}{'response tokens':>17}"]
    for folder, label in zip(folders, labels, strict=True):
        evaluations = read_metrics(folder, "evaluation")
        rows = [(label, evaluations[-1])]
        if folder == folders[0]:
            rows.insert(0, ("start", evaluations[0]))
        for name, record in rows:
            lines.append(
                f"{name:<12}{record['step']:>10}{record['success']:>10.1%}{record['turns']:>8.1f}"
                f"{record['trajectories']:>14,.0f}{record['tokens']:>17,.0f}"
            )
    return "\n".join(lines)


def _example(policy: Policy, env: BatchedEnv, config: Config) -> str:
    """A solved episode of median length among some held-out ones, action by action."""
    episodes = play(policy, env, config, split="eval", episodes=64, temperature=config.evaluation.temperatures[0])
    solved = [trajectory for trajectory in episodes if trajectory.won]
    if not solved:
        return "It solved none of 64 more held-out episodes."
    shown = sorted(solved, key=len)[len(solved) // 2]
    actions = "\n".join(f"  {turn.action}" for turn in shown.turns)
    return f"One of the {len(solved)} of 64 more held-out episodes that it solves now: {shown.task}\n{actions}"


if __name__ == "__main__":
    sys.exit(main())
