"""The model card of a trained policy: what it is, how it did, and the settings that made it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from ..config import Config, default_config
from ..config.files import flat_settings
from .callbacks import EVALUATION

CITATION = "https://arxiv.org/abs/2607.04713"
PACKAGES = ("rspo", "torch", "transformers", "numpy")


def model_card(config: Config, log_history: Sequence[Mapping[str, float]], start: str | None = None) -> str:
    """A README for the Hugging Face Hub.

    Args:
        config: the run's settings.
        log_history: `RSPOTrainer.log_history`.
        start: path or hub's name of the model that training started from; None: the small one.

    Paths of this machine are left out: of a path only the last part is shown.
    """
    environment = config.env.name.rpartition(":")[2]
    parts = [
        _front_matter(config, environment, start),
        f"# {config.title} on {environment}\n",
        _story(config, environment, log_history, start),
        _evaluation(config, log_history),
        _use(config, start),
        _settings(config),
        _versions(),
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(config: Config, environment: str, start: str | None) -> str:
    tags = ["rspo", "reinforcement-learning", "agent", config.estimator_name.rpartition(":")[2], environment]
    values: dict[str, Any] = {
        "library_name": "peft" if config.adapts_both else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(tags)),
    }
    if start and not _is_local(start):
        values["base_model"] = start
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def _story(config: Config, environment: str, log_history: Sequence[Mapping[str, float]], start: str | None) -> str:
    start = f"`{_shown(start)}`" if start else "a small model that knows the environment's words"
    step = int(max((entry["step"] for entry in log_history), default=0))
    paper = f"Reward-Swap Policy Optimization ([paper]({CITATION}))" if config.method == "rspo" else config.title
    text = (
        f"Trained with {paper} on the environment `{environment}`, from {start}: {step} updates, seed {config.run.seed}"
    )
    cost = next((entry for entry in reversed(log_history) if "trajectories" in entry), None)
    if cost is not None:
        text += f", {int(cost['trajectories']):,} trajectories with {int(cost['tokens']):,} response tokens"
    return text + ".\n"


def _evaluation(config: Config, log_history: Sequence[Mapping[str, float]]) -> str:
    """A table of the last evaluation at each temperature; "" where there was none."""
    found = [entry for entry in log_history if f"{EVALUATION}success" in entry]
    if not found:
        return ""
    settings = config.evaluation
    lines = [
        "## Evaluation\n",
        f"{settings.episodes} episodes of the split `{settings.split}` after {int(found[-1]['step'])} updates. The"
        " interval is Wilson's, 95 %: chance in these episodes, not between training runs.\n",
        "| temperature | success | interval | reward | turns |",
        "| ---: | ---: | --- | ---: | ---: |",
    ]
    for number, temperature in enumerate(settings.temperatures):
        suffix = f"@{temperature:g}" if number else ""
        names = ("success", "success_low", "success_high", "reward", "turns")
        success, low, high, reward, turns = (found[-1][f"{EVALUATION}{name}{suffix}"] for name in names)
        lines.append(f"| {temperature:g} | {success:.1%} | {low:.1%} to {high:.1%} | {reward:.2f} | {turns:.1f} |")
    return "\n".join(lines) + "\n"


def _use(config: Config, start: str | None) -> str:
    """How it is loaded, and what an adapter needs for that."""
    heading, path = "## Use\n\n", config.policy.path
    if config.adapts_both and (path is None or _is_local(path)):
        base = f"`{_shown(start)}`" if start else "the small model that the run made"
        return (
            f"{heading}**The base of this LoRA adapter is not published.** It is {base}, as it stood where it was"
            " trained on, and the adapter cannot be used without it; `base.json` has its fingerprint. `rspo export RUN"
            " --out FOLDER` writes base and adapter as one model.\n"
        )
    about = f"A LoRA adapter on `{path}`, which is fetched with it; needs the package peft.\n\n"
    return (
        f"{heading}{about if config.adapts_both else ''}"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        "model = AutoModelForCausalLM.from_pretrained(repo_id)\n"
        "tokenizer = AutoTokenizer.from_pretrained(repo_id)\n```\n"
    )


def _settings(config: Config) -> str:
    """Those that are not the default preset's of the method."""
    defaults = flat_settings(default_config(config.method, config.base))
    changed = {name: _shown(v) for name, v in flat_settings(config).items() if v != defaults[name]}
    lines = [f"    {name}: {value!r}" for name, value in changed.items()]
    heading = f"## Settings\n\nMethod `{config.method}`, base `{config.base}`"
    return heading + ("; beside the defaults:\n\n" + "\n".join(lines) if lines else ", all defaults.") + "\n"


def _shown(value: Any) -> Any:
    """A setting without folders of this machine."""
    if isinstance(value, Mapping):
        return {name: _shown(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shown(part) for part in value)
    if not isinstance(value, str):
        return value
    kind, colon, path = value.rpartition(":")
    return f"{kind}{colon}{Path(path).name}" if _is_local(path) else value


def _is_local(path: str) -> bool:
    """Whether this is a place on this machine, and not a name on a hub."""
    return Path(path).is_absolute() or Path(path).exists()


def _versions() -> str:
    found = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"## Versions\n\nPython {sys.version.split()[0]}, {found}\n"
