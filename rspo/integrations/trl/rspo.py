"""The reward swap inside TRL: Algorithm 1 of the paper (arXiv 2607.04713), whose lines the comments name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.optimization import GreedyLR
from trl import GRPOConfig

from rspo.algorithm.replay import ReplayBuffer
from rspo.config import SwapConfig, decay

from .agents import RewardColumns, Snapshot, metrics_under
from .completions import CollectedCompletion, CompletionBatch, collected
from .grpo import FusedGRPOTrainer, Part
from .settings import default_args, divisor

BY_EVALUATION = (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)
"""Schedules that move by an evaluation's metrics, and not at an optimiser's step; transformers tells them apart so."""


@dataclass(frozen=True)
class Replay:
    """What a micro-batch of agent A replays: nothing, where an update has fewer replayed completions than parts."""

    alpha: float
    part: Part | None


class RSPOGRPOTrainer(FusedGRPOTrainer):
    """FusedGRPOTrainer with the reward swap. The model that is trained, evaluated and saved is agent A.

    An update is what TRL does with one generation batch. Every `swap.k` updates a loop begins: A is put aside, agent B
    goes on from its weights and optimiser state with `swap.k` updates on dense rewards, completes `swap.buffer_tasks`
    prompts, and is forgotten. Its completions keep their log-probs under B and get outcome rewards. A comes back and
    makes `swap.k` updates on outcome rewards, each of its generation batch and of some of B's completions, which are
    the share α = `swap.alpha` of the two. `max_steps` counts A's optimiser steps alone.

    Args:
        model, options: as GRPOTrainer takes them.
        args: as GRPOTrainer takes them; None: GRPOConfig's defaults, in the folder "MODEL-RSPO".
        reward_funcs: outcome rewards, of agent A. A completion whose sum is above 0 counts as success.
        dense_reward_funcs: dense rewards, of agent B. `args.reward_weights` has the weights of both, these last.
        train_dataset: with a length; B takes random rows of it.
        swap: as `rspo`'s own trainer takes it, with `source` "dense" and `mixture` "two-means".
        center_cap: bound on the clip centre of replayed tokens; None: none, as in the paper.
        offload: keep A's weights and optimiser state in the CPU's memory while B learns.

    Metrics of B's updates are called `dense/...`, of its collection `collect/...`, of replayed tokens `replay/...`.
    A run that was resumed begins with a loop; it goes on exactly as before where its checkpoint stands between two.

    Raises:
        ValueError: settings that do not go together, named; before anything is generated.
    """

    # Of TRL and transformers, put aside while B learns:
    _step: int
    _buffered_inputs: Any
    current_gradient_accumulation_steps: int

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        dense_reward_funcs: Any,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        swap: SwapConfig | None = None,
        center_cap: float | None = 1.0,
        offload: bool = False,
        **options: Any,
    ) -> None:
        self.swap = swap or SwapConfig()
        self.offload = offload
        if args is None:
            args = default_args(model, "RSPO")
        outcome, dense = _as_list(reward_funcs), _as_list(dense_reward_funcs)
        _check(args, self.swap, train_dataset, dense)
        super().__init__(model, [*outcome, *dense], args, train_dataset, **options)
        self.loss_config = replace(self.loss_config, clip_center="shift", center_cap=center_cap)
        # An environment's own reward comes after those that were given, and is an outcome.
        columns = range(len(self.reward_funcs))
        given = range(len(outcome), len(outcome) + len(dense))
        self.dense_rewards = RewardColumns.of(self, given)
        self.outcome_rewards = RewardColumns.of(self, [i for i in columns if i not in given])
        if not self.outcome_rewards.reward_funcs:
            raise ValueError("reward_funcs must hold an outcome reward, or the environment have one, got none")
        self.outcome_rewards.use(self)
        self.buffer = ReplayBuffer(self.swap, np.random.default_rng(0))
        self._replay: list[Replay] = []
        self.add_callback(_Loops(self))

    @property
    def alpha(self) -> float:
        """The share of replay at the current step."""
        return self.swap.alpha * decay(self.swap.alpha_schedule, self.state.global_step / max(self.state.max_steps, 1))

    def train_b_and_collect(self) -> None:
        """Lines 4 to 11: agent B learns from dense rewards, then fills the buffer, and A is as it was."""
        rng = np.random.default_rng((self.args.seed, self.state.global_step))
        self.buffer = ReplayBuffer(self.swap, rng)  # 19: D <- ∅
        if _replay_size(self.args, self.alpha) == 0:
            return
        model, gradients = self.model_wrapped, self.accelerator.gradient_state
        before = self._step, self._buffered_inputs, gradients.sync_gradients, self.current_gradient_accumulation_steps
        agent_a = Snapshot(model, self.optimizer, "cpu" if self.offload else None)
        schedule = copy.deepcopy(self.lr_scheduler.state_dict())  # B goes on with a copy of its own
        self.dense_rewards.use(self)  # 5: set π_dense = π_θ
        if self.swap.fresh_optimizer:
            self.optimizer.state.clear()
        rates: list[float] = []
        try:
            for _ in range(self.swap.k):  # 6
                with metrics_under(self, "dense/"):
                    rates += self._update_b(model, self._prompts(self._tasks, rng))  # 7-9
            if not any(rates):
                warnings.warn(
                    f"agent B learns nothing in the loop at step {self.state.global_step}: the schedule's learning rate"
                    f" is 0 at all of its {len(rates)} optimiser steps",
                    stacklevel=2,
                )
            self.outcome_rewards.use(self)
            with metrics_under(self, "collect/"):
                for _ in range(self.swap.buffer_tasks // self._tasks):
                    self.buffer.add(self._collect(self._prompts(self._tasks, rng)))  # 11
        finally:
            self.outcome_rewards.use(self)
            # The schedule first: some write learning rates as they load, and A's own are put back after that.
            self.lr_scheduler.load_state_dict(schedule)
            agent_a.restore()
            self._weights_moved()
            self._step, self._buffered_inputs, sync, self.current_gradient_accumulation_steps = before
            gradients._set_sync_gradients(sync)

    def _update_b(self, model: nn.Module, prompts: list[dict[str, Any]]) -> list[float]:
        """Lines 7 to 9: what transformers and TRL do in an update, without callbacks and counters. Returns the learning
        rate of each optimiser step."""
        rates = self._metrics["train"]["learning_rate"]
        window = self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._step, self._buffered_inputs, self._replay = 0, None, []
        self._weights_moved()
        for micro_step in range(1, self._micro_steps + 1):
            ends_window = micro_step % window == 0
            self.accelerator.gradient_state._set_sync_gradients(ends_window)
            with nullcontext() if ends_window else self.accelerator.no_sync(model):
                self.training_step(model, prompts, None)
            if ends_window:
                if self.args.max_grad_norm > 0:
                    self._clip_grad_norm(model)
                self.optimizer.step()
                rates.append(self._get_learning_rate())
                if not isinstance(self.lr_scheduler, BY_EVALUATION):
                    self.lr_scheduler.step()
                model.zero_grad()
        return rates[-self._micro_steps // window :]

    @torch.no_grad()
    def _collect(self, prompts: list[dict[str, Any]]) -> list[CollectedCompletion]:
        """Line 11: B's completions of all processes, with outcome rewards and the advantages of full groups."""
        self._weights_moved()
        inputs = self._generate_and_score_completions(prompts)
        inputs.pop("importance_sampling_ratio", None)
        batch = CompletionBatch.from_inputs(inputs)
        behavior_logp = self._logp(batch) if batch.old_logp is None else batch.old_logp
        first = self.accelerator.process_index * len(batch)
        scores = self._scores[first : first + len(batch)]
        rewards = (scores * self.reward_weights.to(scores.device)).nansum(1)
        rewards[scores.isnan().all(1)] = torch.nan
        mine = collected(batch, behavior_logp, rewards.tolist(), self.num_generations, first)
        return [c for c in gather_object(mine) if c.loss_mask.any() and np.isfinite(c.rewards).all()]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """A micro-batch; agent A's with what it replays."""
        begins = self.model.training and self._step % self._micro_steps == 0
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if begins:  # 14-15: a new generation batch, and D_off beside it
            self._replay = self._sample_replay()
        return {**inputs, "replay": self._replay[self._step % len(self._replay)]} if self._replay else inputs

    @torch.no_grad()
    def _sample_replay(self) -> list[Replay]:
        """Line 15: this process's part of an update's replay, dealt to its micro-batches; empty where there is none."""
        processes, parts = self.accelerator.num_processes, self.args.steps_per_generation
        alpha = self.alpha
        chosen = cast(list[CollectedCompletion], self.buffer.sample(_replay_size(self.args, alpha)))
        chosen = chosen[: len(chosen) // processes * processes]
        if not chosen:
            return []
        tokens = torch.tensor(sum(c.loss_mask.sum() for c in chosen), device=self.accelerator.device)
        total = divisor(self.loss_type, len(chosen), tokens, self.max_completion_length)
        # An optimiser step sees so much of the update, and takes the mean over processes.
        normalizer = total * self.args.gradient_accumulation_steps / parts / processes / alpha
        self._metrics["train"]["replay/completions"].append(len(chosen))
        self._metrics["train"]["replay/success"].append(float(np.mean([c.won for c in chosen])))
        mine = chosen[self.accelerator.process_index :: processes]
        return [
            Replay(alpha, self._replayed([mine[i] for i in rows], normalizer) if len(rows) else None)
            for rows in np.array_split(np.arange(len(mine)), parts)
        ]

    def _replayed(self, completions: Sequence[CollectedCompletion], normalizer: Tensor) -> Part:
        """Completions of B with old log-probs under A as it is now."""
        batch = CompletionBatch.from_collected(completions, self._tokenizer.pad_token_id, self.accelerator.device)
        behavior_logp = None if self.swap.ignore_behavior else batch.behavior_logp
        return Part(replace(batch, old_logp=self._logp(batch), behavior_logp=behavior_logp), normalizer, "replay/")

    def _parts(self, inputs: dict[str, Any]) -> list[Part]:
        """Lines 16 and 17: D_mix with the weights of eq. 1."""
        (on_policy,) = super()._parts(inputs)
        replay: Replay | None = inputs.get("replay")
        if replay is None:
            return [on_policy]
        on_policy = replace(on_policy, normalizer=on_policy.normalizer / (1 - replay.alpha))
        return [on_policy] if replay.part is None else [on_policy, replay.part]

    def _named(self, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        return super()._named(stats) | {name: stats[name] for name in ("ratio_mean", "center_mean", "ess")}

    def _logp(self, batch: CompletionBatch) -> Tensor:
        """Log-probs [B, C] of completions under the model as it is."""
        rows, length = self.args.per_device_train_batch_size, batch.completion_ids.shape[1]
        return self._get_per_token_logps_and_entropies(
            self.model, batch.input_ids, batch.attention_mask, length, batch_size=rows
        )[0]

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        """Scores [completions of all processes, reward functions], which TRL goes on with."""
        self._scores: Tensor = super()._calculate_rewards(*arguments, **options)
        return self._scores

    def _prompts(self, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """This process's rows of a generation batch of `count` random prompts, each `num_generations` times."""
        size = len(self.train_dataset)
        chosen = rng.choice(size, count, replace=count > size).repeat(self.num_generations).tolist()
        share = len(chosen) // self.accelerator.num_processes
        first = self.accelerator.process_index * share
        return [self.train_dataset[i] for i in chosen[first : first + share]]

    def _weights_moved(self) -> None:
        """vLLM gets weights when the step count changes, which B's updates do not do."""
        self._last_loaded_step = -1

    @property
    def _tasks(self) -> int:
        """Prompts of a generation batch."""
        return self.args.generation_batch_size // self.num_generations

    @property
    def _micro_steps(self) -> int:
        """Micro-batches of an update."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def steps_per_loop(self) -> int:
        """Optimiser steps of agent A from one swap to the next."""
        return self.swap.k * self._micro_steps // self.args.gradient_accumulation_steps


class _Loops(TrainerCallback):
    """Begins loops. Before a step rather than in one: agent B has steps of its own."""

    def __init__(self, trainer: RSPOGRPOTrainer) -> None:
        self.trainer = trainer
        self.first_step = 0

    def on_train_begin(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.first_step = state.global_step

    def on_step_begin(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if (state.global_step - self.first_step) % self.trainer.steps_per_loop == 0:
            self.trainer.train_b_and_collect()


def _as_list(functions: Any) -> list[Any]:
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list) else [functions]


def _replay_size(args: GRPOConfig, alpha: float) -> int:
    """Replayed completions of an update, of all processes and as many for each: the share α of them and the generation
    batch."""
    each = args.generation_batch_size / args.world_size * alpha / (1 - alpha)
    return round(each) * args.world_size


def _check(args: GRPOConfig, swap: SwapConfig, train_dataset: Any, dense: list[Any]) -> None:
    """Raise ValueError for settings that do not go together."""
    if not dense:
        raise ValueError("dense_reward_funcs must hold a reward that agent B learns from, got none")
    if isinstance(train_dataset, IterableDataset):
        raise ValueError("train_dataset must have a length, of which agent B takes random rows, got an IterableDataset")
    if swap.source != "dense" or swap.mixture != "two-means":
        raise ValueError(
            "swap.source and swap.mixture must be 'dense' and 'two-means' in TRL, "
            f"got {swap.source!r} and {swap.mixture!r}"
        )
    if _replay_size(args, swap.alpha) == 0:
        raise ValueError(
            f"swap.alpha={swap.alpha:g} replays no completion beside a generation batch of {args.generation_batch_size}"
        )
    micro_steps, window = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if micro_steps % window:
        raise ValueError(
            f"steps_per_generation·num_iterations = {micro_steps} must be a multiple of gradient_accumulation_steps = "
            f"{window}: an optimiser step must not reach over two generation batches"
        )
    tasks = args.generation_batch_size // args.num_generations
    if swap.buffer_tasks % tasks:
        raise ValueError(
            f"swap.buffer_tasks must be a multiple of the {tasks} prompts of a generation batch, "
            f"got {swap.buffer_tasks}"
        )
    if args.sync_ref_model:
        raise ValueError("sync_ref_model must be False: the reference of both agents is the start policy")
    if args.deepspeed_plugin is not None:
        raise ValueError("DeepSpeed keeps weights of its own, which the swap would miss; use DDP or FSDP2")
