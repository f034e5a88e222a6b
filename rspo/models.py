"""The policy: a transformers causal LM with its tokenizer, and the log-probs of its own responses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rspo_kernels import token_logprobs

from .config import ConfigError, PolicyConfig
from .trajectory import Batch

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


class Policy:
    """A causal LM as the trainer sees it. Always in eval mode, so that its log-probs are a function of its weights.

    Args:
        model: any transformers causal LM.
        tokenizer: its tokenizer. Where that has a chat template, a prompt is one user message.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.cache_argument = _cache_argument(model)
        self._head_is_plain = _head_is_plain(model)

    @classmethod
    def load(cls, path: str | Path, config: PolicyConfig) -> Policy:
        """A model folder written by `save` or by transformers; code in it is never run. Raises ConfigError where there
        is no model."""
        if not config.allow_download and not Path(path).is_dir():
            raise ConfigError(
                f"policy.path={str(path)!r} is not a folder (names on a hub need policy.allow_download=true)"
            )
        options: dict[str, Any] = {"local_files_only": not config.allow_download, "trust_remote_code": False}
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), **options)
            model = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=getattr(torch, config.dtype), attn_implementation=config.attention, **options
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"no causal LM that transformers can load is at {str(path)!r}: {error}") from error
        return cls(model.to(config.device), tokenizer)

    def save(self, path: str | Path) -> None:
        """Write a folder that AutoModelForCausalLM and AutoTokenizer load (weights as safetensors)."""
        self.model.save_pretrained(str(path), safe_serialization=True)
        self.tokenizer.save_pretrained(str(path))

    def copy(self) -> Policy:
        """A policy with weights of its own; the tokenizer is shared."""
        return Policy(copy.deepcopy(self.model), self.tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return cast(torch.device, self.model.device)

    @property
    def num_parameters(self) -> int:
        """Weights in all."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        generation = getattr(self.model, "generation_config", None)
        ids = generation.eos_token_id if generation is not None else None
        ids = self.tokenizer.eos_token_id if ids is None else ids
        if ids is None:
            return ()
        return tuple(ids) if isinstance(ids, list) else (int(ids),)

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of prompts, int64 [P] each."""
        distinct = list(dict.fromkeys(prompts))
        has_template = self.tokenizer.chat_template is not None  # which then writes the special tokens
        texts = [self._as_message(prompt) for prompt in distinct] if has_template else distinct
        encoded = self._token_ids(texts, not has_template)
        ids = {prompt: np.array(row, dtype=np.int64) for prompt, row in zip(distinct, encoded, strict=True)}
        return [ids[prompt] for prompt in prompts]

    def _token_ids(self, texts: list[str], special: bool) -> list[list[int]]:
        """Token ids of texts; `special`: with the tokens that the tokenizer puts around a text."""
        if self.tokenizer.is_fast:
            # As the call below without what nobody asks for (offsets): half the time, which is seen in small models.
            backend = self.tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
        return self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False)["input_ids"]

    def _as_message(self, prompt: str) -> str:
        message = [{"role": "user", "content": prompt}]
        return self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)

    def decode(self, responses: Sequence[np.ndarray]) -> list[str]:
        """Texts of responses, without special tokens."""
        distinct = {row.tobytes(): row.tolist() for row in responses}
        decoded = self.tokenizer.batch_decode(list(distinct.values()), skip_special_tokens=True)
        texts = dict(zip(distinct, decoded, strict=True))
        return [texts[row.tobytes()] for row in responses]

    def logits(self, input_ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Logits [N, V] at the positions (rows[n], columns[n]) of right-padded input_ids [R, L].

        The model's body runs once over the distinct rows (members of a group often are in the same situation and do
        the same: half the rows of a trained household agent), and only the asked-for positions go through its head.
        """
        distinct, row_of = torch.unique(input_ids, dim=0, return_inverse=True)
        rows = row_of[rows]
        if not self._head_is_plain:
            return self.model(input_ids=distinct, use_cache=False).logits[rows, columns]
        hidden = self.model.base_model(input_ids=distinct, use_cache=False).last_hidden_state
        flat = hidden.reshape(-1, hidden.shape[-1])
        return self.model.get_output_embeddings()(flat.index_select(0, rows * input_ids.shape[1] + columns))

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the response tokens, float32 [N] each, with a graph where grad is enabled."""
        logits = self.logits(batch.input_ids, batch.token_row, batch.token_column)
        both = token_logprobs(logits, batch.targets, temperature=temperature, with_entropy=True)
        return cast(tuple[Tensor, Tensor], both)


@torch.no_grad()
def score(policy: Policy, batch: Batch, temperature: float, max_tokens: int) -> Tensor:
    """Log-probs of the response tokens without a graph, float32 [N], in micro-batches of `max_tokens`."""
    result = torch.empty(batch.num_tokens, dtype=torch.float32, device=batch.targets.device)
    for rows in batch.micro_batches(max_tokens):
        chosen = torch.isin(batch.token_row, rows)
        result[chosen] = policy.logprobs(batch.select(rows), temperature)[0]
    return result


def tiny_policy(vocabulary: Sequence[str], seed: int, config: PolicyConfig, max_length: int = 128) -> Policy:
    """A fresh model of two layers and width 64 (85 thousand weights) over a vocabulary of words.

    Of type Llama, which is Qwen2 without biases: transformers 5 gives every Qwen2 folder Qwen2's own tokenizer,
    whatever tokenizer was saved in it.
    """
    words = [PAD, EOS, UNK, *(word for word in vocabulary if word not in (PAD, EOS, UNK))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    shape = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_length,
        initializer_range=0.1,  # transformers' 0.02 is meant for widths of thousands; cloning then takes twice as long
        tie_word_embeddings=True,
        pad_token_id=words.index(PAD),
        bos_token_id=None,
        eos_token_id=words.index(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(shape, attn_implementation=config.attention)
    return Policy(model.to(device=config.device, dtype=getattr(torch, config.dtype)), tokenizer)


def _cache_argument(model: nn.Module) -> str:
    """The name under which the model's forward takes a KV cache; transformers renamed it."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@torch.inference_mode()
def _head_is_plain(model: PreTrainedModel) -> bool:
    """Whether logits are just the output embeddings of the last hidden state: some models scale or cap them.

    Bit for bit, because a cap changes small logits by little; a wrong "no" only costs time.
    """
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    probe = torch.arange(8, device=model.device).unsqueeze(0)
    hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
    expected = model(input_ids=probe, use_cache=False).logits
    return torch.equal(head(hidden).float(), expected.float())
