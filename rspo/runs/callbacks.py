"""Callbacks of transformers' Trainer on a run of RSPO.

    on_init_end                                   of RSPOTrainer
    on_train_begin
    on_log, on_evaluate                           the evaluation before the first update
    on_step_begin, on_step_end, on_log            each update of agent A
    on_log, on_evaluate                           each evaluation
    on_log                                        each update of agent B, and each collection
    on_save                                       each checkpoint
    on_train_end

Of several processes each calls its own callbacks, with `state.is_world_process_zero` in the main one alone, whose
control counts. `control.should_evaluate` after an update, `should_save` (a checkpoint after the loop that runs) and
`should_training_stop` (after the loop that runs, with a checkpoint) are honoured. There are no epochs, and nothing of
what happens inside an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from ..config import Config
from ..config.files import flat_settings
from ..models.processes import is_first
from .checkpoint import checkpoint_path
from .observer import Observer
from .reporters import Record

EVALUATION = "eval_"
"""What the names of an evaluation's metrics begin with."""


@dataclass(frozen=True)
class CallbackArguments:
    """A run's settings as callbacks look for them, under the names of transformers.TrainingArguments."""

    output_dir: str
    run_name: str
    seed: int
    max_steps: int
    learning_rate: float
    eval_strategy: IntervalStrategy
    eval_steps: int
    save_steps: int
    save_total_limit: int
    metric_for_best_model: str
    greater_is_better: bool
    report_to: list[str]
    settings: dict[str, Any]
    """All settings of the run by their full names, `section.field`."""
    num_train_epochs: int = 1
    logging_steps: int = 1
    eval_delay: int = 0
    eval_on_start: bool = True
    logging_first_step: bool = True
    load_best_model_at_end: bool = False
    logging_strategy: IntervalStrategy = IntervalStrategy.STEPS
    save_strategy: IntervalStrategy = IntervalStrategy.STEPS
    disable_tqdm: bool = field(default=False)

    def to_dict(self) -> dict[str, Any]:
        """All of them as plain values."""
        return asdict(self)


def callback_arguments(
    config: Config, folder: Path, *, metric_for_best_model: str, greater_is_better: bool
) -> CallbackArguments:
    """Of a configuration and a run's folder."""
    every = config.evaluation.every
    return CallbackArguments(
        output_dir=str(folder),
        run_name=folder.name,
        seed=config.run.seed,
        max_steps=config.run.steps,
        learning_rate=config.optimizer.learning_rate,
        eval_strategy=IntervalStrategy.STEPS if every > 0 else IntervalStrategy.NO,
        eval_steps=every,
        save_steps=config.run.save_every,
        save_total_limit=config.run.keep,
        metric_for_best_model=metric_for_best_model,
        greater_is_better=greater_is_better,
        report_to=list(config.run.report_to),
        settings=flat_settings(config),
    )


