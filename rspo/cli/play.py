"""An environment at a terminal: a person, a script or the expert acts, and sees what an agent would see."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np

from ..config import ConfigError
from ..engines import expert_of
from ..envs.base import BatchedEnv, Info, PromptContext
from ..envs.returned import reset_checked, step_checked
from ..envs.wording import bare_action

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
        self._show(*reset_checked(self.env, [self.task], [self.seed]))
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
            action, well_formed = bare_action(response), True
        self.history.append((self.observation, action))
        self.actions.append(action)
        observations, rewards, terminated, truncated, infos = step_checked(self.env, [action])
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
        return expert_of(self.env).expert_actions()[0]

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
    as_json: write one JSON object a line instead of text: at each turn what is to be seen, and what came of the action
        before; and the answer to each command.
    source, out: where actions come from and what is shown goes; standard input and output.

    Raises ConfigError where the expert is to act and there is none.
    """
    source, out = source or sys.stdin, out or sys.stdout
    if expert:
        expert_of(game.env)
    screen: Screen = JsonScreen(source, out) if as_json else TextScreen(source, out)
    if not expert:
        screen.greet()
    came_of_it: dict[str, Any] = {}
    while True:
        screen.show(game, came_of_it)
        if game.ended:
            break
        response = game.expert_action() if expert else _next_response(game, screen)
        if response is None:
            break
        if expert:
            screen.see_expert(response)
        came_of_it = game.respond(response)
    screen.end(game)
    return bool(game.info["won"])


def _next_response(game: Game, screen: Screen) -> str | None:
    """The next line that acts; None where there is none. Commands are carried out meanwhile."""
    while line := screen.ask():
        text = line.strip()
        if text == ":quit":
            return None
        if text == ":actions":
            screen.say({"actions": list(game.info["admissible_actions"])})
        elif text == ":expert":
            try:
                screen.say({"expert": game.expert_action()})
            except ConfigError as error:
                screen.say({"error": str(error)})
        elif text == ":undo":
            if game.undo():
                screen.show(game, {})
            else:
                screen.say({"error": "nothing to take back"})
        elif text.startswith(":"):
            screen.say({"error": f"there is no command {text}", "help": HELP})
        elif text:
            return text
    return None


class Screen(ABC):
    """Where a game is shown and actions come from."""

    def __init__(self, source: TextIO, out: TextIO) -> None:
        self.source = source
        self.out = out

    def greet(self) -> None:  # noqa: B027 - not every screen has something to say
        """Say how to play."""

    def ask(self) -> str:
        """The next line, "" at the end."""
        return self.source.readline()

    @abstractmethod
    def say(self, answer: dict[str, Any]) -> None:
        """Answer a command."""

    @abstractmethod
    def show(self, game: Game, came_of_it: dict[str, Any]) -> None:
        """A turn: what is to be seen, and what came of the action before."""

    def see_expert(self, action: str) -> None:  # noqa: B027
        """The expert acts."""

    def end(self, game: Game) -> None:  # noqa: B027
        """Say how it went."""


class JsonScreen(Screen):
    """One JSON object a line."""

    def say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self.out, flush=True)

    def show(self, game: Game, came_of_it: dict[str, Any]) -> None:
        self.say({**came_of_it, **game.state()})


class TextScreen(Screen):
    """For a person."""

    def greet(self) -> None:
        print(HELP, file=self.out)

    def ask(self) -> str:
        if self.source is sys.stdin and self.source.isatty():  # with editing
            try:
                return input("> ") + "\n"
            except EOFError:
                return ""
        print("> ", end="", file=self.out, flush=True)
        line = self.source.readline()
        print(line.rstrip("\n"), file=self.out)
        return line

    def say(self, answer: dict[str, Any]) -> None:
        for value in answer.values():
            lines = value if isinstance(value, list) else [value]
            print("\n".join(f"  {line}" for line in lines) or "  (not known)", file=self.out)

    def show(self, game: Game, came_of_it: dict[str, Any]) -> None:
        if came_of_it:
            valid = "" if came_of_it["valid"] else "not a valid action; "
            reward, dense = came_of_it["reward"], came_of_it["dense_reward"]
            print(f"  {valid}reward {reward:g}, dense reward {dense:g}", file=self.out)
        if game.ended:
            return
        prompt, possible = game.prompt, game.info["admissible_actions"]
        print(f"\n--- turn {len(game.actions) + 1} of {game.env.max_turns} ---\n{prompt}", file=self.out)
        if not all(action in prompt for action in possible):
            print(f"(Possible now: {', '.join(possible)})", file=self.out)

    def see_expert(self, action: str) -> None:
        print(f"expert> {action}", file=self.out)

    def end(self, game: Game) -> None:
        outcome = "won" if game.info["won"] else "lost" if game.ended else "stopped"
        print(
            f"\n{outcome} after {len(game.actions)} turns: reward {game.reward:g}, score {game.info['task_score']:g},"
            f" dense return {game.dense_return:.3g}",
            file=self.out,
        )
