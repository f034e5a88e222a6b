"""Generation with the training model itself: a plain decoding loop over a transformers model with a KV cache.

Prompts are padded on the left, with positions counted from each prompt's first token, so that one row's padding does
not change its log-probs. A token is drawn from the whole vocabulary at the given temperature, and its log-prob is
taken by the same function as in training (`rspo_kernels.token_logprobs`): before an update the ratio is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rspo_kernels import token_logprobs

from ..config import RolloutConfig
from ..models.policy import Policy
from .base import Backend, Generation, PolicyEngine, check_prompts


class TransformersEngine(PolicyEngine):
    """An engine on a policy's own weights. Of the configuration it takes the batch size too."""

    def __init__(
        self, policy: Policy, config: RolloutConfig, generator: torch.Generator, temperature: float | None = None
    ) -> None:
        super().__init__(policy, config, generator, temperature)
        self._eos = torch.tensor(policy.eos_token_ids, dtype=torch.int64, device=policy.device)

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Generation]:
        """One response for each prompt. Raises ConfigError for a prompt that is empty or too long."""
        check_prompts(prompts, self.policy, self.config)
        generations: list[Generation] = []
        for start in range(0, len(prompts), self.config.max_batch):
            generations += self._generate_batch(list(prompts[start : start + self.config.max_batch]))
        texts = self.policy.decode([generation.response_ids for generation in generations])
        for generation, text in zip(generations, texts, strict=True):
            generation.text = text
        return generations

    @torch.inference_mode()
    def _generate_batch(self, prompts: list[np.ndarray]) -> list[Generation]:
        # Equal prompts, as of a group's first turn, are read once.
        distinct = {prompt.tobytes(): prompt for prompt in prompts}
        place = {key: i for i, key in enumerate(distinct)}
        input_ids, mask = self._pad_left(list(distinct.values()))
        prompt_of = torch.tensor([place[prompt.tobytes()] for prompt in prompts], device=input_ids.device)

        n, limit = len(prompts), self.config.max_response_tokens
        tokens = torch.zeros((n, limit), dtype=torch.int64, device=input_ids.device)
        logp = torch.zeros((n, limit), dtype=torch.float32, device=input_ids.device)
        lengths = torch.zeros(n, dtype=torch.int64, device=input_ids.device)

        cache = DynamicCache(config=self.policy.model.config)
        logits = self._forward(input_ids, mask, cache)[prompt_of]
        cache.batch_select_indices(prompt_of)
        mask = None if mask is None else mask[prompt_of]
        rows = torch.arange(n, device=input_ids.device)  # those still being written
        for step in range(limit):
            chosen = self._sample(logits)
            tokens[rows, step] = chosen
            logp[rows, step] = cast(Tensor, token_logprobs(logits, chosen, temperature=self.temperature))
            lengths[rows] = step + 1
            unfinished = (~torch.isin(chosen, self._eos)).nonzero().squeeze(-1)
            if step + 1 == limit or len(unfinished) == 0:
                break
            if len(unfinished) < len(rows):
                cache.batch_select_indices(unfinished)
                rows, chosen = rows[unfinished], chosen[unfinished]
                mask = None if mask is None else mask[unfinished]
            mask = None if mask is None else torch.cat([mask, mask.new_ones((len(rows), 1))], dim=1)
            logits = self._forward(chosen.unsqueeze(-1), mask, cache)

        all_tokens, all_logp, all_lengths = tokens.cpu().numpy(), logp.cpu().numpy(), lengths.tolist()
        return [Generation("", all_tokens[i, : all_lengths[i]], all_logp[i, : all_lengths[i]]) for i in range(n)]

    def _pad_left(self, prompts: list[np.ndarray]) -> tuple[Tensor, Tensor | None]:
        """input_ids int64 [n, P] and mask int64 [n, P], the latter None where nothing is padded."""
        lengths = np.array([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        real = np.arange(width) >= width - lengths[:, None]
        input_ids = np.zeros((len(prompts), width), dtype=np.int64)
        input_ids[real] = np.concatenate(prompts)
        device = self.policy.device
        mask = None if real.all() else torch.from_numpy(real.astype(np.int64)).to(device)
        return torch.from_numpy(input_ids).to(device), mask

    def _forward(self, input_ids: Tensor, mask: Tensor | None, cache: DynamicCache) -> Tensor:
        """Logits [rows, V] of the next token."""
        width = input_ids.shape[1]
        # Without padding the model counts positions itself, and needs no mask of its own either.
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -width:]
        output = self.policy.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.policy.cache_argument: cache},
        )
        return output.logits[:, -1]

    def _sample(self, logits: Tensor) -> Tensor:
        """One token per row, int64 [rows]."""
        probabilities = torch.softmax(logits.float() / self.temperature, dim=-1)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(-1)


class TransformersBackend(Backend):
    """Engines on the policies themselves: nothing is held, nothing has to be brought up to date."""

    @contextmanager
    def engine(
        self, policy: Policy, config: RolloutConfig, generator: torch.Generator, temperature: float | None = None
    ) -> Iterator[TransformersEngine]:
        with policy.whole():
            yield TransformersEngine(policy, config, generator, temperature)


LOCAL = TransformersBackend()
"""Generation with the training model itself."""
