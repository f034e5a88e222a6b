"""What OpenAI-compatible servers understand: how each is asked for a sample of the whole distribution, and what of its
answer says which tokens it has drawn.

Servers fill in what a request leaves out from their own defaults or the model's `generation_config.json`, which often
cut the distribution (top-k 50 and the like). Every request therefore names all the samplers of its server.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import ConfigError
from ..data.texts import SAID, Texts
from .base import EngineError


@dataclass(frozen=True)
class Sampling:
    """temperature; max_tokens of a response; seed of this request."""

    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Answer:
    """What a server has drawn.

    response_ids: int64 [T].
    logp: float32 [T], its log-probs of them; None where it does not say.
    is_retokenized: the ids were made of a text, and are not as many as the server has drawn.
    """

    response_ids: np.ndarray
    logp: np.ndarray | None = None
    is_retokenized: bool = False


class Server(ABC):
    """A kind of server, by what it understands."""

    is_chat = False

    @abstractmethod
    def request(self, texts: Texts, prompt: np.ndarray, sampling: Sampling) -> dict[str, Any]:
        """Arguments of the client's `completions.create` (or, `is_chat`, `chat.completions.create`) for a prompt,
        int64 [P]. Raises ConfigError for a prompt that the server cannot be given."""

    @abstractmethod
    def read(self, texts: Texts, answer: dict[str, Any]) -> Answer:
        """What the server has drawn, of its answer as plain values. May raise EngineError, KeyError, TypeError."""


def _common(sampling: Sampling) -> dict[str, Any]:
    """What all servers understand."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "seed": sampling.seed,
    }


class VLLMServer(Server):
    """vLLM: token ids both ways. Log-probs are at the request's temperature where the server was started with
    `--logprobs-mode processed_logprobs`, else at temperature 1."""

    def request(self, texts: Texts, prompt: np.ndarray, sampling: Sampling) -> dict[str, Any]:
        extra = {
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(texts.eos_token_ids),
            "return_token_ids": True,
        }
        return {**_common(sampling), "prompt": prompt.tolist(), "logprobs": 0, "extra_body": extra}

    def read(self, texts: Texts, answer: dict[str, Any]) -> Answer:
        choice = answer["choices"][0]
        return _checked(choice["token_ids"], choice["logprobs"]["token_logprobs"])


