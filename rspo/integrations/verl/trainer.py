"""RSPO, Algorithm 1 of the paper, on verl's Ray trainer.

The numbers in the comments are the lines of Algorithm 1, as in `rspo.trainer`, whose pieces this loop is made of:
trajectories, rewards, advantages, replay and eq. 1 are the trainer's own. Generation, log-probs, gradients and
checkpoints are verl's; `worker.SwapWorker` remembers agent A while the weights are agent B's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor
from verl.utils.tracking import Tracking

from ...algorithm.estimators import make_estimator
from ...algorithm.metrics import identical_states, trajectory_metrics, zero_advantages
from ...algorithm.replay import ReplayBuffer
from ...algorithm.rewards import RewardFunction, outcome_reward, relabel, training_rewards
from ...algorithm.timing import PhaseTimer
from ...algorithm.update import log_center_quantiles
from ...data.batch import Batch
from ...data.trajectory import Trajectory, intact
from ...envs import make_env
from ...models.randomness import RandomStreams, named_generator, named_seed
from .losses import actor_loss
from .rows import Rows, loss_weights
from .rows_trainer import RowsTrainer, count_minibatches
from .settings import rspo_config


class RSPORayTrainer(RowsTrainer):
    """Trains agent A by Algorithm 1, or by a base method alone (`rspo.method`).

    `global_steps` counts finished updates of A. Checkpoints stand between loops, where agent B does not exist.

    Args:
        config: verl's, with the section `rspo` (`settings.rspo_config`, which see for what is raised).
        arguments, options: RayPPOTrainer's; the actor's worker class must be a `SwapWorker`.
    """

    def __init__(self, config: DictConfig, *arguments: Any, **options: Any) -> None:
        self.settings = rspo_config(config)
        super().__init__(config, *arguments, **options)
        self.global_steps = 0
        self.swaps = self.settings.method == "rspo"
        self.estimator = make_estimator(self.settings.estimator_name, self.settings.estimator)
        self.reward_a, self.reward_b = self._rewards()
        self.timer = PhaseTimer()
        self._before_a: dict[str, list[float]] = defaultdict(list)

    def _rewards(self) -> tuple[RewardFunction, RewardFunction]:
        env = make_env(self.settings.env.name, **self.settings.env.options)
        try:
            return training_rewards(
                self.settings, env.has_dense_reward, named_generator(self.settings.run.seed, "noise")
            )
        finally:
            env.close()

    def init_workers(self) -> None:
        """verl's workers, with the loss of eq. 1."""
        super().init_workers()
        self.set_loss()

    def set_loss(self) -> None:
        """Give the actor the loss of eq. 1 in the place of its own."""
        # The weights of the rows hold the aggregation.
        self.actor_rollout_wg.set_loss_fn(partial(actor_loss, replace(self.settings.loss, aggregation="token-mean")))

    def fit(self) -> None:
        """Go on to `trainer.total_training_steps` updates of A, from verl's latest checkpoint where there is one."""
        self.tracking = self._tracking()
        self._load_checkpoint()
        self._to_engine()
        if self.config.trainer.val_before_train:
            self.tracking.log(data=self._validate(), step=self.global_steps)
        if self.config.trainer.val_only:
            return
        self.task_rows = self._endless_rows()
        while self.global_steps < self.settings.run.steps:  # 3: for each loop of RSPO do
            before = self.global_steps
            self._loop()
            if self._due(self.config.trainer.save_freq, before):
                self._save()
        self._shutdown_dump_executor()

    # Algorithm 1

    def _loop(self) -> None:
        """One loop of Algorithm 1; without RSPO, one update."""
        # Streams of this loop alone: a run that was interrupted does the loop again with the same ones.
        self.random = RandomStreams(named_seed(self.settings.run.seed, f"loop at {self.global_steps}"))
        buffer = ReplayBuffer(self.settings.swap, self.random.replay)  # 19: D <- ∅
        if self.settings.replay_size(self.alpha) > 0:
            self._train_b_and_collect(buffer)
        updates = min(self.settings.swap.k if self.swaps else 1, self.settings.run.steps - self.global_steps)
        for _ in range(updates):  # 12-13: update using outcome rewards
            self._update_a(buffer)

    def _train_b_and_collect(self, buffer: ReplayBuffer) -> None:
        """Lines 4 to 11: agent B learns from dense rewards, then fills the buffer."""
        swap = self.settings.swap
        tasks = self.settings.on_policy_tasks(self.alpha)
        self.actor_rollout_wg.keep_agent(swap.fresh_optimizer)  # 5: set π_dense = π_θ
        for _ in range(swap.k):  # 6
            trajectories = self._rollout(tasks)  # 7: sample (1 - α)·B tasks, generate with π_dense
            relabel(trajectories, self.reward_b)  # 8: compute dense rewards
            self.estimator(trajectories)
            stats = self._update(trajectories)  # 9: update π_dense
            self._note("dense", trajectories, stats)
            self._to_engine()

        collected = self._rollout(swap.buffer_tasks)  # 11: collect with π_dense,
        relabel(collected, outcome_reward)  # re-evaluate with outcome rewards,
        self.estimator(collected)  # (advantages of full groups: a selection of successes would have none)
        buffer.add(collected)  # and add to D
        self._note("collect", collected, {})
        self.actor_rollout_wg.restore_agent()
        self._to_engine()

    def _update_a(self, buffer: ReplayBuffer) -> None:
        """Lines 14 to 17: one update of agent A."""
        alpha = self.alpha
        on_policy = self._rollout(self.settings.on_policy_tasks(alpha))  # 14: D_on
        relabel(on_policy, self.reward_a)
        self.estimator(on_policy)
        replayed = buffer.sample(self.settings.replay_size(alpha))  # 15: D_off
        stats = self._update([*on_policy, *replayed], alpha)  # 16-17: D_mix, eq. 1

        stats |= {"alpha": alpha, "replay/trajectories": len(replayed)}
        if replayed:
            stats["replay/success"] = trajectory_metrics(replayed)["success"]
        self.global_steps += 1
        self._to_engine()
        self._record(on_policy, stats)

    @property
    def alpha(self) -> float:
        """The share of replay at the current step; 0 without RSPO."""
        return self.settings.alpha_at(self.global_steps) if self.swaps else 0.0

    # What a loop is made of

    def _rollout(self, num_tasks: int) -> list[Trajectory]:
        """Play tasks, `rollout.n` times each, with the weights that the engine has. Log-probs are the actor's."""
        size = self.settings.rollout.group_size
        rows = [next(self.task_rows) for _ in range(num_tasks)]
        seeds = self.random.tasks.integers(2**31, size=num_tasks)
        batch = DataProto.concat(rows)
        batch.non_tensor_batch["seed"] = seeds.astype(object)
        batch = batch.repeat(size, interleave=True)
        batch.meta_info["global_steps"] = self.global_steps
        with self.timer("generation"):
            padded, _ = pad_dataproto_to_divisor(batch, self.config.actor_rollout_ref.rollout.agent.num_workers)
            played = self.async_rollout_manager.generate_sequences(padded)
            self.checkpoint_manager.sleep_replicas()
        trajectories = [
            replace(trajectory, group=i // size, index=i % size)
            for i, trajectory in enumerate(played.non_tensor_batch["trajectory"][: len(batch)])
        ]
        trajectories = intact(trajectories)
        with self.timer("logprobs"):
            self._rescore(trajectories)
        return trajectories

    def _rescore(self, trajectories: Sequence[Trajectory]) -> None:
        """Set behaviour log-probs to those of the actor as it is now, who wrote them; note how far the engine's are."""
        batch = self._batch(trajectories)
        logp = self._log_probs(Rows.of(batch, self._pad_token_id))
        difference = (logp - batch.behavior_logp).abs()
        if not difference.isnan().any():
            self._before_a["rollout/logprob_difference"].append(float(difference.mean()))
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        for turn, part in zip(turns, logp.split(batch.turn_lengths.tolist()), strict=True):
            turn.behavior_logp = part.numpy()

    def _update(self, trajectories: Sequence[Trajectory], alpha: float = 0.0) -> dict[str, float]:
        """One update of the agent whose weights the workers hold, on labelled trajectories."""
        batch = self._batch(trajectories)
        rows = Rows.of(batch, self._pad_token_id)
        with self.timer("logprobs"):
            batch = self._prepare(batch, rows)
        batch = self.estimator.at_update(batch)
        settings = self.settings
        minibatches = count_minibatches(batch, settings.optimizer)
        weights = loss_weights(batch, settings.loss, alpha, settings.swap.mixture == "pooled", minibatches)
        with self.timer("update"):
            stats = self._train_rows(batch, rows, weights, minibatches, settings, self.random.minibatches)
        return {**stats, "num_tokens": batch.num_tokens, **log_center_quantiles(batch), **zero_advantages(batch)}

    def _prepare(self, batch: Batch, rows: Rows) -> Batch:
        """The batch with the log-probs that an update holds fixed: old ones of replayed tokens, which are the current
        actor's (those of on-policy tokens are known from the rollout), and the reference's."""
        if batch.is_replay.any():
            replayed = batch.token_row[batch.is_replay].unique()
            selected = batch.select(replayed)
            old_logp = batch.old_logp.clone()
            old_logp[batch.is_replay] = self._log_probs(Rows.of(selected, self._pad_token_id))
            batch = replace(batch, old_logp=old_logp)
            if self.settings.swap.ignore_behavior:
                batch = replace(batch, behavior_logp=old_logp)
        if self.settings.loss.kl_coef > 0:
            batch = replace(batch, ref_logp=self._log_probs(rows, of_reference=True))
        return batch

    def _batch(self, trajectories: Sequence[Trajectory]) -> Batch:
        return Batch.from_trajectories(trajectories, self.settings.env.layout)

    def _to_engine(self) -> None:
        """Give the engine the actor's weights and wake it."""
        with self.timer("weights"):
            self.checkpoint_manager.update_weights(self.global_steps)

    def _save(self) -> None:
        """Write verl's checkpoint while the engine sleeps, which leaves the memory to it."""
        self.checkpoint_manager.sleep_replicas()
        self._save_checkpoint()
        self._to_engine()

    def _endless_rows(self) -> Iterator[DataProto]:
        """Rows of `EnvTasks`, one after the other, epoch after epoch; verl's checkpoints know how far they are."""
        while True:
            for row in self.train_dataloader:
                yield DataProto.from_single_dict(row)

    # Records

    def _tracking(self) -> Tracking:
        """Where records go: verl's loggers."""
        return Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )

    def _note(self, kind: str, trajectories: Sequence[Trajectory], stats: Mapping[str, float]) -> None:
        """Keep what agent B did for the record of A's next update; of its k updates the mean."""
        for name, value in (trajectory_metrics(trajectories) | dict(stats)).items():
            self._before_a[f"{kind}/{name}"].append(float(value))

    def _record(self, on_policy: Sequence[Trajectory], stats: Mapping[str, float]) -> None:
        """Write the record of an update of A, with an evaluation where one is due."""
        record = trajectory_metrics(on_policy) | identical_states(on_policy) | dict(stats)
        record |= {name: float(np.mean(values)) for name, values in self._before_a.items()} | self.timer.take()
        self._before_a.clear()
        if self._due(self.config.trainer.test_freq, self.global_steps - 1):
            record |= self._validate()
        self.tracking.log(data=record, step=self.global_steps)

    def _due(self, every: int, before: int) -> bool:
        """Whether something happens now that happens every so many updates and after the last; 0 or less: never."""
        if every <= 0:
            return False
        return self.global_steps == self.settings.run.steps or self.global_steps // every > before // every
