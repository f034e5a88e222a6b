"""The sections of a configuration: dataclasses that check themselves when they are made. `rspo.config` joins them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

ESTIMATORS = ("grpo", "rloo", "gigpo", "ppo", "reinforce++")
METHODS = ("rspo", *ESTIMATORS)
GROUP_ESTIMATORS = ("grpo", "rloo", "gigpo")
LAYOUTS = ("per_turn", "conversation")
SWITCHES = ("auto", "on", "off")
GAE_LEVELS = ("trajectory", "turn", "token")
BACKBONES = ("own", "shared")
SCHEDULES = ("constant", "linear", "cosine")
SAMPLING = ("reward", "random", "variance")
UNITS = ("trajectory", "group")
BUFFER_SOURCES = ("dense", "outcome", "history")
MIXTURES = ("two-means", "pooled")
TRAIN_REWARDS = ("outcome", "dense")
TARGETS = ("task_score", "won")
LEARNED_REWARD_SCALE = 10.0
SINGLETONS = ("zero", "raw")
ATTENTION = ("sdpa", "eager", "flash_attention_2")
COPIES = ("device", "offload", "adapter")
DTYPES = ("float32", "bfloat16", "float16")
SHARDS = ("none", "fsdp")
REPORTERS = ("tensorboard", "wandb", "trackio")
ENGINES = ("transformers", "vllm", "openai")
SERVERS = ("vllm", "llama.cpp", "completions", "transformers", "chat")
SERVERS_WITH_LOGP = ("vllm", "llama.cpp")
PUSHES = ("off", "vllm", "sglang")


class ConfigError(ValueError):
    """A setting that is unknown or impossible; the message names what is allowed."""


@dataclass(frozen=True)
class EnvConfig:
    """Which environment, and how its turns become prompts."""

    name: str = "household"
    """A registered name, or the path of a class of one's own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    history_length: int = 2
    """(observation, action) pairs that a prompt of the per_turn layout repeats (verl-agent: 2)."""
    layout: str = "per_turn"
    """How a trajectory is laid out for the model: each turn a sample of its own with a prompt made anew ("per_turn",
    the paper), or one growing "conversation", of which only the responses carry loss."""
    workers: int = 0
    """Processes that the episodes are shared out to (`rspo.envs.workers`); 0: none, they run in the trainer's own.
    The number does not change results."""
    worker_timeout: float = 300.0
    """Seconds after which a worker that has not answered is given up."""

    def __post_init__(self) -> None:
        at_least("env.workers", self.workers, 0)
        positive("env.worker_timeout", self.worker_timeout)
        at_least("env.history_length", self.history_length, 0)
        one_of("env.layout", self.layout, LAYOUTS)


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
    at most (`rspo.heads`). It changes results by no more than rounding."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of a model's layers for the backward pass, and compute each layer a second time in it: less
    memory for a third more work, and the same gradients."""
    chat: str = "auto"
    """A prompt is a user's message in the tokenizer's chat template: "auto": where there is a template; "on": one must
    be there in the tokenizer at `path`; "off": never."""
    packing: str = "auto"
    """Forward passes over rows packed end to end, without padding: "on", "off", or "auto": with flash_attention_2,
    whose kernels skip what lies between rows. The other attentions compute and mask it, and are faster padded."""
    allow_download: bool = False
    """Let transformers fetch a model that `path` names on a hub; otherwise nothing is read but local files."""

    def __post_init__(self) -> None:
        one_of("policy.dtype", self.dtype, DTYPES)
        one_of("policy.attention", self.attention, ATTENTION)
        for name in ("packing", "fused", "chat"):
            one_of(f"policy.{name}", getattr(self, name), SWITCHES)

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
        at_least("lora.rank", self.rank, 0)
        if self.alpha is not None:
            at_least("lora.alpha", self.alpha, 1)
        if not self.targets:
            raise ConfigError("lora.targets must name at least one kind of layer, got ()")
        if self.learning_rate is not None:
            at_least("lora.learning_rate", self.learning_rate, 0)

    @property
    def scale_numerator(self) -> int:
        """`alpha`, or what stands for it."""
        return 2 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True)
class WarmupConfig:
    """Behaviour cloning of a small model to a start policy that seldom succeeds (`rspo.warmup`).

    The start matters: at 0.2 % nothing is learned from outcomes, at 3 % all methods look alike.
    """

    width: int = 64
    """Of the model's hidden states, a multiple of 16."""
    layers: int = 2
    pieces: int = 1024
    """Vocabulary of its tokenizer where the environment does not list its words: pieces of text learned from
    demonstrations, 259 at least."""
    trajectories: int = 2500
    expert_rate: float = 0.5
    """Probability that a step of a demonstration is the expert's; otherwise it is random."""
    learning_rate: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    batch_rows: int = 256
    max_updates: int = 800
    check_every: int = 20
    """Updates between two measurements of the success rate."""
    check_episodes: int = 2048
    """Episodes of training tasks in a measurement; an eighth of them first, and all only if that reaches the band."""
    band: tuple[float, float] = (0.010, 0.015)
    """Success rate of the start policy on training tasks, at the rollout temperature."""
    held_out_band: tuple[float, float] = (0.005, 0.015)
    """The same on the held-out episodes of evaluations; wider, because those are fewer."""

    def __post_init__(self) -> None:
        fraction("warmup.expert_rate", self.expert_rate)
        for name in ("layers", "trajectories", "batch_rows", "max_updates", "check_every", "check_episodes"):
            at_least(f"warmup.{name}", getattr(self, name), 1)
        at_least("warmup.pieces", self.pieces, 259)
        if self.width < 16 or self.width % 16:
            raise ConfigError(f"warmup.width must be a multiple of 16, got {self.width}")
        positive("warmup.learning_rate", self.learning_rate)
        betas("warmup.betas", self.betas)
        for name in ("band", "held_out_band"):
            band = getattr(self, name)
            if len(band) != 2 or not 0 <= band[0] < band[1] <= 1:
                raise ConfigError(f"warmup.{name} must be (low, high) with 0 <= low < high <= 1, got {band}")


