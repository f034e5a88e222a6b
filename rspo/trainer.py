"""RSPO, Algorithm 1 of the paper (arXiv 2607.04713), and its base methods as the same loop without agent B.

The numbers in the comments are the lines of Algorithm 1. Mechanics are elsewhere: `rollout` plays episodes, `rewards`
labels them, `estimators` makes advantages, `replay` keeps and orders B's trajectories, `update` holds mini-batches
and eq. 1, `bookkeeping` what is reported, `rspo_kernels` the loss.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

from .algorithm.estimators import make_estimator
from .algorithm.metrics import trajectory_metrics, zero_advantages
from .algorithm.mismatch import check_mismatch
from .algorithm.progress import episode_bar
from .algorithm.replay import ReplayBuffer
from .algorithm.rewards import NonFiniteError, RewardFunction, outcome_reward, relabel, training_rewards
from .algorithm.rollout import rollout
from .algorithm.timing import PhaseTimer
from .algorithm.update import prepare, rescore, update
from .config import Config
from .config.storage import StorageError
from .data.batch import Batch
from .data.layouts import make_layout
from .data.trajectory import Trajectory, intact
from .engines import LOCAL, Backend
from .envs.base import BatchedEnv
from .models.agent import Agent
from .models.policy import Policy
from .models.processes import play_groups
from .models.randomness import RandomStreams
from .runs.bookkeeping import Bookkeeper
from .runs.checkpoint import Checkpoint, checkpoint_path, list_checkpoints, prune_checkpoints, save_checkpoint
from .runs.observer import Observer
from .runs.records import Tracker


class Trainer:
    """Trains agent A.

    Args:
        config: all settings.
        folder: checkpoints go to `folder/checkpoints`.
        env: for training and evaluation in turn.
        agent: agent A, at the start policy.
        reference: the frozen base that a KL term pulls towards; needed where `config.loss.kl_coef > 0`.
        tracker: takes the records.
        observer: is told of them and may ask for evaluations, checkpoints and the end.
        dense_reward: what `config.rewards.dense` names, where that cannot be imported.
        backend: generates the responses.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        env: BatchedEnv,
        agent: Agent,
        reference: Policy | None,
        tracker: Tracker,
        observer: Observer | None = None,
        dense_reward: RewardFunction | None = None,
        backend: Backend = LOCAL,
    ) -> None:
        self.config = config
        self.folder = folder
        self.env = env
        self.agent = agent
        self.reference = reference
        self.ranks, self.backend = agent.ranks, backend
        self.observer = observer or Observer()
        tracker.listeners.append(self.observer.on_record)
        self.random = RandomStreams(config.run.seed, agent.policy.device, self.ranks)
        self.timer = PhaseTimer()
        self.books = Bookkeeper(config, env, tracker, self.timer, self.ranks, backend)
        self.estimator = make_estimator(config.estimator_name, config.estimator)
        self.buffer = ReplayBuffer(config.swap, self.random.replay)
        self.lock: AbstractContextManager[Any] = nullcontext()
        """Lets go of the folder when it is left; `start.open_run` takes it."""
        self.swaps = config.method == "rspo"
        self.reward_a, self.reward_b = training_rewards(config, env.has_dense_reward, self.random.noise, dense_reward)

    def train(self) -> None:
        """Go on to `config.run.steps` updates of A, with evaluations and checkpoints on the way, or until the observer
        wants the end, which comes after a loop and with a checkpoint.

        Raises NonFiniteError after agent A, as it was, has been saved as `checkpoints/failed`: to be looked at, and
        never gone on from. Raises StorageError where something could not be written.
        """
        if self.books.step == 0:
            self.books.evaluate(self.agent.policy)
        try:
            while not self._is_over:  # 3: for each loop of RSPO do
                self._loop()
                self._save_if_due()
        except NonFiniteError as error:
            try:
                self._save(self.folder / "checkpoints" / "failed")
            except StorageError as storage_error:
                raise NonFiniteError(f"{error}; in addition, {storage_error}") from error
            raise

    def _loop(self) -> None:
        """One loop of Algorithm 1; without RSPO, one update."""
        swap = self.config.swap
        if self.config.replay_size(self.alpha) > 0 and swap.source != "history":
            with self.agent.branched() as agent_b:  # 5: set π_dense = π_θ
                self._train_b_and_collect(agent_b)

        history: list[list[Trajectory]] = []
        updates = min(swap.k if self.swaps else 1, self.config.run.steps - self.books.step)
        for _ in range(updates):  # 12-13: update using outcome rewards
            history.append(self._update_a())

        self.buffer.clear()  # 19: D <- ∅
        if self.swaps and swap.source == "history":
            for trajectories in history:  # the ablation RSPO_H: the next loop replays A's own trajectories
                self.buffer.add(trajectories)

    def _train_b_and_collect(self, agent_b: Agent) -> None:
        """Lines 6 to 11: agent B learns from dense rewards, then fills the buffer."""
        swap = self.config.swap
        tasks = self.config.on_policy_tasks(self.alpha)
        for done in range(swap.k):  # 6
            trajectories = self._rollout(agent_b, tasks)  # 7: sample (1 - α)·B tasks, generate with π_dense
            relabel(trajectories, self.reward_b)  # 8: compute dense rewards
            self.estimator(trajectories)
            agent_b.set_learning_rates(self.config.learning_rate_factor(self.books.step + done))
            stats = self._update(agent_b, trajectories)  # 9: update π_dense
            self.books.record("dense", trajectories, stats)

        collected = self._rollout(agent_b, swap.buffer_tasks)  # 11: collect with π_dense,
        relabel(collected, outcome_reward)  # re-evaluate with outcome rewards,
        self.estimator(collected)  # (advantages of full groups: a selection of successes would have none)
        self.buffer.add(collected)  # and add to D
        self.books.record("collect", collected, {})

    def _update_a(self) -> list[Trajectory]:
        """Lines 14 to 17: one update of agent A. Returns its on-policy trajectories."""
        self.observer.on_step_begin()
        alpha = self.alpha
        on_policy = self._rollout(self.agent, self.config.on_policy_tasks(alpha))  # 14: D_on
        relabel(on_policy, self.reward_a)
        self.estimator(on_policy)
        replayed = self.buffer.sample(self.config.replay_size(alpha))  # 15: D_off
        self.agent.set_learning_rates(self.config.learning_rate_factor(self.books.step))
        stats = self._update(self.agent, [*on_policy, *replayed], alpha)  # 16-17: D_mix, eq. 1

        stats |= {"alpha": alpha, "replay/trajectories": len(replayed)}
        if replayed:
            stats["replay/success"] = trajectory_metrics(replayed)["success"]
        self.books.step += 1
        self.books.record("update", on_policy, stats)
        if self._due(self.config.evaluation.every) or self.ranks.from_main(self.observer.wants_evaluation):
            self.books.evaluate(self.agent.policy)
        return on_policy

    @property
    def _is_over(self) -> bool:
        """Whether all updates are made, or the observer has had enough."""
        return self.books.step >= self.config.run.steps or self.ranks.from_main(self.observer.wants_stop)

    @property
    def alpha(self) -> float:
        """The share of replay at the current step; 0 without RSPO."""
        return self.config.alpha_at(self.books.step) if self.swaps else 0.0

    def _rollout(self, agent: Agent, num_tasks: int) -> list[Trajectory]:
        """Play random training tasks, `group_size` times each; each process its share of them, all get all."""
        tasks = self.env.tasks("train")
        chosen = self.random.tasks.choice(len(tasks), size=num_tasks, replace=num_tasks > len(tasks))
        seeds = self.random.tasks.integers(2**31, size=num_tasks).tolist()
        mine, group_size = self.ranks.share(num_tasks), self.config.rollout.group_size

        def play_mine() -> list[Trajectory]:
            bar = episode_bar("playing", len(mine) * group_size, self.books.tracker.progress)
            acting = self.backend.engine(agent.policy, self.config.rollout, self.random.sampling)
            with acting as engine, bar as on_turn:
                return rollout(
                    self.env,
                    engine,
                    make_layout(self.config.env.layout, agent.policy, self.env),
                    [tasks[chosen[i]] for i in mine],
                    [seeds[i] for i in mine],
                    group_size=group_size,
                    history_length=self.config.env.history_length,
                    timer=self.timer,
                    on_turn=on_turn,
                )

        trajectories = play_groups(self.ranks, play_mine)
        self.books.count(trajectories)
        trajectories = intact(trajectories)
        if self.config.rescores:
            with self.timer("logprobs"):
                rescore(agent.policy, trajectories, self.config, self.ranks)
            check_mismatch(trajectories, self.config.engine)
        return trajectories

    def _update(self, agent: Agent, trajectories: list[Trajectory], alpha: float = 0.0) -> dict[str, float]:
        """One update of an agent on labelled trajectories: `optimizer.epochs` passes in mini-batches."""
        with self.timer("batch"):
            batch = Batch.from_trajectories(trajectories, self.config.env.layout).to(agent.policy.device)
        with self.timer("logprobs"):
            batch = prepare(agent, batch, trajectories, self.config, self.reference)
        batch = self.estimator.at_update(batch)
        stats = update(agent, batch, trajectories, self.config, alpha, self.random.minibatches, self.timer)
        return stats | zero_advantages(batch) | agent.learning_rates

    # Checkpoints stand between loops, where agent B does not exist. A loop that was cut off is done again, from the
    # same weights and random states, to the same result.

    def _due(self, every: int) -> bool:
        """Whether something that happens every so many updates, and after the last, happens now."""
        return self.books.step == self.config.run.steps or (every > 0 and self.books.step % every == 0)

    def _save_if_due(self) -> None:
        folder, every, step = self.folder / "checkpoints", self.config.run.save_every, self.books.step
        saved = self.ranks.from_main(lambda: list_checkpoints(folder))
        latest = int(saved[-1].name.split("-")[1]) if saved else 0
        due = step == self.config.run.steps or (every > 0 and step // every > latest // every)
        if self.ranks.from_main(lambda: due or self.observer.wants_checkpoint() or self.observer.wants_stop()):
            self._save(checkpoint_path(folder, step))
            self.ranks.from_main(lambda: prune_checkpoints(folder, self.config.run.keep))
            self.observer.on_save(checkpoint_path(folder, step))

    def _save(self, path: Path) -> None:
        self.books.tracker.sync()
        state = {**self.books.state(), "random": self.random.state(), "observer": self.observer.checkpoint_state()}
        save_checkpoint(path, self.agent, state, self.buffer.trajectories)

    def close(self) -> None:
        """Close the records, the environment and what generates."""
        with closing(self.backend), closing(self.env):
            self.close_folder()

    def close_folder(self) -> None:
        """Close the records, and let others write into the folder."""
        with self.lock:
            self.books.tracker.close()

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        self.agent = checkpoint.agent
        self.books.load_state(checkpoint.state)
        self.random.load_state(checkpoint.state["random"])
        self.observer.load_checkpoint_state(checkpoint.state.get("observer", {}))
        if checkpoint.buffer:
            self.buffer.add(checkpoint.buffer)
