"""Episodes as conversations in any model's tokens.

A reward model may have another tokenizer than the policy, so the texts of the turns are read and not their ids. That
also makes one form of both layouts: the task's opening, then in turn the responses and what answered them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import ConfigError
from .texts import Texts
from .trajectory import Trajectory


@dataclass(frozen=True)
class Reading:
    """One episode as a model reads it.

    rows: int64 [L] each, one where the whole conversation fits.
    turn_row, turn_column: int64 [turns], where the last token of each turn's response stands.
    """

    rows: list[np.ndarray]
    turn_row: np.ndarray
    turn_column: np.ndarray

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(len(row) for row in self.rows)


def read_conversations(texts: Texts, trajectories: Sequence[Trajectory], max_tokens: int) -> list[Reading]:
    """Readings of episodes by a model that takes at most `max_tokens` tokens (at least 2).

    A longer conversation becomes several rows. Each begins with the task's opening and goes on with the latest turns
    before those that are read in it, for up to half of the room. What is too long by itself is cut: an opening keeps
    its beginning, a turn its end.

    Raises ConfigError that names a trajectory without turns or texts.
    """
    for trajectory in trajectories:
        _check(trajectory)
    # A tokenizer without a chat template gets its texts on lines of their own.
    line = "" if texts.tokenizer.chat_template is not None else "\n"
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    openings = texts.encode([str(trajectory.turns[0].message) for trajectory in trajectories])
    replies = iter(texts.encode_replies([f"{line}{turn.message}" for t in trajectories for turn in t.turns[1:]]))
    responses = iter(texts.encode_responses([f"{line}{turn.response}" for turn in turns]))
    readings = []
    for trajectory, opening in zip(trajectories, openings, strict=True):
        pieces = [next(responses)]
        pieces += [np.concatenate([next(replies), next(responses)]) for _ in trajectory.turns[1:]]
        # A position is needed even where nothing was said and nothing answered.
        readings.append(_reading(opening if len(opening) else np.zeros(1, dtype=np.int64), pieces, max_tokens))
    return readings


def _reading(opening: np.ndarray, turns: list[np.ndarray], max_tokens: int) -> Reading:
    """Rows of an opening and turns (each what was replied before it, and its response)."""
    if len(opening) + sum(len(turn) for turn in turns) > max_tokens:
        opening = opening[: max_tokens // 2]
    room = max_tokens - len(opening)
    turns = [turn[-room:] if len(turn) > room else turn for turn in turns]
    rows: list[np.ndarray] = []
    turn_row: list[int] = []
    turn_column: list[int] = []
    first = 0  # turn that has no row yet
    while first < len(turns):
        begin, used = first, 0
        while begin > 0 and used + len(turns[begin - 1]) <= min(room // 2, room - len(turns[first])):
            begin -= 1
            used += len(turns[begin])
        end = first
        while end < len(turns) and used + len(turns[end]) <= room:
            used += len(turns[end])
            turn_row.append(len(rows))
            turn_column.append(len(opening) + used - 1)
            end += 1
        rows.append(np.concatenate([opening, *turns[begin:end]]))
        first = end
    return Reading(rows, np.array(turn_row, dtype=np.int64), np.array(turn_column, dtype=np.int64))


def _check(trajectory: Trajectory) -> None:
    if not trajectory.turns:
        raise ConfigError(f"{trajectory} has no turns")
    for number, turn in enumerate(trajectory.turns):
        if turn.message is None or turn.response is None:
            raise ConfigError(
                f"turn {number} of {trajectory} has no texts (message and response), which a reward model reads;"
                " `rspo collect` records them"
            )