@dataclass(frozen=True)
class RolloutConfig:
    """How trajectories are sampled."""

    tasks: int = 16
    """Tasks of one update, B in the paper's Algorithm 1. RSPO replaces a share α of them by replay."""
    group_size: int = 8
    """Trajectories of each task, N."""
    temperature: float = 1.0
    max_prompt_tokens: int = 128
    max_response_tokens: int = 2
    """Household's compact actions are two words."""
    max_batch: int = 512
    """Sequences that the model generates at once."""
    rescore: str = "auto"
    """Take the log-probs of responses from a training forward pass instead of from generation: "on", "off", or "auto":
    where the policy is not float32, whose rounding makes the two differ, so that ratios would not begin at 1. Engines
    other than "transformers" always have it on."""

    def __post_init__(self) -> None:
        for name in ("tasks", "group_size", "max_prompt_tokens", "max_response_tokens", "max_batch"):
            at_least(f"rollout.{name}", getattr(self, name), 1)
        positive("rollout.temperature", self.temperature)
        one_of("rollout.rescore", self.rescore, SWITCHES)


@dataclass(frozen=True)
class EngineConfig:
    """Who generates the responses (docs/engines.md). Log-probs for training always come from the training model."""

    name: str = "transformers"
    """"transformers": the training model itself; "vllm": vLLM in this process; "openai": an OpenAI-compatible
    server."""
    server: str = "vllm"
    """What the server of "openai" understands: "vllm" and "llama.cpp" take and give token ids, with log-probs;
    "completions" takes token ids and gives text; "transformers" (`transformers serve`) takes and gives text; "chat" has
    chat completions only."""
    url: str | None = None
    """Of the server's API, e.g. "http://localhost:8000/v1"."""
    model: str | None = None
    """Name that the server knows the model by. None: the one it serves."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's key; the key itself is in no configuration."""
    timeout: float = 600.0
    """Seconds after which a request has failed."""
    retries: int = 3
    """Further tries of a request that got no answer, or 408, 409, 429 or 5xx for one; the pause doubles from 0.5 s up
    to 8 s."""
    concurrency: int = 64
    """Requests under way at once."""
    push_weights: str = "off"
    """How the server gets the weights of the agent that acts: "vllm" and "sglang" make that server read them from a
    folder. Needed for training with "openai"; "vllm" in process always gets them."""
    push_folder: str | None = None
    """Where the weights are written for the engine to read, so that the server must see it under the same path; None:
    a folder of the run."""
    tensor_parallel: int = 1
    """GPUs of vLLM in process."""
    gpu_memory: float = 0.5
    """Share of a GPU's memory that vLLM in process may take."""
    sleep: bool = True
    """vLLM in process gives its GPU memory back between rollouts, its weights to the CPU's."""
    mismatch_limit: float | None = None
    """Mean |Δ log-prob| (nats/token) between engine and training model in a rollout above which the run stops; None: it
    only warns, above 0.1."""
    importance_cap: float | None = None
    """Truncated importance sampling: a token's loss is weighted by min(π_train/π_engine, cap) at the time of the
    rollout. None: not weighted. Needs log-probs of the engine."""

    def __post_init__(self) -> None:
        one_of("engine.name", self.name, ENGINES)
        one_of("engine.server", self.server, SERVERS)
        one_of("engine.push_weights", self.push_weights, PUSHES)
        if (self.url is None) == (self.name == "openai"):
            raise ConfigError(
                f"engine.url must be given with engine.name='openai' and with no other, got {self.url!r} with"
                f" {self.name!r}"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"engine.url must begin with http:// or https://, got {self.url!r}")
        if self.push_weights != "off" and self.name != "openai":
            raise ConfigError(
                f"engine.push_weights must be 'off' without a server (engine.name='openai'), got {self.push_weights!r}"
                f" with {self.name!r}"
            )
        positive("engine.timeout", self.timeout)
        at_least("engine.retries", self.retries, 0)
        at_least("engine.concurrency", self.concurrency, 1)
        at_least("engine.tensor_parallel", self.tensor_parallel, 1)
        positive("engine.gpu_memory", self.gpu_memory)
        fraction("engine.gpu_memory", self.gpu_memory)
        for name in ("mismatch_limit", "importance_cap"):
            if getattr(self, name) is not None:
                positive(f"engine.{name}", getattr(self, name))
        if self.importance_cap is not None and self.name == "openai" and self.server not in SERVERS_WITH_LOGP:
            raise ConfigError(
                f"engine.importance_cap needs log-probs of the engine, which engine.server={self.server!r} does not"
                f" give; {' and '.join(map(repr, SERVERS_WITH_LOGP))} do"
            )


