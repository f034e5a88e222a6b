"""WebShop in process: the environment, its episodes, and what is shared by them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..base import PromptContext
from ..episodes import ExpertEnv, ExpertEpisode
from ..verl_agent import VERL_AGENT, VerlAgentStyle
from ..wording import chat_prompt
from .expert import expert_action, query_of
from .goals import Goals, check_kind
from .loading import data_source, load_catalogue
from .nouns import noun_tagger
from .pages import SEARCH_ACTION, Pages, PageState
from .reward import likeness, match, score_purchase
from .text_pages import TextPages

MATCH_WEIGHT = 0.8
"""Share of the dense reward that is paid for the product in front of the agent; the rest is for buying it."""
PROMPT_ACTIONS = 100
"""Admissible actions that a chat prompt lists; `infos` list all."""
COMPACT_HISTORY_WORDS = 16
"""Words of an earlier action that a compact prompt repeats."""

_NOT_POSSIBLE = {"chat": "That is not possible here.\n", "compact": "failed\n", VERL_AGENT: ""}
"""What stands before the page after an action that was none, by prompt style."""


@dataclass(frozen=True)
class ShopSettings:
    """What decides on a shop; see `WebshopEnv`."""

    data: str
    goals: str
    nouns: str
    style: str
    text_limit: int
    value_limit: int


class Shop:
    """Products, goals and pages, shared by all episodes with the same settings."""

    def __init__(self, settings: ShopSettings) -> None:
        check_kind(settings.goals)
        self.settings = settings
        self.nouns = noun_tagger(settings.nouns)
        likeness()  # missing packages are told of here, not at the first step that needs them
        self.catalogue = load_catalogue(settings.data)
        self.catalogue.search("anything")
        try:
            self.goals = Goals(self.catalogue.products, settings.goals)
        except ValueError as error:
            raise ValueError(f"{self.catalogue.source}: {error}") from error
        pages = TextPages if settings.style == VERL_AGENT else Pages
        self.pages = pages(
            self.catalogue,
            compact=settings.style == "compact",
            text_limit=settings.text_limit,
            value_limit=settings.value_limit,
        )


@lru_cache(maxsize=8)
def shop_of(settings: ShopSettings) -> Shop:
    """The shop with these settings; the same object every time."""
    return Shop(settings)


class WebshopEpisode(ExpertEpisode):
    """One visit to the shop.

    number: of the goal.  state: where the agent is.  best: the greatest progress so far, of the dense reward.
    """

    def __init__(self, shop: Shop, number: int) -> None:
        self.shop = shop
        self.number = number
        self.goal = shop.goals[number]
        self.task = self.goal.instruction
        self.task_type = self.goal.product.category
        self.state = PageState()
        self.best = 0.0
        self._arrive(valid=True)

    def act(self, action: str) -> bool:
        state = self.shop.pages.follow(self.state, action)
        if state is None:
            self._arrive(valid=False)
            return False
        self.state = state
        if state.kind == "bought":
            self.score = self._score()
            self.won, self.ended = self.score == 1.0, True
        self._arrive(valid=True)
        progress = self._progress()
        self.dense_reward = max(0.0, progress - self.best)
        self.best = max(self.best, progress)
        return True

    def expert_action(self) -> str:
        return expert_action(self.shop.catalogue, self.goal, self.state, self.shop.pages.link)

    def copy(self) -> WebshopEpisode:
        twin = WebshopEpisode.__new__(WebshopEpisode)
        twin.__dict__.update(self.__dict__)  # nothing in it is ever changed in place
        return twin

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["goal"]
        state["shop"] = self.shop.settings
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, shop=shop_of(state["shop"]))
        self.goal = self.shop.goals[self.number]

    def _arrive(self, *, valid: bool) -> None:
        page = self.shop.pages.show(self.state)
        self.observation = page.text if valid else _NOT_POSSIBLE[self.shop.settings.style] + page.text
        self.anchor = page.anchor
        self.admissible_actions = () if self.ended else page.actions

    def _score(self) -> float:
        product = self.shop.catalogue.by_code[self.state.code]
        values = (value for _, value in self.state.chosen)
        return score_purchase(product, self.goal, product.price, values, self.shop.nouns).total

    def _progress(self) -> float:
        if self.ended:
            return self.score
        if not self.state.is_at_product:
            return 0.0
        product = self.shop.catalogue.by_code[self.state.code]
        return MATCH_WEIGHT * match(product, self.goal, product.price, (value for _, value in self.state.chosen))


class WebshopEnv(ExpertEnv):
    """WebShop: find a product in a web shop of text pages, choose its options and buy it.

    Tasks are the numbers of goals; the seed makes no difference, since nothing in the shop is random. Actions are
    `search[words]`, on the search page, and `click[text]` with the text of a link or option value; see `pages` for
    what leads where. An action that is not possible is not valid and leaves the agent where it is, with a note before
    the page. The admissible actions of the search page are the one entry `search[<your query>]`, which stands for any
    search and is not valid itself.

    `task_score` is 0 until something is bought and then WebShop's score of it (see `reward`); the episode is won with
    1.0. `task_type` is the category of the goal's product. The anchor names the page and the chosen options.

    The dense reward is the increase of the best progress so far, so that nothing pays twice and an episode's sum is at
    most 1. Progress is MATCH_WEIGHT (0.8) times the share of the goal's attributes, options and price bound that the
    product in front of the agent matches, on its page or a sub-page, with the options chosen so far; 0 on other pages;
    and the score itself once bought. The sum is 1 exactly where the episode is won. Progress leaves the product's type
    out of account: a product of another kind with the right attributes pays, too, until it is bought.

    data: directory with WebShop's data or a product file in it (see `loading`), or "own", a small catalogue of our own
        making that needs no files; None for what the environment variable WEBSHOP_DATA says.
    goals: "synthetic" or "human"; see `goals.Goals` for their order and split.
    max_turns: actions allowed.
    outcome_scale: reward of the last turn of a won episode, 0 for any other turn.
    prompt_style: "chat", whole pages for a pre-trained model; "compact", short ones for a small model; or "verl-agent",
        the original's text mode with its rules of what can be done (see `text_pages`), and its page as the anchor.
    nouns: how the type in a score finds nouns; see `nouns.noun_tagger`.
    text_limit: characters shown of a description, of features or of reviews; "verl-agent" has no limits.
    value_limit: values shown of an option; the others can be clicked all the same.

    Raises ValueError when an argument is out of its range, no data is named, or it is damaged or incomplete;
    FileNotFoundError when it is not there; ImportError when a package is missing.
    """

    has_dense_reward = True
    has_snapshots = True
    role = (
        "You are shopping for somebody in an online shop, which you see as text, one page at a time.",
        "On the search page write search[words] with words of your choice. Everywhere else write click[text] with the"
        " text of a link, product code or option value on the page.",
        "Find a product that is all that you were asked for and within the price, choose the right options on its page,"
        " then click[buy now]. You can buy only once.",
    )
    verl_agent = VerlAgentStyle("You are an autonomous agent in the online shop WebShop.", tail=20)

    def __init__(
        self,
        data: str | os.PathLike[str] | None = None,
        goals: str = "synthetic",
        max_turns: int = 15,
        outcome_scale: float = 10.0,
        prompt_style: str = "chat",
        nouns: str = "spacy",
        text_limit: int = 2000,
        value_limit: int = 50,
    ) -> None:
        super().__init__(max_turns, outcome_scale, prompt_style)
        for name, limit in (("text_limit", text_limit), ("value_limit", value_limit)):
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ValueError(f"{name} must be an integer of at least 1; got {limit!r}")
        self.shop = shop_of(ShopSettings(data_source(data), goals, nouns, prompt_style, text_limit, value_limit))

    def tasks(self, split: str = "train") -> Sequence[int]:
        """The numbers of a split's goals. Raises ValueError for another split than "train" and "eval"."""
        return self.shop.goals.numbers(split)

    def start(self, task: int, seed: int) -> WebshopEpisode:
        """A new visit with the goal of that number. Raises TypeError for what is no integer, ValueError for a number
        that no goal has."""
        if isinstance(task, bool) or not isinstance(task, int | np.integer):
            raise TypeError(f"tasks must be the numbers of goals; got {task!r}")
        if not 0 <= task < len(self.shop.goals):
            raise ValueError(f"tasks must be from 0 to {len(self.shop.goals) - 1}; got {task}")
        return WebshopEpisode(self.shop, int(task))

    def render_prompt(self, context: PromptContext) -> str:
        """As `EpisodeEnv.render_prompt`; a chat prompt lists PROMPT_ACTIONS actions at most."""
        left = len(context.admissible_actions) - PROMPT_ACTIONS
        if self.prompt_style == "chat" and left > 0:
            shown = replace(context, admissible_actions=context.admissible_actions[:PROMPT_ACTIONS])
            return chat_prompt(self.role, shown, more_actions=f"or click another of {left} option values")
        return super().render_prompt(context)

    def compact_prompt(self, context: PromptContext) -> str:
        """Task, the last actions and the current page; what can be clicked is what the page shows."""
        done = " ; ".join(" ".join(action.split()[:COMPACT_HISTORY_WORDS]) for _, action in context.history)
        lines = [f"task: {context.task.lower()}", f"did: {done or 'nothing'}", context.observation, ">"]
        return "\n".join(lines)

    def random_actions(self, rng: np.random.Generator, *, admissible: bool = True) -> list[str]:
        """As `EpisodeEnv.random_actions`; on the search page one to six neighbouring words of the instruction."""
        episodes = self.episodes
        seeds = rng.integers(1 << 62, size=len(episodes)).tolist()
        actions = super().random_actions(rng, admissible=admissible)
        return [
            f"search[{_random_words(episode.task, seed)}]" if action == SEARCH_ACTION else action
            for episode, seed, action in zip(episodes, seeds, actions, strict=True)
        ]


def _random_words(instruction: str, seed: int) -> str:
    words = query_of(instruction).split() or ["anything"]
    draw = random.Random(seed)
    length = draw.randint(1, min(6, len(words)))
    start = draw.randint(0, len(words) - length)
    return " ".join(words[start : start + length])


__all__ = ["MATCH_WEIGHT", "Shop", "ShopSettings", "WebshopEnv", "WebshopEpisode"]
