"""WebShop in verl-agent's style: the original's text pages, its rules of what can be done, and the prompts on top."""

from __future__ import annotations

import json
import lzma
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from benchmark_data import data_folder
from webshop_cases import expert_returns, needs_packages, one

from rspo.envs import PromptContext, make_env
from rspo.envs.webshop import WebshopEnv
from rspo.envs.webshop.pages import SEARCH_ACTION, PageState

pytestmark = needs_packages


def shop(**options: Any) -> WebshopEnv:
    env = make_env("webshop", prompt_style="verl-agent", nouns="simple", **{"data": "own", **options})
    assert isinstance(env, WebshopEnv)
    return env


def real() -> WebshopEnv:
    return shop(data=str(data_folder("webshop")))


def records() -> dict[str, dict[str, Any]]:
    """What the original's own loading made of the products: Title, Price, Rating and so on."""
    with lzma.open(data_folder("webshop") / "products_1000.jsonl.xz", "rt", encoding="utf-8") as lines:
        products = [json.loads(line)["product"] for line in lines]
    return {product["asin"]: product for product in products}


def parts(page: str) -> list[str]:
    """A page's parts; each stands in quotes."""
    found = page.split(" [SEP] ")
    assert all(part[0] == part[-1] == "'" for part in found), page
    return [part[1:-1] for part in found]


def clicks(infos: dict[str, Any]) -> list[str]:
    return [action.removeprefix("click[").removesuffix("]") for action in infos["admissible_actions"]]


# Pages


def test_every_product_page_is_the_originals() -> None:
    env, told = real(), records()
    pages = env.shop.pages
    for asin, record in told.items():
        item = PageState("item", "anything", 1, asin.lower())
        options = [part for name, values in record["options"].items() for part in (name, *values)]
        texts = ["Back to Search", "< Prev", *options, record["Title"], f"Price: {record['Price']}"]
        texts += [f"Rating: {record['Rating']}", "Description", "Features", "Reviews", "Buy Now"]
        page = pages.show(item)
        assert parts(page.text) == [text.strip() for text in texts if text.strip()]
        values = list(dict.fromkeys(value for values in record["options"].values() for value in values))
        buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
        assert page.actions == tuple(f"click[{text}]" for text in (*buttons, *values))
        for kind, shown in (("description", [record["Description"]]), ("features", record["BulletPoints"])):
            below = pages.follow(item, f"click[{kind}]")
            assert below is not None
            texts = ["Back to Search", "< Prev", *shown]
            assert parts(pages.show(below).text) == [text.strip() for text in texts if text.strip()]
            assert pages.show(below).actions == ("click[back to search]", "click[< prev]")


def test_result_pages_are_the_originals() -> None:
    env, told = real(), records()
    observations, infos = env.reset([0], [0])
    assert observations == ["'Search'"]
    assert infos[0]["admissible_actions"] == [SEARCH_ACTION, "click[search]"]
    text, *_, info = one(env, "search[women's shoes]")
    found = env.shop.catalogue.search("women's shoes")
    for number in range(1, 6):
        head = ["Back to Search", f"Page {number} (Total results: {len(found)})"]
        head += (["< Prev"] if number > 1 else []) + ["Next >"]
        shown = [told[product.asin] for product in found[10 * number - 10 : 10 * number]]
        assert parts(text) == head + [p[key].strip() for p in shown for key in ("asin", "Title", "Price")]
        assert clicks(info) == [h.lower() for h in head if "Page" not in h] + [p["asin"].lower() for p in shown]
        text, *_, info = one(env, "click[next >]")
    assert parts(text) == ["Back to Search", "Page 6 (Total results: 50)", "< Prev", "Next >"], "an empty one"
    assert info["is_action_valid"]
    text, *_ = one(env, "click[< prev]")
    assert parts(text)[1] == "Page 5 (Total results: 50)"


