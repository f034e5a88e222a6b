"""Products of a shop, as they are read from WebShop's records, and the catalogue that holds them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from .search import SearchIndex

UNPRICED = 100.0
"""Price in dollars of a product whose record names none, as in WebShop."""

_PRICE = re.compile(r"\$\s*([\d,]*\.?\d+)")


class RecordError(ValueError):
    """A product record that cannot be used; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """What a person wrote for a product: the text, the attributes in it, and option values without their names."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(eq=False, slots=True)
class Product:
    """One product. Two are the same only where they are the same object.

    asin: its code, in capitals.  title, description, bullet_points, reviews, rating: what its pages show.
    attributes: what purchases are judged by; not shown.
    options: for every option the values it offers, lower-cased, in their order.
    prices: the price in dollars, or the lowest and the highest.
    price: what it costs, in dollars: within a range a value that depends on the product's code only (WebShop draws it
        anew at every start).
    query: what was searched for when the product was collected; its type.
    category: one word, such as "beauty".  category_path: levels joined with "›".
    instruction, instruction_attributes: the text that synthetic goals are made of; None where there is none.
    human: instructions that people wrote.
    """

    asin: str
    title: str
    description: str
    bullet_points: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[float, ...]
    query: str
    category: str
    category_path: str
    rating: str = ""
    reviews: tuple[str, ...] = ()
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()
    human: tuple[HumanInstruction, ...] = ()
    price: float = field(init=False)

    def __post_init__(self) -> None:
        drawn = random.Random(f"price of {self.asin}").uniform(self.prices[0], self.prices[-1])
        self.price = self.prices[0] if len(self.prices) == 1 else drawn

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price:.2f}" for price in self.prices)

    @property
    def searched_text(self) -> str:
        """What the search finds it by: title, description, first bullet point and options, as in WebShop's index."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullet_points[:1], options]).lower()


class Catalogue:
    """The products of a shop and the search over them.

    source: where they come from, for messages.
    skipped: why records were left out, one line each.
    without_product: numbers of instructions, by kind of goal, for products that are not in the catalogue.
    """

    def __init__(
        self,
        products: Sequence[Product],
        source: str,
        skipped: Sequence[str] = (),
        without_product: Mapping[str, int] | None = None,
    ) -> None:
        self.products = tuple(products)
        self.source = source
        self.skipped = tuple(skipped)
        self.without_product = dict(without_product or {})
        self.by_code = {product.asin.lower(): product for product in self.products}
        self.search = lru_cache(maxsize=4096)(self._search)

    @cached_property
    def index(self) -> SearchIndex:
        return SearchIndex([product.searched_text for product in self.products])

    def _search(self, query: str) -> tuple[Product, ...]:
        """The products found by a query, best first, 50 at most. (Called through `search`, which remembers answers.)"""
        return tuple(self.products[i] for i in self.index.find(query))


def parse_product(
    record: Any, instructions: Mapping[str, Any], human: Mapping[str, Any], *, attributes_given: bool
) -> Product:
    """A product of its record.

    record: of `items_shuffle*.json`, as WebShop publishes them, or of its `documents.jsonl` (key "product").
    instructions: by product code, of `items_ins_v2*.json`: "attributes" and, for some, "instruction" and
        "instruction_attributes".
    human: by product code, of `items_human_ins.json`: lists of "instruction", "instruction_attributes" and
        "instruction_options". Where it has nothing for the product, the record's own "instructions" are taken.
    attributes_given: whether records have the field "Attributes" themselves.

    Raises RecordError with the field and what was expected of it.
    """
    if not isinstance(record, dict):
        raise RecordError(f"a product must be an object; got {type(record).__name__}")
    asin = _text(record, "asin")
    if not asin or asin == "nan" or len(asin) > 10:
        raise RecordError(f"asin must have 1 to 10 characters; got {asin!r}")
    about = instructions.get(asin, {})
    if not isinstance(about, dict):
        raise RecordError(f"its instructions must be an object; got {about!r}")
    attributes = record.get("Attributes") if attributes_given else about.get("attributes", [])
    instruction = about.get("instruction")
    instruction_attributes = _texts(about.get("instruction_attributes") or (), "instruction_attributes")
    is_text = isinstance(instruction, str) and bool(instruction.strip())
    if instruction is not None and not (is_text and instruction_attributes):
        raise RecordError("an instruction must be a text and have at least one attribute in instruction_attributes")
    return Product(
        asin=asin.upper(),
        title=_text(record, "name"),
        description=_text(record, "full_description"),
        bullet_points=_texts(record.get("small_description", record.get("BulletPoints")), "small_description"),
        attributes=_texts(attributes, "Attributes"),
        options=_options(record),
        prices=_prices(record.get("pricing")),
        query=_text(record, "query").lower().strip(),
        category=_text(record, "category"),
        category_path=_text(record, "product_category"),
        instruction=instruction,
        instruction_attributes=instruction_attributes,
        human=_human(human.get(asin, record.get("instructions", []))),
    )


def _text(record: Mapping[str, Any], field: str) -> str:
    if field not in record:
        raise RecordError(f"field {field!r} is missing")
    value = record[field]
    if not isinstance(value, str):
        raise RecordError(f"{field} must be a text; got {value!r}")
    return value


def _texts(values: Any, field: str) -> tuple[str, ...]:
    """A list of texts; one text stands for a list of it, null for an empty one."""
    if values is None:
        return ()
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise RecordError(f"{field} must be a list of texts; got {values!r}")
    return tuple(values)


def _options(record: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Values by option: as they stand in "options", else made of "customization_options" as WebShop makes them."""
    options = record.get("options")
    if isinstance(options, dict):
        found = {
            str(name).lower(): tuple(value.lower() for value in _texts(values, f"options of {name!r}"))
            for name, values in options.items()
        }
    else:
        raw = record.get("customization_options") or {}
        if not isinstance(raw, dict):
            raise RecordError(f"customization_options must be an object; got {raw!r}")
        found = {}
        for name, values in raw.items():
            if values is None:
                continue
            if not isinstance(values, list) or not all(isinstance(v, dict) and "value" in v for v in values):
                raise RecordError(f"customization_options of {name!r} must be a list of objects with a value")
            found[name.lower()] = tuple(str(v["value"]).strip().replace("/", " | ").lower() for v in values)
    return {name: values for name, values in found.items() if values}


def _prices(pricing: Any) -> tuple[float, ...]:
    """One or two prices of a list of numbers or of a text such as "$19.99$27.99"."""
    if not pricing:
        return (UNPRICED,)
    values = [text.replace(",", "") for text in _PRICE.findall(pricing)] if isinstance(pricing, str) else pricing
    try:
        prices = tuple(float(value) for value in values[:2])
    except (TypeError, ValueError):
        prices = ()
    if not prices or not all(math.isfinite(price) and price >= 0 for price in prices):
        raise RecordError(f"pricing must be prices in dollars; got {pricing!r}")
    return prices


def _human(entries: Any) -> tuple[HumanInstruction, ...]:
    """Those that name an attribute, as in WebShop, and say something."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RecordError(f"human instructions must be a list of objects; got {entries!r}")
    return tuple(
        HumanInstruction(
            _text(entry, "instruction"),
            _texts(entry["instruction_attributes"], "instruction_attributes"),
            _texts(entry.get("instruction_options") or (), "instruction_options"),
        )
        for entry in entries
        if entry.get("instruction_attributes") and _text(entry, "instruction").strip(" .")
    )