class LlamaCppServer(Server):
    """llama.cpp's llama-server: token ids both ways. Log-probs are at temperature 1 whatever the request's is."""

    def request(self, texts: Texts, prompt: np.ndarray, sampling: Sampling) -> dict[str, Any]:
        extra = {"top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "samplers": ["temperature"]}
        return {**_common(sampling), "prompt": prompt.tolist(), "logprobs": 1, "extra_body": extra}

    def read(self, texts: Texts, answer: dict[str, Any]) -> Answer:
        drawn = answer["choices"][0]["logprobs"]["content"]
        return _checked([token["id"] for token in drawn], [token["logprob"] for token in drawn])


class CompletionsServer(Server):
    """Any other server with /v1/completions: token ids are sent, text comes back."""

    def request(self, texts: Texts, prompt: np.ndarray, sampling: Sampling) -> dict[str, Any]:
        return {**_common(sampling), "prompt": prompt.tolist()}

    def read(self, texts: Texts, answer: dict[str, Any]) -> Answer:
        choice = answer["choices"][0]
        return _retokenized(texts, choice["text"], choice["finish_reason"], answer.get("usage"))


class TransformersServer(CompletionsServer):
    """`transformers serve`: text both ways."""

    def request(self, texts: Texts, prompt: np.ndarray, sampling: Sampling) -> dict[str, Any]:
        # Replaces the model's own settings, so that whatever is not named here is transformers' default.
        generation = {
            "do_sample": True,
            "top_k": 0,
            "max_new_tokens": sampling.max_tokens,
            "eos_token_id": list(texts.eos_token_ids),
            "pad_token_id": texts.eos_token_ids[0] if texts.eos_token_ids else None,
        }
        extra = {"generation_config": json.dumps(generation)}
        return {**_common(sampling), "prompt": prompt_text(texts, prompt), "extra_body": extra}


class ChatServer(Server):
    """Chat completions alone: the prompt goes as a user's message, of which the server makes ids by its own template.
    For teachers, whose tokenizer is another one anyway. The template's keyword arguments go as vLLM, SGLang and
    llama.cpp take them."""

    is_chat = True

    def request(self, texts: Texts, prompt: np.ndarray, sampling: Sampling) -> dict[str, Any]:
        kwargs = texts.chat_template_kwargs
        return {
            **_common(sampling),
            "messages": [{"role": "user", "content": user_message(texts, prompt)}],
            **({"extra_body": {"chat_template_kwargs": kwargs}} if kwargs else {}),
        }

    def read(self, texts: Texts, answer: dict[str, Any]) -> Answer:
        choice = answer["choices"][0]
        return _retokenized(texts, choice["message"]["content"] or "", choice["finish_reason"])


SERVERS: dict[str, Server] = {
    "vllm": VLLMServer(),
    "llama.cpp": LlamaCppServer(),
    "completions": CompletionsServer(),
    "transformers": TransformersServer(),
    "chat": ChatServer(),
}


def prompt_text(texts: Texts, prompt: np.ndarray) -> str:
    """The text of which the policy's tokenizer, special tokens included, makes just these ids int64 [P].

    Raises ConfigError where there is none.
    """
    tokenizer = texts.tokenizer
    # A tokenizer that begins every text with a special token would otherwise put it there twice.
    for ids in (prompt, prompt[1:]):
        text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if tokenizer(text)["input_ids"] == prompt.tolist():
            return text
    raise ConfigError(
        f"engine.server: the prompt {tokenizer.decode(prompt.tolist())[:80]!r} does not come back from its text as the"
        " same tokens; a server that takes token ids is needed"
    )


def user_message(texts: Texts, prompt: np.ndarray) -> str:
    """The user's message that a prompt int64 [P] consists of. Raises ConfigError for any other prompt."""
    text = str(texts.tokenizer.decode(prompt.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if texts.tokenizer.chat_template is None:
        return text
    (frame,) = texts.encode([SAID])
    before, _, after = str(texts.tokenizer.decode(frame.tolist(), clean_up_tokenization_spaces=False)).partition(SAID)
    message = text.removeprefix(before).removesuffix(after)
    if len(message) != len(text) - len(before) - len(after) or not np.array_equal(texts.encode([message])[0], prompt):
        raise ConfigError(
            f"engine.server='chat' needs prompts that are one message of a user (env.layout='per_turn'), got {text!r}"
        )
    return message


def _checked(ids: Any, logp: Any) -> Answer:
    """Ids and log-probs as a server says them. Raises EngineError where they do not belong together."""
    answer = Answer(np.array(ids, dtype=np.int64), np.array(logp, dtype=np.float32))
    if not len(answer.response_ids) or answer.logp is None or answer.logp.shape != answer.response_ids.shape:
        raise EngineError(f"expected token ids with a log-prob for each, got ids {ids} and log-probs {logp}")
    return answer


def _retokenized(texts: Texts, text: str, finish_reason: str, usage: dict[str, Any] | None = None) -> Answer:
    """The ids of a text as the policy's tokenizer cuts it, with the end that the server has drawn but does not show."""
    (ids,) = texts.encode_responses([text])
    if finish_reason == "stop" or not len(ids):
        ids = np.append(ids, texts.eos_token_ids[:1]).astype(np.int64)
    if not len(ids):
        raise EngineError("expected a response, got an empty text, and the policy has no token for its end")
    drawn = (usage or {}).get("completion_tokens")
    return Answer(ids, is_retokenized=drawn is not None and drawn != len(ids))
