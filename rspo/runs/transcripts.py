"""Episodes of an evaluation as text to read."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..algorithm.evaluate import Evaluation
from ..config.storage import write_text, writing
from ..data.texts import Texts
from ..data.trajectory import Trajectory

TRANSCRIPTS = "transcripts"
"""Their folder in a run's folder."""


def write_transcripts(path: Path, texts: Texts, evaluation: Evaluation, count: int, step: int) -> None:
    """Write `count` of the episodes at the main temperature, the same ones at every evaluation; and where all of those
    were won, or all lost, one of the other kind, if there is any. Raises StorageError."""
    temperature, episodes = evaluation.main
    shown = chosen(episodes, count)
    numbers = ", ".join(str(episode.group) for episode in shown)
    heading = (
        f"After {step} updates of agent A: episodes {numbers} of {len(episodes)} ({evaluation.split}), temperature"
        f" {temperature:g}."
    )
    parts = [heading, *(transcript(texts, episode) for episode in shown)]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n\n".join(parts) + "\n")


def chosen(episodes: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Episodes to show: `count` spread evenly by their number, as far as they are there, and the first of an outcome
    that none of them has."""
    total = episodes[-1].group + 1  # an episode's group is its number; lost ones are missing
    numbers = {i * total // min(count, total) for i in range(min(count, total))}
    shown = [episode for episode in episodes if episode.group in numbers]
    outcomes = {episode.won for episode in shown}
    return shown + [episode for episode in episodes if episode.won not in outcomes][:1]


def transcript(texts: Texts, trajectory: Trajectory) -> str:
    """One episode: task, outcome, and at each turn what the model read and wrote, token for token: special tokens
    stand where the model saw them. Of a prompt that continues the turn before it, only what is new."""
    outcome = "won" if trajectory.won else "lost, cut off by the turn limit" if trajectory.truncated else "lost"
    kind = f" ({trajectory.task_type})" if trajectory.task_type else ""
    lines = [
        f"=== episode {trajectory.group}: {outcome}; reward {trajectory.outcome:g},"
        f" dense return {trajectory.dense_return:.3g}, {len(trajectory)} turns",
        f"task: {trajectory.task}{kind}",
    ]
    before = np.zeros(0, dtype=np.int64)
    for index, turn in enumerate(trajectory.turns):
        continues = len(before) > 0 and np.array_equal(turn.prompt_ids[: len(before)], before)
        read = turn.prompt_ids[len(before) :] if continues else turn.prompt_ids
        before = np.concatenate([turn.prompt_ids, turn.response_ids])
        prompt, response = texts.tokenizer.batch_decode([read.tolist(), turn.response_ids.tolist()])
        validity = "" if turn.is_action_valid else " (invalid)"
        lines += [
            "",
            f"--- turn {index + 1} of {len(trajectory)}: reward {turn.reward:g}, dense reward {turn.dense_reward:.3g}",
            f"state:    {_indented(turn.anchor)}",
            f"prompt:   {_indented(prompt)}",
            f"response: {_indented(response)}",
            f"action:   {turn.action}{validity}",
        ]
    return "\n".join(lines)


def _indented(text: str) -> str:
    """Lines after the first stand under the first."""
    return textwrap.indent(text, " " * 10).lstrip(" ")
