"""An environment at a terminal: a person, a script or the expert acts, and sees what an agent would see."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np

from .config import ConfigError
from .engines import Scripted
from .envs.base import BatchedEnv, Info, PromptContext

HELP = """Type an action as the environment takes it, or a whole response with its tags. Also:
  :actions   what can be done now
  :expert    what the expert would do now
  :undo      take the last action back
  :quit      stop"""


@dataclass
class Game:
    """One episode of an environment, played turn by turn.

    env: plays this episode alone.
    task, seed: of the episode.
    history_length: (observation, action) pairs that a prompt repeats.
    """

    env: BatchedEnv
    task: Any
    seed: int
    history_length: int
    actions: list[str] = field(default_factory=list)
    reward: float = 0.0
    dense_return: float = 0.0

    def __post_init__(self) -> None:
        self._show(*self.env.reset([self.task], [self.seed]))
        self.history: list[tuple[str, str]] = []
        self.ended = False

    def _show(self, observations: list[str], infos: list[Info]) -> None:
        self.observation, self.info = observations[0], infos[0]

    @property
    def prompt(self) -> str:
        """What an agent would read now."""
        shown = self.history[-self.history_length :] if self.history_length else []
        return self.env.render_prompt(
            PromptContext(
                task=self.info["task"],
                history=tuple(shown),
                observation=self.observation,
                admissible_actions=tuple(self.info["admissible_actions"]),
                turn=len(self.actions),
            )
        )

    def respond(self, response: str) -> dict[str, Any]:
        """Act by a response in tags or by a bare action; what came of it."""
        if "<action>" in response:
            action, well_formed = self.env.project(response)
        else:
            action, well_formed = response, True
        self.history.append((self.observation, action))
        self.actions.append(action)
        observations, rewards, terminated, truncated, infos = self.env.step([action])
        self._show(observations, infos)
        dense = float(self.info.get("dense_reward", 0.0))
        self.reward += float(rewards[0])
        self.dense_return += dense
        self.ended = bool(terminated[0] or truncated[0])
        return {
            "action": action,
            "valid": bool(well_formed and self.info["is_action_valid"]),
            "reward": float(rewards[0]),
            "dense_reward": dense,
        }

    def undo(self) -> bool:
        """Take the last action back, by playing the others again; False where there is none."""
        if not self.actions:
            return False
        actions = self.actions[:-1]
        self.actions, self.reward, self.dense_return = [], 0.0, 0.0
        self.__post_init__()
        for action in actions:
            self.respond(action)
        return True

    def expert_action(self) -> str:
        """What the expert would do now. Raises ConfigError where the environment has none."""
        if not isinstance(self.env, Scripted):
            raise ConfigError(f"{type(self.env).__name__} has no expert")
        return self.env.expert_actions()[0]

    def state(self) -> dict[str, Any]:
        """Everything that is to be seen now, as JSON takes it."""
        return {
            "turn": len(self.actions),
            "task": self.info["task"],
            "task_type": self.info.get("task_type", ""),
            "prompt": self.prompt,
            "observation": self.observation,
            "admissible_actions": list(self.info["admissible_actions"]),
            "ended": self.ended,
            "won": bool(self.info["won"]),
            "score": float(self.info["task_score"]),
        }


def choose_task(env: BatchedEnv, split: str, number: int | None, seed: int) -> tuple[int, Any, int]:
    """The number of a task in its split, the task, and how many there are; a random one where no number is given.

    Raises ConfigError for a split that the environment does not have and a number outside of it.
    """
    try:
        tasks = env.tasks(split)
    except ValueError as error:
        raise ConfigError(f"--split: {error}") from error
    if not tasks:
        raise ConfigError(f"--split: the environment has no tasks of {split!r}")
    if number is None:
        number = int(np.random.default_rng(seed).integers(len(tasks)))
    if not 0 <= number < len(tasks):
        raise ConfigError(f"--task must be from 0 to {len(tasks) - 1} (split {split!r}), got {number}")
    return number, tasks[number], len(tasks)


def play_game(
    game: Game, *, expert: bool = False, as_json: bool = False, source: TextIO | None = None, out: TextIO | None = None
) -> bool:
    """Play to the end, or until the source's lines end; whether the episode was won.

    expert: the expert acts instead of what `source` says.
    as_json: write one JSON object a turn instead of text: what is to be seen, and what came of the action before.
    source, out: where actions come from and what is shown goes; standard input and output.
    """
    source, out = source or sys.stdin, out or sys.stdout
    ask = _asks(source, out) if not (expert or as_json) else source.readline
    came_of_it: dict[str, Any] = {}
    if not (expert or as_json):
        print(HELP, file=out)
    while True:
        if as_json:
            print(json.dumps({**came_of_it, **game.state()}), file=out, flush=True)
        else:
            _show_turn(game, came_of_it, out)
        if game.ended:
            break
        response = game.expert_action() if expert else _next_response(game, ask, out)
        if response is None:
            break
        if expert and not as_json:
            print(f"expert> {response}", file=out)
        came_of_it = game.respond(response)
    won = bool(game.info["won"])
    if not as_json:
        print(_ending(game, won), file=out)
    return won


def _asks(source: TextIO, out: TextIO) -> Callable[[], str]:
    """A function that asks for a line; with editing at a terminal. "" at the end."""

    def ask() -> str:
        if source is sys.stdin and source.isatty():
            try:
                return input("> ") + "\n"
            except EOFError:
                return ""
        print("> ", end="", file=out, flush=True)
        line = source.readline()
        print(line.rstrip("\n"), file=out)
        return line

    return ask


def _next_response(game: Game, ask: Callable[[], str], out: TextIO) -> str | None:
    """The next line that acts; None where there is none. Commands are carried out meanwhile."""
    while line := ask():
        text = line.strip()
        if text == ":quit":
            return None
        if text == ":actions":
            print("\n".join(f"  {action}" for action in game.info["admissible_actions"]) or "  (not known)", file=out)
        elif text == ":expert":
            try:
                print(f"  {game.expert_action()}", file=out)
            except ConfigError as error:
                print(f"  {error}", file=out)
        elif text == ":undo":
            _show_turn(game, {}, out) if game.undo() else print("  nothing to take back", file=out)
        elif text.startswith(":"):
            print(HELP, file=out)
        elif text:
            return text
    return None


def _show_turn(game: Game, came_of_it: dict[str, Any], out: TextIO) -> None:
    if came_of_it:
        valid = "" if came_of_it["valid"] else "not a valid action; "
        print(f"  {valid}reward {came_of_it['reward']:g}, dense reward {came_of_it['dense_reward']:g}", file=out)
    if game.ended:
        return
    prompt, possible = game.prompt, game.info["admissible_actions"]
    print(f"\n--- turn {len(game.actions) + 1} of {game.env.max_turns} ---\n{prompt}", file=out)
    if not all(action in prompt for action in possible):
        print(f"(Possible now: {', '.join(possible)})", file=out)


def _ending(game: Game, won: bool) -> str:
    outcome = "won" if won else "lost" if game.ended else "stopped"
    return (
        f"\n{outcome} after {len(game.actions)} turns: reward {game.reward:g}, score {game.info['task_score']:g},"
        f" dense return {game.dense_return:.3g}"
    )