@dataclass(frozen=True)
class EstimatorConfig:
    """Advantages; which estimator is `method`, or under RSPO `base`."""

    std: bool = True
    """GRPO, GiGPO: divide by the group's standard deviation. False: Dr. GRPO, and GiGPO's mean_norm."""
    rows: bool = False
    """GRPO, GiGPO: statistics over the turns' rows, as verl-agent takes them, instead of over trajectories."""
    singleton: str = "zero"
    """Advantage of a group of one: 0, or the "raw" score."""
    invalid_penalty: float = 0.0
    """Taken off the reward of a turn whose action was invalid, and off no other turn (the paper: 0.1). Off for the
    tiny household model: while nearly all groups fail it is the only signal, and Adam makes any signal a large step,
    towards actions that are always accepted and lead nowhere."""
    gamma: float | None = None
    """Discount. None: 0.95 for GiGPO's step returns, 1 for PPO and REINFORCE++."""
    step_weight: float = 1.0
    """GiGPO: weight of the step level."""
    similarity: float | None = None
    """GiGPO: observations at least this similar (difflib's ratio) are one state; None: equal ones are."""
    lam: float = 0.95
    """PPO: λ of GAE."""
    level: str = "trajectory"
    """PPO: GAE over a trajectory's tokens, from a turn's last token on to the next turn's first ("trajectory"), over
    its turns, one value each ("turn"), or inside each turn, which gets the trajectory's total reward ("token", as
    verl-agent)."""
    whiten: bool = True
    """PPO: advantages of an update's batch with mean 0 and deviation 1."""
    bootstrap: bool = False
    """PPO: a truncated trajectory goes on with the critic's value of the state it was cut off in. False: it ends with
    0, which makes the turn limit part of the task. Without a discount, and with most trajectories truncated, a value
    that is its own target has nothing to hold it: on household it drifts until the policy collapses."""

    def __post_init__(self) -> None:
        one_of("estimator.singleton", self.singleton, SINGLETONS)
        at_least("estimator.invalid_penalty", self.invalid_penalty, 0)
        if self.gamma is not None:
            fraction("estimator.gamma", self.gamma)
        at_least("estimator.step_weight", self.step_weight, 0)
        fraction("estimator.lam", self.lam)
        one_of("estimator.level", self.level, GAE_LEVELS)
        if self.similarity is not None and not 0 < self.similarity <= 1:
            raise ConfigError(f"estimator.similarity must be in (0, 1] or null, got {self.similarity}")


