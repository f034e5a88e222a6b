"""Tiny models of the architectures that people train, with random weights: logits large enough that a cap bites."""

from __future__ import annotations

from typing import Any

import torch
from rspo_toys import small_policy
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from rspo.models.policy import Policy

VOCAB = 120
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GPT2_SHAPE: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}

CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    "llama": (LlamaConfig, {}),
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 3.0, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
    "granite": (GraniteConfig, {"logits_scaling": 4.0}),
    "gpt2": (GPT2Config, GPT2_SHAPE),
    "opt": (OPTConfig, {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.5}),
    "mamba": (MambaConfig, {}),
}
"""By a name: the class of the configuration, and what differs from SHAPE."""


def tiny_model(name: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A fresh model of `CONFIGS`, its settings changed by these, in float32, with eager attention."""
    kind, own = CONFIGS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**SHAPE, **own, **settings}), attn_implementation="eager")
    # Layers without a bias in their initialisation are not told from layers without one at all.
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def tiny_model_policy(name: str, *, packs: bool = False, fused: str = "on", **settings: Any) -> Policy:
    """A policy around it; its tokenizer, of household's words, knows fewer tokens than the model."""
    return Policy(tiny_model(name, **settings), small_policy().tokenizer, packs, fused)
