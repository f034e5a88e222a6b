"""Generation by an OpenAI-compatible server: one request for each prompt, many at once.

What each kind of server understands is in `servers`, how it gets weights in `weight_push`. A server's log-probs are
only compared: those that training needs are taken from training forward passes (`Config.rescores`). The seeds of
requests follow from the run's seed; whether the same seed gives the same response is up to the server.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config import Config, ConfigError, EngineConfig, RolloutConfig
from ..models.policy import Policy
from .base import Backend, EngineError, Generation, PolicyEngine, check_prompts
from .servers import SERVERS, Answer, Sampling
from .weight_push import NEEDS, PUSHES, WeightPush

if TYPE_CHECKING:
    from openai import OpenAI

MISUNDERSTOOD = (400, 404, 405, 415, 422)
"""Statuses by which a server says that it does not know a path, or does not understand what it was sent."""
RETOKENIZED = 0.02
"""Share of responses cut into other tokens than the server's beyond which there is a warning."""


class OpenAIBackend(Backend):
    """A server and, where it can be given weights, whose it holds.

    Args:
        config: section `engine` says which server.
        folder: of the run that trains; None: nothing is trained.

    Raises ConfigError where nothing answers, the model is not served, or training could not bring its weights there.
    """

    def __init__(self, config: Config, folder: Path | None = None) -> None:
        settings = config.engine
        if folder is not None and settings.push_weights == "off":
            raise ConfigError(
                "engine.push_weights must be 'vllm' or 'sglang' for training with engine.name='openai': the server must"
                " have the weights of the agent that acts; got 'off', with which `rspo eval` and `rspo collect` work"
            )
        self.settings = settings
        self.client = _client(settings)
        with ExitStack() as failing:
            failing.callback(self.client.close)
            self.model = _served_model(self.client, settings)
            self.weights: WeightPush | None = None
            if settings.push_weights != "off":
                self.weights = WeightPush(partial(PUSHES[settings.push_weights], self._post), settings, folder)
            failing.pop_all()

    @contextmanager
    def engine(
        self, policy: Policy, config: RolloutConfig, generator: torch.Generator, temperature: float | None = None
    ) -> Iterator[OpenAIEngine]:
        if self.weights is not None:
            self.weights.push(policy)
        engine = OpenAIEngine(self, policy, config, generator, temperature)
        yield engine
        share = engine.retokenized / max(engine.answers, 1)
        if share > RETOKENIZED:
            warnings.warn(
                f"{share:.0%} of the responses of a rollout have another number of tokens than the server has drawn:"
                " what is trained on is their text, cut anew",
                stacklevel=3,
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """A completion as plain values. Raises EngineError where the server gives none after all tries."""
        server = self.settings.server
        kind = self.client.chat.completions if SERVERS[server].is_chat else self.client.completions
        others = ", ".join(repr(name) for name in SERVERS if name != server)
        about = f"it was asked as engine.server={server!r} is; the other kinds are {others}"
        answer = self._tried(lambda: kind.create(model=self.model, **request), about)
        if not hasattr(answer, "model_dump"):  # the client passes on what is no JSON
            raise EngineError(f"{self.settings.url} is not an OpenAI-compatible server: it answered {answer!r:.200}")
        return answer.model_dump()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON to a path beside the API's, with the client's key and tries; the JSON of the answer, if it is."""
        import httpx

        root = str(self.settings.url).rstrip("/").removesuffix("/v1")
        push = self.settings.push_weights
        about = f"engine.push_weights={push!r} needs {NEEDS[push]}"
        answer = self._tried(lambda: self.client.post(f"{root}/{path}", body=body, cast_to=httpx.Response), about)
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None

    def _tried(self, request: Callable[[], Any], about: str) -> Any:
        """What a request gives. Raises EngineError; `about` says what is assumed of the server, for where it does not
        understand the request."""
        import openai

        where = f"the server at engine.url={self.settings.url!r}"
        try:
            return request()
        except openai.APITimeoutError as error:
            raise EngineError(f"{where} has not answered in engine.timeout={self.settings.timeout:g} s") from error
        except openai.APIConnectionError as error:
            tries = self.settings.retries + 1
            raise EngineError(f"{where} cannot be reached, after {tries} tries: {error.__cause__ or error}") from error
        except openai.APIStatusError as error:
            reason = f"status {error.status_code}: {_said(error.body) or error.message:.500}"
            hint = f"; {about}" if error.status_code in MISUNDERSTOOD else ""
            raise EngineError(f"{where} refused {error.request.url.path} with {reason}{hint}") from error
        except openai.OpenAIError as error:
            raise EngineError(f"{where}: {error}") from error

    def close(self) -> None:
        self.client.close()


class OpenAIEngine(PolicyEngine):
    """An engine on a server; the policy's tokenizer makes texts of ids, and ids of texts.

    backend: the server, which holds the policy's weights or is meant to have others.
    """

    def __init__(
        self,
        backend: OpenAIBackend,
        policy: Policy,
        config: RolloutConfig,
        generator: torch.Generator,
        temperature: float | None = None,
    ) -> None:
        super().__init__(policy, config, generator, temperature)
        self.backend = backend
        self.server = SERVERS[backend.settings.server]
        self.answers = 0
        self.retokenized = 0

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Generation]:
        """One response for each prompt. Raises ConfigError for a prompt that is empty, too long, or that the server
        cannot be given; EngineError where the server fails."""
        check_prompts(prompts, self.policy, self.config)
        limit = self.config.max_response_tokens
        # Tokenizers are not made for threads: texts are made before requests, and of answers after them.
        requests = [
            self.server.request(self.policy, prompt, Sampling(self.temperature, limit, seed))
            for prompt, seed in zip(prompts, self.seeds(len(prompts)), strict=True)
        ]
        answers = [self._read(answer) for answer in self._ask_all(requests)]
        self.answers += len(answers)
        self.retokenized += sum(answer.is_retokenized for answer in answers)
        texts = self.policy.decode([answer.response_ids for answer in answers])
        return [
            Generation(
                text,
                answer.response_ids,
                np.zeros(len(answer.response_ids), dtype=np.float32) if answer.logp is None else answer.logp,
                answer.logp,
            )
            for text, answer in zip(texts, answers, strict=True)
        ]

    def _ask_all(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers in order. The first failure ends it, and neither that nor Ctrl-C waits for those under way."""
        waiting: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        done: SimpleQueue[tuple[int, dict[str, Any] | Exception]] = SimpleQueue()
        for numbered in enumerate(requests):
            waiting.put(numbered)

        def work() -> None:
            try:
                while True:
                    number, request = waiting.get_nowait()
                    done.put((number, self.backend.ask(request)))
            except Empty:
                return
            except Exception as error:
                done.put((-1, error))

        for _ in range(min(self.backend.settings.concurrency, len(requests))):
            threading.Thread(target=work, daemon=True).start()
        answers: dict[int, dict[str, Any]] = {}
        try:
            while len(answers) < len(requests):
                number, answer = done.get()
                if isinstance(answer, Exception):
                    raise answer
                answers[number] = answer
        finally:
            with suppress(Empty):
                while True:
                    waiting.get_nowait()
        return [answers[number] for number in range(len(requests))]

    def _read(self, answer: dict[str, Any]) -> Answer:
        settings = self.backend.settings
        try:
            return self.server.read(self.policy, answer)
        except (KeyError, IndexError, TypeError, ValueError, EngineError) as error:
            raise EngineError(
                f"the server at engine.url={settings.url!r} does not answer as engine.server={settings.server!r} does"
                f" ({type(error).__name__}: {error}); its answer was {answer!r:.500}"
            ) from error


def _said(body: object) -> str:
    """The body of a refusal on one line; the client's own message leaves out what is not in OpenAI's form."""
    return " ".join((body if isinstance(body, str) else "" if body is None else json.dumps(body)).split())


def _client(settings: EngineConfig) -> OpenAI:
    try:
        from openai import OpenAI
    except ImportError as error:
        raise ConfigError(f"engine.name='openai' needs a package: pip install 'rspo[openai]' ({error})") from error
    key = "none"  # the client wants one, servers of one's own do not
    if settings.api_key_env is not None:
        key = os.environ.get(settings.api_key_env, "")
        if not key:
            raise ConfigError(f"engine.api_key_env={settings.api_key_env!r}: that environment variable is not set")
    return OpenAI(base_url=settings.url, api_key=key, timeout=settings.timeout, max_retries=settings.retries)


def _served_model(client: OpenAI, settings: EngineConfig) -> str:
    """The name to ask for. Raises ConfigError where the server is not there or does not have it."""
    import openai

    served: list[str] = []
    try:
        served += [model.id for model in client.models.list().data]
    except openai.APIConnectionError as error:
        raise ConfigError(
            f"engine.url={settings.url!r}: no server answers there ({error.__cause__ or error})"
        ) from error
    except openai.AuthenticationError as error:
        raise ConfigError(
            f"engine.api_key_env={settings.api_key_env!r}: the server wants another key ({error.message:.200})"
        ) from error
    except (openai.OpenAIError, AttributeError, TypeError) as error:
        if settings.model is not None and isinstance(error, openai.NotFoundError):
            return settings.model  # not every server lists its models
        raise ConfigError(
            f"engine.url={settings.url!r}: no OpenAI-compatible server, /models gave {error!s:.200}"
        ) from error
    chosen = served[0] if settings.model is None and len(served) == 1 else settings.model
    if chosen is None or chosen not in served:
        raise ConfigError(
            f"engine.model must be one that is served at {settings.url}, {', '.join(map(repr, served)) or 'none'};"
            f" got {settings.model!r}"
        )
    return chosen
