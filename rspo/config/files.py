"""Configurations as YAML files and as `section.field=value` flags."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rspo_kernels import PolicyLossConfig
from rspo_kernels.config import DEFAULTS

from .root import PRESETS, Config, ConfigError
from .storage import write_text

CONFIG_FILE = "config.yaml"
"""Under which a run's folder holds its configuration."""


def preset(name: str, method: str = "rspo", base: str = "grpo") -> Config:
    """The named preset of a method. Raises ConfigError naming the presets there are."""
    if name not in PRESETS:
        raise ConfigError(f"preset must be one of {', '.join(map(repr, PRESETS))}, got {name!r}")
    return PRESETS[name](method, base)


def load_config(path: str | Path, base: Config | None = None) -> Config:
    """A YAML file laid over `base`, or over the preset that the file names, for its own method. Raises ConfigError
    naming the file."""
    return config_of_file(path, read_config(path), base)


def config_of_file(path: str | Path, values: Mapping[str, Any], base: Config | None = None) -> Config:
    """As `load_config`, of what `read_config` has read."""
    try:
        return config_from(values, base)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def config_from(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """Sections as in a YAML file, laid over `base`, or over the preset that they name, for their own method."""
    settings = {name: value for name, value in values.items() if name != "preset"}
    config: Config = overlay(base or preset(preset_name(values), **method_names(values)), settings)
    return config


def method_names(values: Mapping[str, Any]) -> dict[str, str]:
    """`method` and `base` of a YAML file's values, as far as they are there."""
    return {name: values[name] for name in ("method", "base") if isinstance(values.get(name), str)}


def preset_name(values: Mapping[str, Any]) -> str:
    """The preset that a YAML file's values name by the key `preset`; "default" where they name none."""
    return str(values.get("preset", "default"))


def read_config(path: str | Path) -> Mapping[str, Any]:
    """What a YAML file says, read once: it may be a pipe. Raises ConfigError naming the file."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not a YAML file: {error}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"the configuration {path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from error
    if not isinstance(values, Mapping):
        found = "nothing" if values is None else type(values).__name__
        raise ConfigError(f"{path}: expected a mapping of sections, got {found}")
    return values


def save_config(config: Config, path: str | Path) -> None:
    """Write every field as YAML, all at once. Raises StorageError."""
    write_text(Path(path), yaml.safe_dump(_plain(asdict(config)), sort_keys=False))


class Entries(dict[str, Any]):
    """Some entries of a section, or of a field that is a mapping; the others stay as they are."""

    def over(self, others: Any) -> dict[str, Any]:
        """These entries and the others; of a value that is no mapping nothing stays."""
        merged = dict(others) if isinstance(others, Mapping) else {}
        for key, value in self.items():
            merged[key] = value.over(merged.get(key)) if isinstance(value, Entries) else value
        return merged


def apply_flags(config: Config, flags: Sequence[str]) -> Config:
    """Lay `section.field=value` flags over a configuration; values are read as YAML. `section.field.key=value` changes
    one entry of a field that is a mapping (`env.options`), of the same environment."""
    values = Entries()
    for flag in flags:
        key, separator, text = flag.partition("=")
        if not separator:
            raise ConfigError(f"--set takes section.field=value, got {flag!r}")
        target = values
        *sections, name = key.strip().split(".")
        for section in sections:
            target = target.setdefault(section, Entries())
            if not isinstance(target, dict):
                raise ConfigError(f"--set {flag!r}: {section!r} was given a value before")
        try:
            target[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {flag!r}: the value is not YAML: {error}") from error
    return overlay(config, values)


def overlay(config: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A copy of a configuration (or section) with the given values, converted to the fields' types and checked."""
    hints = _hints(type(config))
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(f"unknown setting {name!r}{_suggestion(key, hints)}; {_allowed(prefix, hints)}")
        current = getattr(config, key)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} is a section of settings, got the value {value!r}")
            changes[key] = overlay(current, value, f"{name}.")
        elif isinstance(value, Entries):
            others = current if values.get("name") in (None, getattr(config, "name", None)) else {}
            changes[key] = _convert(name, value.over(others), hints[key])
        else:
            changes[key] = _convert(name, value, hints[key])
    if isinstance(config, PolicyLossConfig) and "loss" in changes:
        # Another loss brings its own defaults, as far as they are not given.
        changes = dict.fromkeys(DEFAULTS) | changes
    try:
        return replace(config, **changes)
    except ConfigError:
        raise
    except ValueError as error:  # a section from elsewhere, as PolicyLossConfig, does not know its own place
        raise ConfigError(f"{prefix}{error}") from error


def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _suggestion(key: str, hints: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, hints, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _allowed(prefix: str, hints: Mapping[str, Any]) -> str:
    where = f"the fields of {prefix[:-1]!r} are" if prefix else "the top-level names are"
    return f"{where} {', '.join(hints)}"


def _convert(name: str, value: Any, hint: Any) -> Any:
    """A value from YAML as the type of its field. YAML reads `1e-3` as text, so numbers are parsed from it too."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
        origin = typing.get_origin(hint)
    try:
        if origin is tuple:
            part, *more = typing.get_args(hint)
            if more == [...] and isinstance(value, (str, int, float)):
                value = [value]  # one of any number, without brackets
            if not isinstance(value, str):
                return tuple(_convert(name, item, part) for item in value)
        if origin is dict:
            return dict(value)
        if hint is float and not isinstance(value, bool):
            return float(value)
        if hint is int and not isinstance(value, bool):
            number = value if isinstance(value, int) else float(value)
            if number == int(number):
                return int(number)
        if hint is str and isinstance(value, bool):
            return "on" if value else "off"  # as which YAML reads these words without quotes
        if hint in (bool, str) and isinstance(value, hint):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    expected = str(hint) if origin is tuple else getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{name} must be of type {expected}, got {value!r}")


def flat_settings(config: Config) -> dict[str, Any]:
    """Every setting by its full name, `section.field`."""
    flat: dict[str, Any] = {}
    for name, value in asdict(config).items():
        if is_dataclass(getattr(config, name)):
            flat |= {f"{name}.{field}": part for field, part in value.items()}
        else:
            flat[name] = value
    return flat


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML's safe dialect knows."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