def test_prices_are_written_as_in_the_original() -> None:
    env = real()
    tags = {part for product in env.shop.catalogue.products for part in [f"${product.prices[0]}"]}
    env.reset([0], [0])
    text = one(env, "search[women's shoes]")[0]
    assert any(" to $" in part for part in parts(text))
    assert any(part in tags and part.endswith(".0") for part in parts(text)), "$132.0, not $132.00"


# Actions


def places(env: WebshopEnv) -> list[list[str]]:
    """Ways to a search page, a result page, a product's page and its sub-pages."""
    env.reset([0], [0])
    code = clicks(one(env, "search[anything lamp]")[4])[-1]
    item = ["search[anything lamp]", f"click[{code}]"]
    return [[], item[:1], item, *([*item, f"click[{kind}]"] for kind in ("description", "features", "reviews"))]


def go(env: WebshopEnv, way: list[str]) -> str:
    """The page at the end of a way."""
    observations, _ = env.reset([0], [0])
    return [observations[0], *(one(env, action)[0] for action in way)][-1]


@pytest.mark.parametrize("action", ["search[kite]", "search[kite].", "search[kite] and then I click", "search[KITE]"])
def test_search_is_taken_on_every_page_and_with_text_after_the_bracket(action: str) -> None:
    env = shop()
    expected = go(env, ["search[kite]"])
    assert "Total results" in expected
    for way in places(env):
        before = go(env, way)
        after, *_, info = one(env, action)
        assert info["is_action_valid"]
        assert after == expected
        assert after == info["anchor"]
        assert before != after


@pytest.mark.parametrize(
    "action",
    ["", "kite", "search kite", "search[]", "click[]", "click[nothing]", "click[search]", " search[kite]", "buy[now]",
     "search [kite]", "click[kite] search[kite]", "search[kite"],
)  # fmt: skip
def test_a_refused_action_shows_the_page_again_without_a_note(action: str) -> None:
    env = shop()
    for way in places(env):
        before = go(env, way)
        after, reward, terminated, truncated, info = one(env, action)
        assert not info["is_action_valid"]
        assert (after, info["anchor"]) == (before, before)
        assert (reward, terminated, truncated) == (0.0, False, False)


def test_the_placeholder_of_a_search_is_searched_as_it_stands() -> None:
    env = shop()
    env.reset([0], [0])
    assert one(env, SEARCH_ACTION)[4]["is_action_valid"]


def test_chosen_options_are_kept_and_not_shown() -> None:
    env = shop()
    task = next(n for n in range(len(env.shop.goals)) if len(env.shop.goals[n].options) == 2)
    observations, _ = env.reset([task], [0])
    seen, won = [observations[0]], False
    for _ in range(env.max_turns):
        (action,) = env.expert_actions()
        text, *_, info = one(env, action)
        seen.append(text)
        assert info["anchor"] == text
        if won := info["won"]:
            break
    assert won
    chosen = [text for text, after in pairwise(seen) if text == after]
    assert len(chosen) == 2, "a click on a value leaves the page's text as it is"


def test_a_new_search_and_a_result_page_forget_the_options() -> None:
    env = shop()
    task = next(n for n in range(len(env.shop.goals)) if len(env.shop.goals[n].options) == 2)
    env.reset([task], [0])
    while not env.episodes[0].state.chosen:  # type: ignore[attr-defined]
        env.step(env.expert_actions())
    before = env.snapshot()
    for action in ("click[< prev]", "search[kite]", "click[back to search]"):
        env.restore(before)
        env.step([action])
        assert env.episodes[0].state.chosen == ()  # type: ignore[attr-defined]
    env.restore(before)
    env.step(["click[description]"])
    env.step(["click[< prev]"])
    assert env.episodes[0].state.chosen  # type: ignore[attr-defined]


