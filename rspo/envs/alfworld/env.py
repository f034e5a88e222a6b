"""The ALFWorld environment: household tasks in text over ALFWorld's games or generated ones."""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..base import PromptContext
from ..episodes import ExpertEnv, ExpertEpisode
from ..verl_agent import VERL_AGENT, VerlAgentStyle
from .compact import compact_prompt, compact_reply, vocabulary
from .direct_way import direct_command
from .expert import FACTS, HandCodedExpert, Seen
from .games import SPLIT_FOLDERS, TASK_TYPES, AlfworldTask, Games, find_games, find_root
from .plain import PlainGame
from .progress import Game, Progress
from .speed import FastGame
from .upstream import GameError, check_installed

logger = logging.getLogger(__name__)

GREETING = "-= Welcome to TextWorld, ALFRED! =-"
_TASK = "Your task is to:"
_NOT_SHOWN = "help"
"""A command that only lists commands; it is answered, but not among the admissible ones."""


class AlfworldEpisode(ExpertEpisode):
    """An episode of a game.

    The first observation is without the game's greeting and the task, which has its own place, unless `whole`.

    Args:
        path: the game file.
        task_type: its type.
        seed: of the expert's choices; the game itself has nothing random.
        fast: whether the fast layer plays it.
        whole: whether the first observation is shown as the game says it.
    """

    def __init__(self, path: Path, task_type: str, seed: int, fast: bool, whole: bool = False) -> None:
        self.path = path
        self.task_type = task_type
        self.seed = seed
        self.fast = fast
        self.whole = whole
        self.actions: list[str] = []
        self._game: Game = FastGame(path) if fast else PlainGame(path)
        opening, _, task = self._game.observation.partition(_TASK)
        if not task:
            raise GameError(f"{path} is not a game that can be played: it does not say what the task is")
        self.task = task.strip()
        self._progress = Progress(self._game)
        self._seen = [Seen("", self._game.observation, self._game.commands, tuple(self._game.facts(*FACTS)))]
        self._expert: HandCodedExpert | None = None
        self._look(self._game.observation if whole else opening.replace(GREETING, "").strip())

    def act(self, action: str) -> bool:
        """Take an action; True where it was among the admissible ones."""
        is_valid = action.strip() in self.admissible_actions
        self._game.act(action)
        self.actions.append(action)
        self.dense_reward = self._progress.advance(self._game)
        self._seen.append(
            Seen(action.strip(), self._game.observation, self._game.commands, tuple(self._game.facts(*FACTS)))
        )
        self._look(self._game.observation)
        return is_valid

    def expert_action(self) -> str:
        """What the package's hand-coded expert wants to do, which has followed the episode from its start. Where that
        is not possible, or it has lost its way, a step on the direct way to the goal, worked out from the facts; where
        there is none of these either, the first admissible action."""
        if self._expert is None:
            self._expert = HandCodedExpert(self._game.goal, self.seed)
        for seen in self._seen[self._expert.steps :]:
            self._expert.see(seen)
        wanted = self._expert.propose()
        if wanted is None or wanted not in self.admissible_actions:
            wanted = direct_command(self._game)
        return wanted if wanted is not None else self.admissible_actions[0]

    def copy(self) -> AlfworldEpisode:
        new = AlfworldEpisode.__new__(AlfworldEpisode)
        new.__dict__.update(
            self.__dict__,
            _game=self._game.copy(),
            _progress=self._progress.copy(),
            _seen=list(self._seen),
            _expert=None,
            actions=list(self.actions),
        )
        return new

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as what was done, so that another process can do it again."""
        how = (self.path, self.task_type, self.seed, self.fast, self.whole)
        return _played_again, (how, tuple(self.actions), self.dense_reward)

    def _look(self, observation: str) -> None:
        self.observation = observation
        self.admissible_actions = [command for command in self._game.commands if command != _NOT_SHOWN]
        self.won = self.ended = self._game.won
        self.score = 1.0 if self.won else 0.0


def _played_again(
    how: tuple[Path, str, int, bool, bool], actions: Sequence[str], dense_reward: float
) -> AlfworldEpisode:
    episode = AlfworldEpisode(*how)
    for action in actions:
        episode.act(action)
    episode.dense_reward = dense_reward
    return episode


class AlfworldEnv(ExpertEnv):
    """A batch of ALFWorld episodes; see `BatchedEnv` for the contract.

    data: folder with games (`rspo.envs.alfworld.games` says which kinds there are); by default what the environment
        variable ALFWORLD_DATA names.
    max_turns: actions allowed.
    outcome_scale: reward of the last turn of a won episode, 0 for any other turn.
    prompt_style: "chat"; "compact" (`rspo.envs.alfworld.compact`); or "verl-agent" (`rspo.envs.verl_agent`), with
        observations as the game says them.
    task_types: those that are played; by default all six of TASK_TYPES.
    eval_split: what `tasks("eval")` gives, "eval_in_distribution" or "eval_out_of_distribution".
    fast: whether games are played by the fast layer, which shows the same as TextWorld's environment.

    An action counts as valid when it is among the admissible ones; any other is answered "Nothing happens.".
    `task_score` is 1.0 when won, else 0.0. The dense reward is progress towards the goal, at most 1 in all
    (`rspo.envs.alfworld.progress`). A game that turns out to be broken when it is started is replaced by the next one
    of its split, which depends on the game only; it is warned of once.

    Raises ValueError when an argument is out of its range or there are no games, ImportError when the alfworld package
    is missing; both say what to do.
    """

    has_dense_reward = True
    has_snapshots = True
    episodes_at_once = 64
    """Each of another game takes a copy of the planner's library: 34 MB of the temporary folder, 9 MB of memory."""
    role = (
        "You act in a household through text commands. Things lie on or in furniture and appliances, of which you only"
        " see what you stand at; what is closed must be opened first. You carry one thing at a time.",
        "Clean things at a sink, heat them with a microwave, cool them with a fridge, and use a lamp to look at them.",
    )
    verl_agent = VerlAgentStyle("You are an agent in the household world of ALFRED.", tail=30)

    def __init__(
        self,
        data: str | os.PathLike[str] | None = None,
        max_turns: int = 50,
        outcome_scale: float = 10.0,
        prompt_style: str = "chat",
        task_types: Sequence[str] = TASK_TYPES,
        eval_split: str = "eval_in_distribution",
        fast: bool = True,
    ) -> None:
        super().__init__(max_turns, outcome_scale, prompt_style)
        if isinstance(task_types, str) or not task_types or not set(task_types) <= set(TASK_TYPES):
            raise ValueError(f"task_types must be some of {', '.join(TASK_TYPES)}; got {task_types!r}")
        if eval_split not in list(SPLIT_FOLDERS)[1:]:
            raise ValueError(f"eval_split must be one of {', '.join(list(SPLIT_FOLDERS)[1:])}; got {eval_split!r}")
        check_installed()
        self.root = find_root(data)
        self.task_types = tuple(kind for kind in TASK_TYPES if kind in task_types)
        self.eval_split = eval_split
        self.fast = bool(fast)
        self._games: dict[str, Games] = {}
        self._broken: set[str] = set()

    @property
    def skipped_tasks(self) -> int:
        return sum(games.broken for games in self._games.values()) + len(self._broken)

    def tasks(self, split: str = "train") -> tuple[AlfworldTask, ...]:
        """The games of a split, sorted by folder: "train", "eval", "eval_in_distribution", "eval_out_of_distribution".

        Raises ValueError for another split, and where its games are not there.
        """
        name = self.eval_split if split == "eval" else split
        if name not in SPLIT_FOLDERS:
            raise ValueError(f"split must be one of eval, {', '.join(SPLIT_FOLDERS)}; got {split!r}")
        if name not in self._games:
            self._games[name] = find_games(self.root, name, self.task_types)
        return self._games[name].tasks

    def start(self, task: AlfworldTask, seed: int) -> AlfworldEpisode:
        if not isinstance(task, AlfworldTask):
            raise TypeError(f"tasks must be AlfworldTasks; got {task!r}")
        for candidate in self._from(task):
            if candidate.game in self._broken:
                continue
            try:
                path = self.root / candidate.game / "game.tw-pddl"
                whole = self.prompt_style == VERL_AGENT
                return AlfworldEpisode(path, candidate.task_type, seed, self.fast, whole)
            except GameError as error:
                self._broken.add(candidate.game)
                logger.warning("skipped: %s; the next game of its split is played instead", error)
        raise ValueError(f"no game of the split of {task.game!r} in {str(self.root)!r} can be played")

    def _from(self, task: AlfworldTask) -> Iterator[AlfworldTask]:
        """A task, and then the others of its split from there on."""
        yield task
        top = task.game.partition("/")[0]
        for split in SPLIT_FOLDERS:
            try:
                tasks = self.tasks(split)
            except ValueError:  # a split that is not there
                continue
            if task in tasks or tasks[0].game.partition("/")[0] == top:
                place = bisect_left([one.game for one in tasks], task.game)
                yield from (one for one in [*tasks[place:], *tasks[:place]] if one != task)
                return

    def compact_prompt(self, context: PromptContext) -> str:
        return compact_prompt(context)

    def render_reply(self, context: PromptContext) -> str:
        return compact_reply(context) if self.prompt_style == "compact" else super().render_reply(context)

    def vocabulary(self) -> tuple[str, ...]:
        """All words of compact prompts and actions, sorted; the same for any data."""
        return vocabulary()
