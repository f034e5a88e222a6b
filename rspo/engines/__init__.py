"""Who generates: engines behind one interface."""

from __future__ import annotations

from pathlib import Path

from ..config import Config
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

    Raises ConfigError where a package or server is missing, or the engine cannot be given the weights of training.
    """
    # Packages that only one of them needs are not imported for the others.
    if config.engine.name == "openai":
        from .openai_engine import OpenAIBackend

        return OpenAIBackend(config, folder)
    if config.engine.name == "vllm":
        from .vllm_engine import VLLMBackend

        return VLLMBackend(config, folder)
    return LOCAL
