"""The stopwatch of the trainer suite: finer phases than the trainer's own timer, from outside.

It takes the place of the trainer's timer, and the calls that the trainer's blocks consist of are wrapped to report
phases of their own; what is left of a block goes to the phase that `BLOCKS` names. Records of the trainer end a stage.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import DynamicCache

import rspo.engines.transformers_engine
import rspo.models.forward
import rspo.trainer
from rspo.algorithm.replay import ReplayBuffer
from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import Mixture, UpdateStatistics
from rspo.data.trajectory import Trajectory
from rspo.engines import TransformersEngine
from rspo.models.agent import Agent
from rspo.models.forward import PredictionsByLogits
from rspo.models.policy import Policy
from rspo.runs.bookkeeping import Bookkeeper
from rspo.trainer import Trainer

PHASES = {
    "generation": "model",
    "old log-probs": "model",
    "forward": "model",
    "backward": "model",
    "optimizer": "optimizer",
    "environment": "environment",
    "log-probs": "ours",
    "loss": "ours",
    "advantages": "ours",
    "rollout": "ours",
    "tokenizer": "ours",
    "packing": "ours",
    "replay": "ours",
    "agent B": "ours",
    "records": "ours",
    "checkpoint": "ours",
    "other": "ours",
}
"""Phases in the order of the tables, and whose they are."""

OWNERS = tuple(dict.fromkeys(PHASES.values()))

BLOCKS = {
    "environment": "rollout",
    "generation": "packing",
    "batch": "packing",
    "logprobs": "packing",
    "loss_backward": "packing",
    "optimizer": "optimizer",
}
"""The trainer's own blocks, and the phase of what is left of each once the calls inside it have reported theirs."""


class Stopwatch(PhaseTimer):
    """The trainer's timer with finer phases, cut into stages. Waits for the device wherever a phase begins or ends."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.block = ""
        self.stages: defaultdict[str, list[dict[str, float]]] = defaultdict(list)

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """A block of the trainer."""
        self.block = phase
        return self.phase(BLOCKS[phase])

    def phase(self, phase: str) -> AbstractContextManager[None]:
        """A call inside it."""
        return super().__call__(phase)

    def model_phase(self) -> str:
        """What a forward pass is for, by the block that it happens in."""
        return {"generation": "generation", "logprobs": "old log-probs", "branch": "agent B"}.get(self.block, "forward")

    def switch(self, phase: str) -> None:
        """The innermost phase becomes another one."""
        self._credit()
        self._phases[-1] = phase

    def cut(self, stage: str, **counts: float) -> None:
        """What was measured since the last cut was this stage."""
        self.stages[stage].append({**self.take(), **counts})

    @contextmanager
    def apart(self, stage: str) -> Iterator[None]:
        """A block that is a stage of its own, in the midst of another."""
        self._credit()
        outer = self.seconds.copy()
        self.seconds.clear()
        yield
        self.cut(stage)
        self.seconds.update(outer)

    def _credit(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        super()._credit()


def measure(trainers: Mapping[str, Trainer], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Stages of each method, `<method>/<stage>`: seconds by phase and tokens of each time that it was run."""
    watch = Stopwatch(trainers["grpo"].agent.policy.device)
    with watched(watch, trainers):
        trainers["grpo"]._loop()  # allocator, caches, the optimiser's state
        if rounds > 1:
            trainers["rspo"]._loop()
        watch.take()
        watch.stages.clear()
        for _ in range(rounds):
            for name, trainer in trainers.items():
                for _ in range(1 if name == "rspo" else trainer.config.swap.k):
                    with watch.phase("other"):
                        trainer._loop()
                with watch.apart(f"{name}/checkpoint"), watch.phase("checkpoint"):
                    trainer._save(trainer.folder / "checkpoints" / "bench")
    return dict(watch.stages)


