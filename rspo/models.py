"""The policy: a transformers causal LM with its tokenizer, and the log-probs of its own responses."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .batch import Batch
from .config import AdapterConfig, ConfigError, PolicyConfig
from .distributed import ALONE, Ranks, of_tokens
from .gradient_checkpointing import recompute_layers
from .lora import add_adapter, base_path, has_adapter, is_adapter, load_adapter, merged_weights, save_adapter
from .model_checks import check_attention_caps, check_attention_device, check_device, check_loaded
from .model_shapes import loading_reason
from .policy_module import PolicyModule
from .sharing import copy_module, frozen_view

_VERSIONS = itertools.count()
SAID = "(a response)"
"""Stands for a response where a chat template is asked what follows one."""


Module = TypeVar("Module", bound=nn.Module)


class Policy:
    """A causal LM as the trainer sees it. Always in eval mode, so that its log-probs are a function of its weights.

    Args:
        model: any transformers causal LM.
        tokenizer: its tokenizer. Where that has a chat template, a prompt is one user message.
        packs: forward passes over a batch run without padding.
        fused: as `PolicyConfig.fused`.
        chat: a chat template is used where there is one.

    `rounds`: float32 weights are rounded to compute with them, and in files.
    `module` is the model with all that training computes of it; forward passes over batches go through it alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        packs: bool = False,
        fused: str = "auto",
        chat: bool = True,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.packs, self.fused, self.chat = packs, fused, chat
        self.version = next(_VERSIONS)
        self.rounds = False
        self.module = PolicyModule(self.model, packs, fused)
        self.cache_argument = _cache_argument(model)

    @classmethod
    def load(cls, path: str | Path, config: PolicyConfig) -> Policy:
        """A model folder written by `save` or by transformers; code in it is never run. An adapter's folder makes the
        base that it names with the adapter on it. Raises ConfigError where there is no model, none that can do what
        the configuration asks of it, or not the adapter's base."""
        if is_adapter(path):
            return cls._load_base(Path(path), config).with_adapter_of(path)
        if not config.allow_download and not Path(path).is_dir():
            raise ConfigError(
                f"policy.path={str(path)!r} is not a folder (names on a hub need policy.allow_download=true)"
            )
        check_attention_device(config)
        check_device(config)
        options: dict[str, Any] = {"local_files_only": not config.allow_download, "trust_remote_code": False}
        try:
            check_attention_caps(AutoConfig.from_pretrained(str(path), **options), config.attention)
            tokenizer = AutoTokenizer.from_pretrained(str(path), **options)
            model = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=getattr(torch, config.dtype), attn_implementation=config.attention, **options
            )
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no causal LM that transformers can load is at {str(path)!r} (with"
                f" policy.attention={config.attention!r}): {loading_reason(error)}"
            ) from error
        check_loaded(model, tokenizer, config)
        if config.gradient_checkpointing:
            recompute_layers(model)
        return cls(model.to(config.device), tokenizer, config.packs, config.fused, config.chat != "off")

    @classmethod
    def _load_base(cls, adapter: Path, config: PolicyConfig) -> Policy:
        try:
            return cls.load(base_path(adapter), config)
        except ConfigError as error:
            raise ConfigError(f"the base of the LoRA adapter in {adapter} cannot be loaded: {error}") from error

    def save(self, path: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write a folder that AutoModelForCausalLM and AutoTokenizer load (weights as safetensors); of a base with an
        adapter only the adapter, as peft writes it.

        weights: `gathered_weights`.
        """
        if has_adapter(self.model):
            save_adapter(self.model, Path(path))
        else:
            self.model.save_pretrained(str(path), safe_serialization=True)
        self.tokenizer.save_pretrained(str(path))

    def save_whole(self, path: str | Path) -> None:
        """As `save`, but an adapter is merged into its base, which needs no peft to be loaded."""
        self.model.save_pretrained(str(path), state_dict=merged_weights(self.model), safe_serialization=True)
        self.tokenizer.save_pretrained(str(path))

    def gathered_weights(self) -> dict[str, Tensor] | None:
        """What `save` needs of all processes where each has a share of the weights only: for all of them at once."""
        return None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While the block runs, this process can run the model by itself, to generate. Sharded weights need it."""
        yield

    def copy_body(self) -> nn.Module:
        """The model without its head, with trained weights of its own; a frozen base is shared."""
        return copy_module(self.model.base_model)

    def place(self, module: Module) -> Module:
        """A module that is trained beside the model, on its device; it is float32."""
        return module.to(self.device)

    def copy(self) -> Policy:
        """A policy with trained weights of its own; a frozen base and the tokenizer are shared."""
        return self._with(copy_module(self.model))

    def adapted(self, settings: AdapterConfig, seed: int) -> Policy:
        """A fresh LoRA adapter over this policy's weights, which it shares and never changes. Raises ConfigError for
        targets that the model does not have."""
        model = frozen_view(self.model)
        add_adapter(model, settings, seed)
        return self._with(model)

    def with_adapter_of(self, path: str | Path) -> Policy:
        """A saved LoRA adapter over this policy's weights, which it shares and never changes. Raises ConfigError where
        this is not the adapter's base."""
        model = frozen_view(self.model)
        load_adapter(model, Path(path))
        return self._with(model)

    def _with(self, model: PreTrainedModel) -> Policy:
        """A policy like this one, with another model."""
        return Policy(model, self.tokenizer, self.packs, self.fused, self.chat)

    def weights_changed(self) -> None:
        """To be called after the weights have changed: no other weights in this process have the new `version`, so that
        engines see whether they hold these."""
        self.version = next(_VERSIONS)

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

    @property
    def _has_template(self) -> bool:
        return self.chat and self.tokenizer.chat_template is not None

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of prompts, int64 [P] each; with a chat template as the first message of a user."""
        if not self._has_template:
            return self._ids(prompts, prompts, add_special_tokens=True)
        return self._ids(prompts, [self._chat({"role": "user", "content": prompt}) for prompt in prompts])

    def encode_replies(self, replies: Sequence[str]) -> list[np.ndarray]:
        """Token ids of what follows a response when a user answers it, int64 [P] each: with a chat template the
        response's end, the user's message and the opening of the next response.

        Raises ConfigError where what follows a response cannot be told from the template.
        """
        if not self._has_template:
            return self._ids(replies, replies)
        texts = []
        for reply in replies:
            user, said = {"role": "user", "content": "(a prompt)"}, {"role": "assistant", "content": SAID}
            _, found, following = self._chat(user, said, {"role": "user", "content": reply}).partition(SAID)
            if not found:
                raise ConfigError(
                    f"the chat template of {self.tokenizer.name_or_path!r} must repeat earlier responses as they are,"
                    f" so that a conversation can go on after one; {SAID!r} is not in what it makes"
                )
            texts.append(following)
        return self._ids(replies, texts)

    def encode_responses(self, responses: Sequence[str]) -> list[np.ndarray]:
        """Token ids of responses as a model writes them, int64 [T] each: nothing before or after the text."""
        return self._ids(responses, responses)

    def _ids(self, keys: Sequence[str], texts: Sequence[str], add_special_tokens: bool = False) -> list[np.ndarray]:
        """Token ids of texts, each distinct key's once: members of a group often see the same."""
        distinct = dict(zip(keys, texts, strict=True))
        if not distinct:
            return []
        encoded = self._token_ids(list(distinct.values()), add_special_tokens)
        ids = {key: np.array(row, dtype=np.int64) for key, row in zip(distinct, encoded, strict=True)}
        return [ids[key] for key in keys]

    def _token_ids(self, texts: list[str], special: bool) -> list[list[int]]:
        """Token ids of texts; `special`: with the tokens that the tokenizer puts around a text."""
        if self.tokenizer.is_fast:
            # As the call below without what nobody asks for (offsets): half the time, which is seen in small models.
            backend = self.tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
        # verbose warns of texts beyond the tokenizer's own limit; engines and reward models see to lengths.
        encoded = self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]

    def _chat(self, *messages: dict[str, str]) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    def decode(self, responses: Sequence[np.ndarray]) -> list[str]:
        """Texts of responses, without special tokens."""
        distinct = {row.tobytes(): row.tolist() for row in responses}
        decoded = self.tokenizer.batch_decode(list(distinct.values()), skip_special_tokens=True)
        texts = dict(zip(distinct, decoded, strict=True))
        return [texts[row.tobytes()] for row in responses]

    def logits_and_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits [N, V] that predict the response tokens, and the last hidden states [N, H] they are made of.

        Only the asked-for positions go through the model's head.
        """
        return cast(
            tuple[Tensor, Tensor | None],
            self.module(batch, lambda predictions: (predictions.logits(), predictions.hidden), with_hidden=True),
        )

    def hidden(self, batch: Batch) -> Tensor:
        """Last hidden states [N, H] at the positions that predict the response tokens."""
        return cast(Tensor, self.module(batch, lambda predictions: predictions.hidden, with_hidden=True))

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the response tokens, float32 [N] each, with a graph where grad is enabled."""
        return cast(tuple[Tensor, Tensor], self.module(batch, lambda predictions: predictions.logprobs(temperature)))


def score(policy: Policy, batch: Batch, temperature: float, max_tokens: int, ranks: Ranks = ALONE) -> Tensor:
    """Log-probs of the response tokens without a graph, float32 [N], in micro-batches of `max_tokens`."""
    return of_tokens(batch, max_tokens, policy.packs, lambda part: policy.logprobs(part, temperature)[0], ranks)


def _cache_argument(model: nn.Module) -> str:
    """The name under which the model's forward takes a KV cache; transformers renamed it."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
