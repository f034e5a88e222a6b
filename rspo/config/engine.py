"""Who generates the responses."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import Checks, ConfigError

ENGINES = ("transformers", "vllm", "openai")
SERVERS = ("vllm", "llama.cpp", "completions", "transformers", "chat")
SERVERS_WITH_LOGP = ("vllm", "llama.cpp")
PUSHES = ("off", "vllm", "sglang")


@dataclass(frozen=True)
class EngineConfig:
    """Who generates the responses (docs/engines.md). Log-probs for training always come from the training model."""

    name: str = "transformers"
    """"transformers": the training model itself; "vllm": vLLM in this process; "openai": an OpenAI-compatible
    server."""
    server: str = "vllm"
    """What the server of "openai" understands: "vllm" and "llama.cpp" take and give token ids, with log-probs;
    "completions" takes token ids and gives text; "transformers" (`transformers serve`) takes and gives text; "chat" has
    chat completions only."""
    url: str | None = None
    """Of the server's API, e.g. "http://localhost:8000/v1"."""
    model: str | None = None
    """Name that the server knows the model by. None: the one it serves."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's key; the key itself is in no configuration."""
    timeout: float = 600.0
    """Seconds after which a request has failed."""
    retries: int = 3
    """Further tries of a request that got no answer, or 408, 409, 429 or 5xx for one; the pause doubles from 0.5 s up
    to 8 s."""
    concurrency: int = 64
    """Requests under way at once."""
    push_weights: str = "off"
    """How the server gets the weights of the agent that acts: "vllm" and "sglang" make that server read them from a
    folder. Needed for training with "openai"; "vllm" in process always gets them."""
    push_folder: str | None = None
    """Where the weights are written for the engine to read, so that the server must see it under the same path; None:
    a folder of the run."""
    tensor_parallel: int = 1
    """GPUs of vLLM in process."""
    gpu_memory: float = 0.5
    """Share of a GPU's memory that vLLM in process may take."""
    sleep: bool = True
    """vLLM in process gives its GPU memory back between rollouts, its weights to the CPU's."""
    mismatch_limit: float | None = None
    """Mean |Δ log-prob| (nats/token) between engine and training model in a rollout above which the run stops; None: it
    only warns, above 0.1."""
    importance_cap: float | None = None
    """Truncated importance sampling: a token's loss is weighted by min(π_train/π_engine, cap) at the time of the
    rollout. None: not weighted. Needs log-probs of the engine."""

    def __post_init__(self) -> None:
        checks = Checks("engine", self)
        checks.one_of(ENGINES, "name")
        checks.one_of(SERVERS, "server")
        checks.one_of(PUSHES, "push_weights")
        if (self.url is None) == (self.name == "openai"):
            raise ConfigError(
                f"engine.url must be given with engine.name='openai' and with no other, got {self.url!r} with"
                f" {self.name!r}"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"engine.url must begin with http:// or https://, got {self.url!r}")
        if self.push_weights != "off" and self.name != "openai":
            raise ConfigError(
                f"engine.push_weights must be 'off' without a server (engine.name='openai'), got {self.push_weights!r}"
                f" with {self.name!r}"
            )
        checks.positive("timeout", "gpu_memory")
        checks.at_least(0, "retries")
        checks.at_least(1, "concurrency", "tensor_parallel")
        checks.fraction("gpu_memory")
        checks.positive("mismatch_limit", "importance_cap", or_none=True)
        if self.importance_cap is not None and self.name == "openai" and self.server not in SERVERS_WITH_LOGP:
            raise ConfigError(
                f"engine.importance_cap needs log-probs of the engine, which engine.server={self.server!r} does not"
                f" give; {' and '.join(map(repr, SERVERS_WITH_LOGP))} do"
            )
