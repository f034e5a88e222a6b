"""A causal LM and its tokenizer as transformers reads them.

What is wrong with their files is a ConfigError; transformers itself goes on with random weights, or a tokenizer without
words, where files lack them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..config import ConfigError, PolicyConfig
from ..config.storage import reading
from .shapes import loading_reason

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab*", "merges.txt", "tekken.json", "*.tiktoken")
"""Patterns of the files that hold a tokenizer's words."""
SHOWN = 3
"""Weights that a message names."""


def load_tokenizer(path: str, config: PolicyConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder or name. Raises ConfigError where there is none."""
    what = f"the tokenizer of the model at {path!r} cannot be loaded"
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **_options(config))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{what}: {error}") from error
    is_from_files = bool(tokenizer.vocab_files_names)  # not so where bytes are the tokens
    if is_from_files and Path(path).is_dir() and not any(any(Path(path).glob(name)) for name in TOKENIZER_FILES):
        raise ConfigError(f"{what}: none of {', '.join(TOKENIZER_FILES)} is in that folder")
    return tokenizer


def load_model(path: str, config: PolicyConfig, *, needs_head: bool = True) -> PreTrainedModel:
    """The causal LM of a folder or name, on the CPU.

    needs_head: weights of the output head must be there too.

    Raises ConfigError where there is none, and for weights that its files lack or have in other shapes.
    """
    return _load(path, config, needs_head, dtype=getattr(torch, config.dtype), attn_implementation=config.attention)


def check_weights(path: Path, config: PolicyConfig) -> None:
    """Raises ConfigError for a local model whose files lack weights or have them in other shapes, of which names and
    shapes are read only. Needs accelerate, without which nothing is checked."""
    if find_spec("accelerate") is not None:
        _load(str(path), config, True, device_map="meta", attn_implementation="eager")


def _load(path: str, config: PolicyConfig, needs_head: bool, **settings: Any) -> PreTrainedModel:
    with reading(f"the weights of the model in {path}"):
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                path, output_loading_info=True, ignore_mismatched_sizes=True, **settings, **_options(config)
            )
        except (OSError, ValueError) as error:
            raise no_model(path, config, error) from error
    where = f"policy.path={path!r}" if path == config.path else f"the model in {path!r}"
    _check_complete(model, info, where, needs_head)
    return model


def no_model(path: str, config: PolicyConfig, error: Exception) -> ConfigError:
    """What to raise where transformers does not load a model."""
    return ConfigError(
        f"no causal LM that transformers can load is at {path!r} (with policy.attention={config.attention!r}):"
        f" {loading_reason(error)}"
    )


def _options(config: PolicyConfig) -> dict[str, Any]:
    return {"local_files_only": not config.allow_download, "trust_remote_code": False}


def _check_complete(model: PreTrainedModel, info: Mapping[str, Any], where: str, needs_head: bool) -> None:
    """Raises ConfigError for the weights in transformers' report on what it has loaded."""
    needed = model if needs_head else model.base_model
    weights = {id(weight) for weight in needed.parameters()}
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):  # one weight has several names where it is tied
        if id(weight) in weights:
            names.setdefault(id(weight), []).append(name)
    missing = [group[0] for group in names.values() if all(name in info["missing_keys"] for name in group)]
    if missing:
        raise ConfigError(
            f"{where} lacks weights of {type(model).__name__}, which would be random: {_listed(missing)}; is it a"
            " causal LM that was saved whole, with its output head?"
        )
    known = {name for group in names.values() for name in group}
    others = sorted(mismatch for mismatch in info["mismatched_keys"] if mismatch[0] in known)
    if others:
        shapes = [f"{name} is {list(has)}, expected {list(wanted)}" for name, has, wanted in others]
        raise ConfigError(f"{where} has weights of other shapes than its config.json says: {_listed(shapes)}")


def _listed(things: list[str]) -> str:
    more = f" and {len(things) - SHOWN} more" if len(things) > SHOWN else ""
    return ", ".join(things[:SHOWN]) + more
