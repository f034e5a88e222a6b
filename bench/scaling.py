"""The tables of docs/scaling.md: calculated by `rspo.cli.memory` and `rspo.cli.workload`, nothing measured.

`python -m bench.readme` writes them, and `--check` compares.
"""

from __future__ import annotations

from dataclasses import replace

from rspo.cli.memory import USABLE, MemorySetup
from rspo.cli.workload import Flops, Workload
from rspo.config import Config, paper_config
from rspo.config.files import apply_flags
from rspo.models.shapes import PUBLISHED

from .report import markdown

MODELS = ("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-32B")
GPUS = (1, 8, 64)
SIZES = (80, 141)
"""Memory of a GPU, GB."""
RANK = 32
GENERATED_ROWS = 32
MICRO_BATCH_TOKENS = 16384
RESPONSES = (1536, 8192, 32768)
"""Response tokens of a micro-batch: three of WebShop's turns, and what shorter prompts or whole conversations have."""
GB = 1e9

PEAK_FLOPS = 989e12
"""bfloat16 without sparsity, of an H100 or H200 by its data sheet."""
TRAINING_MFU, GENERATION_MFU = 0.4, 0.1
"""Assumed shares of it."""
BANDWIDTH = {"H100, 80 GB": 3.35e12, "H200, 141 GB": 4.8e12}
"""Bytes a second, by the data sheets."""
TURNS = {"alfworld": 50, "webshop": 15}
LENGTHS = {"alfworld": (2048, 512), "webshop": (4096, 512)}


def tables() -> str:
    """All of them, in Markdown."""
    parts = [
        "### Memory of one GPU, by part",
        _parts(),
        "### Memory of one GPU at its highest",
        _peaks(),
        "### Head and loss of a micro-batch",
        _logits(),
        "### Work of one update of A",
        _work(),
        "### Days for 150 updates of A",
        _days(),
        "### The floor of generation",
        _floors(),
    ]
    return "\n\n".join(parts)


def setup(model: str, gpus: int = 1, agent_b: str = "device", adapter_rank: int = 0) -> MemorySetup:
    """RSPO+GRPO on WebShop at the paper's lengths, bfloat16; full fine-tuning on several GPUs is sharded."""
    prompt, response = LENGTHS["webshop"]
    rows = MICRO_BATCH_TOKENS // (prompt + response)
    return MemorySetup(
        PUBLISHED[model],
        ranks=gpus,
        sharded=gpus > 1 and adapter_rank == 0,
        agent_b=agent_b,
        adapter_rank=adapter_rank,
        adapter_rank_b=RANK,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        micro_batch_responses=rows * response,
        generated_rows=GENERATED_ROWS,
        prompt_tokens=prompt,
        response_tokens=response,
    )


def _parts() -> str:
    """Full fine-tuning on one GPU."""
    setups = [setup(model) for model in MODELS]
    alone = [replace(each, agent_b="none") for each in setups]
    lines = [
        ("weights, bfloat16", [each.parts["weights"] for each in setups]),
        ("float32 masters", [each.parts["float32 masters"] for each in setups]),
        ("Adam's moments", [each.parts["Adam's moments"] for each in setups]),
        ("gradients", [each.parts["gradients"] for each in alone]),
        ("agent B, all of these again", [each.parts["agent B"] for each in setups]),
        ("reference", [each.parts["reference"] for each in setups]),
        ("keys and values while generating", [each.kv_cache for each in setups]),
        ("reading the prompts", [each.prefill for each in setups]),
        ("graph of a micro-batch, checkpointed", [each.activations for each in setups]),
        ("the same without checkpointing", [replace(each, checkpointing=False).activations for each in setups]),
        ("head and loss, fused", [each.head for each in setups]),
    ]
    return markdown(["GB", *MODELS], [[name, *(_gigabytes(size) for size in sizes)] for name, sizes in lines])


CHOICES = (
    ("all weights, GRPO alone", "none", 0, GENERATED_ROWS),
    ("all weights, B beside A", "device", 0, GENERATED_ROWS),
    ("the same, other GPUs generate", "device", 0, 0),
    ("all weights, A waits in CPU memory", "offload", 0, GENERATED_ROWS),
    (f"all weights of A, B an adapter of rank {RANK}", "adapter", 0, GENERATED_ROWS),
    (f"LoRA of rank {RANK} for both", "device", RANK, GENERATED_ROWS),
    ("the same, other GPUs generate", "device", RANK, 0),
)
"""A name, `swap.copy`, `lora.rank`, sequences generated at once. Where all weights are trained, GPUs share them; other
copies of B than "device" are shown for one GPU."""


