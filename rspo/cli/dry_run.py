"""`rspo train --dry-run`: what a configuration asks of a machine, and what of that is not here. Nothing is made,
written or downloaded."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..algorithm.estimators import make_estimator
from ..algorithm.rewards import learns_densely, training_rewards
from ..algorithm.warmup import NO_START
from ..config import Config
from ..engines import expert_of
from ..envs import BatchedEnv, find_factory
from ..models.forward import LARGE_VOCABULARY
from ..models.processes import launch_command, launched
from ..models.shapes import ModelShape, dense_shape, local_shape, published_shape
from ..models.tiny import SPECIAL
from ..runs.reporters import find_reporters
from ..runs.setting import build_env, check_split
from ..start import START
from .memory import USABLE, MemorySetup
from .readiness import Findings, check_machine, check_model_folder, check_small_model
from .workload import Workload

GB = 10**9
USUAL_DEVICES = (80 * GB, 141 * GB)
"""Memory of devices that an estimate is held against where none is here."""


@dataclass(frozen=True)
class Report:
    """What a dry run says, to be read; problems: how many things would stop the run here."""

    text: str
    problems: int


def dry_run(config: Config, folder: Path, resume: bool = False) -> Report:
    """What a run with this configuration, in this folder, needs and does."""
    findings = Findings()
    config = _as_launched(config)
    check_machine(config, folder, resume, findings)
    environment, max_turns, vocabulary = _environment(config, folder, resume, findings)
    is_made = _makes_start(config, folder, resume)
    name, shape = _model(config, vocabulary, is_made, findings)
    estimator = findings.attempt(lambda: make_estimator(config.estimator_name, config.estimator))
    has_critic = estimator is not None and estimator.needs_critic
    findings.attempt(lambda: find_reporters(config.run.report_to))
    about = [
        f"{config.title} on {config.env.name}, {_counted(config.run.steps, 'update')} of A, seed {config.run.seed}",
        f"devices: {_devices(config)}",
        f"model: {name}",
        f"environment: {environment}",
        *_launch(config),
    ]
    parts = ["\n".join(about)]
    if max_turns is not None:
        work = Workload(config, max_turns)
        if shape is not None:
            parts.append(_memory(config, memory_setup(config, work, shape, has_critic), findings))
        parts.append(_batches(config, work))
    return Report("\n\n".join([*parts, *_verdict(findings)]), len(findings.problems))


def _as_launched(config: Config) -> Config:
    """With the number of processes that a launcher has started, where the settings leave it open."""
    if config.parallel.processes is not None or not launched():
        return config
    return replace(config, parallel=replace(config.parallel, processes=int(os.environ.get("WORLD_SIZE", 1))))


def _verdict(findings: Findings) -> list[str]:
    """What was found, and how much of it stops a run."""
    parts = []
    if findings.warnings:
        parts.append("\n".join(["the run would warn:", *(f"  - {text}" for text in findings.warnings)]))
    count = len(findings.problems)
    if not count:
        return [*parts, "nothing that would stop the run was found"]
    parts.append("\n".join(["this would stop the run here:", *(f"  - {text}" for text in findings.problems)]))
    return [*parts, f"{_counted(count, 'thing')} would stop the run here"]


def memory_setup(config: Config, work: Workload, shape: ModelShape, has_critic: bool) -> MemorySetup:
    """What decides on the memory of a configured run."""
    policy, rollout, ranks = config.policy, config.rollout, config.parallel.processes or 1
    # Each process plays whole groups.
    tasks = max(config.on_policy_tasks(work.alpha), config.swap.buffer_tasks if work.has_agent_b else 0)
    generates = config.engine.name == "transformers"
    return MemorySetup(
        shape,
        weight_bytes=getattr(torch, policy.dtype).itemsize,
        ranks=ranks,
        sharded=config.parallel.shard == "fsdp",
        adapter_rank=config.lora.rank if config.adapts_both else 0,
        agent_b=config.swap.copy if work.has_agent_b else "none",
        adapter_rank_b=config.lora.rank,
        reference=config.loss.kl_coef > 0,
        critic=config.critic.backbone if has_critic else "none",
        micro_batch_tokens=work.micro_batch_tokens,
        micro_batch_responses=work.micro_batch_rows * work.responses_in_row,
        eager=policy.attention == "eager",
        checkpointing=policy.gradient_checkpointing,
        fused=policy.fused == "on" or (policy.fused == "auto" and shape.vocab_size >= LARGE_VOCABULARY),
        generated_rows=min(rollout.max_batch, -(-tasks // ranks) * rollout.group_size) if generates else 0,
        prompt_tokens=rollout.max_prompt_tokens,
        response_tokens=rollout.max_response_tokens,
    )


def _devices(config: Config) -> str:
    """What is asked for, and what is here."""
    count, processes = torch.cuda.device_count(), config.parallel.processes or 1
    names = {torch.cuda.get_device_properties(i).name for i in range(count)}
    here = f"{count} CUDA devices ({', '.join(sorted(names))})" if count else "no CUDA device"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    together = f", {processes} processes" if processes > 1 else ""
    return f"asked for {config.policy.device}{together}; here {here}, {cores} CPU cores"


def _launch(config: Config) -> list[str]:
    """How a run of several processes is started, which the dry run itself need not be."""
    if (config.parallel.processes or 1) == 1 and config.parallel.shard == "none":
        return []
    return [f"start: {launch_command(config)}"]


def _environment(config: Config, folder: Path, resume: bool, findings: Findings) -> tuple[str, int | None, int | None]:
    """In words; the turn limit, None where that is not known; and how many words it lists, where it does."""
    made = findings.attempt(lambda: build_env(replace(config, env=replace(config.env, workers=0))))
    has_dense_reward = made is None or made.has_dense_reward
    findings.attempt(lambda: training_rewards(config, has_dense_reward, np.random.default_rng(0)))
    if made is None:
        return f"{config.env.name}, which cannot be opened here", _stated_turns(config), None
    with closing(made) as env:
        findings.attempt(lambda: check_split(env, config))
        if _makes_start(config, folder, resume):
            findings.attempt(lambda: expert_of(env, NO_START))
        words = env.vocabulary()
        text = f"{config.env.name}, {_tasks(env, 'train')} training tasks, {_tasks(env, config.evaluation.split)} of"
        text += f" split {config.evaluation.split!r}, at most {env.max_turns} turns"
        return text, env.max_turns, None if words is None else len(words)


def _makes_start(config: Config, folder: Path, resume: bool) -> bool:
    """Whether the run makes its start policy: `policy.path` names none, and none is in the folder of a run to go on
    with."""
    return config.policy.path is None and not (resume and (folder / START).is_dir())


def _tasks(env: BatchedEnv, split: str) -> str:
    try:
        return f"{len(env.tasks(split)):,}"
    except ValueError:
        return "no"


def _stated_turns(config: Config) -> int | None:
    """The turn limit that the settings or the environment's constructor name, without making it."""
    stated: Any = config.env.options.get("max_turns")
    if stated is None:
        try:
            stated = signature(find_factory(config.env.name)).parameters["max_turns"].default
        except (ImportError, KeyError, TypeError, ValueError):
            return None
    return stated if isinstance(stated, int) and stated > 0 else None


