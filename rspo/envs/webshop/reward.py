"""What a purchase is worth: WebShop's task score.

score = (attributes matched + options matched + 1 if the price is within the bound) / (attributes + options + 1) × type

- A goal attribute is matched by an attribute of the product that is alike (below), or where it stands literally in the
  product's lower-cased title, bullet points or description.
- A goal option is matched by a chosen value that is alike. Both have colours normalised before: a text becomes the
  first of COLOURS that stands anywhere in it ("light blue" becomes "blue", and "standard" becomes "tan"). A goal option
  that is a (name, value) pair becomes a colour only where its name or its value is exactly one, and is otherwise
  compared as the words of both.
- Two texts are alike when rapidfuzz's `token_set_ratio` of their ASCII letters and digits, rounded, is above 85.
- The type factor compares products, the goal's and the bought one: 1 where they came from the same query, share two
  levels of category or share more than 0.2 of the nouns in the goal's title, else 0.5; but 0.1 where that share is
  below 0.1, and 0 where it is 0. A title without nouns counts as a share of 0.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

from .catalogue import Product
from .goals import Goal, GoalOption

COLOURS = (
    "alabaster", "apricot", "aqua", "ash", "asphalt", "azure", "banana", "beige", "black", "blue", "blush",
    "bordeaux", "bronze", "brown", "burgundy", "camel", "camo", "caramel", "champagne", "charcoal", "cheetah",
    "chestnut", "chocolate", "christmas", "coffee", "cognac", "copper", "coral", "cranberry", "cream", "crystal",
    "dark", "denim", "eggplant", "elephant", "espresso", "fuchsia", "gold", "granite", "grape", "graphite", "grass",
    "gray", "green", "grey", "heather", "indigo", "ivory", "ivy", "khaki", "lavender", "lemon", "leopard", "light",
    "lilac", "lime", "magenta", "maroon", "mauve", "merlot", "midnight", "mint", "mocha", "multicolor", "mushroom",
    "mustard", "natural", "navy", "nude", "olive", "orange", "peach", "pewter", "pink", "plum", "purple", "rainbow",
    "red", "rose", "royal", "rust", "sand", "sapphire", "seashell", "silver", "skull", "slate", "steel", "stone",
    "stonewash", "sunflower", "tan", "taupe", "teal", "tiger", "turquoise", "violet", "walnut", "wheat", "white",
    "wine", "yellow",
)  # fmt: skip
"""The colour names that are told apart, in the order in which they are looked for."""

_COLOUR_SET = frozenset(COLOURS)
_ALIKE_ABOVE = 85
_NOT_ASCII = dict.fromkeys(range(128, 256))


@dataclass(frozen=True, slots=True)
class Score:
    """A purchase's score and its parts.

    attributes, options: numbers of the goal's that were matched.  price: whether it is within the bound.
    type: the type factor, of `same_query`, `same_category` and `shared_nouns` (a share).
    total: the score, 0 to 1.
    """

    attributes: int
    options: int
    price: bool
    type: float
    same_query: bool
    same_category: bool
    shared_nouns: float
    total: float


def score_purchase(
    product: Product, goal: Goal, price: float, chosen: Iterable[str], nouns: Callable[[str], tuple[str, ...]]
) -> Score:
    """Score of buying `product` at a price (dollars) with the chosen option values; `nouns` is a `noun_tagger`."""
    values = tuple(chosen)
    attributes, options = matched_attributes(product, goal.attributes), matched_options(goal.options, values)
    affordable = price <= goal.price_limit
    wanted = nouns(goal.product.title)
    shared = len(set(wanted) & set(nouns(product.title))) / len(wanted) if wanted else 0.2
    same_query = product.query == goal.product.query
    same_category = len(_levels(product.category_path) & _levels(goal.product.category_path)) >= 2
    if shared < 0.1:
        factor = 0.1 if shared > 0 else 0.0
    else:
        factor = 1.0 if same_query or same_category or shared > 0.2 else 0.5
    total = _share(attributes, options, affordable, goal) * factor
    return Score(attributes, options, affordable, factor, same_query, same_category, shared, total)


def match(product: Product, goal: Goal, price: float, chosen: Iterable[str]) -> float:
    """The score without the type factor: the share of attributes, options and price that is matched."""
    attributes, options = matched_attributes(product, goal.attributes), matched_options(goal.options, tuple(chosen))
    return _share(attributes, options, price <= goal.price_limit, goal)


def _share(attributes: int, options: int, affordable: bool, goal: Goal) -> float:
    return (attributes + options + affordable) / (len(goal.attributes) + len(goal.options) + 1)


@lru_cache(maxsize=1 << 14)
def matched_attributes(product: Product, wanted: tuple[str, ...]) -> int:
    """How many of the wanted attributes a product has."""
    texts = _lowered(product)
    return sum(
        any(_alike(attribute, had) for had in product.attributes) or any(attribute in text for text in texts)
        for attribute in wanted
    )


@lru_cache(maxsize=1 << 14)
def matched_options(wanted: tuple[GoalOption, ...], chosen: tuple[str, ...]) -> int:
    """How many of the wanted options the chosen values fulfil."""
    values = [normalised_colour(value) for value in chosen]
    texts = [_option_text(option) for option in wanted]
    return sum(any(_alike(value, text) for value in values) for text in texts)


def normalised_colour(text: str) -> str:
    """The first of COLOURS that stands in a text, or the text."""
    return next((colour for colour in COLOURS if colour in text), text)


def _option_text(option: GoalOption) -> str:
    if isinstance(option, str):
        return normalised_colour(option)
    if _COLOUR_SET.isdisjoint(option):
        return str(option)  # written as Python writes pairs, as the original compares them
    return next(colour for colour in COLOURS if colour in option)


@lru_cache(maxsize=1 << 14)
def _alike(a: str, b: str) -> bool:
    return round(likeness()(a.translate(_NOT_ASCII), b.translate(_NOT_ASCII))) > _ALIKE_ABOVE


@lru_cache(maxsize=1)
def likeness() -> Callable[[str, str], float]:
    """rapidfuzz's `token_set_ratio` of the letters and digits of two texts, 0 to 100. Raises ImportError where the
    package is not installed."""
    try:
        from rapidfuzz import fuzz, utils
    except ImportError as error:
        raise ImportError("WebShop's rewards need the package 'rapidfuzz': pip install 'rspo[webshop]'") from error
    return partial(fuzz.token_set_ratio, processor=utils.default_process)


@lru_cache(maxsize=4096)
def _lowered(product: Product) -> tuple[str, str, str]:
    return product.title.lower(), " ".join(product.bullet_points).lower(), product.description.lower()


@lru_cache(maxsize=4096)
def _levels(category_path: str) -> frozenset[str]:
    return frozenset(level.strip() for level in category_path.split("›"))
