"""The policy: a transformers causal LM with its tokenizer, and the log-probs of its own responses."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..config import AdapterConfig, ConfigError, PolicyConfig
from ..data.batch import Batch
from ..data.texts import Texts
from .checks import check_attention_caps, check_attention_device, check_device, check_loaded
from .forward import PolicyModule
from .gradient_checkpointing import recompute_layers
from .loading import load_model, load_tokenizer, no_model
from .lora import add_adapter, base_path, has_adapter, is_adapter, load_adapter, merged_weights, save_adapter
from .processes import ALONE, Ranks, of_tokens
from .reproducible import align
from .sharing import copy_module, frozen_view

_VERSIONS = itertools.count()

Module = TypeVar("Module", bound=nn.Module)


class Policy(Texts):
    """A causal LM as the trainer sees it. Always in eval mode, so that its log-probs are a function of its weights.

    Args:
        model: any transformers causal LM.
        tokenizer: its tokenizer. Where that has a chat template, a prompt is one user message.
        packs: forward passes over a batch run without padding.
        fused: as `PolicyConfig.fused`.
        chat: a chat template is used where there is one.
        chat_template_kwargs: what else the template is given.

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
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, chat, chat_template_kwargs)
        align(model)
        self.model = model.eval()
        self.packs, self.fused = packs, fused
        self.version = next(_VERSIONS)
        self.rounds = False
        self.module = PolicyModule(self.model, packs, fused)
        self.cache_argument = _cache_argument(model)

    @classmethod
    def load(cls, path: str | Path, config: PolicyConfig, *, needs_head: bool = True) -> Policy:
        """A model folder written by `save` or by transformers; code in it is never run. An adapter's folder makes the
        base that it names with the adapter on it.

        needs_head: the output head is used, and its weights must be in the folder too.

        Raises ConfigError where there is no model, one whose weights are not all there, none that can do what the
        configuration asks of it, or not the adapter's base.
        """
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
            model_config = AutoConfig.from_pretrained(str(path), **options)
        except (OSError, ValueError) as error:
            raise no_model(str(path), config, error) from error
        check_attention_caps(model_config, config.attention)
        tokenizer = load_tokenizer(str(path), config)
        model = load_model(str(path), config, needs_head=needs_head)
        check_loaded(model, tokenizer, config)
        if config.gradient_checkpointing:
            recompute_layers(model)
        kwargs = config.chat_template_kwargs
        return cls(model.to(config.device), tokenizer, config.packs, config.fused, config.chat != "off", kwargs)

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
        return Policy(model, self.tokenizer, self.packs, self.fused, self.chat, self.chat_template_kwargs)

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
        """Tokens that end a response: those of the model's generation config, else the tokenizer's."""
        generation = getattr(self.model, "generation_config", None)
        ids = generation.eos_token_id if generation is not None else None
        if ids is None:
            return super().eos_token_ids
        return tuple(ids) if isinstance(ids, list) else (int(ids),)

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
