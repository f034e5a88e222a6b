"""WebShop in process, in Python: `WebshopEnv`, and what it is made of."""

from __future__ import annotations

from .env import WebshopEnv

__all__ = ["WebshopEnv"]
