"""LoRA through peft: a model of frozen weights W and small trained ones, W + alpha/rank · B·A (Hu et al. 2021).

The frozen weights are the base's. Agent A is one adapter on them, agent B another, and the reference of a KL term is
the base itself; `rspo.models.sharing` keeps all of them on one copy. An adapter is in float32 whatever the base is in,
so that it needs no masters. peft is imported when an adapter is made or read, and not before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..config import AdapterConfig, ConfigError
from ..config.storage import reading

ALL_LINEAR = "all-linear"
NAME = "default"
"""peft's name of a model's only adapter."""
SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_FILE = "base.json"
PREFIX = "base_model.model."
"""Of the weights' names in peft's files."""
SAMPLES = 64
"""Values of each weight that a fingerprint is made of."""


def require_peft(setting: str) -> None:
    """Raises ConfigError that names the setting where peft is not installed."""
    if find_spec("peft") is None:
        raise ConfigError(f"{setting} needs peft: pip install 'rspo[lora]'")


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter instead of a whole model."""
    return Path(path, SETTINGS_FILE).is_file()


def require_whole_model(path: str | Path, setting: str) -> None:
    """Raises ConfigError that names the setting where a folder holds an adapter."""
    if is_adapter(path):
        raise ConfigError(
            f"{setting} must be a whole model, got the LoRA adapter {str(path)!r}; `rspo export {path} --out FOLDER`"
            " writes it as one"
        )


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter is part of a model."""
    return hasattr(model, "peft_config")


def add_adapter(model: PreTrainedModel, settings: AdapterConfig, seed: int) -> None:
    """Freeze a model and put a fresh adapter on it, which does not change what it computes: A is random, B is 0.

    Raises ConfigError for targets that the model does not have.
    """
    require_peft(f"lora.rank={settings.rank}")
    from peft import LoraConfig, inject_adapter_in_model

    check_targets(model, settings)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.scale_numerator,
        target_modules=ALL_LINEAR if ALL_LINEAR in settings.targets else list(settings.targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, NAME)
    _finish(model)


def check_targets(model: PreTrainedModel, settings: AdapterConfig) -> None:
    """Raises ConfigError for targets that the model does not have.

    The head stays as it is: it may be the embedding too, and losses are computed from its plain weight.
    """
    head = model.get_output_embeddings()
    linear = [
        name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]
    for target in settings.targets:
        if target != ALL_LINEAR and not any(f".{name}".endswith(f".{target}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"lora.targets must be {ALL_LINEAR!r} or name linear layers of the model other than its head"
                f" ({', '.join(known)}), got {target!r}"
            )


def _finish(model: PreTrainedModel) -> None:
    """peft makes adapters in training mode and in the base's dtype."""
    model.eval()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float64:
            parameter.data = parameter.data.float()


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter alone, as peft does, with `base.json`: what its base must be. The settings name the base as it
    was named when it was loaded, a local folder by its absolute path."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    config, base = model.peft_config[NAME], str(model.name_or_path)
    config.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
    # Sorted: a set's order, which peft would write, changes from process to process.
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    _write_settings(folder, settings)
    weights = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    save_file({f"{PREFIX}{name}": weight.contiguous() for name, weight in weights.items()}, folder / WEIGHTS_FILE)
    (folder / BASE_FILE).write_text(json.dumps({"fingerprint": fingerprint(model)}) + "\n", encoding="utf-8")


def hide_local_base(folder: Path) -> str | None:
    """Leave of a local base's path in an adapter's settings only its last part, which is returned; None where the base
    has a name on a hub."""
    settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    base = Path(settings["base_model_name_or_path"])
    if not base.is_absolute():  # as `save_adapter` writes folders
        return None
    settings["base_model_name_or_path"] = base.name
    _write_settings(folder, settings)
    return base.name


def _write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def base_path(folder: Path) -> str:
    """Where the base of an adapter is: the recorded place, or the start policy of the run that the folder lies in,
    which may have moved. Raises ConfigError for an adapter of another kind."""
    settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    recorded = settings.get("base_model_name_or_path")
    if settings.get("peft_type") != "LORA" or not isinstance(recorded, str):
        raise ConfigError(f"{folder / SETTINGS_FILE} is not that of a LoRA adapter with a base_model_name_or_path")
    start = folder.resolve().parent.parent / "start"
    is_there = recorded != "" and Path(recorded).is_dir()
    return str(start) if start.is_dir() and not is_there else recorded


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Freeze a model and put a saved adapter on it, to be trained further.

    Raises ConfigError where the model is not the adapter's base, or the adapter's weights do not fit it.
    """
    require_peft(f"the LoRA adapter in {folder}")
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    if (folder / BASE_FILE).is_file():
        expected = json.loads((folder / BASE_FILE).read_text(encoding="utf-8"))["fingerprint"]
        if expected != fingerprint(model):
            raise ConfigError(
                f"the LoRA adapter in {folder} was trained on another model than {str(model.name_or_path)!r}: its base"
                f" has the fingerprint {expected[:12]}…, this model {fingerprint(model)[:12]}…"
            )
    model.requires_grad_(False)
    config: Any = LoraConfig.from_pretrained(str(folder))
    with reading(str(folder / WEIGHTS_FILE)):
        saved = {name.removeprefix(PREFIX): weight for name, weight in load_file(folder / WEIGHTS_FILE).items()}
    strange = [name for name in saved if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if strange or isinstance(config.init_lora_weights, str) or config.alora_invocation_tokens:
        raise ConfigError(f"the adapter in {folder} is a variant of LoRA, expected W + alpha/rank · B·A and no more")
    inject_adapter_in_model(config, model, NAME)
    _finish(model)
    result: Any = set_peft_model_state_dict(model, saved, adapter_name=NAME)
    wrong = [*(name for name in result.missing_keys if ".lora_" in name), *result.unexpected_keys]
    if wrong:
        raise ConfigError(f"the LoRA adapter in {folder} does not fit its base: {', '.join(wrong[:3])}")


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict of the plain transformers model that does what this one does. New memory is taken only for
    weights with an adapter, whose product B·A is added in its own precision and the sum rounded once."""
    merged = {}
    for name, weight in model.state_dict().items():
        layer_name, is_adapted, leaf = name.rpartition(".base_layer.")
        if is_adapted and leaf == "weight":
            delta = model.get_submodule(layer_name).get_delta_weight(NAME)
            weight = (weight.to(delta.dtype) + delta).to(weight.dtype)
        if ".lora_" not in name:
            merged[f"{layer_name}.{leaf}" if is_adapted else name] = weight
    return merged


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the base: its weights' names and shapes, and some values of each.

    Values are rounded to bfloat16, so that a model in bfloat16 and the same one read in float32 are alike. A model
    read in float16 is its own kind, as those values are rounded twice.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            flat = parameter.detach().flatten()
            chosen = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].to("cpu", torch.bfloat16)
            digest.update(f"{name.replace('.base_layer.', '.')} {tuple(parameter.shape)}".encode())
            digest.update(chosen.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
