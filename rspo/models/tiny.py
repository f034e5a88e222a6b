"""Small models from scratch, for environments whose bare facts they can read: a tokenizer and a few layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from ..config import Config, ConfigError, PolicyConfig
from .checks import check_attention_device, check_device
from .lora import check_targets
from .policy import Policy

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SPECIAL = (PAD, EOS, UNK)


def word_tokenizer(vocabulary: Iterable[str]) -> Tokenizer:
    """One token a word; words are what stands between white space, and are joined by a space."""
    words = [*SPECIAL, *(word for word in vocabulary if word not in SPECIAL)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def piece_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Byte-pair encoding with `size` pieces (at least 259: all bytes are among them), learned from texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def small_policy(
    tokenizer: Tokenizer,
    seed: int,
    config: PolicyConfig,
    *,
    width: int = 64,
    layers: int = 2,
    max_length: int = 128,
) -> Policy:
    """A fresh model with heads of 16 numbers, behind a tokenizer that knows SPECIAL.

    Of type Llama, which is Qwen2 without biases: transformers 5 gives every Qwen2 folder Qwen2's own tokenizer,
    whatever tokenizer was saved in it.

    Raises ConfigError where the device is not here, or the attention cannot run on it.
    """
    check_attention_device(config)
    check_device(config)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    shape = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=max_length,
        initializer_range=0.1,  # transformers' 0.02 is meant for widths of thousands; cloning then takes twice as long
        tie_word_embeddings=True,
        pad_token_id=tokenizer.token_to_id(PAD),
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(shape, attn_implementation=config.attention)
    return Policy(
        model.to(device=config.device, dtype=getattr(torch, config.dtype)),
        fast,
        config.packs,
        config.fused,
        chat_template_kwargs=config.chat_template_kwargs,
    )


def tiny_policy(vocabulary: Sequence[str], seed: int, config: PolicyConfig, max_length: int = 128) -> Policy:
    """A fresh model of two layers and width 64 (85 thousand weights) over a vocabulary of words."""
    return small_policy(word_tokenizer(vocabulary), seed, config, max_length=max_length)


def check_small_dtype(config: PolicyConfig) -> None:
    """Raises ConfigError for a dtype that the warm-up cannot train in: in float16 Adam divides by zero."""
    if config.dtype == "float16":
        raise ConfigError(
            "policy.dtype must be 'float32' or 'bfloat16' where policy.path is None: the small model's warm-up trains"
            " the weights themselves, got 'float16'"
        )


def check_small_template(config: PolicyConfig) -> None:
    """Raises ConfigError for keyword arguments of a chat template, which the small model does not have."""
    if config.chat_template_kwargs:
        raise ConfigError(
            f"policy.chat_template_kwargs={config.chat_template_kwargs} needs a chat template, and the small model has"
            " none; policy.path names another model"
        )


def check_small_targets(config: Config) -> None:
    """Raises ConfigError for `lora.targets` that the model of `config.warmup` does not have, without making it whole:
    its layers are called what they are called at any width and vocabulary."""
    if config.lora.rank > 0:
        policy = PolicyConfig(fused="off")
        made = small_policy(word_tokenizer(()), 0, policy, width=16, layers=config.warmup.layers)
        check_targets(made.model, config.lora)
