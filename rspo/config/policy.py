"""The model that acts: its weights, the adapters on them, and how a small one comes to its start."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from .checks import SCHEDULES, SWITCHES, Checks, ConfigError

ATTENTION = ("sdpa", "eager", "flash_attention_2")
RESERVED_TEMPLATE_NAMES = (
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "raise_exception",
    "strftime_now",
)
"""What `apply_chat_template` of transformers takes for itself or gives a template."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class PolicyConfig:
    """The causal language model that acts."""

    path: str | None = None
    """Folder of a saved transformers model. None: a small model from scratch, warmed up by behaviour cloning of
    the environment's scripted expert."""
    dtype: str = "float32"
    """Of the weights: "float32", "bfloat16" or "float16"; the optimiser's are float32 in any case."""
    attention: str = "sdpa"
    """"sdpa" (PyTorch's own), "eager" (plain, slow; for models that cap their attention scores, such as Gemma 2), or
    "flash_attention_2" (the extra rspo[flash], on a GPU in bfloat16 or float16)."""
    device: str = "cpu"
    """Any of PyTorch's, such as "cuda" or "cuda:1"; each of several processes takes the GPU of its number."""
    fused: str = "auto"
    """Log-probs and losses straight from hidden states, so that the logits of all words never exist at once: "on",
    "off", or "auto": from a vocabulary of 8192 words on, where the model's head is a linear layer with a scale or a cap
    at most (`rspo.models.heads`). It changes results by no more than rounding."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of a model's layers for the backward pass, and compute each layer a second time in it: less
    memory for a third more work, and the same gradients."""
    chat: str = "auto"
    """A prompt is a user's message in the tokenizer's chat template: "auto": where there is a template; "on": one must
    be there in the tokenizer at `path`; "off": never."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What else the chat template is given, such as {enable_thinking: false} for Qwen3: names that it reads, in every
    prompt, of training as of evaluation. A server with chat completions is sent them."""
    packing: str = "auto"
    """Forward passes over rows packed end to end, without padding: "on", "off", or "auto": with flash_attention_2,
    whose kernels skip what lies between rows. The other attentions compute and mask it, and are faster padded."""
    allow_download: bool = False
    """Let transformers fetch a model that `path` names on a hub; otherwise nothing is read but local files."""

    def __post_init__(self) -> None:
        checks = Checks("policy", self)
        checks.one_of(DTYPES, "dtype")
        checks.one_of(ATTENTION, "attention")
        _check_device_name(self.device)
        checks.one_of(SWITCHES, "packing", "fused", "chat")
        if self.chat_template_kwargs:
            self._check_template_kwargs()

    def _check_template_kwargs(self) -> None:
        """Whether the template reads them shows where there is one (`rspo.data.chat_templates`)."""
        for name, value in self.chat_template_kwargs.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f"policy.chat_template_kwargs: {name!r} cannot be the name of an argument")
            if name in RESERVED_TEMPLATE_NAMES:
                raise ConfigError(
                    f"policy.chat_template_kwargs.{name} cannot be set: the chat template is given {name!r} by rspo or"
                    " transformers"
                )
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"policy.chat_template_kwargs.{name} must be a plain value, of JSON's types, got {value!r}"
                ) from error
        if self.chat == "off":
            raise ConfigError(
                f"policy.chat_template_kwargs={self.chat_template_kwargs} needs prompts in a chat template, got"
                " policy.chat='off'"
            )

    @property
    def packs(self) -> bool:
        """Whether forward passes are packed."""
        return self.packing == "on" or (self.packing == "auto" and self.attention == "flash_attention_2")

    @property
    def needs_template(self) -> bool:
        """Whether the tokenizer must have a chat template; that of the small model from scratch never has one."""
        return self.chat == "on" and self.path is not None


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA through peft: small trained matrices on frozen weights, of both agents, or with `swap.copy="adapter"` of
    agent B alone."""

    rank: int = 0
    """Of the matrices; 0: no adapters."""
    alpha: int | None = None
    """The matrices' product is scaled by alpha / rank. None: twice the rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers that get an adapter: "all-linear", all of them but the head, or ends of their names, as "q_proj".
    """
    learning_rate: float | None = None
    """Of adapters, in place of `optimizer.learning_rate` (None): what suits them is ten times and more of what suits
    full fine-tuning."""

    def __post_init__(self) -> None:
        checks = Checks("lora", self)
        checks.at_least(0, "rank")
        checks.at_least(1, "alpha", or_none=True)
        if not self.targets:
            raise ConfigError("lora.targets must name at least one kind of layer, got ()")
        checks.at_least(0, "learning_rate", or_none=True)

    @property
    def scale_numerator(self) -> int:
        """`alpha`, or what stands for it."""
        return 2 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True)
class WarmupConfig:
    """Behaviour cloning of a small model to a start policy that seldom succeeds (`rspo.algorithm.warmup`).

    The defaults are for a first try: some seconds of cloning, and what comes of it is the start. In a comparison the
    start matters: at 0.2 % nothing is learned from outcomes, at 3 % all methods look alike. There one clones until the
    success rate is measured inside a band, which takes minutes (`rspo.config.measured_start`).
    """

    width: int = 64
    """Of the model's hidden states, a multiple of 16."""
    layers: int = 2
    pieces: int = 1024
    """Vocabulary of its tokenizer where the environment does not list its words: pieces of text learned from
    demonstrations, 259 at least."""
    trajectories: int = 400
    expert_rate: float = 0.6
    """Probability that a step of a demonstration is the expert's; otherwise it is random."""
    learning_rate: float = 5e-3
    schedule: str = "constant"
    """Learning rate over `max_updates`: constant, or falling to 0 linearly or by a cosine."""
    betas: tuple[float, float] = (0.9, 0.95)
    batch_rows: int = 128
    max_updates: int = 160
    check_every: int = 160
    """Updates between two measurements of the success rate."""
    check_episodes: int = 512
    """Episodes of training tasks in a measurement; an eighth of them first, and all only if that reaches the band."""
    band: tuple[float, float] = (0.0, 1.0)
    """Success rate of the start policy on training tasks, at the rollout temperature. (0, 1): any."""
    held_out_band: tuple[float, float] = (0.0, 1.0)
    """The same on the held-out episodes of evaluations; wider, because those are fewer."""

    def __post_init__(self) -> None:
        checks = Checks("warmup", self)
        checks.fraction("expert_rate")
        checks.at_least(1, "layers", "trajectories", "batch_rows", "max_updates", "check_every", "check_episodes")
        checks.at_least(259, "pieces")
        if self.width < 16 or self.width % 16:
            raise ConfigError(f"warmup.width must be a multiple of 16, got {self.width}")
        checks.positive("learning_rate")
        checks.one_of(SCHEDULES, "schedule")
        checks.betas()
        for name in ("band", "held_out_band"):
            band = getattr(self, name)
            if len(band) != 2 or not 0 <= band[0] < band[1] <= 1:
                raise ConfigError(f"warmup.{name} must be (low, high) with 0 <= low < high <= 1, got {band}")


def _check_device_name(device: str) -> None:
    """Raises ConfigError for a name that PyTorch does not know, which is asked about unusual ones only: importing it
    takes seconds."""
    if re.fullmatch(r"cpu|cuda(:\d)?", device):
        return
    import torch

    try:
        torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            "policy.device must be 'cpu', 'cuda', 'cuda:N' (the GPU of that number), or another device of PyTorch,"
            f" got {device!r}"
        ) from error
