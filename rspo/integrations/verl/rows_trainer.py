"""What verl's Ray trainer has its workers compute, for rows of any number and mini-batches of any size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import left_right_2_no_padding

from ...config import Config, OptimizerConfig
from ...data.batch import Batch
from .rows import Rows, deal_rows


class RowsTrainer(RayPPOTrainer):
    """A RayPPOTrainer whose workers score and train rows. A turn is a row, and how many turns there are is not known
    before they were played: verl's own methods count prompts."""

    def _log_probs(self, rows: Rows, of_reference: bool = False) -> Tensor:
        """Log-probs of the response tokens under the actor or the reference, float32 [N]."""
        rollout = self.config.actor_rollout_ref.rollout
        per_process = 1 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu
        data, _ = pad_dataproto_to_divisor(rows.data, self._processes * per_process)
        self._describe(data)
        if of_reference:
            return rows.gather(self._compute_ref_log_prob(data).batch["ref_log_prob"])
        return rows.gather(self._compute_old_log_prob(data)[0].batch["old_log_probs"])

    def _train_rows(
        self, batch: Batch, rows: Rows, weights: Tensor, minibatches: int, settings: Config, rng: np.random.Generator
    ) -> dict[str, float]:
        """`actor.ppo_epochs` passes over the rows, an optimiser step for each mini-batch. Statistics of `actor_loss`,
        the gradient's norm and the learning rate, means over the steps.

        batch: complete, made of the same rows. weights: [N], `rows.loss_weights`. rng: deals the rows.
        """
        actor = self.config.actor_rollout_ref.actor
        per_process = 1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
        order = deal_rows(batch.num_rows, minibatches, self._processes, per_process, rng)
        values = {
            "old_log_probs": batch.old_logp,
            "behavior_log_probs": batch.behavior_logp,
            "advantages": batch.advantages,
            "loss_weights": weights,
        }
        if batch.ref_logp is not None:
            values["ref_log_prob"] = batch.ref_logp
        data = rows.deal(torch.from_numpy(order), values)
        self._describe(data)
        tensors = left_right_2_no_padding(data.to_tensordict())
        tu.assign_non_tensor(
            tensors,
            calculate_entropy=bool(actor.calculate_entropy) or settings.loss.entropy_coef != 0,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=len(order) // minibatches,
            mini_batch_size=len(order) // minibatches,
            epochs=settings.optimizer.epochs,
            seed=settings.run.seed,
            dataloader_kwargs={"shuffle": False},  # the rows have been dealt
            compute_loss=True,
        )
        metrics = reduce_metrics(tu.get(self.actor_rollout_wg.update_actor(tensors), "metrics"))
        return {name: float(value) for name, value in metrics.items()}

    def _describe(self, data: DataProto) -> None:
        """What verl's workers read of a batch besides its tensors."""
        data.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(-1).tolist()

    @property
    def _processes(self) -> int:
        """Data-parallel processes of the actor."""
        return int(self._get_dp_size(self.actor_rollout_wg, "actor"))

    @property
    def _pad_token_id(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)


def count_minibatches(batch: Batch, config: OptimizerConfig) -> int:
    """Mini-batches of one pass: of `minibatch_rows` rows, or as many as configured, none of them without a row."""
    count = config.minibatches
    if config.minibatch_rows is not None:
        count = -(-batch.num_rows // config.minibatch_rows)
    return min(count, batch.num_rows)