@contextmanager
def watched(watch: Stopwatch, trainers: Mapping[str, Trainer]) -> Iterator[None]:
    """Every call that has a phase of its own reports it."""
    with ExitStack() as stack:

        def patch(owner: Any, name: str, wrap: Callable[[Stopwatch, Callable[..., Any]], Callable[..., Any]]) -> None:
            stack.enter_context(mock.patch.object(owner, name, wrap(watch, getattr(owner, name))))

        def phase(owner: Any, name: str, label: str) -> None:
            patch(owner, name, functools.partial(_timed, label))

        for trainer in trainers.values():
            stack.enter_context(mock.patch.object(trainer, "timer", watch))
            model = trainer.agent.policy.model
            for module in {model, model.base_model, model.get_output_embeddings()} - {None}:
                stack.enter_context(_timed_forward(module, watch))
        for estimator in {type(trainer.estimator) for trainer in trainers.values()}:
            phase(estimator, "__call__", "advantages")
            phase(estimator, "at_update", "advantages")
        for name in ("reset", "step", "render_prompt", "project"):
            phase(type(next(iter(trainers.values())).env), name, "environment")
        for owner, name, label in (
            (TransformersEngine, "_sample", "generation"),
            (DynamicCache, "batch_select_indices", "generation"),
            (Policy, "_ids", "tokenizer"),
            (Policy, "decode", "tokenizer"),
            (rspo.engines.transformers_engine, "token_logprobs", "log-probs"),
            (rspo.models.forward, "token_logprobs", "log-probs"),
            (Mixture, "loss", "loss"),
            (rspo.trainer, "relabel", "advantages"),
            (rspo.trainer, "zero_advantages", "records"),
            (UpdateStatistics, "add", "records"),
            (UpdateStatistics, "result", "records"),
            *((ReplayBuffer, name, "replay") for name in ("add", "sample", "clear")),
        ):
            phase(owner, name, label)
        phase(Tensor, "backward", "loss")  # from the loss on backwards, until a gradient arrives at what follows
        patch(PredictionsByLogits, "logprobs", functools.partial(_switched_at_gradient, "log-probs"))
        patch(PredictionsByLogits, "logits", functools.partial(_switched_at_gradient, "backward"))
        patch(Agent, "branch", _branch_apart)
        patch(Bookkeeper, "record", _record_and_cut)
        yield


def _timed(label: str, watch: Stopwatch, original: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        watch.begin(label)
        try:
            return original(*arguments, **options)
        finally:
            watch.end()

    return timed


@contextmanager
def _timed_forward(module: nn.Module, watch: Stopwatch) -> Iterator[None]:
    """By hooks, which agent B's copy of the model has too."""
    handles = [
        module.register_forward_pre_hook(lambda *_: watch.begin(watch.model_phase())),
        module.register_forward_hook(lambda *_: watch.end()),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _switched_at_gradient(phase: str, watch: Stopwatch, original: Callable[..., Any]) -> Callable[..., Any]:
    """Once the gradient of what `original` returns is known, the backward pass is in another phase."""

    def call(*arguments: Any, **options: Any) -> Any:
        output = original(*arguments, **options)
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda _: watch.switch(phase))
        return output

    return call


def _branch_apart(watch: Stopwatch, original: Callable[..., Agent]) -> Callable[..., Agent]:
    def branch(*arguments: Any, **options: Any) -> Agent:
        watch.block = "branch"
        with watch.apart("rspo/branch"), watch.phase("agent B"):
            return original(*arguments, **options)

    return branch


def _record_and_cut(watch: Stopwatch, original: Callable[..., None]) -> Callable[..., None]:
    """A record ends a stage."""

    def record(books: Bookkeeper, kind: str, trajectories: Sequence[Trajectory], stats: Mapping[str, float]) -> None:
        with watch.phase("records"):
            original(books, kind, trajectories, stats)
        sampled = sum(trajectory.num_tokens for trajectory in trajectories)
        read = sum(len(turn.prompt_ids) for trajectory in trajectories for turn in trajectory.turns)
        watch.cut(f"{books.config.method}/{kind}", sampled=sampled, read=read)

    return record
