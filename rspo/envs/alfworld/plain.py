"""Games played by TextWorld's own environment: the standard that `rspo.envs.alfworld.speed` is held against."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .game_text import parse_grammar
from .games import Goal, read_game
from .upstream import GameError, alfworld, loading_library, textworld, translating

# Each has a library of its own, and a process that unloads one may crash when it loads the next.
_free: list[Any] = []


def _new_environment() -> Any:
    request = textworld().EnvInfos(admissible_commands=True, won=True, facts=True)
    environment = textworld("envs").PddlEnv
    with loading_library():
        return environment(request)


class PlainGame:
    """A game under way.

    observation: what the last command (or the start) showed.
    commands: the valid commands, sorted.
    won: whether the goal is fulfilled.
    goal: what wins it.

    Raises GameError where the game cannot be loaded.
    """

    observation: str
    commands: list[str]
    won: bool
    goal: Goal

    def __init__(self, path: Path) -> None:
        game = read_game(path)
        self.goal = game.goal
        self._path = path
        self._played: list[str] = []
        self._env = _free.pop() if _free else _new_environment()
        weakref.finalize(self, _free.append, self._env).atexit = False
        try:
            parse_grammar(game.grammar)  # refused where TextWorld would evaluate more than attributes
            with translating():
                self._env.load({"pddl_domain": game.domain, "grammar": game.grammar, "pddl_problem": game.problem})
                demangler = alfworld("agents.utils.misc").Demangler(game_infos=self._env._entity_infos)
                for info in self._env._entity_infos.values():
                    info.name = demangler.demangle_alfred_name(info.id)
                self._see(self._env.reset())
        except (Exception, SystemExit) as error:
            raise GameError(f"{path} is not a game that can be played: {type(error).__name__}: {error}") from error

    def act(self, command: str) -> bool:
        """Take a command; False where it is not a valid one."""
        self._played.append(command)
        is_valid = command.strip() in self.commands
        self._see(self._env.step(command)[0])
        return is_valid

    def facts(self, *predicates: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What is true, as (predicate, names of things); of some predicates only where they are given."""
        for fact in self._state["facts"]:
            if not predicates or fact.name in predicates:
                yield fact.name, fact.names

    def copy(self) -> PlainGame:
        """A game in the same state that goes on independently, by playing its commands again."""
        new = PlainGame(self._path)
        for command in self._played:
            new.act(command)
        return new

    def close(self) -> None:
        """Nothing to do: the environment is used again when the game is forgotten."""

    def _see(self, state: Any) -> None:
        self._state = state
        self.observation = state["feedback"]
        self.commands = list(state["admissible_commands"])
        self.won = bool(state["won"])
