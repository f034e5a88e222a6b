"""What the memory and the arithmetic of a causal LM follow from: a few numbers of its configuration, no weights.

A local folder's shape is counted on the meta device, for every architecture that transformers knows. The shapes of a
few published models stand here, so that a run can be planned before anything is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..config import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """A decoder of layers with attention and a gated MLP.

    layer_norms: of width `hidden_size`, in one layer.  qk_norm: queries and keys are normalised.
    parameters: weights in all, tied ones once.  body_parameters: without an output head of its own.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    qk_norm: bool
    layer_norms: int
    parameters: int
    body_parameters: int

    @property
    def query_width(self) -> int:
        """Numbers in the queries of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers in the keys of one token."""
        return self.kv_heads * self.head_dim

    def adapter_parameters(self, rank: int) -> int:
        """Weights of a LoRA adapter of this rank on the seven linear layers of every layer."""
        hidden, inner, query, kv = self.hidden_size, self.intermediate_size, self.query_width, self.kv_width
        attention = (hidden + query) + 2 * (hidden + kv) + (query + hidden)
        return self.layers * rank * (attention + 3 * (hidden + inner))


def dense_shape(
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    head_dim: int | None = None,
    tied: bool,
) -> ModelShape:
    """The shape of a model of the family "llama", "qwen2", "qwen3" or "gemma2", its weights by their formula."""
    head_dim = head_dim or hidden_size // heads
    query, kv = heads * head_dim, kv_heads * head_dim
    norms = 4 if family == "gemma2" else 2
    attention = 2 * hidden_size * query + 2 * hidden_size * kv
    biases = query + 2 * kv if family == "qwen2" else 0
    head_norms = 2 * head_dim if family == "qwen3" else 0
    layer = attention + biases + head_norms + 3 * hidden_size * intermediate_size + norms * hidden_size
    body = vocab_size * hidden_size + layers * layer + hidden_size
    return ModelShape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=tied,
        qk_norm=family == "qwen3",
        layer_norms=norms,
        parameters=body if tied else body + vocab_size * hidden_size,
        body_parameters=body,
    )


PUBLISHED = {
    "Qwen2.5-0.5B": dense_shape("qwen2", 151936, 896, 4864, 24, 14, 2, tied=True),
    "Qwen2.5-1.5B": dense_shape("qwen2", 151936, 1536, 8960, 28, 12, 2, tied=True),
    "Qwen2.5-3B": dense_shape("qwen2", 151936, 2048, 11008, 36, 16, 2, tied=True),
    "Qwen2.5-7B": dense_shape("qwen2", 152064, 3584, 18944, 28, 28, 4, tied=False),
    "Qwen2.5-14B": dense_shape("qwen2", 152064, 5120, 13824, 48, 40, 8, tied=False),
    "Qwen2.5-32B": dense_shape("qwen2", 152064, 5120, 27648, 64, 40, 8, tied=False),
    "Qwen3-0.6B": dense_shape("qwen3", 151936, 1024, 3072, 28, 16, 8, head_dim=128, tied=True),
    "Qwen3-1.7B": dense_shape("qwen3", 151936, 2048, 6144, 28, 16, 8, head_dim=128, tied=True),
    "Qwen3-4B": dense_shape("qwen3", 151936, 2560, 9728, 36, 32, 8, head_dim=128, tied=True),
    "Qwen3-8B": dense_shape("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128, tied=False),
    "Llama-3.2-1B": dense_shape("llama", 128256, 2048, 8192, 16, 32, 8, tied=True),
    "Llama-3.2-3B": dense_shape("llama", 128256, 3072, 8192, 28, 24, 8, tied=True),
    "Llama-3.1-8B": dense_shape("llama", 128256, 4096, 14336, 32, 32, 8, tied=False),
}
"""By the model's name without its owner and without "-Instruct"."""


def published_shape(name: str) -> ModelShape | None:
    """The shape of a published model of this name, as "Qwen/Qwen2.5-1.5B-Instruct"; None where it is not known here."""
    return PUBLISHED.get(name.rpartition("/")[2].removesuffix("-Instruct"))


def local_shape(folder: Path) -> ModelShape:
    """The shape of a saved model; its weights are not read and no code of it is run.

    Raises ConfigError where the folder holds no configuration of a causal LM.
    """
    try:
        return config_shape(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except (OSError, ValueError) as error:
        reason = loading_reason(error)
        raise ConfigError(f"no causal LM that transformers knows is at {str(folder)!r}: {reason}") from error


def loading_reason(error: Exception) -> str:
    """Why transformers does not load a model, without the hundreds of names of the ones it does."""
    return str(error).partition("\nModel type should be one of")[0]


def config_shape(config: PretrainedConfig) -> ModelShape:
    """The shape of a model with this configuration, its weights counted on the meta device."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    names = [name for name, weight in model.named_parameters() if ".0." in name and weight.dim() == 1]
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return ModelShape(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        tied=bool(text.tie_word_embeddings),
        qk_norm=any(name.endswith("q_norm.weight") for name in names),
        layer_norms=sum(name.endswith("layernorm.weight") for name in names) or 2,
        parameters=sum(weight.numel() for weight in model.parameters()),
        body_parameters=sum(weight.numel() for weight in model.base_model.parameters()),
    )
