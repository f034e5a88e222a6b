"""What a run shows of itself: evaluations with intervals, transcripts, reporters, plots, tables, documented names."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rspo_toys import ParityEnv, make_trajectory, small_config, small_policy

from rspo.algorithm import progress
from rspo.algorithm.evaluate import Evaluation, evaluate
from rspo.algorithm.metrics import SuccessRate, success_by_type
from rspo.cli import main
from rspo.config import Config, ConfigError, paper_config
from rspo.config.files import apply_flags
from rspo.data.texts import Texts
from rspo.envs import make_env
from rspo.runs.records import read_metrics
from rspo.runs.reporters import Record, Reporter
from rspo.runs.transcripts import chosen, transcript
from rspo.start import open_run
from rspo.trainer import Trainer
from rspo_kernels.config import STATS

DOCS = Path(__file__).parents[3] / "docs" / "training.md"
SHORT = ["env.options={max_turns: 3}", "rollout.group_size=2", "run.steps=2"]


def run(config: Config, folder: Path, resume: bool = False) -> Trainer:
    trainer = open_run(config, folder, resume=resume, progress=False)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


# Success rates


@pytest.mark.parametrize(
    ("successes", "episodes", "expected"),
    [(8, 10, (0.490, 0.943)), (0, 20, (0.0, 0.161)), (20, 20, (0.839, 1.0)), (5, 10, (0.237, 0.763))],
)
def test_wilson_intervals_have_their_known_values(successes: int, episodes: int, expected: tuple[float, float]) -> None:
    assert SuccessRate(successes, episodes).interval == pytest.approx(expected, abs=5e-4)


def test_wilson_interval_ends_where_the_observed_rate_is_z_deviations_away() -> None:
    for n in (1, 7, 512):
        for successes in range(0, n + 1, max(1, n // 7)):
            rate = SuccessRate(successes, n)
            for p in rate.interval:
                assert abs(rate.value - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / n), abs=1e-9)


def test_success_by_type_counts_each_kind() -> None:
    trajectories = [make_trajectory(i, reward=float(i % 2)) for i in range(6)]
    assert success_by_type(trajectories) == {}, "an environment without kinds"
    for trajectory, kind in zip(trajectories, ["b", "b", "a", "a", "a", ""], strict=True):
        trajectory.task_type = kind
    assert list(success_by_type(trajectories).items()) == [("a", SuccessRate(1, 3)), ("b", SuccessRate(1, 2))]


# Evaluation


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    env = make_env("household", max_turns=3)
    config = small_config("evaluation.episodes=115", "evaluation.temperatures=[1.0, 0.4]")
    return evaluate(small_policy(), env, config)


def test_every_temperature_plays_the_same_episodes_and_the_first_has_the_plain_names(evaluation: Evaluation) -> None:
    warm, cold = evaluation.episodes[1.0], evaluation.episodes[0.4]
    assert [t.task for t in warm] == [t.task for t in cold]
    answers = [[turn.action for t in played for turn in t.turns] for played in (warm, cold)]
    assert answers[0] != answers[1]
    env = make_env("household", max_turns=3)
    config = small_config("evaluation.episodes=115")
    alone = {
        temperature: evaluate(
            small_policy(), env, apply_flags(config, [f"evaluation.temperatures={temperature}"])
        ).metrics()
        for temperature in (1.0, 0.4)
    }
    expected = alone[1.0] | {f"{name}@0.4": value for name, value in alone[0.4].items()}
    assert evaluation.metrics() == expected
    assert {"success", "success_low", "success_high@0.4", "success/type/clean", "turns@0.4"} <= set(expected)


def test_the_table_has_temperatures_as_columns_and_kinds_as_rows(evaluation: Evaluation) -> None:
    rows = {line.split()[0]: line for line in evaluation.table().splitlines() if line}
    assert re.search(r"T = 1 .*T = 0\.4", evaluation.table())
    assert {"all", "pick", "clean", "heat", "cool", "reward", "turns"} <= set(rows)
    low, high = SuccessRate.of(evaluation.episodes[0.4]).interval
    assert f"({100 * low:.1f} to {100 * high:.1f})" in rows["all"].split(")")[1] + ")"
    counts = [int(rows[kind].split()[1]) for kind in ("pick", "clean", "heat", "cool")]
    assert sum(counts) == 115 == int(rows["all"].split()[1])


def test_eval_takes_several_temperatures(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", str(start), "--episodes", "6", "--set", "env.options={max_turns: 2}"]
    assert main([*command, "--temperature", "0.7", "--temperature", "0.2", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {"success", "success@0.2", "success_low@0.2", "split"} <= set(values)
    assert [row["episodes"] for row in values["rates"] if row["type"] == "all"] == [6, 6]
    assert {row["temperature"] for row in values["rates"]} == {0.7, 0.2}
    assert main([*command, "--temperature", "0.7", "--temperature", "0.7"]) == 2
    assert "evaluation.temperatures must be one or more different numbers" in capsys.readouterr().err


def test_settings_of_evaluation_and_reporting_are_checked() -> None:
    assert Config().evaluation.temperatures == (1.0, 0.4)
    assert paper_config().evaluation.temperatures == (0.4,)
    assert apply_flags(Config(), ["evaluation.temperatures=0.5"]).evaluation.temperatures == (0.5,)
    assert apply_flags(Config(), ["run.report_to=tensorboard"]).run.report_to == ("tensorboard",)
    assert apply_flags(Config(), ["run.report_to=[my.module:Class]"]).run.report_to == ("my.module:Class",)
    for flag, message in (
        ("evaluation.temperatures=[]", "one or more different numbers"),
        ("evaluation.temperatures=[1, 0]", "evaluation.temperatures must be > 0, got 0"),
        ("evaluation.temperatures=[hot]", r"must be of type tuple\[float, \.\.\.\], got \['hot'\]"),
        ("evaluation.transcripts=-1", "evaluation.transcripts must be >= 0"),
        (
            "run.report_to=[tensorbord]",
            "run.report_to must be one of 'tensorboard', 'wandb', 'trackio', got 'tensorbord'",
        ),
        ("warmup.band=0.1", "must be of type tuple"),
    ):
        with pytest.raises(ConfigError, match=message):
            apply_flags(Config(), [flag])


# Transcripts


def test_the_same_episodes_are_shown_and_one_of_the_missing_outcome() -> None:
    episodes = [make_trajectory(i, reward=float(i in (3, 5))) for i in range(8)]
    assert [t.group for t in chosen(episodes, 4)] == [0, 2, 4, 6, 3], "all of the four are lost: one win is added"
    for number in (2, 6):
        episodes[number].won = True
    assert [t.group for t in chosen(episodes, 4)] == [0, 2, 4, 6]
    assert [t.group for t in chosen(episodes[:2] + episodes[3:], 4)] == [0, 4, 6], "episode 2 was lost"
    assert [t.group for t in chosen(episodes, 99)] == list(range(8))


def test_a_transcript_shows_what_was_read_written_and_earned() -> None:
    policy = small_policy()
    env = make_env("household", max_turns=2)
    played = evaluate(policy, env, small_config("evaluation.temperatures=[1.0]")).main[1][0]
    played.turns[1].is_action_valid, played.turns[1].reward, played.turns[1].dense_reward = False, 10.0, 0.25
    text = transcript(policy, played)
    head, first, second = text.split("--- turn ")
    assert "=== episode 0: lost, cut off by the turn limit; reward 10" in head
    assert f"task: {played.task} ({played.task_type})" in head
    assert first.startswith("1 of 2: reward 0")
    assert second.startswith("2 of 2: reward 10, dense reward 0.25")
    for turn, part in zip(played.turns, (first, second), strict=True):
        prompt, response = policy.tokenizer.batch_decode([turn.prompt_ids.tolist(), turn.response_ids.tolist()])
        assert f"state:    {turn.anchor}" in part
        assert f"prompt:   {prompt}\nresponse: {response}\naction:   {turn.action}" in part
    assert f"action:   {played.turns[1].action} (invalid)" in second


def test_a_transcript_of_a_conversation_shows_only_what_is_new_and_special_tokens_as_they_are() -> None:
    texts = Texts(small_policy().tokenizer)
    trajectory = make_trajectory(turns=2)
    first, second = trajectory.turns
    (new,) = texts.encode(["put apple"])
    first.response_ids = np.append(first.response_ids, texts.eos_token_ids[0])
    second.prompt_ids = np.concatenate([first.prompt_ids, first.response_ids, new])
    text = transcript(texts, trajectory)
    assert "prompt:   put apple\n" in text.split("--- turn ")[2]
    assert re.search(r"response: .*<eos>", text)


def test_a_run_leaves_a_transcript_of_each_evaluation(start: Path, tmp_path: Path) -> None:
    flags = [*SHORT, f"policy.path={start}", "evaluation.every=1"]
    run(small_config(*flags, method="grpo"), tmp_path / "with")
    names = [path.name for path in sorted((tmp_path / "with" / "transcripts").iterdir())]
    assert names == ["step-000000.txt", "step-000001.txt", "step-000002.txt"]
    heading = (tmp_path / "with" / "transcripts" / names[2]).read_text().splitlines()[0]
    assert heading == "After 2 updates of agent A: episodes 0, 2, 4, 6 of 8 (eval), temperature 1."
    run(small_config(*flags, "evaluation.transcripts=0", method="grpo"), tmp_path / "without")
    assert not (tmp_path / "without" / "transcripts").exists()


# Reporters


class ListReporter(Reporter):
    """Keeps what it is given, by folder."""

    kept: dict[Path, list[Record]] = {}  # noqa: RUF012 - a test looks at it from outside

    def __init__(self, folder: Path, records: Any) -> None:
        self.mine = self.kept[folder] = list(records)

    @classmethod
    def check(cls) -> None:
        pass

    def record(self, record: Record) -> None:
        self.mine.append(record)

    def close(self) -> None:
        self.mine.append({"kind": "closed", "step": 0})


def test_a_reporter_of_ones_own_is_given_what_metrics_jsonl_has(start: Path, tmp_path: Path) -> None:
    name = "test_seeing:ListReporter"
    flags = [*SHORT, f"policy.path={start}", f"run.report_to=[{name}]", "run.save_every=1"]
    config = small_config(*flags, method="grpo")
    run(apply_flags(config, ["run.steps=1"]), tmp_path)
    run(config, tmp_path, resume=True)
    module = sys.modules["test_seeing"]
    assert module.ListReporter.kept[tmp_path] == [*read_metrics(tmp_path), {"kind": "closed", "step": 0}]
    for wrong, message in (("rspo.models.policy:Policy", "must be a subclass"), ("nomodule:X", "cannot be imported")):
        with pytest.raises(ConfigError, match=message):
            run(apply_flags(config, [f"run.report_to=['{wrong}']"]), tmp_path / wrong)


def test_tensorboard_has_every_number_once_also_after_a_resume(start: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is an extra"
    )
    flags = [*SHORT, f"policy.path={start}", "run.report_to=[tensorboard]", "run.save_every=2", "run.steps=4"]
    config = small_config(*flags)
    run(apply_flags(config, ["run.steps=2"]), tmp_path)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:  # a record past the checkpoint
        file.write(json.dumps({"kind": "update", "step": 3, "success": 0.5}) + "\n")
    run(config, tmp_path, resume=True)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for kind in ("update", "dense", "collect", "evaluation"):
        for number, record in enumerate(read_metrics(tmp_path, kind), start=1):
            for name, value in record.items():
                if name not in ("kind", "step") and value is not None:
                    at = number if kind == "dense" else record["step"]
                    expected.setdefault(f"{kind}/{name}", []).append((at, pytest.approx(value, rel=1e-6)))
    found = {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == expected
    assert len(found["dense/success"]) == 4
    assert "evaluation/success@0.4" in found


def test_a_missing_package_is_an_error_before_anything_is_played(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    config = small_config(*SHORT, "run.report_to=[tensorboard]")  # with a start policy to be warmed up
    with pytest.raises(ConfigError, match=r"needs a package: pip install 'rspo\[tensorboard\]'"):
        open_run(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_damaged_records_are_named(tmp_path: Path) -> None:
    for line in ("{]", "[1]", '{"kind": "update"}'):
        (tmp_path / "metrics.jsonl").write_text('{"kind": "update", "step": 1}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl is not a record"):
            read_metrics(tmp_path)


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_episodes_show_a_bar_and_short_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    config = small_config("env.name=rspo_toys:ParityEnv", "evaluation.episodes=16", "evaluation.temperatures=[1.0]")
    evaluate(small_policy(), ParityEnv(), config, progress=True)
    assert "turn" not in terminal.getvalue(), "over before anyone could wait"
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    clock = iter(range(10_000))
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    evaluate(small_policy(), ParityEnv(), config, progress=True)
    shown = terminal.getvalue()
    assert re.search(r"evaluating at temperature 1: .*\d+/16 .*episode.*turn=2", shown)
    before = len(shown)
    evaluate(small_policy(), ParityEnv(), config, progress=False)
    assert len(terminal.getvalue()) == before


# Names of metrics


def documented() -> list[re.Pattern[str]]:
    """The names in the table of docs/training.md, their placeholders filled in."""
    section = DOCS.read_text(encoding="utf-8").split("### Metrics")[1].split("\n## ")[0]
    names = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    evaluated = [*names[names.index("success") : names.index("success/type/<kind>")], "success/type/[a-z]+"]
    evaluated.remove("lost_episodes")
    fill = {"<kind>": "[a-z]+", "<T>": r"[0-9.]+", "<statistic>": "|".join(STATS), "<evaluated>": "|".join(evaluated)}
    patterns = []
    for name in names:
        pattern = re.escape(name)
        for placeholder, values in fill.items():
            pattern = pattern.replace(re.escape(placeholder), f"(?:{values})")
        patterns.append(re.compile(pattern))
    return patterns


def test_the_documented_names_of_metrics_are_those_of_the_records(start: Path, tmp_path: Path) -> None:
    flags = [*SHORT, f"policy.path={start}"]
    run(small_config(*flags, "loss.kl_coef=0.01", "rollout.rescore=on"), tmp_path / "rspo")
    run(small_config(*flags, "rollout.group_size=1", method="ppo"), tmp_path / "ppo")
    names = {name for folder in ("rspo", "ppo") for record in read_metrics(tmp_path / folder) for name in record}
    patterns = documented()
    assert not {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}
    assert not {p.pattern for p in patterns if not any(p.fullmatch(name) for name in names)}


def test_updates_record_the_learning_rate_that_they_were_made_with(start: Path, tmp_path: Path) -> None:
    flags = [*SHORT, f"policy.path={start}", "run.steps=3", "optimizer.schedule=linear", "optimizer.learning_rate=0.3"]
    run(small_config(*flags, "critic.learning_rate=0.6", "rollout.group_size=1", method="ppo"), tmp_path)
    updates = read_metrics(tmp_path, "update")
    assert [record["learning_rate"] for record in updates] == pytest.approx([0.3, 0.2, 0.1])
    assert [record["critic/learning_rate"] for record in updates] == pytest.approx([0.6, 0.4, 0.2])
