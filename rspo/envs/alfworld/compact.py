"""Compact prompts: what an ALFWorld player sees, in few words of a closed vocabulary, for a small model.

Words are lower case and separated by spaces, punctuation too. Things are listed by kind with their numbers ("mug 1 2"
for "a mug 1, and a mug 2"), commands by verb. An action is written as the game takes it: "move mug 1 to desk 1", or
"put mug 1 in/on desk 1" in games of before alfworld 0.4, where "in/on" is one word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from ..base import PromptContext
from .game_text import Each, Expression, Literal, Rule, Symbol, parse_grammar
from .games import TASK_TYPES
from .placing import OLD_TEXTS
from .speed import NOTHING_HAPPENS
from .upstream import alfworld

UNKNOWN = "unknown"
"""Stands for what is not in the vocabulary, in an action that a model has made up."""

NUMBERS = 100
"""Things of a kind are numbered from 1; the official games have up to 27, and up to 59 locations ("loc 59")."""

ACTION_WORDS = 8
"""Words of a past action that are shown; those of the game have up to 7."""

_OWN_WORDS = ("actions", "do", "now", "task", "then", UNKNOWN)
_PUNCTUATION = (",", ".", ":", ";")
_WORD = re.compile(r"in/on|[a-z0-9']+|[^\sa-z0-9']")
_LIST = re.compile(r"you see (a .+?)(?=\.|$)", re.DOTALL)
_ARTICLE = re.compile(r"^(?:and )?an? ")
_ROOM = "you are in the middle of a room"
_COMMAND = re.compile(
    r"(take|move|put|heat|clean|cool|slice) (.+) (from|to|in/on|with) (.+)|(go to|open|close|examine|use) (.+)"
)


def compact_prompt(context: PromptContext) -> str:
    """Task, the last actions with what followed each, what can be done now."""
    words = ["task :", _spaced(context.task)]
    shown = [observation for observation, _ in context.history] + [context.observation]
    if not context.history:
        words += ["now", compact_observation(context.observation)]
    for (_, action), observation in zip(context.history, shown[1:], strict=True):
        words += ["then", known_words(action), ":", compact_observation(observation)]
    return " ".join([*words, compact_actions(context.admissible_actions), "do :"])


def compact_reply(context: PromptContext) -> str:
    """What answers an action in a conversation."""
    return f"{compact_observation(context.observation)} {compact_actions(context.admissible_actions)} do :"


def compact_observation(observation: str) -> str:
    """An observation in words of the vocabulary. The first one's list of the room is left out: it is what one can go
    to."""
    text = observation.lower()
    if _ROOM in text:
        return f"{_ROOM} ."
    return _spaced(_LIST.sub(lambda found: f"you see {_grouped(_listed(found.group(1)))}", text))


def _listed(text: str) -> list[str]:
    return [_ARTICLE.sub("", part.strip()) for part in text.split(",")]


def _spaced(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))


def _grouped(things: Iterable[str]) -> str:
    """Things by kind with their numbers, both in order."""
    kinds: dict[str, list[int]] = {}
    for thing in things:
        kind, _, number = thing.strip().rpartition(" ")
        if kind and number.isdecimal():
            kinds.setdefault(kind, []).append(int(number))
        else:
            kinds.setdefault(thing, [])
    return " , ".join(" ".join([kind, *map(str, sorted(numbers))]) for kind, numbers in sorted(kinds.items()))


def compact_actions(commands: Sequence[str]) -> str:
    """The commands by verb: "actions : go to : desk 1 2 , shelf 1 ; take : mug 1 from desk 1 ; look ;"."""
    groups: dict[tuple[str, str], list[str]] = {}
    for command in commands:
        found = _COMMAND.fullmatch(command.strip())
        if found is None:
            groups.setdefault((command, ""), [])
        elif found.group(5):
            groups.setdefault((found.group(5), ""), []).append(found.group(6))
        else:
            verb, thing, how, other = found.group(1, 2, 3, 4)
            groups.setdefault((verb, f" {how} {other}"), []).append(thing)
    parts = [
        f"{verb} : {_grouped(things)}{rest} ;" if things else f"{verb} ;" for (verb, rest), things in groups.items()
    ]
    return " ".join(["actions :", *parts])


def known_words(action: str) -> str:
    """An action that a model wrote, with UNKNOWN for what is not in the vocabulary, and not longer than any of the
    game's."""
    known = _vocabulary_set()
    return " ".join(word if word in known else UNKNOWN for word in _spaced(action).split()[:ACTION_WORDS]) or UNKNOWN


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """All words of compact prompts and of actions in games of either grammar, sorted: from the package's grammar and
    its names of things."""
    constants, library = alfworld("gen.constants"), alfworld("gen.goal_library")
    info = alfworld("info")
    grammar = parse_grammar(Path(info.ALFRED_TWL2_PATH).read_text(encoding="utf-8"))
    texts = [text for rules in grammar.rules.values() for _, symbols in rules for text in _literals(symbols)]
    texts += [text for pair in grammar.actions.values() for symbols in pair for text in _literals(symbols)]
    texts += [re.sub(r"\{\w+\}", " ", template) for kind in TASK_TYPES for template in library.gdict[kind]["templates"]]
    names = {*constants.OBJECTS, *constants.RECEPTACLES, *constants.VAL_RECEPTACLE_OBJECTS}
    texts += [NOTHING_HAPPENS, _ROOM, *OLD_TEXTS]
    words = {word for text in texts for word in _spaced(text).split()}
    words |= {name.lower() for name in names} | {str(number) for number in range(NUMBERS + 1)}
    return tuple(sorted(words.union(_OWN_WORDS, _PUNCTUATION)))


@lru_cache(maxsize=1)
def _vocabulary_set() -> frozenset[str]:
    return frozenset(vocabulary())


def _literals(symbols: Sequence[Symbol]) -> list[str]:
    """The fixed texts in some symbols, and those of expressions' constants."""
    texts = []
    for symbol in symbols:
        if isinstance(symbol, Literal):
            texts.append(symbol.text)
        elif isinstance(symbol, Expression | Each):
            expression = symbol.symbol if isinstance(symbol, Each) else symbol
            if not isinstance(expression, Rule):
                texts += [constant for constant in expression.code.co_consts if isinstance(constant, str)]
    return texts
