"""Which workloads, most important first: a run whose time is up has what matters, and lists the rest.

CPU: SmolLM2-135M in float32, the sizes of a small training step; a whole run takes minutes. CUDA: bf16 at the sizes of
real models and batches, with float32 points.
"""

from __future__ import annotations

from .workloads import Workload

EACH = ("forward", "backward", "both")
FUSED = ("both", "forward")
"""The fused losses make their gradient in the forward pass: no backward pass alone."""

BUDGET = {("cpu", False): 330.0, ("cpu", True): 60.0, ("cuda", False): 390.0, ("cuda", True): 60.0}
"""Seconds after which no further workload begins, by device and --quick."""

SMALL = "SmolLM2-135M"
FRACTIONS = (0.25, 1.0, 0.5, 0.1)


def cases(device: str, quick: bool) -> list[Workload]:
    """The workloads of a run."""
    if device == "cuda":
        return _cuda_quick() if quick else _cuda()
    return _cpu_quick() if quick else _cpu()


def _cpu() -> list[Workload]:
    n = 1024
    return [
        Workload("linear_policy_loss", SMALL, n, active=0.25, memory=True),
        Workload("logits_policy_loss", SMALL, n, active=0.25, directions=FUSED, memory=True),
        Workload("token_logprobs", SMALL, n, directions=EACH, memory=True),
        Workload("linear_token_logprobs", SMALL, n // 2, directions=("forward", "both"), memory=True),
        Workload("policy_loss", "", 16384, active=0.5, directions=EACH),
        *_scans(1),
        Workload("linear_policy_loss", SMALL, n, active=1.0, memory=True),
        Workload("logits_policy_loss", SMALL, n, active=1.0, memory=True),
        Workload("logits_policy_loss", SMALL, n, active=0.5, natural=True),
        Workload("linear_policy_loss", SMALL, n, active=0.5, natural=True),
        *(Workload("logits_policy_loss", SMALL, n, active=f) for f in (0.5, 0.1)),
        *(Workload("linear_policy_loss", SMALL, n, active=f) for f in (0.5, 0.1)),
        Workload("token_logprobs + entropy", SMALL, n, directions=("forward", "both")),
        Workload("linear_token_logprobs + entropy", SMALL, n // 2),
        Workload("logits_policy_loss", SMALL, 512, "bf16", active=0.25),
        Workload("token_logprobs", SMALL, 512, "bf16", directions=("forward", "both")),
        Workload("linear_policy_loss", SMALL, 256, "bf16", active=0.25),
        # Only with a larger --budget.
        Workload("linear_policy_loss", SMALL, 2048, active=0.25, memory=True),
        Workload("linear_policy_loss", "Qwen2.5-0.5B", 512, active=0.25, memory=True),
        Workload("logits_policy_loss", "Qwen2.5-0.5B", 512, active=0.25, memory=True),
        Workload("linear_policy_loss", SMALL, 2048, active=1.0, memory=True),
    ]


def _cpu_quick() -> list[Workload]:
    return [
        Workload("linear_policy_loss", SMALL, 256, active=0.25, memory=True),
        Workload("logits_policy_loss", SMALL, 256, active=0.25, directions=FUSED),
        Workload("token_logprobs", SMALL, 128, directions=EACH),
        Workload("linear_token_logprobs", SMALL, 64, directions=FUSED),
        Workload("policy_loss", "", 16384, active=0.5, directions=EACH),
        *_scans(1),
    ]


def _cuda() -> list[Workload]:
    big, small = "Qwen2.5-7B", "Qwen2.5-0.5B"
    return [
        Workload("linear_policy_loss", big, 16384, "bf16", 0.25, memory=True, directions=FUSED),
        Workload("logits_policy_loss", big, 16384, "bf16", 0.25, memory=True, directions=FUSED),
        Workload("token_logprobs", big, 16384, "bf16", directions=EACH, memory=True),
        Workload("linear_token_logprobs", big, 8192, "bf16", directions=EACH, memory=True),
        Workload("policy_loss", "", 65536, active=0.5, directions=EACH),
        *_scans(4),
        *(Workload("linear_policy_loss", big, 16384, "bf16", f, memory=True) for f in (1.0, 0.5, 0.1)),
        *(Workload("logits_policy_loss", big, 16384, "bf16", f, memory=True) for f in (1.0, 0.5, 0.1)),
        Workload("linear_policy_loss", big, 16384, "bf16", 0.5, natural=True),
        Workload("logits_policy_loss", big, 16384, "bf16", 0.5, natural=True),
        Workload("token_logprobs + entropy", big, 16384, "bf16", directions=EACH),
        Workload("linear_token_logprobs + entropy", big, 8192, "bf16", directions=("forward", "both")),
        *(
            Workload("linear_policy_loss", model, n, "bf16", 0.25, memory=True)
            for model, n in (
                ("Qwen2.5-1.5B", 16384),
                ("Llama-3.2-3B", 16384),
                (small, 65536),
                ("Qwen3-32B", 8192),
                (small, 512),
                (SMALL, 16384),
            )
        ),
        *(Workload("logits_policy_loss", model, n, "bf16", 0.25) for model, n in ((SMALL, 65536), (small, 512))),
        Workload("token_logprobs", SMALL, 65536, "bf16", directions=EACH),
        Workload("linear_policy_loss", small, 4096, "fp32", 0.25),
        Workload("logits_policy_loss", small, 8192, "fp32", 0.25),
        Workload("token_logprobs", small, 8192, "fp32", directions=("forward", "both")),
    ]


def _cuda_quick() -> list[Workload]:
    model = "Qwen2.5-1.5B"
    return [
        Workload("linear_policy_loss", model, 4096, "bf16", 0.25, memory=True),
        Workload("logits_policy_loss", model, 4096, "bf16", 0.25, directions=FUSED, memory=True),
        Workload("token_logprobs", model, 4096, "bf16", directions=EACH),
        Workload("linear_token_logprobs", model, 2048, "bf16", directions=FUSED),
        Workload("policy_loss", "", 65536, active=0.5, directions=EACH),
        *_scans(1),
    ]


def _scans(factor: int) -> list[Workload]:
    """Advantages of a batch of 64 (or more) sequences."""
    forward = ("forward",)
    return [
        Workload("group_advantages", "", 512 * factor, directions=forward),
        Workload("step_advantages", "", 1024 * factor, directions=forward),
        Workload("gae", "", 8192 * factor, active=0.5, directions=forward),
        Workload("discounted_returns", "", 8192 * factor, directions=forward),
        Workload("masked_whiten", "", 8192 * factor, active=0.5, directions=forward),
    ]
