"""Who generates: engines behind one interface."""

from .base import Engine, Generation
from .transformers_engine import TransformersEngine

__all__ = ["Engine", "Generation", "TransformersEngine"]
