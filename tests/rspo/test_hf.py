"""RSPOTrainer: the runs of the command line with the habits of transformers' Trainer, its callbacks, and the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from doc_examples import code_blocks
from huggingface_hub import HfApi
from huggingface_hub.utils import are_progress_bars_disabled
from rspo_toys import ParityEnv, small_config, small_policy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
)
from transformers.utils import logging as transformers_logging

from rspo import RSPOTrainer
from rspo.algorithm.evaluate import evaluate
from rspo.cli import main
from rspo.config import Config, ConfigError
from rspo.config.files import apply_flags, load_config, save_config
from rspo.data.trajectory import Trajectory
from rspo.models.policy import Policy
from rspo.runs.records import read_metrics, without_timings

pytestmark = pytest.mark.usefixtures("one_thread")

WARMUP = ["warmup.trajectories=40", "warmup.max_updates=20", "warmup.check_episodes=16", "warmup.band=[0, 1]"]
WARMUP += ["warmup.held_out_band=[0, 1]"]


def parity(*flags: str, method: str = "rspo") -> Config:
    """Settings with which untrained policies succeed now and then, on ParityEnv."""
    return small_config("env.name=rspo_toys:ParityEnv", "run.steps=4", "run.save_every=2", *flags, method=method)


def timeless(folder: Path) -> list[dict[str, Any]]:
    return without_timings(read_metrics(folder))


def weights(folder: Path) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(folder).state_dict().values())


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def by_command_line(config: Config, folder: Path, *arguments: str) -> Path:
    """The run that `rspo train` makes of a configuration."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_config(config, folder.with_suffix(".yaml"))
    given = ["train", "--config", str(folder.with_suffix(".yaml")), "--out", str(folder), "--quiet", *arguments]
    assert main(given) == 0
    return folder


quiet = partial(RSPOTrainer, progress=False)


