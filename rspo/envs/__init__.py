"""Environments the trainer can be run on, the contract they fulfil, and the names they go by."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from rspo.envs.base import BatchedEnv, Info, PromptContext, StepResult

EnvFactory = Callable[..., BatchedEnv]

# Class paths are imported when asked for, so that an environment's own dependencies are needed by its users only.
_REGISTRY: dict[str, EnvFactory | str] = {
    "alfworld": "rspo.envs.alfworld:AlfworldEnv",
    "household": "rspo.envs.household:HouseholdEnv",
    "webshop": "rspo.envs.webshop:WebshopEnv",
}


def available_envs() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_REGISTRY))


def register_env(name: str, factory: EnvFactory | str, *, overwrite: bool = False) -> None:
    """Make an environment known under a name.

    factory: called with the keyword arguments of `make_env`; or a class path "package.module:Class".

    Raises ValueError when the name is empty, holds a colon (those are class paths) or is taken and `overwrite` is
    False, and when a class path is not of the form "package.module:Class"; TypeError for any other factory.
    """
    if not name or ":" in name:
        raise ValueError(f"name must be a non-empty word without a colon; got {name!r}")
    if name in _REGISTRY and not overwrite:
        raise ValueError(f"name {name!r} is already registered; pass overwrite=True to replace it")
    if isinstance(factory, str):
        _split_path(factory)
    elif not callable(factory):
        raise TypeError(f"factory must be callable or a class path; got {type(factory).__name__}")
    _REGISTRY[name] = factory


def find_factory(name: str) -> EnvFactory:
    """What builds the environment of a registered name or class path "package.module:Class".

    Raises ValueError when the name is neither, or the module has no such class; ImportError when the module cannot be
    imported.
    """
    if name not in _REGISTRY and ":" not in name:
        raise ValueError(
            f"unknown environment {name!r}; available: {', '.join(available_envs())}, "
            'or a class path "package.module:Class"'
        )
    factory = _REGISTRY.get(name, name)
    return _load(factory) if isinstance(factory, str) else factory


def make_env(name: str, **kwargs: Any) -> BatchedEnv:
    """Build an environment.

    name: a registered name, or a class path "package.module:Class" of one's own.
    kwargs: go to the environment's constructor.

    Raises ValueError and ImportError as `find_factory`, and TypeError when what was built is not a BatchedEnv.
    """
    env = find_factory(name)(**kwargs)
    if not isinstance(env, BatchedEnv):
        raise TypeError(f"environment {name!r} must be a BatchedEnv; got {type(env).__name__}")
    return env


def _split_path(path: str) -> tuple[str, str]:
    module, _, attribute = path.partition(":")
    if not module or not attribute or ":" in attribute:
        raise ValueError(f'a class path must be of the form "package.module:Class"; got {path!r}')
    return module, attribute


def _load(path: str) -> EnvFactory:
    module_name, attribute = _split_path(path)
    module = import_module(module_name)
    if not hasattr(module, attribute):
        raise ValueError(f"module {module_name!r} has no class {attribute!r} (from environment {path!r})")
    factory: EnvFactory = getattr(module, attribute)
    return factory


__all__ = [
    "BatchedEnv",
    "EnvFactory",
    "Info",
    "PromptContext",
    "StepResult",
    "available_envs",
    "find_factory",
    "make_env",
    "register_env",
]
