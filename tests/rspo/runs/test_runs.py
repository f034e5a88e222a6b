"""Whole runs, small: through the command line, resumed, and read back by transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rspo_toys import ParityEnv, small_config, small_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from rspo import RSPOTrainer
from rspo.algorithm.metrics import trajectory_metrics
from rspo.algorithm.rewards import NonFiniteError
from rspo.algorithm.warmup import BELOW, INSIDE, demonstrations, measure, warm_up
from rspo.cli import demo, main
from rspo.config import Config, ConfigError, default_config
from rspo.config.files import apply_flags, load_config, save_config
from rspo.data.batch import Batch
from rspo.data.trajectory import Trajectory
from rspo.engines import TransformersBackend
from rspo.envs import make_env
from rspo.envs.base import PromptContext
from rspo.envs.household import HouseholdEnv
from rspo.models.agent import Agent
from rspo.models.policy import Policy
from rspo.runs.collect import collect
from rspo.runs.plots import plot_runs
from rspo.runs.records import Tracker, read_metrics, without_timings
from rspo.runs.reporters import Record, Reporter
from rspo.start import START_MARK, how_to_go_on, open_run
from rspo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [
    "rollout.tasks=4",
    "rollout.group_size=2",
    "swap.k=2",
    "swap.alpha=0.25",
    "swap.buffer_tasks=3",
    "optimizer.minibatches=2",
    "evaluation.episodes=8",
    "env.options={max_turns: 3}",
]


def run(config: Config, folder: Path, resume: bool = False) -> Trainer:
    trainer = open_run(config, folder, resume=resume, progress=False)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def timeless(folder: Path) -> list[dict[str, object]]:
    return without_timings(read_metrics(folder))


def flags_for(start: Path, *flags: str) -> list[str]:
    return [*SMALL, f"policy.path={start}", *flags]


def test_train_eval_and_plot_through_the_command_line(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    sets = [part for flag in SMALL for part in ("--set", flag)]
    command = ["train", "--method", "rspo", "--env", "household", "--seed", "3", "--steps", "3", "--policy", str(start)]
    assert main([*command, "--out", str(out), "--quiet", *sets, "--set", "evaluation.every=2"]) == 0
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "learning_curve.png"} <= {p.name for p in out.iterdir()}
    assert load_config(out / "config.yaml").run.seed == 3

    kinds = [(record["kind"], record["step"]) for record in read_metrics(out)]
    loop = [("dense", 0), ("dense", 0), ("collect", 0), ("update", 1), ("update", 2), ("evaluation", 2)]
    last = [("dense", 2), ("dense", 2), ("collect", 2), ("update", 3), ("evaluation", 3)]
    assert kinds == [("evaluation", 0), *loop, *last]
    update = read_metrics(out, "update")[-1]
    # 2 dense updates and 1 collection in each loop, 3 updates of A in all; 3 of 4 tasks are on-policy.
    assert update["trajectories"] == 2 * (2 * 6 + 6) + 3 * 6
    expected = {
        "success", "reward", "dense_return", "clip_frac_low", "clip_frac_high", "replay/clip_frac_low", "approx_kl_k3",
        "entropy", "replay/log_center_q50", "replay/zero_advantages", "identical_states", "identical_states_per_turn",
        "tokens", "seconds/generation", "seconds/environment", "seconds/logprobs", "seconds/loss_backward",
        "seconds/optimizer",
    }  # fmt: skip
    assert expected <= set(update)

    capsys.readouterr()
    assert main(["eval", str(out), "--episodes", "4", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) >= {"success", "turns"}
    assert main(["eval", str(start), "--episodes", "4", "--set", "env.options={max_turns: 2}"]) == 0
    assert "4 episodes" in capsys.readouterr().out
    assert main(["plot", str(out), str(out), "--out", str(tmp_path / "both.png"), "--labels", "a", "b"]) == 0
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_demo_starts_over_and_prints_its_table(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [part for flag in flags_for(start, "evaluation.every=1") for part in ("--set", flag)]
    for _ in range(2):
        assert demo.main(["--out", str(tmp_path), "--steps", "2", "--baseline", *sets]) == 0
        table = capsys.readouterr().out.split("held-out household tasks:")[1].split("\n\n")[1].splitlines()
        names = [line.split()[0] for line in table[1:]]
        assert names == ["start", "RSPO+GRPO", "GRPO"]
        assert [line.split()[1] for line in table[1:]] == ["0", "2", "2"]
        assert [line.split()[4] for line in table[1:]] == ["0", "30", "16"]
    assert (tmp_path / "learning_curve.png").is_file()


def test_errors_of_the_command_line_name_what_is_allowed(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    out = ["--out", str(tmp_path / "x"), "--quiet", "--policy", str(start)]
    assert "available: alfworld, household, webshop, or" in error("train", "--env", "webshop2", *out)
    assert "swap.alpha must be in [0, 1)" in error("train", "--set", "swap.alpha=2", *out)
    assert "no dense reward" in error(
        "train", "--env", "rspo_toys:ParityEnv", "--set", "env.options={dense: false}", *out
    )
    assert "no causal LM" in error("train", "--out", str(tmp_path / "y"), "--policy", str(tmp_path))
    assert "holds no run" in error("train", "--resume", "--out", str(tmp_path / "nowhere"))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "warmup.pt").touch()
    assert "its warm-up goes on with the command that began it" in error(
        "train", "--resume", "--out", str(tmp_path / "begun")
    )
    assert "not the folder of a run" in error("plot", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["train", "--method", "sarsa"])
    assert "'rspo', 'grpo'" in capsys.readouterr().err.replace("choose from rspo, grpo", "'rspo', 'grpo'")


@pytest.mark.parametrize(("method", "extra"), [("rspo", ()), ("grpo", ()), ("rspo", ("swap.source=history",))])
def test_a_resumed_run_gives_the_same_metrics_bit_for_bit(
    start: Path, tmp_path: Path, method: str, extra: tuple[str, ...]
) -> None:
    # An environment in which untrained policies succeed, so that every part of the update has something to do.
    parity = ["env.name=rspo_toys:ParityEnv", "env.options={}", "rollout.group_size=4"]
    flags = flags_for(start, "run.steps=4", "run.save_every=2", "evaluation.every=2", *parity, *extra)
    config = small_config(*flags, method=method)
    run(config, tmp_path / "whole")
    updates = read_metrics(tmp_path / "whole", "update")
    assert all(record["gradient_norm"] > 0 for record in updates)
    assert method == "grpo" or updates[-1]["replay/trajectories"] == 4
    run(apply_flags(config, ["run.steps=2"]), tmp_path / "parts")
    run(config, tmp_path / "parts", resume=True)
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    whole, parts, first = (
        Policy.load(tmp_path / name, config.policy).model.state_dict().values()
        for name in ("whole/checkpoints/step-000004", "parts/checkpoints/step-000004", start)
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole, first, strict=True))


def test_records_after_the_checkpoint_are_dropped_on_resume(start: Path, tmp_path: Path) -> None:
    config = small_config(*flags_for(start, "run.steps=2", "run.save_every=1"), method="grpo")
    run(config, tmp_path)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "upd')  # killed inside a line
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2, 2]
    tracker = Tracker(tmp_path, 2, start=1, records=2, progress=False)
    tracker.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]


def test_a_run_killed_inside_a_loop_resumes_to_the_same_records(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B's records of the loop that was cut off are made again, not kept twice."""
    flags = flags_for(start, "run.steps=4", "run.save_every=2", "env.name=rspo_toys:ParityEnv", "env.options={}")
    config = small_config(*flags)
    run(config, tmp_path / "whole")
    update_a = Trainer._update_a

    def killed(self: Trainer) -> list[Trajectory]:
        if self.books.step == 3:
            raise KeyboardInterrupt
        return update_a(self)

    monkeypatch.setattr(Trainer, "_update_a", killed)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "parts")
    monkeypatch.undo()
    run(config, tmp_path / "parts", resume=True)
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")


