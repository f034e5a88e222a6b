"""An environment in several worker processes: for environments that are slow, or that may crash or hang.

The episodes of a batch are shared out in equal runs to workers, each with an instance of the environment. Because an
episode depends on its task and seed only, it is the same for any number of workers.

A worker is lost when its process ends, when it does not answer in time, or when `step` raises an exception in it. It is
started again at once. Its unfinished episodes are truncated where they stand, with `lost_worker` True in their infos;
the other workers go on. Nothing is lost in `reset` and `restore`, which are tried again. What cannot be cured by that
is an error: an exception in `reset`, or a worker that is lost LIMIT times without a step in between.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rspo.envs import find_factory, make_env
from rspo.envs.base import (
    BatchedEnv,
    EnvironmentValueError,
    Info,
    PromptContext,
    ResourceError,
    StepResult,
    WorkerError,
)
from rspo.envs.losses import LossLog
from rspo.envs.returned import check_start, check_step
from rspo.envs.worker_handle import CLOSING_SECONDS, Lost, Worker
from rspo.envs.worker_process import Failure

LIMIT = 3

logger = logging.getLogger(__name__)


@dataclass
class Share:
    """A worker's run of the batch's episodes, `start` to `stop`, and whether they are lost."""

    worker: Worker
    start: int
    stop: int
    is_lost: bool = False


@dataclass(frozen=True)
class WorkerSnapshot:
    """State of all episodes: for each share its bounds and its environment's snapshot (None where it is lost)."""

    shares: tuple[tuple[int, int, Any], ...]
    observations: tuple[str, ...]
    infos: tuple[Info, ...]
    terminated: np.ndarray
    truncated: np.ndarray