class Callbacks(Observer):
    """Callbacks with the state and control that they are given.

    Args:
        callbacks: a sequence of objects, or of classes that are called without arguments. Raises TypeError for anything
            else.
        args: what they see of the settings. `metric_for_best_model` is the evaluation's metric that
            `state.best_metric` follows.

    state: transformers' TrainerState; `log_history` has one dictionary for each record.
    subject: what callbacks get beside args, state and control: model, processing_class, optimizer.
    """

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback]], args: CallbackArguments) -> None:
        if not isinstance(callbacks, Iterable):
            raise TypeError(
                "callbacks must be a sequence of transformers.TrainerCallback objects or classes, as [one], got"
                f" {callbacks!r}"
            )
        self.args = args
        self.state = TrainerState(
            max_steps=args.max_steps,
            logging_steps=1,
            eval_steps=args.eval_steps,
            save_steps=args.save_steps,
            is_local_process_zero=is_first("LOCAL_RANK"),
            is_world_process_zero=is_first("RANK"),
        )
        self.control = TrainerControl()
        self.subject: dict[str, Any] = {}
        self.callbacks: list[TrainerCallback] = []
        self._save_asked = False
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Append one, an object or a class. Raises TypeError where it is no TrainerCallback."""
        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, TrainerCallback):
            raise TypeError(f"callbacks must be transformers.TrainerCallback objects or classes, got {callback!r}")
        self.callbacks.append(made)

    def remove(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Take away an object, or the first one of a class. Raises ValueError where there is none."""
        for mine in self.callbacks:
            if mine is callback or (isinstance(callback, type) and isinstance(mine, callback)):
                self.callbacks.remove(mine)
                return
        raise ValueError(f"{callback!r} is not among the callbacks {self.callbacks}")

    def event(self, name: str, **details: Any) -> None:
        """Call `name` of every callback in turn; what one returns is the control that the next one sees."""
        for callback in self.callbacks:
            control = getattr(callback, name)(self.args, self.state, self.control, **self.subject, **details)
            self.control = control or self.control
        self._save_asked |= self.control.should_save

    def train_begin(self, step: int, records: Sequence[Record]) -> None:
        """Training begins after `step` updates, of which a resumed run has these records."""
        self.state.global_step = step
        self.state.log_history = [_log_entry(record) for record in records]
        for record in records:
            if record["kind"] == "evaluation":
                self._follow_best(record["step"], _logs(record))
        if self.state.best_global_step is not None:
            best = checkpoint_path(Path(self.args.output_dir) / "checkpoints", self.state.best_global_step)
            self.state.best_model_checkpoint = str(best) if best.is_dir() else None
        self.control.should_training_stop = self._save_asked = False
        self.event("on_train_begin")

    def train_end(self) -> None:
        """Training has ended as it should."""
        self.event("on_train_end")

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """An evaluation has been made; its metrics' names begin with `eval_`."""
        self.event("on_log", logs=dict(metrics))
        self.control.should_evaluate = False
        self.event("on_evaluate", metrics=dict(metrics))

    def on_step_begin(self) -> None:
        self.control.should_save = self.control.should_evaluate = self.control.should_log = False
        self.event("on_step_begin")

    def on_record(self, record: Record) -> None:
        self.state.global_step = record["step"]
        if record["kind"] == "update":
            self.event("on_step_end")
        self.state.log_history.append(_log_entry(record))
        logs = _logs(record)
        if record["kind"] == "evaluation":
            self.evaluated(logs)
            self._follow_best(record["step"], logs)
        else:
            self.event("on_log", logs=logs)

    def on_save(self, path: Path) -> None:
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(path)
        self.control.should_save = self._save_asked = False
        self.event("on_save")

    def wants_evaluation(self) -> bool:
        return bool(self.control.should_evaluate)

    def wants_checkpoint(self) -> bool:
        return self._save_asked

    def wants_stop(self) -> bool:
        return bool(self.control.should_training_stop)

    def checkpoint_state(self) -> dict[str, Any]:
        """Of the callbacks that have a state (transformers' ExportableState), in order."""
        return {"callbacks": [[_name(c), c.state()] for c in self.callbacks if isinstance(c, ExportableState)]}

    def load_checkpoint_state(self, state: Mapping[str, Any]) -> None:
        """Each callback with a state takes the first one that its class left there; the arguments that it was made with
        stay."""
        left = list(state.get("callbacks", []))
        for callback in self.callbacks:
            found = next((item for item in left if item[0] == _name(callback)), None)
            if found is not None:
                left.remove(found)
                for name, value in found[1]["attributes"].items():
                    setattr(callback, name, value)

    def _follow_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """As transformers' Trainer: after the callbacks have seen the evaluation beside the best one before it."""
        value, best = metrics.get(self.args.metric_for_best_model), self.state.best_metric
        if value is None:
            return
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, step


def _name(callback: TrainerCallback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _logs(record: Record) -> dict[str, float]:
    """A record's finite numbers: of an update of A under their own names, of an evaluation as `eval_…`, of what agent B
    does as `dense/…` and `collect/…`."""
    prefix = {"update": "", "evaluation": EVALUATION}.get(record["kind"], f"{record['kind']}/")
    return {f"{prefix}{name}": v for name, v in record.items() if name not in ("kind", "step") and v is not None}


def _log_entry(record: Record) -> dict[str, float]:
    return _logs(record) | {"step": record["step"]}
