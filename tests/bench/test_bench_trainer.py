"""The trainer suite: phases add up to the whole, ours is what the docstring says, and the trainer learns as before."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytest
import torch
from rspo_toys import small_policy

from bench import trainer as suite
from bench.report import Report
from bench.stopwatch import OWNERS, PHASES, Stopwatch
from rspo.algorithm.timing import PhaseTimer

SMALL = (
    "rollout.tasks=4",
    "rollout.group_size=4",
    "swap.alpha=0.25",
    "swap.buffer_tasks=3",
    "swap.k=2",
    "env.options={max_turns: 4}",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("start")
    small_policy().save(folder)
    threads = torch.get_num_threads()
    try:
        return suite.run(argparse.Namespace(device="cpu", quick=True, rounds=2, policy=folder, set=[*SMALL]))
    finally:
        torch.set_num_threads(threads)


def test_phases_nest() -> None:
    """Time inside an inner phase is not the outer's, and none is lost."""
    timer = PhaseTimer()
    began = time.perf_counter()
    with timer("outer"):
        time.sleep(0.01)
        with timer("inner"):
            time.sleep(0.02)
        assert timer.take()["seconds/inner"] >= 0.02, "also in the midst of a phase"
        time.sleep(0.01)
    elapsed = time.perf_counter() - began
    seconds = timer.take()
    assert set(seconds) == {"seconds/outer"}
    assert 0.01 <= seconds["seconds/outer"] < elapsed - 0.02


def test_a_stage_apart_leaves_the_stage_around_it_whole() -> None:
    watch = Stopwatch(torch.device("cpu"))
    with watch.phase("other"):
        time.sleep(0.01)
        with watch.apart("inside"), watch.phase("checkpoint"):
            time.sleep(0.02)
        time.sleep(0.01)
    watch.cut("around", sampled=3)
    (inside,), (around,) = watch.stages["inside"], watch.stages["around"]
    assert inside["seconds/checkpoint"] >= 0.02
    assert around["seconds/other"] >= 0.02
    assert "seconds/checkpoint" not in around
    assert around["sampled"] == 3


def test_every_stage_has_its_phases(report: Report) -> None:
    rows = {row["stage"]: row for row in report.rows}
    assert set(rows) == {*suite.STAGES.values(), *suite.WHOLES.values()}
    playing = {"generation", "environment", "log-probs", "advantages", "rollout", "tokenizer", "packing", "records"}
    learning = {"forward", "backward", "optimizer", "loss"}
    # k = 2 updates of each kind in a loop, one collection, one start of agent B.
    for name, phases, times in (
        ("GRPO update", playing | learning, 4),
        ("RSPO B-update", playing | learning, 4),
        ("RSPO collection", playing | {"replay"}, 2),
        ("RSPO A-update", playing | learning | {"old log-probs", "replay"}, 4),
        ("agent B's start, once a loop", {"agent B"}, 2),
        ("checkpoint", {"checkpoint"}, 2),
    ):
        row = rows[name]
        assert row["times"] == times, name
        measured = {phase for phase in PHASES if row[f"seconds/{phase}"] > 0}
        assert phases <= measured <= phases | {"other", "replay"}, name
        assert (row["sampled_per_s"] > 0) == ("generation" in phases)
        assert row["sampled"] < row["read"] or "generation" not in phases
    assert {phase for phase in PHASES if rows[suite.WHOLES["rspo"]][f"seconds/{phase}"] > 0} == set(PHASES)


def test_shares_add_up_and_ours_is_what_is_neither_model_nor_environment_nor_optimizer(report: Report) -> None:
    assert set(OWNERS) == {"model", "optimizer", "environment", "ours"}
    theirs = {"generation", "old log-probs", "forward", "backward", "optimizer", "environment"}
    for row in report.rows:
        seconds = {phase: row[f"seconds/{phase}"] for phase in PHASES}
        assert sum(seconds.values()) == pytest.approx(row["seconds"], abs=1e-5)
        assert sum(row[f"share/{whose}"] for whose in OWNERS) == pytest.approx(1, abs=1e-4)
        ours = sum(s for phase, s in seconds.items() if phase not in theirs)
        assert row["share/ours"] == pytest.approx(ours / row["seconds"], abs=1e-3)


def test_a_whole_update_has_its_part_of_what_happens_once_a_loop(report: Report) -> None:
    rows = {row["stage"]: row for row in report.rows}
    parts = {"RSPO B-update": 1, "RSPO A-update": 1, "RSPO collection": 1 / 2, "agent B's start, once a loop": 1 / 2}
    expected = sum(weight * rows[part]["seconds"] for part, weight in parts.items()) + rows["checkpoint"]["seconds"] / 9
    assert rows[suite.WHOLES["rspo"]]["seconds"] == pytest.approx(expected, abs=1e-4)


def test_the_stopwatch_sees_the_whole_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the phases add up to is the wall clock's time, within what the bookkeeping between stages takes."""
    small_policy().save(tmp_path)
    cut, begun = Stopwatch.cut, []
    elapsed: list[tuple[float, float]] = []

    def timed(self: Stopwatch, stage: str, **counts: float) -> None:
        cut(self, stage, **counts)
        now = time.perf_counter()
        if begun and stage == "grpo/update":
            elapsed.append((sum(v for k, v in self.stages[stage][-1].items() if "/" in k), now - begun[-1]))
        begun.append(now)

    monkeypatch.setattr(Stopwatch, "cut", timed)
    suite.run(argparse.Namespace(device="cpu", quick=True, rounds=1, policy=tmp_path, set=[*SMALL]))
    # The second of the two updates follows the first without a checkpoint of another trainer between them.
    measured, wall = elapsed[-1]
    assert 0.9 * wall < measured <= wall


def test_table_and_picture(report: Report, tmp_path: Path) -> None:
    text = suite.table(report)
    for name in (*PHASES, *suite.STAGES.values(), *suite.WHOLES.values()):
        assert f"| {name} " in text or f"| {name}, ms" in text, name
    assert report.environment["machine"] in text
    suite.plot(report, tmp_path / "trainer.png")
    assert (tmp_path / "trainer.png").stat().st_size > 10_000
    report.write(tmp_path / "trainer.json")
    assert Report.read(tmp_path / "trainer.json").rows == report.rows
