"""The alfworld package's hand-coded expert, made to act from any state of any game."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

from .games import Goal
from .placing import by_new_words, in_new_words
from .upstream import alfworld

FACTS = ("holds", "inreceptacle", "isclean", "ishot", "iscool")
"""The predicates that the expert looks at."""

LOOPS = 3
"""How often the expert may want the same thing after the same observation before it is held to be going in circles."""


class ExpertFact(NamedTuple):
    """A fact as the expert reads it."""

    name: str
    names: tuple[str, ...]


class Seen(NamedTuple):
    """What the expert learns of a step.

    command: what was done, "" at the start.
    observation: what it showed, at the start with the game's greeting.
    commands: what is valid now.
    facts: those of FACTS that are true now.
    """

    command: str
    observation: str
    commands: list[str]
    facts: tuple[tuple[str, tuple[str, ...]], ...]


class HandCodedExpert:
    """What the package's expert would do, from what it has seen of a game.

    It searches the receptacles in which the goal object is likely, and remembers what it saw. It is shown every step,
    whoever took it. What it wants may be no valid command, and it may lose its way for good: see `propose`.

    Args:
        goal: of the game.
        seed: of its choices among like objects.
    """

    def __init__(self, goal: Goal, seed: int) -> None:
        self.seed = seed
        self.steps = 0
        self.is_lost = False
        self._wanted: str | None = None
        self._wishes: Counter[tuple[str, str]] = Counter()
        policies = alfworld("agents.expert.handcoded_expert_tw")
        name = "".join(part.title() for part in goal.task_type.split("_")) + "TWPolicy"
        targets = {
            "object_target": goal.object_type,
            "parent_target": goal.receptacle_type,
            "toggle_target": goal.lamp_type,
        }
        parameters = {key: (type_ or "").removesuffix("type") for key, type_ in targets.items()}
        self._policy: Any = getattr(policies, name)(parameters, max_steps=10**9)

    def see(self, seen: Seen) -> None:
        """Show it a step."""
        self.steps += 1
        if self.is_lost:
            return
        commands = by_new_words(seen.commands)  # the package's expert knows no others
        state = {
            "feedback": seen.observation,
            "admissible_commands": list(commands),
            "facts": [ExpertFact(*fact) for fact in seen.facts],
        }
        command = in_new_words(seen.command) or "look"
        # The other way round, only "put" ends its memory of what is held.
        command = "put" + command[4:] if command.startswith("move ") else command
        before = random.getstate()
        random.seed(f"{self.seed} {self.steps}")
        try:
            wanted: str = self._policy.act(state, command)
        except Exception:  # the package's expert gives up by exceptions of several kinds
            self.is_lost = True
            return
        finally:
            random.setstate(before)
        self._wishes[seen.observation, wanted] += 1
        self.is_lost = self._wishes[seen.observation, wanted] > LOOPS
        valid = commands.get(wanted)
        self._wanted = valid if valid != seen.command else None

    def propose(self) -> str | None:
        """What it wants to do now; None where that is not valid, repeats the last command, or it is lost."""
        return None if self.is_lost else self._wanted
