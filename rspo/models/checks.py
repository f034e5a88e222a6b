"""What a model and its tokenizer must be able to do, found out before the first rollout."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..config import ConfigError, PolicyConfig
from ..data.chat_templates import check_template_kwargs

FLASH = "flash_attention_2"


def check_device(config: PolicyConfig) -> None:
    """Raises ConfigError where this machine, or its PyTorch, does not have the device."""
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]  # CUDA's errors go on with advice on debugging
        raise ConfigError(f"policy.device={config.device!r} cannot be used here: {reason}") from error


def check_attention_device(config: PolicyConfig) -> None:
    """Raises ConfigError where flash attention is asked for and cannot run."""
    if config.attention != FLASH:
        return
    if torch.device(config.device).type == "cpu":
        raise ConfigError(f"policy.attention={FLASH!r} needs a GPU, got policy.device={config.device!r}")
    if find_spec("flash_attn") is None:
        raise ConfigError(f"policy.attention={FLASH!r} needs the package flash-attn (pip install 'rspo[flash]')")


def check_attention_caps(model_config: PretrainedConfig, attention: str) -> None:
    """Raises ConfigError for a model that caps its attention scores, of which "sdpa" knows nothing."""
    cap = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None and attention == "sdpa":
        raise ConfigError(
            f"policy.attention must be 'eager' or {FLASH!r} for a model of type {model_config.model_type!r}, which caps"
            f" its attention scores (attn_logit_softcapping={cap}), got 'sdpa'"
        )


def check_loaded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: PolicyConfig) -> None:
    """Raises ConfigError for a model without a head, a tokenizer with more tokens than the model has, or one without
    the chat template that is asked for or with one that does not read what it is to be given."""
    where = repr(config.path) if config.path is not None else "the model"
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{type(model).__name__} at {where} has no output embeddings: it is not a causal LM")
    known = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > known:
        raise ConfigError(f"the tokenizer at {where} has {len(tokenizer)} tokens, its model only {known}")
    if config.needs_template and tokenizer.chat_template is None:
        raise ConfigError(
            f"policy.chat='on', but the tokenizer at {where} has no chat template: take the instruct version of the"
            " model, put a chat_template.jinja in its folder, or set policy.chat='auto' for prompts as plain text"
        )
    check_template_kwargs(tokenizer, config.chat_template_kwargs, config.chat != "off")


def check_attention_dtype(config: PolicyConfig) -> None:
    """Raises ConfigError where flash attention is asked for in a dtype that it does not know."""
    if config.attention == FLASH and config.dtype == "float32":
        raise ConfigError(f"policy.attention={FLASH!r} needs policy.dtype 'bfloat16' or 'float16', got 'float32'")
