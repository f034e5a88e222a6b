"""How games say that a thing is put down: "move mug 1 to desk 1" since alfworld 0.4, "put mug 1 in/on desk 1" before.

The two grammars also answer differently ("You arrive at desk 1." was "You arrive at loc 7."); problems and rules are
the same. Who works out commands does so in the new words, and translates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OLD_TEXTS = (
    "put in/on",
    "You put the in/on the .",
    "You arrive at loc .",
    "put (object) in/on (receptacle): put an object in or on a receptacle",
)
"""What games of the old grammar say, and those of the new one do not."""

_OLD = re.compile(r"put (.+) in/on (.+)")


def in_new_words(command: str) -> str:
    """A command of either grammar in the words of the new one."""
    return _OLD.sub(r"move \1 to \2", command) if _OLD.fullmatch(command) else command


def by_new_words(commands: Iterable[str]) -> dict[str, str]:
    """A game's commands by what they are in the new words, in their order."""
    return {in_new_words(command): command for command in commands}
