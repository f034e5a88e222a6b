"""TRL's GRPOTrainer with the fused policy loss: hidden states go in, no logits come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from rspo_kernels import linear_policy_loss, linear_token_logprobs

from .completions import CompletionBatch, side_by_side
from .head import Read, WholeHead, head_of, make_readable
from .settings import CLIPPED, default_args, divisor, loss_config


@dataclass(frozen=True)
class Part:
    """Completions that have one normalizer.

    normalizer: what the sum of their token losses is divided by, > 0, a number or a 0-d tensor.
    prefix: of their metrics.
    """

    completions: CompletionBatch
    normalizer: Tensor | float
    prefix: str = ""


class FusedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose loss is `rspo_kernels.linear_policy_loss`; everything else is TRL's.

    The loss, its gradients and the metrics are TRL's to rounding, for the loss types grpo, bnpo, dr_grpo, dapo, luspo,
    cispo and sapo, with ratios of tokens or sequences, KL, two-sided clipping (`delta`), tool masks, and vLLM's
    importance sampling correction. Old and reference log-probs come from the same head, so that ratios begin at 1.

    Args:
        model, reward_funcs, args, train_dataset, options: as GRPOTrainer takes them. Without `args`: GRPOConfig's
            defaults, in the folder "MODEL-GRPO".
        exact_metrics: compute metrics over all trained tokens, as TRL does. False: tokens without an advantage need no
            matmul in a loss without KL, and are left out of entropy and clip ratios.

    Metrics keep TRL's names. Clip ratios are shares of tokens also where a sequence has one ratio, `cispo_clip_ratio`
    counts bounded ratios whatever the advantage's sign, and `clip_ratio/low_min` and `high_max` do not exist.

    Raises:
        ValueError: a setting of `args`, or a model, that this loss cannot honour; before anything is generated.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        exact_metrics: bool = True,
        **options: Any,
    ) -> None:
        if args is None:
            args = default_args(model, "GRPO")
        loss_config(args)  # before a model is loaded
        super().__init__(model, reward_funcs, args, train_dataset, **options)
        self.exact_metrics = exact_metrics
        self.loss_config = loss_config(self.args)
        if self._is_vlm:
            raise ValueError("the fused policy loss is for text: processing_class must be a tokenizer")
        if self.aux_loss_enabled:
            raise ValueError("router_aux_loss_coef must be 0: the fused policy loss has no load-balancing term")
        plugin = self.args.deepspeed_plugin
        if plugin is not None and plugin.zero_stage == 3:
            raise ValueError(
                "DeepSpeed's ZeRO-3 hides the output head's weight; the fused policy loss needs a stage of 0 to 2"
            )
        policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
        head = head_of(policy)
        make_readable(policy, head, self.args.cast_lm_head_to_fp32)
        if self.ref_model is not None:
            make_readable(self.accelerator.unwrap_model(self.ref_model), head, self.args.cast_lm_head_to_fp32)

    def _send_telemetry(self) -> None:
        """Nothing leaves the machine unasked."""

    def _read(self, model: PreTrainedModel, batches: Sequence[CompletionBatch], readers: Sequence[Read]) -> list[Any]:
        """What each batch's reader gives, in one forward pass over all of them.

        A reader gets the hidden states [B, C, H] that predict its batch's completions, and the output head.
        """
        inputs = side_by_side(batches, self._tokenizer.pad_token_id)
        completions = max(batch.completion_ids.shape[1] for batch in batches)

        def read(hidden: Tensor, head: WholeHead) -> list[Any]:
            # From the right: prompt tuning puts virtual tokens before the prompt.
            predicting = hidden[:, -completions - 1 : -1].split([len(batch) for batch in batches])
            return [
                reader(rows[:, : batch.completion_ids.shape[1]], head)
                for batch, reader, rows in zip(batches, readers, predicting, strict=True)
            ]

        with self.accelerator.autocast():
            return list(model(**inputs, read=read))

    def _get_per_token_logps_and_entropies(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Log-probs and entropies [B, logits_to_keep] of the last tokens, 0 where the attention mask is."""
        parts = []
        for rows in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
            prompt, completion = input_ids[rows].tensor_split([-logits_to_keep], dim=1)
            prompt_mask, mask = attention_mask[rows].tensor_split([-logits_to_keep], dim=1)
            nothing = torch.zeros_like(completion, dtype=torch.float32)
            batch = CompletionBatch(prompt, prompt_mask, completion, mask, mask.bool(), nothing)
            parts += self._read(model, [batch], [partial(self._logprobs, batch)])
        logp, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        return logp, entropy if compute_entropy else None, None

    def _logprobs(self, batch: CompletionBatch, hidden: Tensor, head: WholeHead) -> tuple[Tensor, Tensor]:
        scored = linear_token_logprobs(
            hidden,
            head.weight,
            batch.completion_ids,
            mask=batch.loss_mask,
            temperature=self.temperature,
            with_entropy=True,
            **head.arguments(),
        )
        return cast(tuple[Tensor, Tensor], scored)

    def _compute_loss(self, model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch, 0-d; its metrics are recorded."""
        parts = self._parts(inputs)
        batches = [part.completions for part in parts]
        results = self._read(model, batches, [partial(self._loss, part) for part in parts])
        for part, (_, stats) in zip(parts, results, strict=True):
            self._record(part.prefix, stats)
        return torch.stack([loss for loss, _ in results]).sum()

    def _loss(self, part: Part, hidden: Tensor, head: WholeHead) -> tuple[Tensor, dict[str, Tensor]]:
        batch = part.completions
        return linear_policy_loss(
            hidden,
            head.weight,
            batch.completion_ids,
            batch.advantages,
            mask=batch.loss_mask,
            normalizer=part.normalizer,
            old_logp=batch.old_logp,
            behavior_logp=batch.behavior_logp,
            ref_logp=batch.ref_logp,
            config=self.loss_config,
            temperature=self.temperature,
            with_entropy=True,
            exact_stats=self.exact_metrics,
            **head.arguments(),
        )

    def _parts(self, inputs: dict[str, Any]) -> list[Part]:
        """What a micro-batch is made of."""
        batch = CompletionBatch.from_inputs(inputs)
        args, training = self.args, self.model.training
        accumulation = self.current_gradient_accumulation_steps if training else 1
        if self.loss_type in ("dapo", "cispo"):
            # The number of tokens is that of the whole generation batch, of which an optimiser step may see a part.
            tokens = inputs["num_items_in_batch"]
            share = accumulation / args.steps_per_generation if training else 1
            scale = share / self.accelerator.num_processes
        else:
            tokens, scale = batch.loss_mask.sum(), accumulation
        total = divisor(self.loss_type, len(batch), tokens, self.max_completion_length)
        return [Part(batch, total * scale)]

    def _record(self, prefix: str, stats: dict[str, Tensor]) -> None:
        """Means over the tokens of all processes."""
        named, tokens = self._named(stats), stats["num_tokens"]
        sums = torch.stack([tokens, *(value * tokens for value in named.values())])
        total, *values = self.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in zip(named, values, strict=True):
            metrics[prefix + name].append(value / max(total, 1.0))

    def _named(self, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over tokens, 0-d, under TRL's names."""
        named = {"entropy": stats["entropy"]}
        if self.beta != 0:
            named["kl"] = stats["kl_ref"]
        if self.loss_type in CLIPPED:
            low, high = stats["clip_frac_low"], stats["clip_frac_high"]
            named |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
        elif self.loss_type == "cispo":
            named["cispo_clip_ratio"] = stats["clip_frac_high"]
        return named