@dataclass(frozen=True)
class CriticConfig:
    """PPO's value function."""

    backbone: str = "own"
    """A body of its own, which starts as a copy of the policy's, or one "shared" with the policy, where the value loss
    trains both."""
    learning_rate: float = 1e-3
    """Of a critic with a body of its own, AdamW; a shared one is trained with the policy."""
    value_clip: float | None = 0.5
    """Values may move this far from those before the update before the loss stops pulling; None: no limit."""
    coef: float = 0.5
    """Weight of the value loss beside the policy loss, where the body is shared."""

    def __post_init__(self) -> None:
        one_of("critic.backbone", self.backbone, BACKBONES)
        at_least("critic.learning_rate", self.learning_rate, 0)
        at_least("critic.coef", self.coef, 0)
        if self.value_clip is not None:
            positive("critic.value_clip", self.value_clip)


@dataclass(frozen=True)
class RewardConfig:
    """Which rewards train, and where dense ones come from."""

    train: str = "outcome"
    """Rewards of every method but "rspo"; "dense" shows reward hacking (the paper's Figure 3)."""
    dense: str = "environment"
    """"environment", "model:FOLDER" of a process reward model (`rspo reward-model`), or "package.module:function" that
    maps a Trajectory to one number per turn."""
    dense_scale: float | None = None
    """Factor on dense rewards. None: 10 for a reward model, whose total is about 1 for a success, so that dense returns
    have the scale of outcomes; 1 for the others."""
    dense_noise: float = 0.0
    """Standard deviation of Gaussian noise on each turn's dense reward before the scale (the paper's Table 5)."""

    def __post_init__(self) -> None:
        one_of("rewards.train", self.train, TRAIN_REWARDS)
        if self.dense != "environment" and not all(self.dense.partition(":")):
            raise ConfigError(
                f"rewards.dense must be 'environment', 'model:FOLDER' or 'package.module:function', got {self.dense!r}"
            )
        if self.dense_scale is not None:
            positive("rewards.dense_scale", self.dense_scale)
        at_least("rewards.dense_noise", self.dense_noise, 0)

    @property
    def model_path(self) -> str | None:
        """Folder of the process reward model, where dense rewards come from one."""
        kind, _, path = self.dense.partition(":")
        return path if kind == "model" else None

    @property
    def scale(self) -> float:
        """The factor that `dense_scale` stands for."""
        if self.dense_scale is not None:
            return self.dense_scale
        return 1.0 if self.model_path is None else LEARNED_REWARD_SCALE


