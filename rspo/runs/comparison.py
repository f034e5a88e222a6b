"""Runs side by side: what a folder's run was, and which runs differ in nothing but their seed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ..config.files import CONFIG_FILE, method_names, preset, read_config
from .records import read_metrics

IGNORED = (
    "run.seed", "run.save_every", "run.keep", "run.threads", "run.reproducible", "run.report_to", "run.report_online",
    "evaluation.transcripts",
    "policy.device", "policy.attention", "policy.packing", "policy.fused", "policy.gradient_checkpointing",
    "policy.allow_download", "rollout.max_batch", "optimizer.micro_batch_tokens", "env.workers",
    "env.worker_timeout", "parallel.processes", "parallel.shard", "engine.url", "engine.model", "engine.api_key_env",
    "engine.timeout", "engine.retries", "engine.concurrency", "engine.push_weights", "engine.push_folder",
    "engine.tensor_parallel", "engine.gpu_memory", "engine.sleep", "engine.mismatch_limit",
)  # fmt: skip
"""Settings of how a run is made and kept, not of what it learns."""
EQUAL = {"swap.copy": {"offload": "device"}}
"""Values of settings that train the same as another one, which stands for them."""
START = "policy.path"
MOST_NAMED = 3
"""Settings that a label names; where more differ, it names the folder instead."""


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it.

    title: the method, e.g. "RSPO+GRPO"; the folder's name where there is no `config.yaml`.
    settings: those that decide what is learned, by dotted name.  start: the start policy's folder, with the seed's
    number as "*"; None where the run made its own.
    """

    folder: Path
    title: str
    seed: int
    settings: Mapping[str, Any]
    start: str | None
    records: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RunData:
        """Raises FileNotFoundError where the folder holds no run, ValueError naming a file that is damaged."""
        records = read_metrics(folder)
        if not (folder / CONFIG_FILE).is_file():
            return cls(folder, folder.name, 0, {}, None, records)
        # Laid over the preset's values name by name: a setting that this version does not know decides nothing here.
        config = preset("default", **method_names(read_config(folder / CONFIG_FILE)))
        stored = _flat(yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8")))
        settings = {name: stored.get(name, value) for name, value in _flat(asdict(config)).items()}
        seed, start = settings["run.seed"], settings.pop(START)
        if start is not None:
            start = re.sub(rf"(?<!\d){seed}(?!\d)", "*", str(start))
        kept = {
            name: EQUAL[name].get(value, value) if name in EQUAL else value
            for name, value in settings.items()
            if name not in IGNORED and (config.method == "rspo" or not name.startswith("swap."))
        }
        return cls(folder, config.title, seed, kept, start, records)

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Records of one kind, in order."""
        return [record for record in self.records if record["kind"] == kind]


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed, and the start policy that a seed has."""

    label: str
    runs: Sequence[RunData]


def read_groups(folders: Sequence[Path], labels: Sequence[str] | None = None) -> list[Group]:
    """The runs of folders as by `group_runs`. Raises ValueError for no folder, FileNotFoundError for one without
    metrics."""
    if not folders:
        raise ValueError("at least one run folder must be given, got none")
    if labels is not None and len(labels) != len(folders):
        raise ValueError(f"labels must be as many as runs ({len(folders)}), got {len(labels)}")
    return group_runs([RunData.read(folder) for folder in folders], labels)


def group_runs(runs: Sequence[RunData], labels: Sequence[str] | None = None) -> list[Group]:
    """Runs by what they have learned from, in the order of their first runs.

    labels: one for each run instead; runs with equal labels are a group.

    A label is the method, followed by those settings, by their full names, in which the given runs of that method
    differ.
    """
    groups: defaultdict[Any, list[RunData]] = defaultdict(list)
    if labels is not None:
        for run, label in zip(runs, labels, strict=True):
            groups[label].append(run)
        return [Group(label, members) for label, members in groups.items()]
    for run in runs:
        groups[run.title, repr(sorted(run.settings.items()))].append(run)
    split = [part for members in groups.values() for part in _by_start(members)]
    return [Group(_label(members, split), members) for members in split]


def _by_start(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Each seed may have a start policy of its own; a seed that was run from two of them tells these apart."""
    starts: defaultdict[int, set[str | None]] = defaultdict(set)
    for run in runs:
        starts[run.seed].add(run.start)
    if all(len(found) == 1 for found in starts.values()):
        return [list(runs)]
    parts: defaultdict[str | None, list[RunData]] = defaultdict(list)
    for run in runs:
        parts[run.start].append(run)
    return list(parts.values())


def _label(members: Sequence[RunData], groups: Sequence[Sequence[RunData]]) -> str:
    """What tells a group from the others of its method."""
    first = members[0]
    others = [group[0] for group in groups if group[0].title == first.title]
    names = [name for name in first.settings if len({repr(run.settings.get(name)) for run in others}) > 1]
    if len(names) > MOST_NAMED:
        namesakes = [run for run in others if run.folder.name == first.folder.name]
        return f"{first.title} ({first.folder.name if len(namesakes) == 1 else first.folder})"
    parts = [f"{name}={_value(first.settings[name])}" for name in names]
    same = [run for run in others if run.settings == first.settings]
    if len(same) > 1:
        parts.append(f"from {first.start or 'its own start'}")
    return ", ".join([first.title, *parts])


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return {None: "none", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name; options of the environment stay together."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and f"{prefix}{name}" != "env.options":
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat
