"""What a run counts and reports: costs, timings, metrics, evaluations."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..algorithm.evaluate import evaluate
from ..algorithm.metrics import identical_states, trajectory_metrics
from ..algorithm.mismatch import engine_mismatch
from ..algorithm.timing import PhaseTimer
from ..config import Config
from ..data.trajectory import Trajectory
from ..engines import LOCAL, Backend
from ..envs.base import BatchedEnv
from ..models.policy import Policy
from ..models.processes import ALONE, Ranks
from .records import Tracker
from .transcripts import TRANSCRIPTS, write_transcripts


class Bookkeeper:
    """Counters of a run and the records made of them.

    step: updates of agent A.  trajectories, tokens: sampled for training so far, agent B's included, evaluation's not;
    tokens are response tokens.  seconds: spent on training so far.  lost_episodes: among the trajectories, those cut
    off by lost workers since the last record.
    """

    def __init__(
        self,
        config: Config,
        env: BatchedEnv,
        tracker: Tracker,
        timer: PhaseTimer,
        ranks: Ranks = ALONE,
        backend: Backend = LOCAL,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.env = env
        self.tracker = tracker
        self.timer = timer
        self.backend = backend
        self.step = 0
        self.trajectories = 0
        self.tokens = 0
        self.seconds = 0.0
        self.lost_episodes = 0
        self._last = time.perf_counter()

    def count(self, trajectories: Sequence[Trajectory]) -> None:
        """Add sampled trajectories, lost ones included, to the cost."""
        self.trajectories += len(trajectories)
        self.tokens += sum(trajectory.num_tokens for trajectory in trajectories)
        self.lost_episodes += sum(trajectory.lost for trajectory in trajectories)

    def record(self, kind: str, trajectories: Sequence[Trajectory], stats: Mapping[str, float]) -> None:
        """Report an update ("update" of A, "dense" of B) or a collection ("collect")."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        self.seconds += elapsed
        found = {**trajectory_metrics(trajectories), **identical_states(trajectories), **engine_mismatch(trajectories)}
        values = {**found, **stats}
        values["lost_episodes"], self.lost_episodes = self.lost_episodes, 0
        phases = {**self.timer.take(), "seconds/total": elapsed}
        self.tracker.record(kind, self.step, {**values, **phases, **self.cost()})
        self.tracker.show(_PHASES[kind], values, advance=1 if kind == "update" else 0)

    def cost(self) -> dict[str, float]:
        """Cumulative cost of training."""
        return {"trajectories": self.trajectories, "tokens": self.tokens, "seconds": self.seconds}

    def evaluate(self, policy: Policy) -> dict[str, float]:
        """Evaluate on held-out episodes and write some out; its time and samples are not part of the cost."""
        evaluation = evaluate(
            policy, self.env, self.config, progress=self.tracker.progress, ranks=self.ranks, backend=self.backend
        )
        values = evaluation.metrics()
        settings = self.config.evaluation
        played = sum(len(trajectories) for trajectories in evaluation.episodes.values())
        values["lost_episodes"] = settings.episodes * len(settings.temperatures) - played
        values["skipped_tasks"] = max(self.ranks.gather(lambda: self.env.skipped_tasks))
        self.tracker.record("evaluation", self.step, {**values, **self.cost()})
        if self.config.evaluation.transcripts > 0 and self.ranks.is_main:
            path = self.tracker.folder / TRANSCRIPTS / f"step-{self.step:06d}.txt"
            write_transcripts(path, policy, evaluation, self.config.evaluation.transcripts, self.step)
        self.tracker.say(f"after {self.step} updates and {self.trajectories:,} trajectories: {evaluation}")
        self._last = time.perf_counter()
        return values

    def state(self) -> dict[str, Any]:
        """Counters as plain values."""
        return {"step": self.step, "records": self.tracker.records, **self.cost()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.step, self.trajectories, self.tokens = state["step"], state["trajectories"], state["tokens"]
        self.seconds = state["seconds"]


_PHASES = {"update": "A: outcome rewards", "dense": "B: dense rewards", "collect": "B: collecting"}