@dataclass(frozen=True)
class RewardModelConfig:
    """Training of a process reward model (`rspo.reward_training`).

    The defaults are SPA-RL's, for a pre-trained model of a few billion weights.
    """

    target: str = "task_score"
    """What the turns' rewards should add up to, in [0, 1]: "task_score", or "won"."""
    epochs: int = 1
    batch_size: int = 16
    """Trajectories of an update."""
    learning_rate: float = 3e-6
    weight_decay: float = 0.01
    warmup_updates: int = 500
    """Updates over which the learning rate rises from 0; then it stays."""
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    head_width: int | None = None
    """Hidden units of the MLP; None: as many as the model's hidden states have numbers."""
    max_tokens: int | None = None
    """Longest conversation that is read in one piece; None: as long as the model can read."""
    held_out: float = 0.1
    """Share of the trajectories that is not trained on, and measured instead."""
    micro_batch_tokens: int = 16384
    """Tokens in one forward pass, padding included; a conversation is never split between two."""
    bf16: bool = True
    """Train in bfloat16 on a GPU that can; weights and Adam's state stay float32."""

    def __post_init__(self) -> None:
        one_of("reward_model.target", self.target, TARGETS)
        for name in ("epochs", "batch_size", "micro_batch_tokens"):
            at_least(f"reward_model.{name}", getattr(self, name), 1)
        positive("reward_model.learning_rate", self.learning_rate)
        positive("reward_model.grad_clip", self.grad_clip)
        at_least("reward_model.weight_decay", self.weight_decay, 0)
        at_least("reward_model.warmup_updates", self.warmup_updates, 0)
        if self.head_width is not None:
            at_least("reward_model.head_width", self.head_width, 1)
        if self.max_tokens is not None:
            at_least("reward_model.max_tokens", self.max_tokens, 2)
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"reward_model.held_out must be in [0, 1), got {self.held_out}")


@dataclass(frozen=True)
class SwapConfig:
    """The reward swap: agent B, its buffer, and how much of it agent A replays (Algorithm 1, section 4.2)."""

    k: int = 3
    """Updates of B with dense rewards, then of A with outcome rewards, in one loop."""
    alpha: float = 0.125
    """Share of replayed data, and its weight in eq. 1; in [0, 1)."""
    alpha_schedule: str = "constant"
    """α over the run: constant, or decaying to 0 linearly or by a cosine (named as future work in appendix F)."""
    buffer_tasks: int = 28
    """Tasks that B collects, `group_size` trajectories each."""
    source: str = "dense"
    """Who fills the buffer: B after dense updates (RSPO), B after outcome updates ("outcome", RSPO_O), or A's own
    previous loop ("history", RSPO_H)."""
    sampling: str = "reward"
    """Replay the highest rewards first, uniformly at "random", or whole groups by reward "variance"."""
    unit: str = "trajectory"
    """What sampling takes: single trajectories, or whole groups ("variance" always takes groups)."""
    success_only: bool = False
    """Replay fewer trajectories rather than unsuccessful ones."""
    fresh_optimizer: bool = False
    """B starts with a new optimiser instead of a copy of A's state."""
    copy: str = "device"
    """What agent B is. "device": a copy of A's trained weights and optimiser state beside A's own. "offload": the same,
    in A's place, while A's wait in CPU memory. "adapter": a LoRA adapter (section `lora`) on A's weights, which are
    fully trained but stand still while B acts and learns; its optimiser is new. Under `lora.rank` > 0 with "device"
    both agents are adapters on one frozen base."""
    ignore_behavior: bool = False
    """Treat replayed tokens as if A had written them: ratio to π_old and clip centre 1, whoever sampled them."""
    mixture: str = "two-means"
    """"two-means": (1 - α)·mean of the on-policy terms + α·mean of the replayed terms (eq. 1); "pooled": one mean."""

    def __post_init__(self) -> None:
        at_least("swap.k", self.k, 1)
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"swap.alpha must be in [0, 1), got {self.alpha}")
        one_of("swap.alpha_schedule", self.alpha_schedule, SCHEDULES)
        at_least("swap.buffer_tasks", self.buffer_tasks, 1)
        one_of("swap.source", self.source, BUFFER_SOURCES)
        one_of("swap.sampling", self.sampling, SAMPLING)
        one_of("swap.unit", self.unit, UNITS)
        one_of("swap.mixture", self.mixture, MIXTURES)
        one_of("swap.copy", self.copy, COPIES)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule, and the mini-batches of an update."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    schedule: str = "constant"
    """Learning rate over the run's A-updates, after the warm-up: constant, or falling to 0 linearly or by a cosine."""
    warmup_updates: int = 0
    """A-updates over which the learning rate rises from 0."""
    epochs: int = 1
    """Passes of an update over its data."""
    minibatches: int = 4
    """Optimiser steps of a pass."""
    minibatch_rows: int | None = None
    """Rows (turns, or conversations) in a mini-batch; overrides `minibatches`."""
    micro_batch_tokens: int = 16384
    """Tokens in one forward pass, padding included; the gradient does not depend on it."""

    def __post_init__(self) -> None:
        at_least("optimizer.learning_rate", self.learning_rate, 0)
        at_least("optimizer.eps", self.eps, 0)
        positive("optimizer.grad_clip", self.grad_clip)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        one_of("optimizer.schedule", self.schedule, SCHEDULES)
        at_least("optimizer.warmup_updates", self.warmup_updates, 0)
        at_least("optimizer.epochs", self.epochs, 1)
        at_least("optimizer.minibatches", self.minibatches, 1)
        at_least("optimizer.micro_batch_tokens", self.micro_batch_tokens, 1)
        if self.minibatch_rows is not None:
            at_least("optimizer.minibatch_rows", self.minibatch_rows, 1)
        betas("optimizer.betas", self.betas)


