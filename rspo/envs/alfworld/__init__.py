"""ALFWorld: household tasks in text, played on the official games or on generated ones."""

from .env import AlfworldEnv

__all__ = ["AlfworldEnv"]
