"""Small things for the tests of the TRL plug-in: a tokenizer that calls tools, tiny models, arguments."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from rspo.config import SwapConfig
from rspo.integrations.trl import RSPOGRPOTrainer, environment_dataset, environment_factory
from rspo.integrations.trl.agents import Snapshot
from rspo.integrations.trl.completions import CompletionBatch
from rspo.integrations.trl.rspo import Replay
from rspo.models.tiny import piece_tokenizer, word_tokenizer
from rspo_kernels import reference

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


TOKENIZER = word_level()


def made_up_inputs(rows: int = 4, prompt: int = 5, completion: int = 6, seed: int = 1) -> dict[str, Tensor]:
    """A micro-batch as TRL makes them: padding on either side, a tool's answer, a row that is cut away."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, len(TOKENIZER), (rows, prompt + completion), generator=rng)
    prompt_mask, completion_mask = torch.ones(rows, prompt).long(), torch.ones(rows, completion).long()
    prompt_mask[0, :2] = 0
    completion_mask[1, 4:] = 0
    completion_mask[3] = 0
    tool_mask = torch.ones_like(completion_mask)
    tool_mask[2, 2:4] = 0
    return {
        "prompt_ids": ids[:, :prompt].where(prompt_mask.bool(), TOKENIZER.pad_token_id),
        "prompt_mask": prompt_mask,
        "completion_ids": ids[:, prompt:].where(completion_mask.bool(), TOKENIZER.pad_token_id),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([1.0, -0.7, 0.4, -0.3]).repeat(rows // 4),
        "num_items_in_batch": torch.tensor(37),
    }


def trainer_of(kind: type[GRPOTrainer], model: Any, folder: Path, **settings: Any) -> GRPOTrainer:
    """A trainer in the middle of training."""
    trainer = kind(model, variety, small_args(folder, **settings), prompts(), processing_class=TOKENIZER)
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    return trainer


def loss_gradients_metrics(
    trainer: GRPOTrainer, inputs: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss, gradients, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def plain_logprobs(model: PreTrainedModel, batch: CompletionBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """In float64, from the logits of the model's own forward."""
    width = batch.completion_ids.shape[1]
    model = copy.deepcopy(model).double()
    logits = Qwen2ForCausalLM.forward(model, batch.input_ids, batch.attention_mask).logits[:, -width - 1 : -1]
    mask = batch.completion_mask.bool()
    return reference.token_logprobs(logits, batch.completion_ids, temperature=temperature, mask=mask)


def third_words(completions: list[str], **_: Any) -> list[float]:
    """A dense reward that wants something else than the outcome."""
    return [float(sum(word in ("w3", "w6", "w9", "w12", "w15") for word in text.split())) for text in completions]


def long_enough(completions: list[str], **_: Any) -> list[float]:
    """An outcome of 0 or 1."""
    return [float(len(set(text.split())) > 6) for text in completions]


class Watched(RSPOGRPOTrainer):
    """Keeps what the tests want to see of the loops."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loops: list[dict[str, Any]] = []
        self.replays: list[tuple[int, list[Replay], PreTrainedModel]] = []

    def train_b_and_collect(self) -> None:
        """With A before and after."""
        loop: dict[str, Any] = {"before": snapshot(self), "step": self.state.global_step}
        self.loops.append(loop)
        super().train_b_and_collect()
        loop |= {"after": snapshot(self), "buffer": self.buffer.trajectories}

    def _collect(self, prompts: Any) -> Any:
        self.loops[-1].setdefault("b", copy.deepcopy(self.model))
        return super()._collect(prompts)

    def _sample_replay(self) -> list[Replay]:
        replay = super()._sample_replay()
        if replay:
            self.replays.append((len(self.loops), replay, copy.deepcopy(self.model)))
        return replay


def snapshot(trainer: RSPOGRPOTrainer) -> list[Tensor]:
    kept = Snapshot(trainer.model, trainer.optimizer)
    state = [value for _, values in kept.state for value in values.values()]
    return [*(weight for _, weight in kept.weights), *state]


def swap_trainer(folder: Path, kind: type[RSPOGRPOTrainer] = RSPOGRPOTrainer, **settings: Any) -> Any:
    options = {name: settings.pop(name) for name in ("swap", "offload", "center_cap") if name in settings}
    defaults = {"max_steps": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    args = small_args(folder, **{**defaults, "optim": "adamw_torch", "learning_rate": 1e-2, **settings})
    options.setdefault("swap", SwapConfig(k=2, alpha=0.25, buffer_tasks=8))
    model = small_model(TOKENIZER)
    return kind(model, long_enough, third_words, args, prompts(), processing_class=TOKENIZER, **options)
