"""Small things for the tests of the TRL plug-in: a tokenizer that calls tools, tiny models, arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config
from trl import GRPOConfig

from rspo.integrations.trl import environment_dataset, environment_factory
from rspo.small_models import piece_tokenizer, word_tokenizer

WORDS = [f"w{i}" for i in range(60)]
CALLS = ["go fridge", "open fridge", "go cabinet", "go sink"]
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"


def small_args(folder: Path, **settings: Any) -> GRPOConfig:
    """Arguments for a few short updates on the CPU; SGD, whose steps do not blow up rounding."""
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 0.5,
        "bf16": False,
        "activation_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**defaults, **settings})


def word_level() -> PreTrainedTokenizerFast:
    """Sixty words."""
    return _fast(word_tokenizer(WORDS), "<eos>")


def prompts() -> Dataset:
    """Plain prompts of different lengths."""
    return Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 2 + i % 3]) for i in range(12)]})


def variety(completions: list[str], **_: Any) -> list[float]:
    """A reward: the number of different words."""
    return [float(len(set(text.split()))) for text in completions]


def small_model(tokenizer: PreTrainedTokenizerFast, config: Any = None, seed: int = 0) -> PreTrainedModel:
    """A fresh float32 model, Qwen2 unless the config is another's."""
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    kind, extra = config or (Qwen2Config, {})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(kind(**{**shape, **extra}), dtype=torch.float32)


def tool_caller() -> tuple[PreTrainedModel, PreTrainedTokenizerFast, dict[str, Any]]:
    """A fresh model, a tokenizer for which each of CALLS is one token, and generation settings under which the model
    writes nothing but those and the end of its turn."""
    calls = [f'<tool_call>\n{{"name": "act", "arguments": {{"action": "{call}"}}}}\n</tool_call>' for call in CALLS]
    tool = environment_factory("household", prompt_style="chat")()
    opening = tool.reset(**environment_dataset("household", 1, prompt_style="chat")[0])
    texts = [TEMPLATE.read_text(encoding="utf-8"), opening, str(tool.act.__doc__), tool.act("go fridge")]
    tokenizer = _fast(piece_tokenizer(texts, 900), "<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(calls)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    allowed = {*tokenizer.convert_tokens_to_ids(calls), tokenizer.eos_token_id}
    suppressed = [token for token in range(len(tokenizer)) if token not in allowed]
    return (
        small_model(tokenizer, (Qwen2Config, {"max_position_embeddings": 4096})),
        tokenizer,
        {
            "generation_kwargs": {"suppress_tokens": suppressed},
            "max_completion_length": 1000,
            "max_tool_calling_iterations": 2,
        },
    )


def _fast(tokenizer: Any, eos: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token=eos,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
