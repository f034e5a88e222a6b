"""Whether a start policy can be rolled out and trained as configured, found out before the first rollout."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PretrainedConfig

from ..config import Config, ConfigError
from ..data.batch import Batch
from ..models.checks import check_attention_dtype
from ..models.forward import run_body
from ..models.heads import body_of
from ..models.policy import Policy


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


def check_length(config: Config, done: int) -> None:
    """Raises ConfigError where a resumed run has made more updates already than it is to have in all."""
    if done > config.run.steps:
        raise ConfigError(f"run.steps must be at least the {done} updates already made, got {config.run.steps}")
