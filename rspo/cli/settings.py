"""The configuration that a command's flags describe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from ..config import Config, ConfigError
from ..config.files import apply_flags, config_of_file, method_names, preset, preset_name, read_config
from ..envs import available_envs, find_factory


def settings_of(parsed: argparse.Namespace, base: Config | None = None) -> Config:
    """The configuration that the flags describe, laid over `base` instead of a preset where given."""
    method = getattr(parsed, "method", None)
    values = read_config(parsed.config) if parsed.config else {}
    if base is None or parsed.preset is not None:
        named = method_names(values)
        chosen = {"method": method, "base": getattr(parsed, "base", None)}
        chosen |= {name: value for name, _, value in (flag.partition("=") for flag in parsed.set) if name in chosen}
        named |= {name: value for name, value in chosen.items() if value is not None}
        base = preset(parsed.preset or preset_name(values), **named)
    config = config_of_file(parsed.config, values, base) if parsed.config else base
    flags = {
        "method": method,
        "base": getattr(parsed, "base", None),
        "env.name": parsed.env,
        "policy.path": getattr(parsed, "policy", None),
        "rewards.dense": getattr(parsed, "dense_reward", None),
        "reward_model.epochs": getattr(parsed, "epochs", None),
        "reward_model.batch_size": getattr(parsed, "batch_size", None),
        "reward_model.learning_rate": getattr(parsed, "learning_rate", None),
        "run.seed": parsed.seed,
        "run.steps": getattr(parsed, "steps", None),
        "run.save_every": getattr(parsed, "save_every", None),
        "run.keep": getattr(parsed, "keep", None),
        "evaluation.episodes": getattr(parsed, "episodes", None),
        "evaluation.temperatures": getattr(parsed, "temperature", None),
        "evaluation.split": getattr(parsed, "split", None),
    }
    given = [f"{name}={json.dumps(value)}" for name, value in flags.items() if value is not None]
    for flag in parsed.set:
        _check_colons(flag)
    return apply_flags(config, [*given, *parsed.set])


def check_names(config: Config) -> None:
    """Raises ConfigError for an environment, a model folder or a reward model that is not there: what a run would say
    of it, without waiting for torch."""
    name, path = config.env.name, config.policy.path
    if name not in available_envs():
        try:
            find_factory(name)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"env.name={name!r} with env.options={config.env.options}: {error}") from error
    if path is not None and not config.policy.allow_download and not Path(path).is_dir():
        raise ConfigError(f"policy.path={path!r} is not a folder (names on a hub need policy.allow_download=true)")
    kind, colon, model = config.rewards.dense.partition(":")
    if colon and kind == "model" and not Path(model).is_dir():
        raise ConfigError(
            f"rewards.dense={config.rewards.dense!r}: {model!r} must be a reward model (a folder written by"
            " `rspo reward-model`): there is no such folder"
        )


def _check_colons(flag: str) -> None:
    """Raises ConfigError for a value like {a:1}, which to YAML is a key "a:1" without a value."""
    try:
        joined = _joined_key(yaml.safe_load(flag.partition("=")[2]))
    except yaml.YAMLError:  # of which `apply_flags` says more
        return
    if joined is not None:
        name, _, value = joined.partition(":")
        raise ConfigError(f"--set {flag!r}: YAML wants a space after the colon of a pair: {name}: {value}")


def _joined_key(value: Any) -> str | None:
    """A key with a colon in it and no value, anywhere in what YAML has made of a text."""
    if isinstance(value, dict):
        for key, part in value.items():
            if part is None and isinstance(key, str) and ":" in key:
                return key
        value = list(value.values())
    found = map(_joined_key, value) if isinstance(value, list) else ()
    return next((key for key in found if key is not None), None)