def _model(config: Config, vocabulary: int | None, is_made: bool, findings: Findings) -> tuple[str, ModelShape | None]:
    """In words, and its shape where that is known without a download; is_made: as `_makes_start`."""
    path, dtype = config.policy.path, config.policy.dtype
    if path is None:
        shape: ModelShape | None = _small_shape(config, vocabulary)
        name = "a small one, made and warmed up before training"
        if is_made:
            check_small_model(config, findings)
    elif Path(path).is_dir():
        shape, name = findings.attempt(lambda: local_shape(Path(path))), f"{path}, a local folder"
        if shape is not None:
            check_model_folder(Path(path), config, findings)
    else:
        shape, name = published_shape(path), f"{path}, not on this machine, its shape as published"
        if not config.policy.allow_download:
            findings.problems.append(
                f"policy.path={path!r} is not a folder: --policy FOLDER, or --set policy.allow_download=true to let"
                " transformers fetch it"
            )
    if shape is None:
        return f"{path}, of unknown shape: no estimate of its memory", None
    return f"{name}: {shape.parameters:,} weights in {dtype}", shape


def _small_shape(config: Config, vocabulary: int | None) -> ModelShape:
    """The model of `rspo.models.tiny`."""
    settings = config.warmup
    pieces = settings.pieces if vocabulary is None else vocabulary + len(SPECIAL)
    heads = settings.width // 16
    return dense_shape("llama", pieces, settings.width, 2 * settings.width, settings.layers, heads, heads, tied=True)