class Recorder(TrainerCallback):
    """Keeps the events with the step at which they came, and what they brought; `asks` sets flags at some of them."""

    def __init__(self, asks: dict[tuple[str, int], str] | None = None) -> None:
        self.asks = asks or {}
        self.events: list[tuple[str, int]] = []
        self.details: list[dict[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: TrainerControl, **details: Any) -> TrainerControl:
            self.events.append((name, state.global_step))
            self.details.append({"args": args, **details})
            if (name, state.global_step) in self.asks:
                setattr(control, self.asks[name, state.global_step], True)
            return control

        return event

    def steps(self, event: str) -> list[int]:
        return [step for name, step in self.events if name == event]


# Runs


@pytest.fixture(scope="module")
def whole(start: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """A run by the command line: 4 updates from the untrained policy."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return by_command_line(parity("evaluation.every=2"), folder, "--policy", str(start))


def test_importing_the_package_is_cheap() -> None:
    code = "import rspo, sys; assert 'torch' not in sys.modules; rspo.RSPOTrainer; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["path", "model", "policy"])
def test_a_trainer_makes_the_run_of_the_command_line(whole: Path, start: Path, tmp_path: Path, kind: str) -> None:
    config = parity("evaluation.every=2")
    model = {"path": start, "policy": Policy.load(start, config.policy)}.get(
        kind
    ) or AutoModelForCausalLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start) if kind == "model" else None
    with quiet(model, config, processing_class=tokenizer, output_dir=tmp_path / "run") as trainer:
        result = trainer.train()
    assert timeless(tmp_path / "run") == timeless(whole)
    assert same(weights(tmp_path / "run/checkpoints/step-000004"), weights(whole / "checkpoints/step-000004"))
    assert same(list(trainer.model.state_dict().values()), weights(whole / "checkpoints/step-000004"))
    update, evaluation = read_metrics(tmp_path / "run", "update")[-1], read_metrics(tmp_path / "run", "evaluation")[-1]
    assert result.global_step == 4 == trainer.state.global_step
    assert result.training_loss == pytest.approx(
        sum(record["loss"] for record in read_metrics(whole, "update")) / 4, rel=1e-12
    )
    expected = {f"train_{name}": value for name, value in update.items()}
    expected |= {f"eval_{name}": value for name, value in evaluation.items()}
    assert result.metrics == {n: v for n, v in expected.items() if n.partition("_")[2] not in ("kind", "step")}
    if kind == "model":
        assert trainer.model is model, "the model itself is trained"
        assert trainer.processing_class is tokenizer


@pytest.mark.parametrize("given", ["object", "class", "name"])
def test_an_environment_may_be_an_object_a_class_or_a_name(
    whole: Path, start: Path, tmp_path: Path, given: str
) -> None:
    env = {"object": ParityEnv(), "class": ParityEnv, "name": "rspo_toys:ParityEnv"}[given]
    config = apply_flags(parity("evaluation.every=2", f"policy.path={start}"), ["env.name=household"])
    trainer = quiet(args=config, env=env, output_dir=tmp_path)
    assert trainer.config.env.name == f"{'rspo_toys' if given == 'name' else 'rspo_parity'}:ParityEnv"
    trainer.train()
    assert timeless(tmp_path) == timeless(whole)
    assert (trainer.env is env) == (given == "object")


def test_without_a_model_the_small_one_is_warmed_up_as_by_the_command_line(tmp_path: Path) -> None:
    config = small_config(*WARMUP, "env.options={max_turns: 2}", "run.steps=1", method="grpo")
    by_command_line(config, tmp_path / "cli")
    trainer = quiet(args=tmp_path / "cli.yaml", output_dir=tmp_path / "run")
    before = trainer.evaluate()  # needs the start policy before the run has a folder
    trainer.train()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "cli")
    first = read_metrics(tmp_path / "cli", "evaluation")[0]
    assert before["eval_turns"] == first["turns"]
    assert same(weights(tmp_path / "run" / "start"), weights(tmp_path / "cli" / "start"))


class Killed(TrainerCallback):
    """Ctrl-C in the second loop."""

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("model", ["path", "object"])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    whole: Path, start: Path, tmp_path: Path, model: str
) -> None:
    config = parity("evaluation.every=2", "run.keep=9")

    def trainer(*callbacks: TrainerCallback) -> RSPOTrainer:
        given = start if model == "path" else small_policy()
        return quiet(given, config, output_dir=tmp_path, callbacks=callbacks)

    with pytest.raises(KeyboardInterrupt):
        trainer(Killed()).train()
    recorder = Recorder()
    resumed = trainer(recorder)
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    assert timeless(tmp_path) == timeless(whole)
    assert recorder.steps("on_step_begin") == [2, 3]
    assert [entry["step"] for entry in resumed.log_history] == [record["step"] for record in read_metrics(tmp_path)]
    assert resumed.state.best_metric == max(r["success"] for r in read_metrics(tmp_path, "evaluation"))

    # From an earlier checkpoint, as if it were the latest.
    again = trainer()
    again.train(resume_from_checkpoint=tmp_path / "checkpoints" / "step-000002")
    assert timeless(tmp_path) == timeless(whole)
    assert same(weights(tmp_path / "checkpoints/step-000004"), weights(whole / "checkpoints/step-000004"))


def test_going_on_from_an_earlier_checkpoint_forgets_the_newer_ones(start: Path, tmp_path: Path) -> None:
    config = parity("run.save_every=1", "run.keep=9", "swap.k=1")
    quiet(start, config, output_dir=tmp_path).train()
    names = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == [f"step-00000{step}" for step in (1, 2, 3, 4)]
    trainer = quiet(start, apply_flags(config, ["run.steps=2"]), output_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"run\.steps must be at least the 3 updates already made, got 2"):
        trainer.train(resume_from_checkpoint=tmp_path / "checkpoints" / "step-000003")
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4, "an error deletes nothing"
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step-000001"))
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == names[:2]
    assert [record["step"] for record in read_metrics(tmp_path, "update")] == [1, 2]


def test_a_run_that_was_never_saved_starts_over_from_the_given_model(whole: Path, tmp_path: Path) -> None:
    """The run keeps the start in its folder, so that it does not matter that the object has been trained since."""
    policy = small_policy()
    config = parity("evaluation.every=2", "run.save_every=0")
    with pytest.raises(KeyboardInterrupt):
        quiet(policy, config, output_dir=tmp_path, callbacks=[Killed]).train()
    quiet(policy, config, output_dir=tmp_path).train(resume_from_checkpoint=True)
    assert timeless(tmp_path) == timeless(whole)


# Arguments


def test_settings_may_be_a_dictionary_a_file_or_a_config(tmp_path: Path) -> None:
    values = {"method": "gigpo", "run": {"seed": 3}, "rollout": {"temperature": 0.7}}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(values))
    expected = apply_flags(Config(method="gigpo"), ["run.seed=3", "rollout.temperature=0.7"])
    for args in (values, tmp_path / "args.yaml", str(tmp_path / "args.yaml"), expected):
        assert quiet(args=args).config == expected
    trainer = quiet(args={"method": "ppo"})
    assert trainer.config.rollout.group_size == 1, "the preset of the method"
    assert trainer.folder == Path("runs/ppo-household-seed0")


def half(trajectory: Trajectory) -> list[float]:
    return [0.5 * turn.dense_reward for turn in trajectory.turns]


def test_a_dense_reward_may_be_any_function(start: Path, tmp_path: Path) -> None:
    def nested(trajectory: Trajectory) -> list[float]:
        return half(trajectory)

    def wrong(trajectory: Trajectory) -> list[float]:
        return [1.0]

    def trainer(name: str, dense_reward: Any) -> RSPOTrainer:
        config = parity("run.steps=2", "rewards.dense_scale=4")
        return quiet(start, config, dense_reward=dense_reward, output_dir=tmp_path / name)

    for name, dense_reward in (
        ("named", "test_hf:half"),
        ("function", half),
        ("nested", nested),
        ("environment", None),
    ):
        trainer(name, dense_reward).train()
    assert timeless(tmp_path / "named") == timeless(tmp_path / "function") == timeless(tmp_path / "nested")
    assert timeless(tmp_path / "named") != timeless(tmp_path / "environment")
    assert load_config(tmp_path / "nested" / "config.yaml").rewards.dense.endswith("<locals>.nested")
    with pytest.raises(ConfigError, match=r"rewards\.dense='test_hf:.*wrong' must be a function .* gave shape"):
        trainer("wrong", wrong).train()


def test_wrong_arguments_are_named_before_anything_is_played(start: Path, tmp_path: Path) -> None:
    class Homeless(ParityEnv):
        def __init__(self, needed: int) -> None:
            super().__init__()

    model = AutoModelForCausalLM.from_pretrained(start)
    double = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    words = AutoTokenizer.from_pretrained(start)
    bigger = AutoTokenizer.from_pretrained(start)
    bigger.add_tokens([f"new{i}" for i in range(2000)])
    plain = parity(f"policy.path={start}")
    workers = apply_flags(plain, ["env.workers=2"])
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "model must be a path, a transformers PreTrainedModel", {"model": 3}),
        (ConfigError, "model='no/such' is not a folder", {"model": "no/such"}),
        (TypeError, "processing_class must be the tokenizer", {"model": model}),
        (TypeError, "processing_class goes with a transformers model", {"processing_class": words}),
        (ConfigError, "processing_class has 20.. tokens, more than", {"model": model, "processing_class": bigger}),
        (ConfigError, "model must have weights of type .*, got float64", {"model": double, "processing_class": words}),
        (TypeError, "args must be a Config, a dictionary", {"args": 3}),
        (ConfigError, "args='no.yaml' is not a file", {"args": "no.yaml"}),
        (ConfigError, "unknown setting 'run.stepz'", {"args": {"run": {"stepz": 1}}}),
        (TypeError, "env must be a name, or an rspo.envs.BatchedEnv", {"env": object()}),
        (TypeError, "env must be a name, or an rspo.envs.BatchedEnv", {"env": dict}),
        (ConfigError, "unknown environment 'alfwrld'", {"env": "alfwrld"}),
        (ConfigError, "env=.*Homeless.* with env.options={}: .*needed", {"env": Homeless}),
        (ConfigError, "env.workers=2 needs an environment", {"env": ParityEnv(), "args": workers}),
        (ConfigError, "this environment has no dense reward", {"env": ParityEnv(dense=False)}),
        (TypeError, "dense_reward must be a function", {"dense_reward": 3}),
        (ConfigError, "rewards.dense='nomodule:f' cannot be imported", {"dense_reward": "nomodule:f"}),
        (TypeError, "callbacks must be transformers.TrainerCallback", {"callbacks": [print]}),
        (TypeError, "callbacks must be a sequence .* got <test_hf.Recorder", {"callbacks": Recorder()}),
        (TypeError, "callbacks must be a sequence .* got <class .*Recorder", {"callbacks": Recorder}),
        (TypeError, "callbacks must be a sequence .* got None", {"callbacks": None}),
    ]  # fmt: skip
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            quiet(**{"args": plain, "output_dir": tmp_path / "run", **arguments})
    assert not (tmp_path / "run").exists()

    trainer = quiet(args=plain, output_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=True: .* holds no run"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    with pytest.raises(ConfigError, match=r"already holds a run.*output_dir"):
        trainer.train()
    with pytest.raises(ConfigError, match=r"step-000003 is not a checkpoint of the run in .* which has step-000002"):
        trainer.train(resume_from_checkpoint=tmp_path / "run" / "checkpoints" / "step-000003")
    for wrong, message in (
        ({"episodes": 0}, "episodes must be >= 1"),
        ({"temperature": -1.0}, "temperatures must be > 0"),
    ):
        with pytest.raises(ConfigError, match=rf"evaluation\.{message}"):
            trainer.evaluate(**wrong)
    with pytest.raises(ConfigError, match=r"evaluation\.split='tset'"):
        quiet(small_policy(), env="household").evaluate(split="tset")


def test_without_progress_no_bar_is_drawn(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not transformers' own either, which are as they were afterwards."""
    config = parity(f"policy.path={start}", "run.steps=1")
    quiet_one = quiet(args=config, output_dir=tmp_path / "run")
    transformers_logging.enable_progress_bar()
    try:
        quiet_one.evaluate()
        quiet_one.train()
        quiet_one.save_model(tmp_path / "saved")
        assert capsys.readouterr().err == ""
        assert transformers_logging.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
        RSPOTrainer(args=config, output_dir=tmp_path / "other").save_model(tmp_path / "saved")
        assert "Loading weights" in capsys.readouterr().err
    finally:
        transformers_logging.disable_progress_bar()


def test_a_given_model_is_the_base_that_its_adapters_find_again(start: Path, tmp_path: Path) -> None:
    """Though it was changed since it was loaded, and the folder that it is from still stands."""
    pytest.importorskip("peft")
    model, words = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    trainer = quiet(model, parity("lora.rank=4"), processing_class=words, output_dir=tmp_path / "run")
    trainer.train()
    loaded = Policy.load(tmp_path / "run/checkpoints/step-000004", trainer.config.policy)
    assert same(list(loaded.model.state_dict().values()), list(trainer.model.state_dict().values()))


def test_a_given_model_obeys_the_settings_and_a_policy_sets_them(start: Path, tmp_path: Path) -> None:
    model, words = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    with pytest.raises(ConfigError, match=r"policy\.chat='on', but the model's tokenizer has no chat template"):
        quiet(model, parity("policy.chat=on"), processing_class=words, output_dir=tmp_path / "run")
    for _ in range(2):
        quiet(model, parity("policy.gradient_checkpointing=true"), processing_class=words, output_dir=tmp_path / "run")
        forward = model.model.layers[0].forward
        assert isinstance(forward, partial), "computed twice,"
        assert not isinstance(forward.args[0], partial), "and not four times"
    policy = Policy.load(start, apply_flags(Config(), ["policy.chat=off", "policy.fused=on"]).policy)
    settings = quiet(policy, parity(), output_dir=tmp_path / "run").config.policy
    assert (settings.chat, settings.fused) == ("off", "on"), "as a resumed run will load it"


# Callbacks


def test_callbacks_are_called_in_order_with_state_and_control(start: Path, tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    config = parity("evaluation.every=2", "run.steps=3", "run.save_every=2")
    trainer = quiet(start, config, callbacks=[first], output_dir=tmp_path)
    trainer.add_callback(second)
    trainer.add_callback(PrinterCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    loop = ["on_log"] * 3  # two updates of B and a collection
    update, evaluation = ["on_step_begin", "on_step_end", "on_log"], ["on_log", "on_evaluate"]
    expected = ["on_train_begin", *evaluation, *loop, *update, *update, *evaluation, "on_save"]
    expected += [*loop, *update, *evaluation, "on_save", "on_train_end"]
    assert [name for name, _ in first.events] == ["on_init_end", *expected]
    assert [name for name, _ in second.events] == expected
    assert first.steps("on_step_begin") == [0, 1, 2]
    assert first.steps("on_step_end") == [1, 2, 3]
    assert first.steps("on_evaluate") == [0, 2, 3]
    assert first.steps("on_save") == [2, 3]
    details = first.details[-1]
    assert details["model"] is trainer.model
    assert details["processing_class"] is trainer.processing_class
    assert details["optimizer"].param_groups[0]["lr"] == config.optimizer.learning_rate
    assert details["args"].max_steps == 3
    assert details["args"].to_dict()["settings"]["rollout.tasks"] == 4

    records = read_metrics(tmp_path)
    logs = [detail["logs"] for detail in first.details if "logs" in detail]
    assert len(logs) == len(records) == len(trainer.log_history)
    prefixes = {"update": "", "evaluation": "eval_", "dense": "dense/", "collect": "collect/"}
    for record, log, entry in zip(records, logs, trainer.log_history, strict=True):
        values = {n: v for n, v in record.items() if n not in ("kind", "step") and v is not None}
        assert log == {f"{prefixes[record['kind']]}{name}": value for name, value in values.items()}
        assert entry == {**log, "step": record["step"]}
    shown = [detail["metrics"]["eval_success"] for detail in first.details if "metrics" in detail]
    assert shown == [record["success"] for record in read_metrics(tmp_path, "evaluation")]
    assert trainer.state.best_metric == max(shown)
    assert trainer.state.best_global_step == [0, 2, 3][shown.index(max(shown))]


def test_control_asks_for_evaluations_checkpoints_and_the_end(start: Path, tmp_path: Path) -> None:
    asks = {
        ("on_step_end", 1): "should_evaluate",
        ("on_log", 3): "should_save",
        ("on_step_end", 5): "should_training_stop",
    }
    recorder = Recorder(asks)
    config = parity("run.steps=20", "run.save_every=0", "run.keep=9")
    trainer = quiet(start, config, callbacks=[recorder], output_dir=tmp_path)
    assert trainer.train().global_step == 6, "the loop of two updates is finished"
    assert recorder.steps("on_evaluate") == [0, 1]
    assert recorder.steps("on_save") == [4, 6]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000004", "step-000006"]

    # What was asked for changes nothing of the training.
    stop = Recorder({("on_step_end", 6): "should_training_stop"})
    quiet(start, config, output_dir=tmp_path / "quiet", callbacks=[stop]).train()
    updates = [[r for r in timeless(folder) if r["kind"] != "evaluation"] for folder in (tmp_path, tmp_path / "quiet")]
    assert updates[0] == updates[1]


def test_early_stopping_stops_and_its_patience_survives_a_resume(start: Path, tmp_path: Path) -> None:
    # Without a learning rate every evaluation is the same: the first is the best, and no other is better.
    config = parity("optimizer.learning_rate=0", "evaluation.every=1", "run.steps=20", "run.save_every=1", "swap.k=1")

    def trainer(name: str, *more: TrainerCallback) -> RSPOTrainer:
        callbacks = [EarlyStoppingCallback(early_stopping_patience=3), *more]
        return quiet(start, config, callbacks=callbacks, output_dir=tmp_path / name)

    whole = trainer("whole")
    assert whole.train().global_step == 3
    assert whole.state.best_global_step == 0
    assert (tmp_path / "whole" / "checkpoints" / "step-000003").is_dir()

    with pytest.raises(KeyboardInterrupt):
        trainer("parts", Killed()).train()
    resumed = trainer("parts")
    assert resumed.train(resume_from_checkpoint=True).global_step == 3, "two evaluations without progress came before"
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")


def test_best_may_mean_least(start: Path, tmp_path: Path) -> None:
    config = parity("evaluation.every=1", "run.save_every=1", "swap.k=1", "run.keep=9", "optimizer.learning_rate=0.03")
    best = {"metric_for_best_model": "reward", "greater_is_better": False}
    trainer = quiet(start, config, output_dir=tmp_path, **best)
    trainer.train()
    values = [record["reward"] for record in read_metrics(tmp_path, "evaluation")]
    assert len(set(values)) > 1
    step = values.index(min(values))
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (values[step], step)
    checkpoint = str(tmp_path / "checkpoints" / f"step-{step:06d}") if step else None
    assert trainer.state.best_model_checkpoint == checkpoint


def test_transformers_own_printers_work(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [ProgressCallback, PrinterCallback]
    config = parity("run.steps=2")
    quiet(start, config, callbacks=callbacks, output_dir=tmp_path).train()
    shown = capsys.readouterr()
    assert shown.out.count("'approx_kl_k3'") == 4, "each prints both updates"
    assert shown.out.count("'eval_success'") == 4
    assert "2/2" in shown.err


# Evaluation, saving, the hub


def test_evaluate_measures_the_policy_as_it_is(start: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    config = parity("evaluation.episodes=16")
    trainer = quiet(start, config, output_dir=tmp_path, callbacks=[recorder])
    expected = evaluate(Policy.load(start, config.policy), ParityEnv(), config).metrics()
    assert trainer.evaluate() == {f"eval_{name}": value for name, value in expected.items()}
    assert recorder.details[-1]["metrics"] == trainer.evaluate()
    assert not tmp_path.joinpath("metrics.jsonl").exists()
    trainer.train()
    flags = ["evaluation.episodes=5", "evaluation.split=train", "evaluation.temperatures=[0.3, 0.6]"]
    policy = Policy.load(tmp_path / "checkpoints" / "step-000004", config.policy)
    expected = evaluate(policy, ParityEnv(), apply_flags(config, flags)).metrics()
    found = trainer.evaluate("train", episodes=5, temperature=[0.3, 0.6])
    assert found == {f"eval_{name}": value for name, value in expected.items()}
    assert "eval_success@0.6" in found
    assert len(trainer.log_history) == len(read_metrics(tmp_path)), "the run's records are its own"


def test_saved_models_load_with_transformers(start: Path, tmp_path: Path) -> None:
    trainer = quiet(start, parity("run.steps=2"), output_dir=tmp_path / "run")
    trainer.train()
    trainer.save_model(tmp_path / "model")
    saved = list(trainer.model.state_dict().values())
    assert same(weights(tmp_path / "model"), saved)
    assert not same(weights(start), saved)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode("go kitchen") == trainer.processing_class.encode("go kitchen")


@pytest.fixture(scope="module")
def trained(start: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> RSPOTrainer:
    folder = tmp_path_factory.mktemp("secret-place") / "run"
    trainer = quiet(start, parity("run.steps=2", "run.seed=7"), output_dir=folder)
    trainer.train()
    return trainer


def test_the_model_card_has_what_was_trained_how_and_with_which_result(trained: RSPOTrainer, tmp_path: Path) -> None:
    trained.create_model_card(tmp_path)
    card = (tmp_path / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rspo", "reinforcement-learning", "agent", "grpo", "ParityEnv"],
    }
    last = read_metrics(trained.folder)[-1]
    assert "# RSPO+GRPO on ParityEnv" in text
    assert "2 updates, seed 7, 60 trajectories" in text
    assert f"| 1 | {last['success']:.1%} | {last['success_low']:.1%} to {last['success_high']:.1%} |" in text
    assert f"| 0.4 | {last['success@0.4']:.1%} |" in text
    assert "    swap.alpha: 0.25\n" in text
    assert "rollout.temperature" not in text, "only what is not a default"
    assert "secret-place" not in card
    assert str(Path(trained.config.policy.path or "").parent) not in card


def test_a_model_from_the_hub_is_named_as_the_base(start: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(start)
    model.config.name_or_path = "someone/some-model"
    tokenizer = AutoTokenizer.from_pretrained(start)
    trainer = quiet(model, parity(), processing_class=tokenizer, output_dir=tmp_path)
    trainer.create_model_card(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "someone/some-model"
    assert "from `someone/some-model`: 0 updates" in card
    assert "## Evaluation" not in card


def test_only_push_to_hub_uploads_and_it_uploads_model_tokenizer_and_card(
    trained: RSPOTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self: HfApi, repo_id: str, **options: Any) -> SimpleNamespace:
        calls.append(("create_repo", {"token": self.token, "repo_id": repo_id, **options}))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self: HfApi, **options: Any) -> str:
        place = Path(options.pop("folder_path"))
        calls.append(("upload_folder", options))
        assert same(weights(place), list(trained.model.state_dict().values()))
        names = {path.name for path in place.iterdir()}
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
        assert not names & {"optimizer.pt", "state.json", "metrics.jsonl"}
        assert "# RSPO+GRPO" in (place / "README.md").read_text()
        return "https://hub/me/agent/commit/1"

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    other = quiet(trained.config.policy.path, trained.config, output_dir=tmp_path / "run")
    other.train()
    other.evaluate()
    other.save_model(tmp_path / "model")
    other.create_model_card(tmp_path / "model")
    assert calls == []
    assert trained.push_to_hub("agent", private=True, token="hf_mine") == "https://hub/me/agent/commit/1"
    assert calls == [
        ("create_repo", {"token": "hf_mine", "repo_id": "agent", "private": True, "exist_ok": True}),
        ("upload_folder", {"repo_id": "me/agent", "commit_message": "Model trained with RSPO"}),
    ]


def from_hub(load: Callable[..., Any], name: str, folder: Path) -> Callable[..., Any]:
    """`from_pretrained` where a hub has what is in the folder under a name."""

    def loaded(path: str, **options: Any) -> Any:
        made = load(folder if str(path) == name else path, **options)
        if str(path) == name:
            (made[0] if isinstance(made, tuple) else made).name_or_path = name
        return made

    return loaded


@pytest.mark.parametrize("base", ["Qwen/some-model", "local"])
def test_a_pushed_adapter_names_a_base_that_others_can_find_or_says_that_there_is_none(
    base: str, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    pytest.importorskip("peft")
    uploaded: dict[str, str] = {}

    def upload_folder(self: HfApi, *, folder_path: str, **options: Any) -> str:
        texts = [path for path in Path(folder_path).iterdir() if path.suffix != ".safetensors"]
        uploaded.update({path.name: path.read_text() for path in texts})
        return "done"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    path = str(start) if base == "local" else base
    for kind in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", from_hub(kind.from_pretrained, base, start))
    config = parity("run.steps=1", "lora.rank=2", "policy.allow_download=true", f"policy.path={path}")
    trainer = quiet(args=config, output_dir=tmp_path / "run")
    trainer.train()
    recwarn.clear()
    assert trainer.push_to_hub("agent") == "done"
    card, settings = uploaded["README.md"], json.loads(uploaded["adapter_config.json"])
    warned = [str(one.message) for one in recwarn if "LoRA" in str(one.message)]
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "peft"
    if base == "local":
        assert settings["base_model_name_or_path"] == start.name
        assert "**The base of this LoRA adapter is not published.** It is `" + start.name in card
        assert len(warned) == 1
        assert "rspo export" in warned[0]
        assert str(start.parent) not in "".join(uploaded.values())
    else:
        assert settings["base_model_name_or_path"] == base
        assert f"A LoRA adapter on `{base}`, which is fetched with it" in card
        assert not warned


# What the documentation shows


def test_the_examples_of_the_documentation_run(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {name: value for name, value in yaml.safe_load(yaml.safe_dump({
        "policy": {"path": str(start)},
        "rollout": {"tasks": 4, "group_size": 4},
        "swap": {"buffer_tasks": 3, "alpha": 0.25},
        "env": {"options": {"max_turns": 2}},
        "evaluation": {"every": 1, "episodes": 4},
    })).items()}  # fmt: skip
    found = [block for page in ("../README.md", "training.md") for block in code_blocks(page) if "RSPOTrainer" in block]
    assert len(found) == 2
    for block in found:
        assert '"run": {"seed": 1, "steps": 36}' in block
        text = block.replace('"run": {"seed": 1, "steps": 36}', f'"run": {{"seed": 1, "steps": 3}}, **{small!r}')
        exec(compile(text, "example", "exec"), {"__name__": "example"})
    assert (tmp_path / "models" / "mine" / "model.safetensors").is_file()
