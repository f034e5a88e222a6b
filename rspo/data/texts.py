"""What a policy reads and writes: prompts as token ids, and the texts of its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..config import ConfigError
from .chat_templates import check_template_kwargs
from .control_tokens import ControlTokens

SAID = "(a response)"
"""Stands for a response where a chat template is asked what follows one."""


class Texts:
    """A tokenizer as prompts and responses need it. `rspo.models.policy.Policy` adds the model.

    Args:
        tokenizer: any of transformers'. Where it has a chat template, a prompt is one user message.
        chat: a chat template is used where there is one.
        chat_template_kwargs: what else the template is given.

    Raises ConfigError for keyword arguments that no template reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        check_template_kwargs(tokenizer, self.chat_template_kwargs, chat)

    @cached_property
    def control(self) -> ControlTokens:
        """What no text of an environment becomes."""
        return ControlTokens(self.tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: the tokenizer's end of sequence."""
        return () if self.tokenizer.eos_token_id is None else (int(self.tokenizer.eos_token_id),)

    @property
    def _has_template(self) -> bool:
        return self.chat and self.tokenizer.chat_template is not None

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of prompts, int64 [P] each; with a chat template as the first message of a user. No part of a
        prompt becomes a special token."""
        prompts = [self.control.broken_in_message(prompt) for prompt in prompts]
        if not self._has_template:
            return self._ids(prompts, prompts, add_special_tokens=True)
        return self._ids(prompts, [self._chat({"role": "user", "content": prompt}) for prompt in prompts])

    def encode_replies(self, replies: Sequence[str]) -> list[np.ndarray]:
        """Token ids of what follows a response when a user answers it, int64 [P] each: with a chat template the
        response's end, the user's message and the opening of the next response.

        Raises ConfigError where what follows a response cannot be told from the template.
        """
        replies = [self.control.broken_in_message(reply) for reply in replies]
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
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
        )

    def decode(self, responses: Sequence[np.ndarray]) -> list[str]:
        """Texts of responses, without special tokens."""
        distinct = {row.tobytes(): row.tolist() for row in responses}
        decoded = self.tokenizer.batch_decode(list(distinct.values()), skip_special_tokens=True)
        texts = dict(zip(distinct, decoded, strict=True))
        return [texts[row.tobytes()] for row in responses]
