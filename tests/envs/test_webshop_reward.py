"""WebShop's task score: cases worked out by hand, and the original's own values for 500 purchases."""

from __future__ import annotations

import json
import lzma
import math
from typing import Any

import pytest
from benchmark_data import data_folder
from webshop_cases import needs_packages

from rspo.envs.webshop.catalogue import Product
from rspo.envs.webshop.goals import Goal, GoalOption
from rspo.envs.webshop.loading import load_catalogue
from rspo.envs.webshop.nouns import noun_tagger
from rspo.envs.webshop.reward import COLOURS, match, normalised_colour, score_purchase

pytestmark = needs_packages

TENT = "Tent Shelter Canopy Poles Stakes Ropes Carrier Liner Porch Vent"


def product(title: str = TENT, **changes: Any) -> Product:
    fields: dict[str, Any] = {
        "asin": "T1",
        "title": title,
        "description": "Sleeps four. Stays Dry Inside.",
        "bullet_points": ("Up in two minutes", "Light Weight fabric"),
        "attributes": ("water proof", "machine washable"),
        "options": {"color": ("light blue", "standard"), "size": ("small", "large")},
        "prices": (50.0,),
        "query": "tents",
        "category": "outdoor",
        "category_path": "Sports › Camping › Tents",
    }
    return Product(**(fields | changes))


def goal(attributes: tuple[str, ...] = ("water proof",), options: tuple[GoalOption, ...] = (), limit: float = 60.0):
    return Goal(product(), "", attributes, options, limit)


def score(bought: Product, wanted: Goal, *chosen: str, price: float = 50.0) -> float:
    return score_purchase(bought, wanted, price, chosen, noun_tagger("simple")).total


def test_every_part_counts_once() -> None:
    wanted = goal(("water proof", "stays dry"), (("color", "light blue"), ("size", "small")))
    assert score(product(), wanted, "light blue", "small") == 1.0
    assert score(product(), wanted, "light blue", "large") == 4 / 5  # one of two options
    assert score(product(), wanted, "light blue") == 4 / 5
    assert score(product(), wanted, "light blue", "small", price=60.0) == 1.0  # the bound itself is within it
    assert score(product(), wanted, "light blue", "small", price=60.01) == 4 / 5
    assert score(product(), wanted) == 3 / 5
    assert score(product(description="", attributes=()), wanted) == 1 / 5  # the price alone


@pytest.mark.parametrize(
    ("attribute", "is_matched"),
    [
        ("water proof", True),  # among the attributes
        ("proof water", True),  # words in any order
        ("machine wash", True),  # 85.7 of 100 like "machine washable"
        ("light weight", True),  # literally in a bullet point, whose case does not matter
        ("in two minutes light", True),  # bullet points are joined by a space
        ("sleeps four", True),  # in the description
        ("canopy poles", True),  # in the title
        ("four stays", False),  # "Sleeps four. Stays": the point is in between
        ("fire proof", False),
        ("Light Weight", False),  # what is looked for literally is not lower-cased; attributes are
    ],
)
def test_an_attribute_is_matched_by_likeness_or_literally(attribute: str, is_matched: bool) -> None:
    assert score(product(), goal((attribute,))) == (1.0 if is_matched else 0.5)


def test_likeness_is_rounded_before_it_is_compared() -> None:
    # 23 of 27 letters in common: 2 * 23 / 54 = 85.19 of 100, which rounds to 85 and is not above it; 24 of 28: 85.71.
    assert score(product(attributes=("q" * 23 + "w" * 4,)), goal(("q" * 23 + "z" * 4,))) == 0.5
    assert score(product(attributes=("q" * 24 + "w" * 4,)), goal(("q" * 24 + "z" * 4,))) == 1.0


@pytest.mark.parametrize(
    ("wanted", "chosen", "is_matched"),
    [
        (("color", "light blue"), "light blue", True),  # "blue" stands first in "light blue"; the pair has that word
        (("color", "blue"), "dark navy", False),  # becomes "dark": it stands before "navy" among the colours
        (("color", "blue"), "light blue", True),
        ("navy blue", "blue", True),  # a value alone becomes a colour as chosen values do: "blue"
        ("navy blue", "navy", False),
        (("color", "standard"), "standard", False),  # becomes "tan", which the pair's words do not have
        ("standard", "standard", True),  # both become "tan"
        (("size", "small"), "small", True),  # all words of the value are among the pair's
        (("size", "x-small"), "small", True),
        (("size", "small"), "x-small", False),  # "small" and "small x": 2 * 5 / 12 = 83 of 100
        (("size", "small"), "large", False),
        (("size", "8.5"), "8.5", True),
        (("size", "8.5"), "9.5", False),
    ],
)
def test_options_and_the_quirks_of_colours(wanted: GoalOption, chosen: str, is_matched: bool) -> None:
    expected = 1.0 if is_matched else 2 / 3
    assert score(product(), goal(options=(wanted,)), chosen) == pytest.approx(expected)


