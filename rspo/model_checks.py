"""What a model and its tokenizer must be able to do, found out before the first rollout."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .batch import Batch
from .chat_templates import check_template_kwargs
from .heads import body_of
from .policy_module import run_body
from .sections import ConfigError, PolicyConfig

if TYPE_CHECKING:
    from .config import Config
    from .models import Policy

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


def check_run(policy: Policy, config: Config) -> None:
    """Raises ConfigError where the start policy cannot be rolled out and trained as configured; warns where its
    positions may not suffice, or where RSPO's settings leave nothing to replay."""
    if config.without_replay:
        warnings.warn(config.without_replay, stacklevel=2)
    check_attention_dtype(config.policy)
    check_ends(policy.eos_token_ids, config)
    check_positions(policy.model.config, config)
    if policy.packs:
        _check_packing(policy)


def check_attention_dtype(config: PolicyConfig) -> None:
    """Raises ConfigError where flash attention is asked for in a dtype that it does not know."""
    if config.attention == FLASH and config.dtype == "float32":
        raise ConfigError(f"policy.attention={FLASH!r} needs policy.dtype 'bfloat16' or 'float16', got 'float32'")


def check_ends(eos_token_ids: Sequence[int], config: Config) -> None:
    """Raises ConfigError where no token ends a response."""
    if not eos_token_ids:
        raise ConfigError(
            f"nothing would end a response: neither the tokenizer at {config.policy.path!r} nor the model's generation"
            " config has an end-of-sequence token; set eos_token in tokenizer_config.json"
        )


def check_positions(model_config: PretrainedConfig, config: Config) -> None:
    """Raises ConfigError, or warns, where prompt and response may be longer than a model of this configuration reads: a
    table of positions ends in an error, rotary ones go on into what the model has never seen."""
    text = model_config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    needed = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if limit is None or needed <= limit:
        return
    message = (
        f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and"
        f" rollout.max_response_tokens={config.rollout.max_response_tokens} allow {needed} tokens, the model has"
        f" {limit} positions"
    )
    if getattr(text, "rope_parameters", None) is None:
        raise ConfigError(message)
    warnings.warn(message, stacklevel=2)


@torch.inference_mode()
def _check_packing(policy: Policy) -> None:
    """Rows that are packed must not see each other: not every model takes positions that begin anew for that."""
    vocab_size = policy.model.get_input_embeddings().weight.shape[0]
    second = np.arange(6) % vocab_size
    seen = []
    for shift in (0, 7):
        first = (np.arange(5) + shift) % vocab_size
        batch = Batch.from_prompts([first, second]).to(policy.device)
        seen.append(run_body(body_of(policy.model), batch, packs=True)[1])  # the state after the second row
    one, other = seen
    if float((one - other).abs().max()) > max(4 * torch.finfo(one.dtype).eps, 1e-4) * float(one.abs().max()):
        raise ConfigError(
            f"policy.packing must be 'off' for {type(policy.model).__name__} with"
            f" policy.attention={policy.model.config._attn_implementation!r}: packed rows would see each other"
        )