def _memory(config: Config, setup: MemorySetup, findings: Findings) -> str:
    processes = config.parallel.processes or 1
    each = f"for each of {processes} processes" if processes > 1 else ""
    lines = [f"{f'memory of a device {each}'.rstrip()}, calculated:"]
    lines += [_line(name, size) for name, size in setup.parts.items()]
    largest = max(setup.phases, key=lambda name: setup.phases[name])
    lines += [
        _line(f"{name}{', the largest' if name == largest else ''}", size, "for a moment")
        for name, size in setup.phases.items()
    ]
    peak = setup.peak
    if setup.host:
        lines.append(_line("in the CPU's memory, agent A", setup.host, "while B acts"))
        if _is_cpu(config):  # which is the same memory
            peak += setup.host
    lines.append(_line("at the highest", peak, each))
    if processes > 1 and _is_cpu(config):  # which is one device for all of them
        lines.append(f"  together {_size(processes * peak)}, where they share a machine")
    if config.engine.name == "vllm":
        lines.append(f"  and vLLM, {config.engine.gpu_memory:.0%} of the device, which is not counted")
    if config.rewards.model_path is not None and any(learns_densely(config)):
        lines.append(f"  and the process reward model at {config.rewards.model_path}, which is not counted")
    other = replace(setup, fused=not setup.fused)
    lines.append(
        f"  of a micro-batch, head and loss take {_size(setup.head)};"
        f" with policy.fused={'off' if setup.fused else 'on'} {_size(other.head)}"
    )
    return "\n".join([*lines, _fits(peak, config, findings)])


def _fits(peak: int, config: Config, findings: Findings) -> str:
    """Held against this machine's device, or where there is none of the kind against usual ones."""
    total = _device_memory(config.policy.device)
    if total is not None and peak > total:
        findings.problems.append(f"{_size(peak)} do not fit the device's {_size(total)}")
    elif total is not None and peak > USABLE * total:
        findings.warnings.append(
            f"{_size(peak)} leave less than a tenth of the device's {_size(total)} free: they may not fit"
        )
    sizes = USUAL_DEVICES if total is None else (total,)
    words = ", ".join(f"{size / GB:,.0f} GB: {'yes' if peak <= USABLE * size else 'no'}" for size in sizes)
    one = "one process fits" if (config.parallel.processes or 1) > 1 else "fits"
    return f"  {one}, a tenth left free, into {words}"


def _is_cpu(config: Config) -> bool:
    return torch.device(config.policy.device).type == "cpu"


def _device_memory(device: str) -> int | None:
    """Bytes of a device, of the machine for its CPU; None where this machine has none of the kind."""
    kind = device.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    if kind == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _line(name: str, size: int, note: str = "") -> str:
    return f"  {name:<36}{_size(size):>11}  {note}".rstrip()


def _size(size: int) -> str:
    scale, unit = (GB, "GB") if size >= GB / 10 else (10**6, "MB")
    return f"{size / scale:,.1f} {unit}"


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing if count == 1 else f'{thing}s'.replace('ys', 'ies')}"


def _batches(config: Config, work: Workload) -> str:
    rollout, optimizer = config.rollout, config.optimizer
    base = f"{work.sampled_without_swap:,} by {config.estimator_name} alone"
    lines = ["batches:"]
    if config.without_replay:
        lines.append(f"  {config.without_replay}")
    if work.has_agent_b:
        lines.append(
            f"  a loop: {_counted(work.updates_b, 'update')} of B, which then collects {config.swap.buffer_tasks} ×"
            f" {rollout.group_size} = {_counted(work.collected, 'trajectory')}, and {work.updates_a} of A"
        )
    tasks = config.on_policy_tasks(work.alpha)
    on_policy = f"{_counted(tasks, 'task')} × {rollout.group_size} = {_counted(work.on_policy, 'trajectory')}"
    replay = f" and {_counted(work.replayed, 'replayed one')} (α = {work.alpha:g})" if work.replayed else ""
    processes = config.parallel.processes or 1
    each = f", in each of {processes} processes" if processes > 1 else ""
    lines += [
        f"  an update of A: {on_policy}{replay}",
        f"  its rows: {work.rows}, of {work.row_tokens:,} tokens at most",
        f"  its mini-batches: {work.minibatches}, one optimiser step each"
        + (f", {optimizer.epochs} passes" if optimizer.epochs > 1 else ""),
        f"  micro-batches of a mini-batch{each}: at most {work.micro_batches}, of"
        f" {_counted(work.micro_batch_rows, 'row')} of that length ({optimizer.micro_batch_tokens:,} tokens)",
        f"  its tokens: at most {work.tokens:,}, of them {work.response_tokens:,} of responses",
        f"  sampled for {_counted(work.updates_a, 'update')} of A: {_counted(work.sampled, 'trajectory')}"
        + (f", {base}" if work.sampled != work.sampled_without_swap else ""),
        f"  sampled in the run: {_counted(work.sampled_in_run, 'trajectory')}",
    ]
    return "\n".join(lines)
