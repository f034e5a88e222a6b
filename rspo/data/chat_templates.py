"""Keyword arguments of chat templates, and which of them a template reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import RESERVED_TEMPLATE_NAMES, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTING = "policy.chat_template_kwargs"
GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""transformers' own addition to Jinja; it marks responses and reads nothing."""


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], chat: bool) -> None:
    """Raises ConfigError for keyword arguments that a tokenizer's chat template would not read.

    chat: the template is used.
    """
    if not kwargs:
        return
    given = f"{SETTING}={dict(kwargs)}"
    if not chat:
        raise ConfigError(f"{given} needs prompts in a chat template, got policy.chat='off'")
    where = f"of {tokenizer.name_or_path!r}" if tokenizer.name_or_path else "of the model"
    if tokenizer.chat_template is None:
        raise ConfigError(f"{given} needs a chat template, and the tokenizer {where} has none")
    read = template_names(tokenizer.get_chat_template())
    unknown = sorted(set(kwargs) - read)
    if unknown:
        raise ConfigError(
            f"{SETTING}: the chat template {where} does not read {', '.join(map(repr, unknown))}, which would have no"
            f" effect; what may be given is {', '.join(map(repr, sorted(read))) or 'nothing'}"
        )


def template_names(template: str) -> set[str]:
    """Names that a chat template reads of its caller, without those that transformers fills in. Raises ConfigError for
    text that is no template."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    # Only parsed, never run.
    environment = Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(GENERATION_TAG.sub("", template))
    except TemplateSyntaxError as error:
        raise ConfigError(f"{SETTING}: the model's chat template cannot be read: {error}") from error
    return meta.find_undeclared_variables(parsed) - set(environment.globals) - set(RESERVED_TEMPLATE_NAMES)
