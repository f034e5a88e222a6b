"""What is to be bought: goals made of products, as WebShop makes them, and their split.

A synthetic goal is a product's instruction with one value of each of its options, in all combinations. A human goal is
what a person wrote for a product. Both get a price bound above the product's price.

Goals are made when asked for: their number alone is known from the start, so that millions cost next to nothing.
"""

from __future__ import annotations

import bisect
import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from .catalogue import Product

GOAL_KINDS = ("synthetic", "human")
MAX_EVALUATION_GOALS = 500
GoalOption = str | tuple[str, str]
"""A value, or the pair of an option's name and its value."""

_SHUFFLE_SEED = 233
_PRICE_BOUNDS = [10.0 * i for i in range(1, 100)]


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal: what the agent is told (`instruction`), and what its purchase is judged by.

    product: the one that the goal was made of.  price_limit: dollars; infinite where the instruction names none.
    """

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[GoalOption, ...]
    price_limit: float


class Goals(Sequence[Goal]):
    """All goals of a kind, in the order of WebShop's own shuffle (of the same products), each made when asked for.

    The first ones are for evaluation: 500 as in the paper's code base, or a fifth where there are fewer than 2,500
    (at least one, where there are two). The others are for training. Goals of one product stand in both parts.

    Raises ValueError for an unknown kind and where no product has an instruction of that kind.
    """

    def __init__(self, products: Sequence[Product], kind: str = "synthetic") -> None:
        check_kind(kind)
        self.kind = kind
        self._products = [product for product in products if _goals_of(product, kind)]
        self._ends = list(accumulate(_goals_of(product, kind) for product in self._products))
        if not self._products:
            raise ValueError(f"no product has {kind} instructions; choose other goals ({', '.join(GOAL_KINDS)})")
        order = list(range(self._ends[-1]))
        random.Random(_SHUFFLE_SEED).shuffle(order)
        self._order = array("q", order)
        self.evaluation = min(MAX_EVALUATION_GOALS, max(len(order) // 5, int(len(order) > 1)))
        self._make = lru_cache(maxsize=1 << 14)(self._made)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> Goal:  # type: ignore[override]  # slices are not needed
        """Raises IndexError for a number that is not below their number."""
        if not 0 <= number < len(self._order):
            raise IndexError(f"goal must be from 0 to {len(self._order) - 1}; got {number}")
        return self._make(self._order[number])

    def numbers(self, split: str) -> range:
        """The numbers of a split's goals. Raises ValueError for another split than "train" and "eval"."""
        if split == "eval":
            return range(self.evaluation)
        if split == "train":
            return range(self.evaluation, len(self))
        raise ValueError(f"split must be one of train, eval; got {split!r}")

    def _made(self, place: int) -> Goal:
        i = bisect.bisect_right(self._ends, place)
        product = self._products[i]
        within = place - (self._ends[i - 1] if i else 0)
        return _synthetic_goal(product, within) if self.kind == "synthetic" else _human_goal(product, within)


def check_kind(kind: str) -> None:
    """Raises ValueError for what is not one of GOAL_KINDS."""
    if kind not in GOAL_KINDS:
        raise ValueError(f"goals must be one of {', '.join(GOAL_KINDS)}; got {kind!r}")


def _goals_of(product: Product, kind: str) -> int:
    if kind == "human":
        return len(product.human)
    return math.prod(len(values) for values in product.options.values()) if product.instruction is not None else 0


def _synthetic_goal(product: Product, number: int) -> Goal:
    """The goal with the number-th combination of options: options in alphabetical order, the last one varies first."""
    assert product.instruction is not None
    options: list[tuple[str, str]] = []
    for name in sorted(product.options, reverse=True):
        number, i = divmod(number, len(product.options[name]))
        options.insert(0, (name, product.options[name][i]))
    limit, words = _price_limit(product, "")
    wanted = ", and ".join(f"{name}: {value}" for name, value in options)
    instruction = product.instruction + (f" with {wanted}" if wanted else "") + words
    return Goal(product, instruction, product.instruction_attributes, tuple(options), limit)


def _human_goal(product: Product, number: int) -> Goal:
    human = product.human[number]
    limit, words = _price_limit(product, human.text)
    return Goal(product, human.text.strip(".") + words, human.attributes, human.options, limit)


def _price_limit(product: Product, text: str) -> tuple[float, str]:
    """A bound in dollars and its words. The greater of two different ones of the next four multiples of ten above the
    price, drawn by the product's code (and the text), so that it does not depend on what else is loaded; none for a
    price of 980 and more."""
    first = bisect.bisect_right(_PRICE_BOUNDS, product.price)
    above = _PRICE_BOUNDS[first : first + 4]
    if len(above) < 2:
        return math.inf, ""
    limit = max(random.Random(f"bound of {product.asin} {text}").sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"
