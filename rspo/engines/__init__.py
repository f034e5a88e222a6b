"""Who generates: engines behind one interface."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import Config, ConfigError
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


def open_backend(config: Config, folder: Path | None = None) -> Backend:
    """What generates under a configuration.

    folder: of the run that trains what generates; without one weights stay as they are, and those that an engine has to
        read are written into a temporary folder.

    Raises ConfigError where a package or server is missing, the engine cannot be given the weights of training, or
    several processes train with one that is not the training model.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and accelerate say it
    if processes > 1 and folder is not None and config.engine.name != "transformers":
        raise ConfigError(
            f"engine.name must be 'transformers' where {processes} processes train together, got"
            f" {config.engine.name!r}: one would push weights while another generates"
        )
    # Packages that only one of them needs are not imported for the others.
    if config.engine.name == "openai":
        from .openai_engine import OpenAIBackend

        return OpenAIBackend(config, folder)
    if config.engine.name == "vllm":
        from .vllm_engine import VLLMBackend

        return VLLMBackend(config, folder)
    return LOCAL
