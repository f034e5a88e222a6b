"""Models whose files are damaged, or lack what training needs: named, never made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rspo_toys import small_config, small_policy
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, VOCAB, tiny_model
from transformers import BertConfig, BertModel, PreTrainedModel

from rspo.cli.readiness import Findings, check_model_folder
from rspo.config import AdapterConfig, ConfigError, PolicyConfig
from rspo.models.lora import add_adapter
from rspo.models.policy import Policy
from rspo.start import open_run

WEIGHTS = "model.safetensors"


def write(model: PreTrainedModel, folder: Path) -> Path:
    """A model's folder with household's tokenizer."""
    model.save_pretrained(folder)
    small_policy().tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A saved causal LM that lacks nothing."""
    return write(tiny_model("llama"), tmp_path / "whole")


def headless(tmp_path: Path) -> Path:
    return write(tiny_model("llama").base_model, tmp_path / "headless")


def encoder(tmp_path: Path) -> Path:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return write(BertModel(BertConfig(**shape, num_attention_heads=4)), tmp_path / "encoder")


def rewrite(folder: Path, drop: str = "", widen: str = "") -> None:
    """Save the weights without some, or with some a row longer."""
    weights = {name: weight for name, weight in load_file(folder / WEIGHTS).items() if not drop or drop not in name}
    for name in weights:
        if widen and widen in name:
            weights[name] = torch.cat([weights[name], weights[name][:1]])
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def problems(folder: Path) -> list[str]:
    """What a dry run would say."""
    findings = Findings()
    check_model_folder(folder, small_config(f"policy.path={folder}"), findings)
    return findings.problems


def refused(folder: Path) -> str:
    """What loading says, which the dry run must say too."""
    with pytest.raises(ConfigError) as refusal:
        Policy.load(folder, PolicyConfig(path=str(folder)))
    assert str(refusal.value) in problems(folder)
    return str(refusal.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_model_lacks_nothing(name: str, tmp_path: Path) -> None:
    folder = write(tiny_model(name), tmp_path / "model")
    Policy.load(folder, PolicyConfig(path=str(folder), fused="off", attention="eager"))
    findings = Findings()
    check_model_folder(folder, small_config(f"policy.path={folder}", "policy.attention=eager"), findings)
    assert findings.problems == []


def test_a_model_without_its_output_head(tmp_path: Path) -> None:
    folder = headless(tmp_path)
    text = refused(folder)
    assert text.startswith(f"policy.path={str(folder)!r} lacks weights of LlamaForCausalLM")
    assert "lm_head.weight" in text
    with pytest.raises(ConfigError, match=r"lacks weights .*lm_head\.weight"):
        open_run(small_config(f"policy.path={folder}"), tmp_path / "run", progress=False)


def test_an_encoder(tmp_path: Path) -> None:
    assert "lacks weights of BertLMHeadModel, which would be random: cls.predictions" in refused(encoder(tmp_path))


def test_a_reward_model_needs_no_output_head_but_all_else(tmp_path: Path) -> None:
    folder = headless(tmp_path)
    Policy.load(folder, PolicyConfig(), needs_head=False)
    rewrite(folder, drop="layers.1.")
    with pytest.raises(ConfigError, match=r"^the model in .*headless' lacks weights .*layers\.1\.") as refusal:
        Policy.load(folder, PolicyConfig(), needs_head=False)
    assert "lm_head" not in str(refusal.value)
    assert str(refusal.value).count("layers.1.") == 3
    assert " and 6 more" in str(refusal.value)


def test_weights_of_another_shape(whole: Path) -> None:
    rewrite(whole, widen="layers.0.mlp.up_proj")
    text = refused(whole)
    assert "has weights of other shapes than its config.json says" in text
    assert "model.layers.0.mlp.up_proj.weight is [49, 32], expected [48, 32]" in text


@pytest.mark.parametrize("damage", ["cut", "empty", "no safetensors"])
def test_a_damaged_file(damage: str, whole: Path) -> None:
    content = (whole / WEIGHTS).read_bytes()
    damaged = {"cut": content[: len(content) // 2], "empty": b"", "no safetensors": b"x" * 99}
    (whole / WEIGHTS).write_bytes(damaged[damage])
    assert refused(whole).startswith(f"the weights of the model in {whole} cannot be read (")


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    tiny_model("llama").save_pretrained(folder, max_shard_size="20KB")
    small_policy().tokenizer.save_pretrained(folder)
    assert problems(folder) == []
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(folder)


def test_the_base_of_an_adapter(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    policy = Policy.load(whole, PolicyConfig())
    add_adapter(policy.model, AdapterConfig(rank=2), 0)
    adapter = tmp_path / "adapter"
    policy.save(adapter)
    content = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(content[:100])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
        Policy.load(adapter, PolicyConfig())
    (adapter / "adapter_model.safetensors").write_bytes(content)
    Policy.load(adapter, PolicyConfig())
    rewrite(whole, drop="lm_head")
    with pytest.raises(
        ConfigError, match=r"the base of the LoRA adapter .* cannot be loaded: .* lacks weights .*lm_head"
    ):
        Policy.load(adapter, PolicyConfig())


def test_no_tokenizer(whole: Path) -> None:
    for path in whole.glob("tokenizer*"):
        path.unlink()
    assert refused(whole).startswith(f"the tokenizer of the model at {str(whole)!r} cannot be loaded: ")


def test_a_damaged_tokenizer(whole: Path) -> None:
    (whole / "tokenizer.json").write_text("{")
    assert refused(whole).startswith(f"the tokenizer of the model at {str(whole)!r} cannot be loaded: ")


def test_a_damaged_configuration(whole: Path) -> None:
    (whole / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"no causal LM that transformers can load is at"):
        Policy.load(whole, PolicyConfig())
    settings = json.loads((write(tiny_model("llama"), whole) / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**settings, "model_type": "unheard"}))
    with pytest.raises(ConfigError, match=r"no causal LM that transformers can load is at"):
        Policy.load(whole, PolicyConfig())