def _peaks() -> str:
    lines = []
    for model in MODELS:
        for name, agent_b, rank, rows in CHOICES:
            setups = [replace(setup(model, gpus, agent_b, rank), generated_rows=rows) for gpus in GPUS]
            shown = [_fitting(each.peak) for each in setups]
            lines.append([model, name, *(shown if agent_b in ("none", "device") else [shown[0], "", ""])])
    return markdown(["model", "trained", *(f"{n} GPU{'s' * (n > 1)}" for n in GPUS)], lines)


def _fitting(size: int) -> str:
    """GB, and the smallest usual GPU that has so much with a tenth left free."""
    fit = next((f"{gpu}" for gpu in SIZES if size <= USABLE * gpu * GB), "–")
    return f"{_gigabytes(size)} ({fit})"


def _logits() -> str:
    lines = []
    for model in MODELS:
        for responses in RESPONSES:
            each = replace(setup(model), micro_batch_responses=responses)
            kinds = [replace(each, fused=fused) for fused in (False, True)]
            lines.append([model, f"{responses:,}", *(_gigabytes(kind.head) for kind in kinds)])
    return markdown(["GB", "response tokens", "logits made", "fused"], lines)


def config(env: str, method: str) -> Config:
    """The paper's settings of a method on an environment."""
    prompt, response = LENGTHS[env]
    flags = [f"env.name={env}", f"rollout.max_prompt_tokens={prompt}", f"rollout.max_response_tokens={response}"]
    return apply_flags(paper_config(method), [*flags, "policy.dtype=bfloat16"])


def _flops(env: str, method: str, model: str) -> tuple[Workload, Flops]:
    work = Workload(config(env, method), TURNS[env])
    return work, Flops.of(work, PUBLISHED[model], checkpointing=True, frozen=False, critic=False)


CASES = [(env, method) for env in TURNS for method in ("grpo", "rspo")]
TITLES = {"alfworld": "ALFWorld", "webshop": "WebShop", "grpo": "GRPO", "rspo": "RSPO+GRPO"}


def _work() -> str:
    lines = []
    for env, method in CASES:
        work, _ = _flops(env, method, MODELS[0])
        flops = [_flops(env, method, model)[1] for model in MODELS]
        sampled = f"{work.sampled / work.updates_a:,.0f}"
        numbers = [f"{f.training / 1e15:,.0f} + {f.scoring / 1e15:,.0f} + {f.generation / 1e15:,.0f}" for f in flops]
        lines.append([TITLES[env], TITLES[method], sampled, f"{work.tokens / 1e6:.1f} M", *numbers])
    names = (f"{model}, PFLOP" for model in MODELS)
    return markdown(["environment", "method", "trajectories sampled", "tokens trained on", *names], lines)


def _days() -> str:
    lines = []
    for env, method in CASES:
        for model in MODELS:
            flops = _flops(env, method, model)[1]
            trained, generated = flops.training + flops.scoring, flops.generation
            seconds = 150 * (trained / TRAINING_MFU + generated / GENERATION_MFU) / PEAK_FLOPS
            lines.append([TITLES[env], TITLES[method], model, *(f"{seconds / gpus / 86400:,.2f}" for gpus in GPUS)])
    return markdown(["environment", "method", "model", *(f"{n} GPU{'s' * (n > 1)}" for n in GPUS)], lines)


def _floors() -> str:
    """Every response token of a turn waits for the one before it, and each reads all weights."""
    lines = []
    for model in MODELS:
        weights = 2 * PUBLISHED[model].parameters
        steps = {name: weights / bandwidth for name, bandwidth in BANDWIDTH.items()}
        cells = [f"{1e3 * step:.1f}" for step in steps.values()]
        for env in TURNS:
            cells += [f"{step * TURNS[env] * LENGTHS[env][1] / 60:.1f}" for step in steps.values()]
        lines.append([model, *cells])
    header = [f"ms a token, {name}" for name in BANDWIDTH]
    header += [f"min a rollout, {TITLES[env]}, {name}" for env in TURNS for name in BANDWIDTH]
    return markdown(["model", *header], lines)


def _gigabytes(size: float) -> str:
    return f"{size / GB:.1f}"