@dataclass(frozen=True)
class ParallelConfig:
    """Several processes of one run, started by `accelerate launch` or `torchrun` (`rspo.distributed`)."""

    processes: int | None = None
    """How many the run needs; with another number it does not begin. None: as many as were started."""
    shard: str = "none"
    """What of the model each process holds: the whole ("none"), or with FSDP2 its share of the weights, gradients and
    optimiser states ("fsdp")."""

    def __post_init__(self) -> None:
        if self.processes is not None:
            at_least("parallel.processes", self.processes, 1)
        one_of("parallel.shard", self.shard, SHARDS)


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation during training and by `rspo eval`."""

    every: int = 9
    """A-updates between evaluations; 0: only before and after."""
    episodes: int = 512
    """At each temperature, the same ones every time."""
    temperatures: tuple[float, ...] = (1.0, 0.4)
    """Sampling temperatures. The first is the main one: its success rate is the record's plain `success`, that of
    another T is `success@T`."""
    split: str = "eval"
    """Of the environment's tasks: every environment has "train" and "eval", some have more."""
    transcripts: int = 4
    """Episodes of each evaluation that are written out as text, the same ones every time; 0: none."""

    def __post_init__(self) -> None:
        at_least("evaluation.every", self.every, 0)
        at_least("evaluation.episodes", self.episodes, 1)
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"evaluation.temperatures must be one or more different numbers, got {self.temperatures}")
        for temperature in self.temperatures:
            positive("evaluation.temperatures", temperature)
        at_least("evaluation.transcripts", self.transcripts, 0)


@dataclass(frozen=True)
class RunConfig:
    """Length, seed and record keeping of a run."""

    seed: int = 0
    steps: int = 54
    """Updates of agent A."""
    save_every: int = 9
    """A-updates between checkpoints, rounded up to the end of a loop; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    threads: int | None = 1
    """CPU threads of PyTorch. One suits the tiny model, whose tensors are too small to share out, and makes results
    independent of the number of cores; None leaves the choice to PyTorch, for larger models on a CPU."""
    report_to: tuple[str, ...] = ()
    """Where records go besides `metrics.jsonl`: "tensorboard", "wandb", "trackio", or the class path
    "package.module:Class" of an `rspo.reporters.Reporter` of one's own."""
    report_online: bool = False
    """Let "wandb" send records to its server as they come, and "trackio" ask the Hugging Face Hub for the user's name;
    without it both stay on this machine, unless their own environment variables say otherwise."""

    def __post_init__(self) -> None:
        at_least("run.seed", self.seed, 0)
        at_least("run.steps", self.steps, 1)
        at_least("run.save_every", self.save_every, 0)
        at_least("run.keep", self.keep, 1)
        if self.threads is not None:
            at_least("run.threads", self.threads, 1)
        for name in self.report_to:
            if ":" not in name:
                one_of("run.report_to", name, REPORTERS)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def at_least(name: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise ConfigError(f"{name} must be >= {low}, got {value}")


def positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be > 0, got {value}")


def fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be in [0, 1], got {value}")


def betas(name: str, value: tuple[float, float]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ConfigError(f"{name} must be two numbers in [0, 1), got {value}")
