"""Runs side by side: which are one group and what it is called, their curves, their table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from rspo.cli import main
from rspo.config import Config, default_config, paper_config
from rspo.config.files import apply_flags, save_config
from rspo.runs.comparison import RunData, group_runs
from rspo.runs.plots import PANELS, _draw, plot_runs
from rspo.runs.reporters import Record
from rspo.runs.summary import COLUMNS, summary_table


def write_run(folder: Path, config: Config, records: list[Record]) -> Path:
    """A run's folder without the run."""
    folder.mkdir(parents=True)
    save_config(config, folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def evaluations(*successes: float, every: int = 1, cost: int = 10) -> list[Record]:
    return [
        {"kind": "evaluation", "step": i * every, "success": value, "trajectories": i * cost, "tokens": i, "seconds": i}
        for i, value in enumerate(successes)
    ]


# Groups of runs


def test_runs_that_differ_in_the_seed_are_a_group_and_labels_name_what_differs(tmp_path: Path) -> None:
    runs = {
        name: RunData.read(write_run(tmp_path / name, apply_flags(default_config(method), flags), []))
        for name, method, flags in (
            ("first", "rspo", ["policy.path=starts/seed-0/start"]),
            (
                "other seed",
                "rspo",
                [
                    "run.seed=200",
                    "run.keep=9",
                    "env.workers=2",
                    "policy.path=starts/seed-200/start",
                    "policy.attention=eager",
                    "policy.fused=on",
                    "swap.copy=offload",
                ],
            ),
            ("alpha", "rspo", ["swap.alpha=0.25"]),
            ("alpha, cap", "rspo", ["swap.alpha=0.25", "run.seed=7", "loss.center_cap=null"]),
            ("baseline", "grpo", ["swap.alpha=0.5"]),
            ("baseline, seed", "grpo", ["run.seed=1"]),
        )
    }
    found = {group.label: [run.folder.name for run in group.runs] for group in group_runs(list(runs.values()))}
    assert found == {
        "RSPO+GRPO, swap.alpha=0.125, loss.center_cap=1": ["first", "other seed"],
        "RSPO+GRPO, swap.alpha=0.25, loss.center_cap=1": ["alpha"],
        "RSPO+GRPO, swap.alpha=0.25, loss.center_cap=none": ["alpha, cap"],
        "GRPO": ["baseline", "baseline, seed"],  # no replay, so that alpha makes no difference
    }
    (alone,) = group_runs([runs["first"], runs["other seed"]])
    assert alone.label == "RSPO+GRPO"
    labelled = group_runs(list(runs.values()), list("xyxyzz"))
    assert {group.label: len(group.runs) for group in labelled} == {"x": 2, "y": 2, "z": 2}


def test_labels_name_settings_as_they_are_set(tmp_path: Path) -> None:
    """By their section too: a rank or an alpha alone says not of what."""
    flags = {"a": [], "b": ["lora.rank=8"], "c": ["lora.rank=8", "lora.alpha=4", "swap.alpha=0.25"]}
    runs = [RunData.read(write_run(tmp_path / name, apply_flags(Config(), f), [])) for name, f in flags.items()]
    assert [group.label for group in group_runs(runs)] == [
        "RSPO+GRPO, lora.rank=0, lora.alpha=none, swap.alpha=0.125",
        "RSPO+GRPO, lora.rank=8, lora.alpha=none, swap.alpha=0.125",
        "RSPO+GRPO, lora.rank=8, lora.alpha=4, swap.alpha=0.25",
    ]


def test_start_policies_are_told_apart_only_where_a_seed_has_two(tmp_path: Path) -> None:
    flags = {
        "a": ["policy.path=strong/0"],
        "b": ["policy.path=strong/1", "run.seed=1"],
        "c": ["policy.path=elsewhere", "run.seed=2"],
        "d": ["policy.path=weak/0"],
    }
    runs = [RunData.read(write_run(tmp_path / n, apply_flags(Config(), f), [])) for n, f in flags.items()]
    assert [len(group.runs) for group in group_runs(runs[:3])] == [3]
    labels = [group.label for group in group_runs([runs[0], runs[1], runs[3]])]
    assert labels == ["RSPO+GRPO, from strong/*", "RSPO+GRPO, from weak/*"]


def test_settings_that_a_file_has_not_or_nobody_knows_decide_nothing(tmp_path: Path) -> None:
    now = write_run(tmp_path / "now", Config(), [])
    old = write_run(tmp_path / "old", Config(), [])
    (old / "config.yaml").write_text("method: rspo\nestimator: {name: grpo}\nrun: {seed: 3}\n")
    (group,) = group_runs([RunData.read(now), RunData.read(old)])
    assert [run.seed for run in group.runs] == [0, 3]
    (old / "config.yaml").unlink()
    assert RunData.read(old).title == "old"


def test_many_differences_are_named_by_the_folder(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "ours", Config(), []), write_run(tmp_path / "paper", paper_config(), [])]
    labels = [group.label for group in group_runs([RunData.read(folder) for folder in folders])]
    assert labels == ["RSPO+GRPO (ours)", "RSPO+GRPO (paper)"]
    same = write_run(tmp_path / "elsewhere" / "paper", paper_config("rspo", "rloo"), [])
    grpo = apply_flags(paper_config(), ["swap.k=4", "swap.alpha=0.5", "rollout.tasks=8", "run.steps=9"])
    other = write_run(tmp_path / "elsewhere" / "ours", grpo, [])
    labels = [group.label for group in group_runs([RunData.read(folder) for folder in [*folders, other, same]])]
    assert labels == [
        f"RSPO+GRPO ({folders[0]})", "RSPO+GRPO (paper)", f"RSPO+GRPO ({other})", "RSPO+RLOO"
    ]  # fmt: skip


