"""What is measured: an op, a shape of a real model, and inputs like those of agent training.

Tokens are packed sequences of turns: an observation (masked) and then an action, in runs, so that the active fraction
is what multi-turn data has. The log-ratios lie well inside or well outside the clip interval: no rounding can
move a token across the bound, which would make gradients differ for a reason that is nobody's fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rspo_kernels import PolicyLossConfig

MODELS = {
    "SmolLM2-135M": (576, 49152),
    "Qwen2.5-0.5B": (896, 151936),
    "Qwen2.5-1.5B": (1536, 151936),
    "Llama-3.2-3B": (3072, 128256),
    "Qwen2.5-7B": (3584, 152064),
    "Qwen3-32B": (5120, 151936),
    "tiny": (32, 1000),
}
"""Hidden size and vocabulary."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONFIG = PolicyLossConfig(loss="grpo")
CLIP = 0.2
"""Token-wise clipped ratio, token-mean, no KL and no entropy term: what every library has."""

LOSS_OPS = ("policy_loss", "logits_policy_loss", "linear_policy_loss")
LOGITS_OPS = ("token_logprobs", "token_logprobs + entropy", "logits_policy_loss")
LINEAR_OPS = ("linear_token_logprobs", "linear_token_logprobs + entropy", "linear_policy_loss")
SCAN_OPS = ("group_advantages", "step_advantages", "gae", "discounted_returns", "masked_whiten")
GROUP_SIZE = 8
GAMMA, LAM, EPS = 0.95, 0.9, 1e-6


@dataclass(frozen=True)
class Workload:
    """One op on one input. rows: tokens (rewards, for the advantages of groups; turns, for those of steps).

    active: fraction of unmasked tokens. natural: a third of the sequences has no advantage besides, and a fifth of the
    tokens is clipped. directions: "forward" (no gradient wanted), "backward" (alone), "both".
    """

    op: str
    model: str
    rows: int
    dtype: str = "fp32"
    active: float = 1.0
    natural: bool = False
    directions: tuple[str, ...] = ("both",)
    memory: bool = False

    @property
    def hidden_size(self) -> int:
        return MODELS[self.model][0] if self.op in LINEAR_OPS else 0

    @property
    def vocab(self) -> int:
        return MODELS[self.model][1] if self.op in (*LINEAR_OPS, *LOGITS_OPS) else 0

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return max(1, min(1024, self.rows // 8))

    @property
    def shape(self) -> str:
        """In words, e.g. SmolLM2-135M, N 1024."""
        return f"{self.model}, N {self.rows}" if self.vocab else f"N {self.rows}"

    @property
    def kind(self) -> str:
        """The active fraction in words."""
        return f"{self.active:.0%}" + (", ⅓ no advantage, ⅕ clipped" if self.natural else "")

    def bytes_needed(self, hungriest: bool) -> int:
        """About what inputs, reference and gradients hold at once; with the buffers of the hungriest provider, too."""
        logits = 4 * self.rows * self.vocab
        kept = 3 if self.op in LOGITS_OPS else 0
        return (5 if hungriest else kept) * logits + 4 * 8 * self.hidden_size * (self.vocab + self.rows)


@dataclass
class Inputs:
    """Tensors of a workload; those that it does not have are None. The leaves require a gradient.

    N tokens stand as B sequences of L: `view` makes [N, ...] into [B, L, ...].
    """

    workload: Workload
    targets: Tensor
    mask: Tensor
    advantages: Tensor
    log_ratio: Tensor
    upstream: dict[str, Tensor]
    old_logp: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None
    logp: Tensor | None = None
    numbers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keep = self.mask.to(torch.float32)

    @property
    def leaves(self) -> dict[str, Tensor]:
        candidates = {name: getattr(self, name) for name in ("logits", "hidden", "weight", "logp")}
        return {name: x for name, x in candidates.items() if x is not None}

    def view(self, x: Tensor) -> Tensor:
        """[N, ...] as [B, L, ...]."""
        return x.view(-1, self.workload.length, *x.shape[1:])

    @property
    def sequence_advantages(self) -> Tensor:
        """One for each sequence, [B]."""
        return self.view(self.advantages)[:, 0].contiguous()

    def state(self) -> Tensor | None:
        """What `make` cannot make again without the reference, on the CPU."""
        return None if self.old_logp is None else self.old_logp.cpu()


def make(workload: Workload, device: torch.device, old_logp: Tensor | None = None) -> Inputs:
    """The inputs of a workload, the same in every process. old_logp [N] comes from the reference's log-probs."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    n, vocab, length = workload.rows, max(workload.vocab, 1), workload.length
    targets = torch.randint(0, vocab, (n,), device=device, generator=generator)
    mask = _turns(workload).to(device)
    advantages = normal(n // length)
    advantages += advantages.sign() * 0.1
    log_ratio = (torch.rand(n, device=device, generator=generator) - 0.5) * 0.2
    if workload.natural:
        advantages[::3] = 0.0
        clipped = torch.rand(n, device=device, generator=generator) < 0.2
        outside = 0.5 * advantages.sign().repeat_interleave(length)
        log_ratio = torch.where(clipped, outside, log_ratio)
    inputs = Inputs(
        workload,
        targets,
        mask,
        advantages.repeat_interleave(length),
        log_ratio,
        {"logp": normal(n), "entropy": normal(n)},
        old_logp=None if old_logp is None else old_logp.to(device),
    )
    dtype = DTYPES[workload.dtype]
    if workload.op in LOGITS_OPS:
        inputs.logits = normal(n, vocab).mul_(2.0).to(dtype)
        # Tokens that a policy sampled are likely ones.
        inputs.logits[torch.arange(n, device=device), targets] += 9.0
        inputs.logits.requires_grad_()
    if workload.op in LINEAR_OPS:
        size = workload.hidden_size
        weight = normal(vocab, size).mul_(2.0 / size**0.5)
        hidden = normal(n, size).add_(weight[targets], alpha=2.25)
        inputs.weight, inputs.hidden = weight.to(dtype).requires_grad_(), hidden.to(dtype).requires_grad_()
    if workload.op == "policy_loss":
        inputs.logp = normal(n).abs_().neg_().requires_grad_()
    if workload.op in SCAN_OPS:
        inputs.numbers = _scan_numbers(workload, generator, device)
    return inputs


def _turns(workload: Workload) -> Tensor:
    """bool [N]: in each sequence a few turns, the last part of each active; lengths differ from turn to turn."""
    generator = torch.Generator().manual_seed(2)
    length = workload.length
    sequences = []
    for _ in range(workload.rows // length):
        turns = max(1, min(6, length // 16))
        shares = torch.rand(turns, generator=generator) + 0.5
        ends = (shares.cumsum(0) / shares.sum() * length).round().long().tolist()
        row, start = torch.zeros(length, dtype=torch.bool), 0
        for end in ends:
            row[end - round((end - start) * workload.active) : end] = True
            start = end
        sequences.append(row)
    return torch.cat(sequences)


def _scan_numbers(workload: Workload, generator: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    """Rewards [N], values [N], and ids: groups of 8, trajectories of 16 turns, anchors that half the turns share."""
    n = workload.rows
    index = torch.arange(n, device=device)
    by_turn = workload.op == "step_advantages"
    anchors = torch.randint(0, 32, (n,), device=device, generator=generator)
    return {
        "rewards": torch.randn(n, device=device, generator=generator),
        "values": torch.randn(n, device=device, generator=generator),
        "groups": index // (16 * GROUP_SIZE if by_turn else GROUP_SIZE),
        "trajectories": index // 16,
        "anchors": anchors,
    }
