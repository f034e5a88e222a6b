"""Who generates: engines behind one interface."""

from __future__ import annotations

from pathlib import Path

from ..config import Config, ConfigError
from ..models.processes import ALONE, Ranks
from .base import Backend, Engine, EngineError, Generation
from .scripted_engine import Scripted, ScriptedEngine, expert_of
from .transformers_engine import LOCAL, TransformersBackend, TransformersEngine

__all__ = [
    "LOCAL",
    "Backend",
    "Engine",
    "EngineError",
    "Generation",
    "Scripted",
    "ScriptedEngine",
    "TransformersBackend",
    "TransformersEngine",
    "expert_of",
    "open_backend",
]


def open_backend(config: Config, folder: Path | None = None, ranks: Ranks = ALONE) -> Backend:
    """What generates under a configuration.

    folder: of the run that trains what generates; without one weights stay as they are, and those that an engine has to
        read are written into a temporary folder.
    ranks: the processes that train together.

    Raises ConfigError where a package or server is missing, the engine cannot be given the weights of training, or
    several processes, or sharded weights, are trained with one that is not the training model.
    """
    if folder is not None and config.engine.name != "transformers":
        if ranks.size > 1:
            raise ConfigError(
                f"engine.name must be 'transformers' where {ranks.size} processes train together, got"
                f" {config.engine.name!r}: one would push weights while another generates"
            )
        if config.parallel.shard != "none":
            raise ConfigError(
                f"engine.name must be 'transformers' with parallel.shard={config.parallel.shard!r}, got"
                f" {config.engine.name!r}: only whole weights are pushed"
            )
    # Packages that only one of them needs are not imported for the others.
    if config.engine.name == "openai":
        from .openai_engine import OpenAIBackend

        return OpenAIBackend(config, folder)
    if config.engine.name == "vllm":
        from .vllm_engine import VLLMBackend

        return VLLMBackend(config, folder)
    return LOCAL
