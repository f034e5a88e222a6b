"""What would stop a run on this machine, found without starting it: the checks that a start makes one after the other,
as far as they need no weights, no server and no other process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..config import Config, ConfigError
from ..config.lock import check_unused
from ..engines import open_backend
from ..models.checks import (
    FLASH,
    check_attention_caps,
    check_attention_device,
    check_attention_dtype,
    check_device,
    check_loaded,
)
from ..models.loading import check_weights, load_tokenizer, no_model
from ..models.lora import check_targets, is_adapter, require_whole_model
from ..models.processes import Ranks
from ..models.tiny import check_small_dtype, check_small_targets, check_small_template
from ..runs.checkpoint import list_checkpoints
from ..runs.checks import check_ends, check_length, check_positions
from ..start import check_folder

WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)

T = TypeVar("T")


@dataclass
class Findings:
    """problems: what would stop the run.  warnings: what it would say and go on."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What `work` gives; None, and a problem more, where it raises ConfigError."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                return work()
            except ConfigError as error:
                self.problems.append(str(error))
                return None
            finally:
                self.warnings += [str(one.message) for one in caught if one.category is UserWarning]


def check_machine(config: Config, folder: Path, resume: bool, findings: Findings) -> None:
    """Devices, packages, the engine, and the run's folder."""
    _check_devices(config, findings)
    _check_packages(config, findings)
    _check_engine(config, folder, findings)
    findings.attempt(lambda: _check_place(config, folder, resume))


def _check_devices(config: Config, findings: Findings) -> None:
    device, count, processes = config.policy.device, torch.cuda.device_count(), config.parallel.processes or 1
    findings.attempt(lambda: check_device(config.policy))
    findings.attempt(lambda: check_attention_device(config.policy))
    findings.attempt(lambda: check_attention_dtype(config.policy))
    if device == "cuda" and count < processes and processes > 1:
        findings.problems.append(
            f"parallel.processes={processes} need a device each, and this machine has {count}: more machines, or fewer"
            " processes"
        )
    if device.startswith("cuda:") and processes > 1:
        findings.problems.append(
            f"policy.device={device!r} is one device, but parallel.processes={processes} need one each; with"
            " policy.device=cuda each takes that of its number"
        )


def _check_packages(config: Config, findings: Findings) -> None:
    """Packages that the settings ask for and that are not here."""
    needed = {
        "peft": ("lora", f"lora.rank={config.lora.rank}", config.lora.rank > 0),
        "accelerate": (
            "distributed",
            "parallel",
            (config.parallel.processes or 1) > 1 or config.parallel.shard != "none",
        ),
        "vllm": ("vllm", "engine.name='vllm'", config.engine.name == "vllm"),
        "openai": ("openai", "engine.name='openai'", config.engine.name == "openai"),
    }
    findings.problems += [
        f"{setting} needs the package {package}: pip install 'rspo[{extra}]'"
        for package, (extra, setting, is_asked) in needed.items()
        if is_asked and find_spec(package) is None
    ]


def _check_engine(config: Config, folder: Path, findings: Findings) -> None:
    """Of an engine other than the training model; whether a server answers is not asked."""
    engine, processes = config.engine, config.parallel.processes or 1
    if engine.name == "transformers":
        return
    weights_stay = engine.name == "openai" and engine.push_weights == "off"
    if processes > 1 or config.parallel.shard != "none" or weights_stay:
        # All of which is refused before anything is opened.
        together = Ranks()
        together.size = processes
        findings.attempt(lambda: open_backend(config, folder, together))
    if engine.name == "vllm" and torch.cuda.device_count() < engine.tensor_parallel:
        findings.problems.append(
            f"engine.tensor_parallel={engine.tensor_parallel} needs as many GPUs with engine.name='vllm',"
            f" {torch.cuda.device_count()} are here"
        )
    if engine.api_key_env is not None and not os.environ.get(engine.api_key_env):
        findings.problems.append(f"engine.api_key_env={engine.api_key_env!r}: that environment variable is not set")


def _check_place(config: Config, folder: Path, resume: bool) -> None:
    """Raises ConfigError where the run could not begin, or go on, in its folder."""
    check_folder(config, folder, resume)
    check_unused(folder)
    checkpoints = list_checkpoints(folder / "checkpoints") if resume else []
    if checkpoints:
        check_length(config, int(checkpoints[-1].name.rpartition("-")[2]))
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ConfigError(f"{folder} cannot be written: {there} is no folder that one may write to")


def check_small_model(config: Config, findings: Findings) -> None:
    """Of the model that is made where `policy.path` names none."""
    findings.attempt(lambda: check_small_dtype(config.policy))
    findings.attempt(lambda: check_small_template(config.policy))
    findings.attempt(lambda: check_small_targets(config))


def check_model_folder(path: Path, config: Config, findings: Findings) -> None:
    """Of a local model, whose weights are not read and no code of which is run."""
    policy = replace(config.policy, allow_download=False)
    findings.attempt(lambda: require_whole_model(path, "policy.path"))
    if not any((path / name).is_file() for name in WEIGHTS):
        findings.problems.append(f"policy.path={str(path)!r} holds no weights: none of {', '.join(WEIGHTS)} is there")
    elif not is_adapter(path):
        findings.attempt(lambda: check_weights(path, policy))
    model_config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    findings.attempt(lambda: check_attention_caps(model_config, policy.attention))
    findings.attempt(lambda: check_positions(model_config, config))

    def without_weights() -> PreTrainedModel:
        try:
            # On the meta device flash attention, which only a GPU has, would be looked for here.
            attention = "eager" if policy.attention == FLASH else policy.attention
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(model_config.get_text_config(), attn_implementation=attention)
        except (OSError, ValueError) as error:
            raise no_model(str(path), policy, error) from error

    model = findings.attempt(without_weights)
    tokenizer = findings.attempt(lambda: load_tokenizer(str(path), policy))
    if model is not None and tokenizer is not None:
        findings.attempt(lambda: check_loaded(model, tokenizer, policy))
        findings.attempt(lambda: check_ends(_ends(path, tokenizer), config))
        if config.lora.rank > 0:
            findings.attempt(lambda: check_targets(model, config.lora))


def _ends(path: Path, tokenizer: Any) -> list[int]:
    """Tokens that end a response of a saved model, as `Policy.eos_token_ids`."""
    try:
        ids = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except OSError:  # a model without that file
        ids = getattr(AutoConfig.from_pretrained(path, local_files_only=True), "eos_token_id", None)
    ids = tokenizer.eos_token_id if ids is None else ids
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