@pytest.mark.parametrize("source", ["dense", "outcome", "history"])
def test_the_loop_is_algorithm_one(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Who is updated on what, with which weight, and what the buffer holds, over two loops."""
    flags = flags_for(start, "run.steps=4", "env.name=rspo_toys:ParityEnv", "env.options={}", f"swap.source={source}")
    config = small_config(*flags, "swap.alpha_schedule=linear")
    seen: list[tuple[str, str, float, int]] = []
    buffers: list[int] = []
    update, loop = Trainer._update, Trainer._loop

    def spied_update(self: Trainer, agent: Agent, trajectories: list[Trajectory], alpha: float = 0.0) -> dict:
        who = "A" if agent is self.agent else "B"
        fresh = [t for t in trajectories if t.source == "on_policy"]
        dense = all(float(t.rewards.sum()) == pytest.approx(t.dense_return) for t in fresh)
        outcome = all(float(t.rewards.sum()) == t.outcome for t in trajectories)
        labels = {(True, False): "dense", (False, True): "outcome"}[(dense, outcome)]
        if who == "B":
            assert agent.policy.model is not self.agent.policy.model
        seen.append((who, labels, alpha, len(trajectories) - len(fresh)))
        return update(self, agent, trajectories, alpha)

    def spied_loop(self: Trainer) -> None:
        loop(self)
        buffers.append(len(self.buffer))

    monkeypatch.setattr(Trainer, "_update", spied_update)
    monkeypatch.setattr(Trainer, "_loop", spied_loop)
    run(config, tmp_path)
    of_b = [] if source == "history" else [("B", source, 0.0, 0)] * 2
    alphas = [0.25 * (1 - step / 4) for step in range(4)]
    sizes = [config.replay_size(alpha) for alpha in alphas]
    of_a = [("A", "outcome", alpha, size) for alpha, size in zip(alphas, sizes, strict=True)]
    if source == "history":  # the first loop has nothing to replay yet
        of_a[:2] = [(who, label, alpha, 0) for who, label, alpha, _ in of_a[:2]]
    assert seen == [*of_b, *of_a[:2], *of_b, *of_a[2:]]
    kept = [2 * config.rollout.group_size * n for n in (3, 4)] if source == "history" else [0, 0]
    assert buffers == kept


def test_resuming_takes_new_optimizer_settings_and_refuses_another_run(start: Path, tmp_path: Path) -> None:
    config = small_config(*flags_for(start, "run.steps=1", "run.save_every=1"), method="grpo")
    run(config, tmp_path)
    changed = apply_flags(config, ["run.steps=2", "optimizer.learning_rate=0.5", "optimizer.weight_decay=0.25"])
    trainer = open_run(changed, tmp_path, resume=True, progress=False)
    trainer.close()
    (group,) = trainer.agent.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    for flags, message in (
        (["method=rspo"], "method of the run in .* is 'grpo' and cannot change on --resume, got 'rspo'"),
        (["run.seed=9"], "run.seed of the run in .* is 0 and cannot change"),
        (["env.history_length=1"], "env.history_length of the run in .* is 2 and cannot change on --resume, got 1"),
        (["loss.clip_low=0.1"], "loss.clip_low of the run in .* cannot change"),
        (["rollout.temperature=0.5"], "rollout.temperature of the run in .* cannot change"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_run(apply_flags(config, flags), tmp_path, resume=True, progress=False)


@pytest.mark.parametrize("kl_coef", [0, 0.1])
@pytest.mark.parametrize("begun", [True, False])
def test_a_run_goes_on_with_a_start_that_moved_but_with_no_other(
    begun: bool, kl_coef: float, start: Path, tmp_path: Path
) -> None:
    """begun: it has a checkpoint."""
    mine, folder = tmp_path / "mine", tmp_path / "run"
    shutil.copytree(start, mine)
    config = small_config(*flags_for(mine, "run.steps=1", f"loss.kl_coef={kl_coef}"), method="grpo")
    run(config, folder) if begun else open_run(config, folder, progress=False).close()
    mine.rename(tmp_path / "moved")
    small_policy(seed=3).save(mine)

    def resume(path: Path | None) -> None:
        changed = apply_flags(config, ["run.steps=2", f"policy.path={'null' if path is None else path}"])
        open_run(changed, folder, resume=True, progress=False).close()

    with pytest.raises(ConfigError, match=r"run in .*run was trained on another model than policy\.path='.*mine'"):
        resume(mine)
    with pytest.raises(ConfigError, match=r"policy\.path of the run in .* is '.*mine' and cannot change .* got None"):
        resume(None)
    assert load_config(folder / "config.yaml") == config
    resume(tmp_path / "moved")
    assert load_config(folder / "config.yaml").policy.path == str(tmp_path / "moved")


def test_a_model_cannot_take_the_place_of_the_small_one(start: Path, tmp_path: Path) -> None:
    config = small_config(*SMALL, "run.steps=1", method="grpo")
    open_run(config, tmp_path, progress=False, policy=small_policy()).close()
    for path in (start, tmp_path / "start"):
        with pytest.raises(ConfigError, match=r"policy\.path of the run in .* is None and cannot change .* got '"):
            open_run(apply_flags(config, [f"policy.path={path}"]), tmp_path, resume=True, progress=False)


def test_a_start_that_broke_off_leaves_no_fingerprint(start: Path, tmp_path: Path) -> None:
    open_run(small_config(*flags_for(start)), tmp_path, progress=False).close()
    (tmp_path / "config.yaml").unlink()
    config = small_config(*SMALL)
    open_run(config, tmp_path, progress=False, policy=small_policy(seed=5)).close()
    assert not (tmp_path / "base.json").exists()
    open_run(config, tmp_path, resume=True, progress=False).close()


@pytest.mark.parametrize("name", ["optimizer.pt", "state.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_named(start: Path, tmp_path: Path, name: str) -> None:
    config = small_config(*flags_for(start, "run.steps=1", "run.save_every=1"), method="grpo")
    run(config, tmp_path)
    damaged = tmp_path / "checkpoints" / "step-000001" / name
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"step-000001 cannot be read|no causal LM .*step-000001"):
        open_run(apply_flags(config, ["run.steps=2"]), tmp_path, resume=True, progress=False)


def test_a_checkpoint_is_evaluated_in_its_own_environment(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_for(start, "run.steps=1", "env.name=rspo_toys:ParityEnv", "env.options={}", "evaluation.episodes=32")
    run(small_config(*flags, method="grpo"), tmp_path)
    assert main(["eval", str(tmp_path / "checkpoints" / "step-000001"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["turns"] < 4, "household episodes of this policy last 12 turns"


def test_a_start_policy_is_evaluated_in_its_runs_environment(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "run" / "start"
    shutil.copytree(start, model)
    (model / START_MARK).touch()
    config = small_config("env.name=rspo_toys:ParityEnv", "env.options={}", "evaluation.episodes=32", method="grpo")
    save_config(config, tmp_path / "run" / "config.yaml")
    assert main(["eval", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["turns"] < 4


@pytest.mark.parametrize(
    ("place", "inside"), [("models/mine", False), ("models/mine", True), ("checkpoints/mine", False), ("start", False)]
)
def test_a_config_of_another_project_is_none_of_ours(
    start: Path, tmp_path: Path, place: str, inside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("name: something else\n", encoding="utf-8")
    shutil.copytree(start, tmp_path / place)
    if inside:
        (tmp_path / "config.yaml").rename(tmp_path / place / "config.yaml")
    command = [str(tmp_path / place), "--out", str(tmp_path / "whole")]
    assert main(["export", *command]) == 0
    assert "the model of" in capsys.readouterr().out
    flags = ["--episodes", "2", "--json", "--set", "env.options={max_turns: 2}"]
    assert main(["eval", str(tmp_path / place), *flags]) == 0


def test_a_model_that_was_saved_in_a_runs_folder_leaves_it_a_run(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small_config(*flags_for(start, "run.steps=1"), method="grpo"), tmp_path)
    small_policy().save(tmp_path)
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "whole")]) == 0
    assert "step-000001" in capsys.readouterr().out


def test_a_start_that_fails_leaves_nothing_in_the_way(start: Path, tmp_path: Path) -> None:
    config = small_config(*flags_for(start, "run.steps=1"))
    with pytest.raises(ConfigError, match="nomodule"):
        open_run(apply_flags(config, ["rewards.dense=nomodule:f"]), tmp_path / "run", progress=False)
    run(config, tmp_path / "run")


def test_a_start_that_fails_leaves_no_empty_folder(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor takes away one that was there."""
    folder = tmp_path / "run"

    def fails(said: str, *flags: str) -> None:
        with pytest.raises(ConfigError, match=said):
            open_run(small_config(*SMALL, *flags), folder, progress=False)

    def refuse(*arguments: object) -> None:
        raise ConfigError("the model cannot do that")

    for existed in (False, True):
        if existed:
            folder.mkdir()
        fails("'nowhere' is not a folder", "policy.path=nowhere")
        fails("no scripted expert", "env.name=rspo_toys:ParityEnv", "env.options={}")
        with monkeypatch.context() as patch:
            patch.setattr("rspo.start.check_run", refuse)
            fails("cannot do that", f"policy.path={start}")
        assert folder.exists() == existed
        assert not existed or list(folder.iterdir()) == []


OPEN: set[str] = set()
"""What is open of the three below."""


class OpenReporter(Reporter):
    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        OPEN.add("reporter")

    @classmethod
    def check(cls) -> None:
        pass

    def record(self, record: Record) -> None:
        pass

    def close(self) -> None:
        OPEN.discard("reporter")


class FailingReporter(OpenReporter):
    """Finds out late that it cannot report."""

    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        assert sorted(OPEN) == ["engine", "environment", "reporter"]
        raise ConfigError("no tracker answers")


class OpenEnv(ParityEnv):
    def __init__(self) -> None:
        super().__init__()
        OPEN.add("environment")

    def close(self) -> None:
        OPEN.discard("environment")


class OpenEngines(TransformersBackend):
    def __init__(self) -> None:
        OPEN.add("engine")

    def close(self) -> None:
        OPEN.discard("engine")


def test_a_start_that_fails_late_closes_what_it_opened(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rspo.start.open_backend", lambda *arguments: OpenEngines())
    config = small_config(*flags_for(start, "run.steps=1", "env.name=test_runs:OpenEnv", "env.options={}"))
    reporters = "run.report_to=[test_runs:OpenReporter, test_runs:FailingReporter]"
    with pytest.raises(ConfigError, match="no tracker answers"):
        open_run(apply_flags(config, [reporters]), tmp_path / "run", progress=False)
    assert not OPEN
    with pytest.raises(ConfigError, match="nomodule"):
        RSPOTrainer(args=apply_flags(config, ["rewards.dense=nomodule:f"]))
    assert not OPEN
    run(config, tmp_path / "run")
    assert not OPEN


class LateEnv(ParityEnv):
    """Only its training tasks have prompts that are too long."""

    def render_prompt(self, context: PromptContext) -> str:
        return super().render_prompt(context) * (1000 if context.task in self.tasks("train") else 1)


@pytest.mark.parametrize("by", ["command", "trainer"])
def test_a_run_that_cannot_play_can_be_started_again(by: str, start: Path, tmp_path: Path) -> None:
    """As where a prompt is too long, in the first evaluation, or only in the first rollout after it."""
    flags = flags_for(start, "run.steps=1", "evaluation.every=1", "run.save_every=1")

    def train(*more: str) -> int:
        if by == "command":
            sets = [part for flag in (*flags, *more) for part in ("--set", flag)]
            return main(["train", "--quiet", "--out", str(tmp_path / "run"), *sets])
        try:
            RSPOTrainer(args=small_config(*flags, *more), output_dir=tmp_path / "run", progress=False).train()
        except ConfigError:
            return 2
        return 0

    assert train("rollout.max_prompt_tokens=3") == 2
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert read_metrics(tmp_path / "run") == []
    assert train("env.name=test_runs:LateEnv", "env.options={}") == 2
    assert [record["kind"] for record in read_metrics(tmp_path / "run")] == ["evaluation"]
    assert train() == 0
    assert [record["step"] for record in read_metrics(tmp_path / "run", "evaluation")] == [0, 1]
    assert train() == 2, "a run that was trained stays"
    assert load_config(tmp_path / "run" / "config.yaml").env.name == "household"


def test_a_given_model_is_the_start_again_where_it_could_not_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the small model in its place."""
    policy = small_policy(seed=5)
    trainer = RSPOTrainer(policy, small_config(*SMALL, "run.steps=1"), output_dir=tmp_path, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.env, "render_prompt", lambda context: "go " * 999)
        with pytest.raises(ConfigError, match="a prompt has"):
            trainer.train()
    assert trainer.model is policy.model
    trainer.train()
    assert trainer.model is policy.model


def test_checkpoints_load_with_transformers_and_old_ones_go(start: Path, tmp_path: Path) -> None:
    config = small_config(*flags_for(start, "run.steps=5", "run.save_every=1", "run.keep=2"), method="grpo")
    trainer = run(config, tmp_path)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-000004", "step-000005"]
    folder = tmp_path / "checkpoints" / "step-000005"
    assert (folder / "model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = tokenizer("pick apple table", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(inputs[0]) == "pick apple table"
    with torch.no_grad():
        torch.testing.assert_close(model(inputs).logits, trainer.agent.policy.model(inputs).logits)


def test_a_new_run_does_not_overwrite_an_old_one(start: Path, tmp_path: Path) -> None:
    config = small_config(*flags_for(start, "run.steps=1"), method="grpo")
    run(config, tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        open_run(config, tmp_path, progress=False)


def test_a_new_run_leaves_a_model_of_someone_else_alone(tmp_path: Path) -> None:
    """In its folder, under the name of its own start policy; that of a start that broke off makes room."""
    config = small_config(*SMALL, "run.steps=1", method="grpo")
    small_policy().save(tmp_path / "start")
    before = {path: path.read_bytes() for path in (tmp_path / "start").iterdir()}
    with pytest.raises(ConfigError, match=r"start is where a run keeps .* holds something else; choose another --out"):
        open_run(config, tmp_path, progress=False)
    assert {path: path.read_bytes() for path in (tmp_path / "start").iterdir()} == before

    broken = tmp_path / "broken"
    open_run(config, broken, progress=False, policy=small_policy()).close()
    (broken / "config.yaml").unlink()
    other = small_policy(seed=5)
    open_run(config, broken, progress=False, policy=other).close()
    kept = Policy.load(broken / "start", config.policy).model.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in other.model.state_dict().items())


def test_replay_enters_the_update_with_its_share(start: Path, tmp_path: Path) -> None:
    """Dense rewards, one loop: agent A's batch has 3 tasks' rows and α·B·N = 2 replayed trajectories."""
    trainer = open_run(small_config(*flags_for(start)), tmp_path, progress=False)
    with trainer.agent.branched() as agent_b:
        trainer._train_b_and_collect(agent_b)
    assert len(trainer.buffer) == 3 * 2
    assert all(t.rewards is not None and t.rewards.sum() == t.outcome for t in trainer.buffer.trajectories)
    before = trainer.books.trajectories
    trainer._update_a()
    assert trainer.books.trajectories - before == 3 * 2
    record = read_metrics(tmp_path, "update")[-1]
    assert record["replay/trajectories"] == 2
    trainer.close()


def test_a_non_finite_reward_stops_the_run_after_a_checkpoint(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward function's; an environment's is found earlier."""
    config = small_config(*flags_for(start), method="grpo")
    monkeypatch.setattr("rspo.algorithm.rewards.outcome_reward", lambda trajectory: [float("nan")] * len(trajectory))
    agent = Agent(Policy.load(start, config.policy), config)
    trainer = Trainer(config, tmp_path, ParityEnv(), agent, None, Tracker(tmp_path, 2, progress=False))
    with pytest.raises(NonFiniteError, match=r"reward nan at turn \d of trajectory \d of group \d"):
        trainer.train()
    trainer.close()
    assert (tmp_path / "checkpoints" / "failed" / "model.safetensors").is_file()


def test_paper_preset_runs_on_household(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sets = [part for flag in [*SMALL, "rollout.max_response_tokens=4", "policy.chat=auto"] for part in ("--set", flag)]
    command = ["train", "--preset", "paper", "--steps", "1", "--policy", str(start), "--out", str(out), "--quiet"]
    assert main([*command, *sets]) == 0
    record = read_metrics(out, "update")[-1]
    assert record["kl_ref"] >= 0
    assert load_config(out / "config.yaml").loss.center_cap is None


@pytest.fixture(scope="module")
def household() -> HouseholdEnv:
    env = make_env("household")
    assert isinstance(env, HouseholdEnv)
    return env


WARM = ["warmup.trajectories=40", "warmup.check_episodes=16", "warmup.check_every=5", "warmup.batch_rows=64"]


def test_demonstrations_mix_expert_and_random_steps(household: HouseholdEnv) -> None:
    policy = small_policy()
    expert = demonstrations(household, policy, small_config(*WARM, "warmup.expert_rate=1.0"))
    assert trajectory_metrics(expert)["success"] == 1.0
    mixed = demonstrations(household, policy, small_config(*WARM, "warmup.expert_rate=0.5"))
    assert 0 < trajectory_metrics(mixed)["invalid_actions"] < 0.6
    assert {len(turn.response_ids) for t in mixed for turn in t.turns} == {2}
    longer = demonstrations(household, policy, small_config(*WARM, "rollout.max_response_tokens=3"))
    (eos,) = policy.eos_token_ids
    assert {int(turn.response_ids[-1]) for t in longer for turn in t.turns} == {eos}


def test_demonstrations_heed_what_a_machine_should_hold() -> None:
    started: list[int] = []

    class CostlyEnv(HouseholdEnv):
        episodes_at_once = 16

        def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[dict[str, Any]]]:
            started.append(len(tasks))
            return super().reset(tasks, seeds)

    played = demonstrations(CostlyEnv(), small_policy(), small_config(*WARM))
    assert (len(played), started) == (40, [16, 16, 8])


def test_warm_up_is_deterministic_and_measures_its_band(household: HouseholdEnv) -> None:
    config = small_config(*WARM, "warmup.band=[0.0, 1.0]", "warmup.held_out_band=[0.0, 1.0]")
    (a, rate_a), (b, rate_b) = (warm_up(household, config, progress=False) for _ in range(2))
    assert (rate_a, INSIDE) == (rate_b, INSIDE) == measure(a, household, config)
    for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True):
        assert torch.equal(x, y)
    unreachable = small_config(*WARM, "warmup.band=[0.9, 0.95]", "warmup.max_updates=5")
    with pytest.raises(ConfigError, match=r"raise warmup\.max_updates"):
        warm_up(household, unreachable, progress=False)
    with pytest.raises(ConfigError, match=r"set policy\.path"):
        warm_up(ParityEnv(), config, progress=False)


def test_a_warm_up_that_was_broken_off_goes_on(
    household: HouseholdEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, state = small_config(*WARM, "warmup.max_updates=20"), tmp_path / "warmup.pt"
    sides: list[int] = []

    def measured(*_: Any) -> tuple[float, int]:
        if not sides:
            raise KeyboardInterrupt
        return 0.0, sides.pop(0)

    monkeypatch.setattr("rspo.algorithm.warmup.measure", measured)
    sides += [BELOW, BELOW, BELOW, INSIDE]
    whole, _ = warm_up(household, config, progress=False)
    sides += [BELOW, BELOW]
    with pytest.raises(KeyboardInterrupt):
        warm_up(household, config, progress=True, state=state)
    said = capsys.readouterr().err
    assert "40 episodes are played, then up to 20 updates" in said
    assert re.search(r"at most about \d+ (seconds|minutes); .* the same command goes on", said)
    sides += [BELOW, INSIDE]
    resumed, _ = warm_up(household, config, progress=False, state=state)
    assert not sides, "two of four intervals were left"
    for x, y in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(x, y)
    sides += [BELOW, BELOW, BELOW, INSIDE]
    warm_up(household, apply_flags(config, ["run.seed=1"]), progress=False, state=state)
    assert not sides, "of another seed nothing is taken up"


def test_a_first_run_needs_few_updates_and_one_measurement() -> None:
    settings = default_config().warmup
    assert settings.max_updates * settings.batch_rows <= 160 * 128, "some 10 CPU-seconds on household"
    assert settings.check_every == settings.max_updates
    assert settings.band == settings.held_out_band == (0.0, 1.0), "what comes of it is the start"


@pytest.mark.parametrize(("schedule", "factors"), [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25])])
def test_the_learning_rate_of_cloning_follows_its_schedule(
    schedule: str, factors: list[float], household: HouseholdEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []

    def clone(policy: Policy, batch: Batch, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        used.append(optimizer.param_groups[0]["lr"])

    monkeypatch.setattr("rspo.algorithm.warmup._clone", clone)
    wide = ("warmup.band=[0.0, 1.0]", "warmup.held_out_band=[0.0, 1.0]", "warmup.max_updates=4", "warmup.check_every=4")
    warm_up(household, small_config(*WARM, *wide, f"warmup.schedule={schedule}"), progress=False)
    assert used == pytest.approx([5e-3 * factor for factor in factors])


def test_labels_must_match_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="labels must be as many"):
        plot_runs([tmp_path], tmp_path / "x.png", labels=["a", "b"])


class UnstartableEnv(ParityEnv):
    """Fails at its first reset, in one way or another."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> Any:
        if self.fault == "raises":
            raise ZeroDivisionError("this environment is broken")
        observations, infos = super().reset(tasks, seeds)
        return [None] * len(tasks) if self.fault == "value" else observations, infos

    def tasks(self, split: str = "train") -> Sequence[str]:
        return () if self.fault == "no tasks" and split == "train" else super().tasks(split)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "this environment is broken"),
        ("value", "environment UnstartableEnv, reset: observations of episode 0 must be a str; got None"),
        ("no tasks", "has no tasks to train on"),
    ],
)
def test_an_environment_that_cannot_start_leaves_the_folder_free(
    fault: str, said: str, workers: int, start: Path, tmp_path: Path
) -> None:
    options = [f"env.options={{fault: {fault}}}", f"env.workers={workers}"]
    broken = small_config(*flags_for(start), "env.name=test_runs:UnstartableEnv", *options, method="grpo")
    with pytest.raises(Exception, match=said):
        open_run(broken, tmp_path / "run", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_collecting_from_an_environment_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    config = small_config()
    with pytest.raises(ZeroDivisionError):
        collect(UnstartableEnv("raises"), small_policy(), config, tmp_path / "data", 4, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_stopped_in_its_warm_up_is_told_that_it_goes_on(tmp_path: Path) -> None:
    assert how_to_go_on(tmp_path) == "start the run again, which had not begun"
    (tmp_path / "warmup.pt").touch()
    assert how_to_go_on(tmp_path).endswith("; its warm-up goes on from the last measurement")
