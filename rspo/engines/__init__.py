"""Who generates: engines behind one interface."""

from .base import Engine, Generation
from .scripted_engine import Scripted, ScriptedEngine, expert_of
from .transformers_engine import TransformersEngine

__all__ = ["Engine", "Generation", "Scripted", "ScriptedEngine", "TransformersEngine", "expert_of"]