# Pictures and tables


def test_a_groups_curve_is_the_mean_with_a_band_as_far_as_all_runs_have_come(tmp_path: Path) -> None:
    successes = [(0.0, 0.2, 0.4), (0.0, 0.6, 0.2), (0.1, 0.1)]
    runs = [
        RunData.read(write_run(tmp_path / str(i), apply_flags(Config(), [f"run.seed={i}"]), evaluations(*values)))
        for i, values in enumerate(successes)
    ]
    figure, axes = plt.subplots()
    _draw(axes, PANELS["cost"], group_runs(runs)[0], "C0")
    mean, *rest = axes.lines
    assert list(mean.get_xdata()) == [0, 10]
    assert list(mean.get_ydata()) == pytest.approx([100 / 30, 30])
    (band,) = axes.collections
    corners = {(round(float(x)), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(0, 0.0), (0, 10.0), (10, 10.0), (10, 60.0)}
    assert [list(line.get_ydata()) for line in rest] == [pytest.approx([20, 40]), pytest.approx([60, 20])]
    plt.close(figure)


def test_plots_of_runs_under_way_empty_or_with_fewer_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    update = {"kind": "update", "step": 1, "reward": None, "entropy": 1.0, "trajectories": 4}
    some = write_run(tmp_path / "some", Config(), [*evaluations(0.1), update])
    empty = write_run(tmp_path / "empty", apply_flags(Config(), ["run.seed=1"]), [])
    with open(some / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "upda')  # being written just now
    picture = plot_runs([some, empty], tmp_path / "plots" / "both.png")
    assert picture.stat().st_size > 10_000
    assert main(["plot", str(some), "--panels", "success", "entropy", "gradient"]) == 0
    capsys.readouterr()
    for arguments, message in (
        ([str(empty)], "nothing to draw yet: there are no records of updates or evaluations in"),
        ([str(some), "--panels", "kl"], "nothing to draw yet"),
        ([str(some), "--panels", "sucess"], "panels must be some of success, cost"),
        ([str(tmp_path)], "not the folder of a run"),
    ):
        assert main(["plot", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_the_summary_has_a_row_for_each_run_and_the_mean_of_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [evaluations(0.01, 0.5, 0.3, every=9), evaluations(0.03, 0.1, 0.5, every=9)]
    records[0][-1] |= {"success_low": 0.25, "success_high": 0.35}
    folders = [
        write_run(tmp_path / str(i), apply_flags(Config(), [f"run.seed={i}"]), found) for i, found in enumerate(records)
    ]
    folders.append(write_run(tmp_path / "empty", default_config("ppo"), []))
    assert main(["summary", *map(str, folders)]) == 0
    cells = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert cells[0] == list(COLUMNS)
    assert cells[1] == ["RSPO+GRPO", "0", "0", "1.0", "30.0", "25.0 to 35.0", "50.0", "9", "40.0", "20", "2", "0:02"]
    assert cells[2][:9] == ["RSPO+GRPO", "1", "0", "3.0", "50.0", "-", "50.0", "18", "30.0"]
    assert cells[3][:5] == ["RSPO+GRPO, mean of 2", "2.0", "40.0 ± 14.1", "50.0 ± 0.0", "35.0 ± 7.1"]
    assert cells[4] == ["PPO", "0", "0", *["-"] * 9]
    with pytest.raises(ValueError, match="at least one run folder"):
        summary_table([])
    update = {"kind": "update", "step": 9, "trajectories": 4, "tokens": 5, "seconds": 6.0}
    (folders[0] / "metrics.jsonl").write_text(json.dumps(update) + "\n")
    table = summary_table(folders[:2])
    assert "RSPO+GRPO, mean of 2 (of unequal length)" in table