def test_the_expert_wins_as_often_as_in_the_readable_style() -> None:
    env, readable = real(), WebshopEnv(data=str(data_folder("webshop")), nouns="simple")
    numbers = random.Random(0).sample(list(env.tasks("eval")), 60)
    assert expert_returns(env, numbers)[:2] == expert_returns(readable, numbers)[:2]


def test_random_play_ends_as_it_should() -> None:
    env = shop(max_turns=6)
    env.reset(list(range(20)), [0] * 20)
    rng = np.random.default_rng(0)
    for _ in range(6):
        _, _, terminated, truncated, infos = env.step(env.random_actions(rng))
    assert (terminated | truncated).all()
    assert all(info["anchor"] for info in infos)


# Prompts


def test_prompt_holds_the_facts_and_quotes_the_actions() -> None:
    env = shop()
    observations, infos = env.reset([0], [0])
    first = env.render_prompt(
        PromptContext(infos[0]["task"], (), observations[0], tuple(infos[0]["admissible_actions"]), 0)
    )
    assert f"Your task: {infos[0]['task']}\n" in first
    assert f"\n'{SEARCH_ACTION}'\n'click[search]'\n" in first
    assert "Steps taken" not in first
    text, *_, info = one(env, "search[kite]")
    admissible = tuple(info["admissible_actions"])
    history = (("'Search'", "search[lamp]"), ("'Other'", "search[kite]"))
    later = env.render_prompt(PromptContext(info["task"], history, text, admissible, 7))
    assert "Steps taken so far: 7. The last 2 observations" in later
    assert "[Observation 6: ''Search'', Action 6: 'search[lamp]']\n[Observation 7: ''Other'', Action 7" in later
    assert f"Now, at step 8, you observe: {text}\n" in later
    assert all(f"\n'{action}'\n" in later for action in admissible)
    many = tuple(f"click[v{i}]" for i in range(300))
    assert "'click[v299]'" in env.render_prompt(PromptContext("t", (), "o", many, 0)), "none is left out"
    reply = env.render_reply(PromptContext(info["task"], (), text, admissible, 1))
    assert text in reply
    assert all(f"\n'{action}'\n" in reply for action in admissible)


def test_past_turns_are_dropped_above_13000_characters() -> None:
    env = shop()

    def prompt(length: int) -> str:
        return env.render_prompt(PromptContext("a task", (("x" * length, "search[a]"),), "'Search'", ("a",), 1))

    fixed = len(prompt(1000)) - 1000
    assert len(prompt(13_000 - fixed)) == 13_000
    short = prompt(13_001 - fixed)
    assert "xxx" not in short
    assert short == env.render_prompt(PromptContext("a task", (), "'Search'", ("a",), 1))


@pytest.mark.parametrize(
    ("response", "action", "well_formed"),
    [
        ("<think>so</think><action>Click[ABC]</action>", "click[abc]", True),
        ("<think></think> <ACTION> search[a] </ACTION> x <action>b</action>", "search[a]", True),
        ("<action>search[a]</action>", "search[a]", False),
        ("<think>so<action>search[a]</action>", "search[a]", False),
        ("<THINK>so</THINK><action>search[a]</action>", "search[a]", False),
        ("<think>购买</think><action>search[a]</action>", "search[a]", False),
        ("<think>ça, Füße</think><action>search[a]</action>", "search[a]", True),
        ("<think>so</think><action></action>", "", True),
        ("<think>so</think><action>search[a]", "hink><action>search[a]"[-20:], False),
        ("I would say: Search[Red Shoes]", "say: search[red shoes]"[-20:], False),
    ],
)
def test_responses_are_read_as_there(response: str, action: str, well_formed: bool) -> None:
    env = shop()
    assert env.project(response) == (action, well_formed)
    assert env.project(env.render_action("search[a b]")) == ("search[a b]", True)


def test_turns_and_reward_are_the_papers() -> None:
    env = shop()
    assert (env.max_turns, env.outcome_scale) == (15, 10.0)