class WorkerEnv(BatchedEnv):
    """The environment `name` (as for `make_env`) with the constructor's arguments `options`, in worker processes.

    workers: their number, at least 1. They start with the first `reset`.
    timeout: seconds after which a worker that has not answered is given up.

    `tasks`, prompts and projection are those of an instance in this process, `local`, which plays no episodes; they
    must not depend on episodes under way. Use it in a `with` statement or call `close`; workers also end with the
    process that started them.

    A lost episode keeps the observation and infos of its last finished step, with `won` False and reward 0 from then
    on. It is neither a success nor a failure: `rspo.data.trajectory.intact` leaves it out of training, and says what
    that does to the estimate.

    Raises ValueError for an argument out of its range and an environment that cannot be sent to another process, and
    what building the environment raises.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None, workers: int = 1, timeout: float = 300.0):
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ValueError(f"workers must be an integer of at least 1; got {workers!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds; got {timeout!r}")
        factory, options = find_factory(name), dict(options or {})
        try:
            pickle.dumps((factory, options))
        except Exception as error:
            raise ValueError(
                f"environment {name!r} cannot be sent to worker processes; register it under a class path"
                f" 'package.module:Class', with picklable options ({error})"
            ) from error
        self.local = make_env(name, **options)
        self.max_turns = self.local.max_turns
        self.has_dense_reward = self.local.has_dense_reward
        self.has_snapshots = self.local.has_snapshots
        self.episodes_at_once = self.local.episodes_at_once
        self.timeout = timeout
        self.lost_episodes = 0
        """Episodes that were lost since this object was made."""
        self._failures = LossLog(logger)
        self.workers = [Worker(i, factory, options) for i in range(workers)]
        self._shares: list[Share] | None = None
        self._is_closed = False

    # What needs no worker

    @property
    def skipped_tasks(self) -> int:
        """Those that were found when tasks were looked for; what a worker passes over later is in its warnings."""
        return self.local.skipped_tasks

    def tasks(self, split: str = "train") -> Sequence[Any]:
        return self.local.tasks(split)

    def render_prompt(self, context: PromptContext) -> str:
        return self.local.render_prompt(context)

    def render_opening(self, context: PromptContext) -> str:
        return self.local.render_opening(context)

    def render_reply(self, context: PromptContext) -> str:
        return self.local.render_reply(context)

    def vocabulary(self) -> Sequence[str] | None:
        return self.local.vocabulary()

    def project(self, response: str) -> tuple[str, bool]:
        return self.local.project(response)

    # Episodes

    def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
        """Start one episode per pair.

        Raises ValueError when there are none or the lengths differ, ValueError or TypeError that the environment
        raises, EnvironmentValueError for values that the contract does not allow, and WorkerError for any other
        exception or a worker that is lost again and again.
        """
        if len(tasks) == 0:
            raise ValueError("tasks must hold at least one task; got none")
        if len(tasks) != len(seeds):
            raise ValueError(f"seeds must be as many as tasks ({len(tasks)}); got {len(seeds)}")
        bounds = np.linspace(0, len(tasks), min(len(self.workers), len(tasks)) + 1).round().astype(int).tolist()
        shares = [Share(*share) for share in zip(self.workers, bounds[:-1], bounds[1:], strict=False)]
        found = self._begin("reset", [(s, (tasks[s.start : s.stop], seeds[s.start : s.stop])) for s in shares])
        answers = [check_start(self, answer, s.stop - s.start) for answer, s in zip(found, shares, strict=True)]
        self._terminated, self._truncated = np.zeros(len(tasks), bool), np.zeros(len(tasks), bool)
        self._observations = [observation for observations, _ in answers for observation in observations]
        self._infos = [info for _, infos in answers for info in infos]
        self._shares = shares
        return list(self._observations), list(self._infos)

    def step(self, actions: Sequence[str]) -> StepResult:
        """Advance every episode by one action; see `BatchedEnv.step`.

        Raises RuntimeError before the first reset, ValueError when the number of actions is not that of the episodes,
        TypeError when an action is not a string, WorkerError for a worker that is lost again and again,
        EnvironmentValueError for values that the contract does not allow.
        """
        shares = self._started("step")
        if isinstance(actions, str) or not all(isinstance(action, str) for action in actions):
            raise TypeError(f"actions must be a sequence of strings; got {actions!r}")
        if len(actions) != len(self._infos):
            raise ValueError(f"actions must be as many as episodes ({len(self._infos)}); got {len(actions)}")
        rewards = np.zeros(len(actions), np.float32)
        asked = [share for share in shares if not share.is_lost]
        answers = self._exchange([(share, "step", (actions[share.start : share.stop],)) for share in asked])
        for share, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Failure) and answer.kind == EnvironmentValueError.__name__:
                raise EnvironmentValueError(answer.message)
            if isinstance(answer, Lost | Failure):
                self._lose(share, answer)
                continue
            running = np.flatnonzero(~(self._terminated | self._truncated)[share.start : share.stop]).tolist()
            answer = check_step(self, answer, share.stop - share.start, running)
            share.worker.losses_in_a_row = 0
            here = slice(share.start, share.stop)
            self._observations[here], rewards[here], self._terminated[here], self._truncated[here], infos = answer
            self._infos[here] = infos
        return list(self._observations), rewards, self._terminated.copy(), self._truncated.copy(), list(self._infos)

    def snapshot(self) -> WorkerSnapshot:
        """The state of all episodes. Raises RuntimeError where the environment has no snapshots."""
        if not self.has_snapshots:
            return super().snapshot()  # raises
        shares = self._started("snapshot")
        asked = [share for share in shares if not share.is_lost]
        parts: dict[int, Any] = {}
        for share, answer in zip(asked, self._exchange([(s, "snapshot", ()) for s in asked]), strict=True):
            if isinstance(answer, Lost | Failure):
                self._lose(share, answer)
            else:
                parts[share.start] = answer
        return WorkerSnapshot(
            tuple((share.start, share.stop, parts.get(share.start)) for share in shares),
            tuple(self._observations),
            tuple(self._infos),
            self._terminated.copy(),
            self._truncated.copy(),
        )

    def restore(self, state: WorkerSnapshot) -> tuple[list[str], list[Info]]:
        """Go back to a snapshot of this or another WorkerEnv with as many workers; lost episodes in it stay lost.

        Raises TypeError when `state` is no such snapshot, ValueError when it needs more workers.
        """
        if not self.has_snapshots:
            return super().restore(state)
        if not isinstance(state, WorkerSnapshot):
            raise TypeError(f"state must be a WorkerSnapshot from snapshot(); got {type(state).__name__}")
        if len(state.shares) > len(self.workers):
            raise ValueError(f"state needs {len(state.shares)} workers; got {len(self.workers)}")
        shares = [
            Share(worker, start, stop, part is None)
            for worker, (start, stop, part) in zip(self.workers, state.shares, strict=False)
        ]
        asked = [(share, (part,)) for share, (_, _, part) in zip(shares, state.shares, strict=True) if part is not None]
        self._observations, self._infos = list(state.observations), list(state.infos)
        self._terminated, self._truncated = state.terminated.copy(), state.truncated.copy()
        for (share, _), answer in zip(asked, self._begin("restore", asked), strict=True):
            observations, infos = check_start(self, answer, share.stop - share.start, "restore")
            self._observations[share.start : share.stop] = observations
            self._infos[share.start : share.stop] = infos
        self._shares = shares
        return list(self._observations), list(self._infos)

    def close(self) -> None:
        """End the workers; no method that plays episodes can be called any more."""
        self._is_closed, self._shares = True, None
        deadline = time.monotonic() + CLOSING_SECONDS
        for worker in self.workers:  # all channels first, so that they end side by side
            worker.hang_up()
        for worker in self.workers:
            worker.stop(max(deadline - time.monotonic(), 0.0))
        self.local.close()

    def __enter__(self) -> WorkerEnv:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside

    def _started(self, method: str) -> list[Share]:
        if self._is_closed:
            raise RuntimeError(f"{method} was called after close")
        if self._shares is None:
            raise RuntimeError(f"call reset before {method}")
        return self._shares

    def _begin(self, method: str, requests: Sequence[tuple[Share, tuple[Any, ...]]]) -> list[Any]:
        """Answers to a request that begins episodes; it is made again of workers that are lost meanwhile."""
        if self._is_closed:
            raise RuntimeError(f"{method} was called after close")
        self._shares = None
        answers: dict[int, Any] = {}
        while len(answers) < len(requests):
            asked = [(share, arguments) for share, arguments in requests if share.start not in answers]
            found = self._exchange([(share, method, arguments) for share, arguments in asked])
            for (share, _), answer in zip(asked, found, strict=True):
                if isinstance(answer, Failure):
                    raise _raised(answer, share)
                if isinstance(answer, Lost):
                    self._restart(share.worker, answer.reason, "its episodes begin again")
                else:
                    answers[share.start] = answer
        return [answers[share.start] for share, _ in requests]

    def _exchange(self, requests: Sequence[tuple[Share, str, tuple[Any, ...]]]) -> list[Any]:
        """What each share's worker answers to a request (method, arguments): a result, a Failure, or Lost."""
        deadline = time.monotonic() + self.timeout
        try:
            sent = []
            for share, method, arguments in requests:
                share.worker.start()
                sent.append(share.worker.send(pickle.dumps((method, arguments)), deadline))
            return [
                lost or share.worker.receive(deadline, self.timeout)
                for lost, (share, *_) in zip(sent, requests, strict=True)
            ]
        except BaseException:
            # Answers that were not read must not be taken for those of a later request.
            for share, *_ in requests:
                share.worker.stop()
            self._shares = None
            raise

    def _lose(self, share: Share, answer: Lost | Failure) -> None:
        """Cut off a share's unfinished episodes."""
        here = range(share.start, share.stop)
        unfinished = [i for i in here if not (self._terminated[i] or self._truncated[i])]
        for i in here:
            changes: Info = {"dense_reward": 0.0} if "dense_reward" in self._infos[i] else {}
            if i in unfinished:
                changes |= {"won": False, "lost_worker": True}
            self._infos[i] = {**self._infos[i], **changes}
        self._truncated[unfinished] = True
        share.is_lost = True
        self.lost_episodes += len(unfinished)
        consequence = f"{len(unfinished)} unfinished episodes are cut off and left out"
        if isinstance(answer, Lost):
            self._restart(share.worker, answer.reason, consequence)
        else:
            self._restart(share.worker, f"raised {answer.kind}: {answer.message}", consequence, answer)

    def _restart(self, worker: Worker, reason: str, consequence: str, failure: Failure | None = None) -> None:
        worker.stop()
        worker.losses_in_a_row += 1
        text = f"environment worker {worker.index} {reason}"
        if worker.losses_in_a_row >= LIMIT:
            trace = f"\n{failure.trace.rstrip()}" if failure else ""
            raise WorkerError(f"{text}; it was lost {LIMIT} times in a row without a finished step in between{trace}")
        text = f"{text}; {consequence}, and it is started again"
        if failure is None:
            logger.warning(text)
        else:
            self._failures.warn((failure.kind, failure.place), text, failure.trace)
        worker.start()


def _raised(failure: Failure, share: Share) -> Exception:
    """The exception that a worker's environment raised when its episodes began."""
    where = f"environment worker {share.worker.index}, episodes {share.start} to {share.stop - 1}"
    kinds = {kind.__name__: kind for kind in (ValueError, TypeError, EnvironmentValueError, ResourceError)}
    kind = kinds.get(failure.kind)
    if kind is None:
        return WorkerError(f"{where}:\n{failure.trace}")
    return kind(f"{failure.message} (in {where})")