def test_colours_become_the_first_that_stands_in_a_text() -> None:
    assert len(COLOURS) == len(set(COLOURS)) == 102
    assert [normalised_colour(text) for text in ("navy blue", "rectangular", "size 8", "red")] == [
        "blue", "tan", "size 8", "red",
    ]  # fmt: skip


def test_the_type_factor_depends_on_query_category_and_shared_nouns() -> None:
    wanted = goal()
    other = {"query": "flags", "category_path": "Home › Decor"}
    # The goal's title has ten nouns; each title here shares the given number of them.
    assert score(product("Tent Shelter Canopy Flag", **other), wanted) == 1.0  # 3 of 10: above 0.2
    assert score(product("Tent Shelter Flag", **other), wanted) == 0.5  # 2 of 10: not above 0.2
    assert score(product("Tent Flag", **other), wanted) == 0.5  # 1 of 10
    assert score(product("Flag", **other), wanted) == 0.0  # none
    assert score(product("Tent Flag", **(other | {"query": "tents"})), wanted) == 1.0
    assert score(product("Tent Flag", **(other | {"category_path": "Sports › Camping › Flags"})), wanted) == 1.0
    assert score(product("Tent Flag", **(other | {"category_path": "Sports › Flags"})), wanted) == 0.5
    assert score(product("Flag"), wanted) == 0.0  # the same query and category do not help without a shared noun
    eleven = Goal(product(f"{TENT} Rug"), "", ("water proof",), (), 60.0)
    assert score(product("Tent Flag"), eleven) == pytest.approx(0.1)  # 1 of 11: below 0.1
    nameless = Goal(product(""), "", ("water proof",), (), 60.0)
    assert score(product("Flag", **other), nameless) == 0.5  # no nouns: counts as 0.2, which is not above it


def test_match_is_the_score_without_the_type() -> None:
    wanted = goal(("water proof", "none such"), (("size", "small"),), limit=math.inf)
    assert match(product("Flag"), wanted, 1e9, ["small"]) == 3 / 4
    assert score(product("Flag"), wanted, "small") == 0.0


def test_spacy_tells_nouns_and_the_simple_tagger_takes_words() -> None:
    title = "Women's Waterproof Hiking Boots with Warm Lining for the Winter"
    assert noun_tagger("simple")(title) == ("women", "waterproof", "hiking", "boots", "warm", "lining", "winter")
    nouns = noun_tagger("spacy")(title)
    assert {"women", "boots", "winter"} <= set(nouns)
    assert not {"with", "for", "the", "'s"} & set(nouns)
    with pytest.raises(ValueError, match="nouns must be one of spacy, simple; got 'nltk'"):
        noun_tagger("nltk")


def test_all_500_purchases_score_as_in_the_original() -> None:
    folder = data_folder("webshop")
    products = load_catalogue(str(folder)).by_code
    with lzma.open(folder / "reward_cases.jsonl.xz", "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    assert len(cases) == 500
    differing = 0
    for case in cases:
        told, options = case["goal"], case["goal"]["goal_options"]
        wanted = Goal(
            products[told["asin"].lower()],
            told["instruction_text"],
            tuple(told["attributes"]),
            tuple(options.items()) if isinstance(options, dict) else tuple(options),
            told["price_upper"],
        )
        bought = products[case["purchased_asin"].lower()]
        result = score_purchase(bought, wanted, case["price"], case["options"].values(), noun_tagger("spacy"))
        parts = case["parts"]
        assert result.total == pytest.approx(case["reward"], abs=1e-9)
        assert result.type == pytest.approx(parts["r_type"], abs=1e-9)
        assert result.shared_nouns == pytest.approx(parts["title_score"], abs=1e-9)
        assert result.attributes / len(wanted.attributes) == pytest.approx(parts["r_att"], abs=1e-9)
        assert (result.same_query, result.same_category, result.price) == (
            parts["query_match"], parts["category_match"], parts["r_price"],
        )  # fmt: skip
        if wanted.options:
            assert result.options / len(wanted.options) == pytest.approx(parts["r_option"], abs=1e-9)
        else:
            assert "r_option" not in parts
        simple = score_purchase(bought, wanted, case["price"], case["options"].values(), noun_tagger("simple"))
        differing += abs(simple.total - case["reward"]) > 1e-9
    assert differing == 12  # what an approximation costs, as its documentation says


def test_colours_are_those_of_the_original() -> None:
    assert list(COLOURS) == json.loads((data_folder("webshop") / "colors.json").read_text(encoding="utf-8"))
