"""Texts of environments never become control tokens: a page with `<|im_end|>` in it must not end the user's message.

A tokenizer looks for its special tokens in any text that it is given, and a chat template gives it one text of frame
and messages together. So the texts are changed before: a space behind the first character of what would be read as a
control token, `< |im_end|>`. All other texts stay as they are. That works alike for every tokenizer and template, and
for a server that is sent the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..envs.base import PromptContext

_CONTROL_LIKE = re.compile(r"<\|[^<>\s]*\|>|</?(think|thinking|reasoning|tool\w*|function\w*)>|\[/?[A-Z_]+\]")
"""Added tokens that steer a model although its tokenizer does not call them special. Others stand for ordinary text:
runs of white space, tags of HTML."""
_USUAL = re.compile(
    r"<\|[^<>\s|]*\|>|<｜[^<>\s｜]*｜>|</?(s|bos|eos|pad|unk|mask|think|thinking|reasoning|tool\w*|function\w*)>"
    r"|</?(start|end)_of_\w+>|\[/?(INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL\w*)\]|<</?SYS>>"
)
"""What the tokenizers of today's models read as control tokens, for where the tokenizer is not at hand."""


class ControlTokens:
    """The control tokens of a tokenizer.

    special: what it calls special.  all: these, and added tokens that steer the model like `<think>`, `<tool_call>`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in tokenizer.all_special_tokens} | {t.content for t in added if t.special}
        template = str(tokenizer.chat_template or "")
        steering = {
            token.content
            for token in added
            if _CONTROL_LIKE.fullmatch(token.content) or (token.content.strip() and token.content in template)
        }
        # A single character, or white space, cannot be told from ordinary text.
        self.special = _any_of(text for text in special if len(text) > 1 and text.strip())
        self.all = _any_of(text for text in special | steering if len(text) > 1 and text.strip())
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        # Only these are looked for in what a normalizer has made of a text.
        self._normalizer = backend.normalizer if backend and any(t.normalized for t in added) else None

    def broken_in_message(self, text: str) -> str:
        """A whole message, which may tell the model to answer in tags like `<think>`: without special tokens."""
        return self._broken(text, self.special)

    def broken_in_context(self, context: PromptContext) -> PromptContext:
        """What the environment says, without control tokens of any kind."""

        def broken(text: str) -> str:
            return self._broken(text, self.all)

        return replace(
            context,
            task=broken(context.task),
            history=tuple((broken(observation), broken(action)) for observation, action in context.history),
            observation=broken(context.observation),
            admissible_actions=tuple(map(broken, context.admissible_actions)),
        )

    def _broken(self, text: str, tokens: re.Pattern[str] | None) -> str:
        if tokens is None:
            return text
        text = _broken(text, tokens)
        if self._normalizer is not None and tokens.search(normalized := self._normalizer.normalize_str(text)):
            return _broken(normalized, tokens)
        return text


def without_usual_control_tokens(text: str) -> str:
    """A text in which what the tokenizers of today's models read as control tokens is broken up, for where the
    tokenizer is not at hand."""
    return _broken(text, _USUAL)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    found = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None


def _broken(text: str, tokens: re.Pattern[str]) -> str:
    """With a space behind the first character of each token; what is then a token again is broken up too."""
    while tokens.search(text):
        text = tokens.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
    return text
