"""A run as an object with the habits of transformers' Trainer: what `rspo train` and `rspo eval` do, from Python."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from .algorithm.evaluate import evaluate
from .algorithm.progress import transformers_bars
from .algorithm.rewards import RewardFunction, training_rewards
from .config import Config, ConfigError
from .config.files import CONFIG_FILE, overlay
from .config.lock import one_writer
from .config.storage import write_text
from .engines import Backend, open_backend
from .envs import BatchedEnv
from .models.lora import hide_local_base, is_adapter
from .models.policy import Policy
from .models.processes import ALONE, Ranks, join, launched, placed
from .runs.arguments import as_config, as_dense_reward, as_env, as_policy
from .runs.callbacks import EVALUATION, Callbacks, callback_arguments
from .runs.model_card import model_card
from .runs.records import read_metrics
from .runs.setting import check_split, set_threads
from .start import default_folder, nothing_trained, open_run, startable_again, untrained_policy
from .trainer import Trainer


class RSPOTrainer:
    """Trains an agent into a run folder.

    Args:
        model: what training starts from: a folder (or a hub's name, with `policy.allow_download`), a transformers
            model, which is trained itself, or a Policy. None: `args`' `policy.path`, or the small model, warmed up.
        args: a Config, a dictionary of sections as in a YAML file, or a YAML file's path; None: the default preset.
        env: a name, an environment, or a class that is called with `env.options`; None: `args`' own. An environment
            that is given stays open, others are closed by `close` or at the end of a `with` block.
        dense_reward: agent B's: a function of a Trajectory to one number per turn, or a setting of `rewards.dense`;
            None: `args`' own.
        processing_class: the tokenizer of a model object.
        callbacks: transformers' TrainerCallback objects or classes; `rspo.runs.callbacks` says which events there are.
        output_dir: the run's folder; None: `runs/METHOD-ENV-seedSEED`, as `rspo train`.
        metric_for_best_model: the evaluation's metric that `state.best_metric` follows, with or without `eval_`.
        greater_is_better: which way.
        progress: show bars, transformers' own among them.

    Several processes (`torchrun`, `accelerate launch`) each have a trainer and call the same methods in the same order;
    the main one writes.

    Raises ConfigError that names a wrong setting, TypeError that names an argument of the wrong type.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel | Policy | None = None,
        args: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        env: str | BatchedEnv | type[BatchedEnv] | None = None,
        *,
        dense_reward: str | RewardFunction | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = (),
        output_dir: str | os.PathLike[str] | None = None,
        metric_for_best_model: str = "eval_success",
        greater_is_better: bool = True,
        progress: bool = True,
    ) -> None:
        config, self._dense_reward = as_dense_reward(as_config(args), dense_reward)
        set_threads(config)
        config, self._given = as_policy(config, model, processing_class)
        self._start = self._given
        name = config.policy.path if self._start is None else self._start.model.config.name_or_path
        self._start_name: str | None = name or None
        self.config, self.env = as_env(config, env)
        self._owns_env = self.env is not env
        with ExitStack() as on_failure:
            if self._owns_env:
                on_failure.callback(self.env.close)
            check_split(self.env, self.config)
            training_rewards(self.config, self.env.has_dense_reward, np.random.default_rng(0), self._dense_reward)
            on_failure.pop_all()
        self.folder = Path(output_dir) if output_dir is not None else default_folder(self.config)
        self.progress = progress
        self._trainer: Trainer | None = None
        self._joined: Ranks | None = None
        self._backend: Backend | None = None
        best = metric_for_best_model.removeprefix(EVALUATION)
        arguments = callback_arguments(
            self.config,
            self.folder,
            metric_for_best_model=f"{EVALUATION}{best}",
            greater_is_better=greater_is_better,
        )
        self._callbacks = Callbacks(callbacks, arguments)
        if self._start is not None:
            self._show_callbacks(self._start)
        self._callbacks.event("on_init_end")

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """Train to `run.steps` updates of agent A, or until a callback stops it.

        Args:
            resume_from_checkpoint: True: go on with the run in `output_dir` from its latest checkpoint, or from its
                start where it has none yet; a folder: from that checkpoint of the run, whose newer ones are deleted.

        Returns global_step, training_loss (mean over the updates made by this call) and metrics: `train_…` of the
        last update, `eval_…` of the last evaluation.

        Raises ConfigError where the folder holds a run already, or none to go on with; what else `rspo.trainer` raises.
        """
        resume = self._resume(resume_from_checkpoint)
        self._close_backend()
        # One that several processes have made for an evaluation may be sharded, and is made again in the run's folder.
        start = self._given if launched() else self._start
        with transformers_bars(self.progress):
            trainer = open_run(
                self.config,
                self.folder,
                resume=resume,
                progress=self.progress,
                env=self.env,
                policy=None if resume or self.config.policy.path is not None else start,
                dense_reward=self._dense_reward,
                observer=self._callbacks,
            )
        self._trainer, self._start, self._backend = trainer, None, trainer.backend
        self._show_callbacks(trainer.agent.policy)
        self._callbacks.subject["optimizer"] = trainer.agent.optimizer
        before = trainer.books.tracker.records
        try:
            self._callbacks.train_begin(trainer.books.step, read_metrics(self.folder))
            with startable_again(trainer, resume), transformers_bars(self.progress):
                trainer.train()
            self._callbacks.train_end()
        except ConfigError:
            if not resume and nothing_trained(trainer):
                self._trainer, self._start = None, start
            raise
        finally:
            trainer.close_folder()
        losses = [r["loss"] for r in read_metrics(self.folder)[before:] if r["kind"] == "update"]
        return TrainOutput(trainer.books.step, float(np.mean(losses)) if losses else 0.0, self._last_metrics())

    def evaluate(
        self,
        split: str | None = None,
        episodes: int | None = None,
        temperature: float | Sequence[float] | None = None,
    ) -> dict[str, float]:
        """Play the held-out episodes of the settings, or as many of another split or at other temperatures, with the
        policy as it is. Returns the metrics of an evaluation's record with names that begin with `eval_`. They go to
        the callbacks, not to the run's records.

        Raises ConfigError for a split, number or temperature that cannot be.
        """
        given = {"split": split, "episodes": episodes, "temperatures": temperature}
        changes = {name: value for name, value in given.items() if value is not None}
        config: Config = overlay(self.config, {"evaluation": changes})
        check_split(self.env, config)
        if self._backend is None:
            self._backend = open_backend(self.config)
        policy, ranks = self._policy(), self._ranks
        progress = self.progress and ranks.is_main
        found = evaluate(policy, self.env, config, progress=progress, ranks=ranks, backend=self._backend)
        metrics = {f"{EVALUATION}{name}": value for name, value in found.metrics().items()}
        self._callbacks.evaluated(metrics)
        return metrics

    def save_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Write the policy as it is, with its tokenizer, as a folder that transformers loads.

        Raises FolderInUseError where another process writes into that folder.
        """
        policy = self._policy()
        weights = policy.gathered_weights()

        def save() -> None:
            with one_writer(Path(output_dir)):
                policy.save(Path(output_dir), weights)

        with transformers_bars(self.progress):
            self._ranks.from_main(save)

    def create_model_card(self, output_dir: str | os.PathLike[str]) -> None:
        """Write `README.md`, the model card that `push_to_hub` uploads, into a folder. It has no paths of this
        machine. Raises StorageError."""
        card = model_card(self.config, self.state.log_history, self._start_name)
        self._ranks.from_main(lambda: write_text(Path(output_dir) / "README.md", card))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Model trained with RSPO",
    ) -> str:
        """Upload what `save_model` and `create_model_card` write, as one commit to a repository of the Hugging Face
        Hub, which is made where it is missing. Nothing else in this package uploads anything. Warns where a LoRA
        adapter stands on a local model, of whose path only the last part is uploaded.

        Returns the commit's address. Raises huggingface_hub's errors.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        self._callbacks.event("on_push_begin")
        with TemporaryDirectory() as folder:
            self.save_model(folder)
            self.create_model_card(folder)

            def upload() -> str:
                base = hide_local_base(Path(folder)) if is_adapter(folder) else None
                if base is not None:
                    warnings.warn(
                        f"the base of this LoRA adapter is the local model {base!r}, which is not uploaded, and without"
                        f" which it cannot be used: rspo export {self.folder} --out FOLDER writes both as one model",
                        stacklevel=2,
                    )
                name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=commit_message))

            return self._ranks.from_main(upload)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Append a callback, an object or a class."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Take away a callback, or the first one of a class. Raises ValueError where there is none."""
        self._callbacks.remove(callback)

    @property
    def model(self) -> PreTrainedModel:
        """The policy's model as it is: after `train` the trained one."""
        return self._policy().model

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return self._policy().tokenizer

    @property
    def state(self) -> TrainerState:
        """Steps, records and the best evaluation, as callbacks see them."""
        return self._callbacks.state

    @property
    def log_history(self) -> list[dict[str, float]]:
        """One dictionary for each record of the run, `step` (updates of A) among its values."""
        return list(self.state.log_history)

    def close(self) -> None:
        """Let go of the engine, and close the environment unless it was given."""
        self._close_backend()
        if self._owns_env:
            self.env.close()

    def __enter__(self) -> RSPOTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_backend(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    @property
    def _ranks(self) -> Ranks:
        """The processes of the run. One that was not launched with others may measure a policy whose training needs
        them."""
        if self._trainer is not None:
            return self._trainer.agent.ranks
        if self._joined is None:
            self._joined = join(self.config) if launched() else ALONE
        return self._joined

    def _policy(self) -> Policy:
        """The policy as it is; before training the one that it will start from."""
        if self._trainer is not None:
            return self._trainer.agent.policy
        if self._start is None:
            ranks = self._ranks
            config = placed(self.config, ranks)
            if not launched():  # shares are for several processes
                config = replace(config, parallel=replace(config.parallel, shard="none"))
            progress = self.progress and ranks.is_main
            with transformers_bars(self.progress):
                self._start = untrained_policy(config, self.env, ranks, progress=progress)
        return self._start

    def _resume(self, given: bool | str | os.PathLike[str] | None) -> bool | Path:
        if not given:
            return False
        if not (self.folder / CONFIG_FILE).is_file():
            raise ConfigError(
                f"resume_from_checkpoint={given!r}: {self.folder} holds no run ({CONFIG_FILE} is missing)"
            )
        if given is True:
            return True
        path = Path(given)
        # By its name, so that it does not matter from where the two folders are looked at.
        inside = path.resolve().parent == (self.folder / "checkpoints").resolve()
        return self.folder / "checkpoints" / path.name if inside else path

    def _show_callbacks(self, policy: Policy) -> None:
        self._callbacks.subject |= {"model": policy.model, "processing_class": policy.tokenizer}

    def _last_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for kind, prefix in (("update", "train_"), ("evaluation", EVALUATION)):
            for record in read_metrics(self.folder, kind)[-1:]:
                metrics |= {f"{prefix}{name}": v for name, v in record.items() if name not in ("kind", "step")}
        return metrics
