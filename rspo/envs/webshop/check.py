"""Whether a data directory can be used, and what is in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .catalogue import Product
from .expert import wanted_values
from .goals import GOAL_KINDS, Goals
from .loading import OWN, data_source, load_catalogue
from .reading import DataError, read_json
from .reward import matched_options

SHOWN_SKIPPED = 10


@dataclass(frozen=True)
class GoalCounts:
    """Numbers of goals of one kind.

    out_of_reach: evaluation goals that score below 1.0 even with the goal's own product and options: in WebShop's
        reward an option value that has a colour's name inside a word is not recognised ("rectangular" has "tan").
    """

    total: int
    train: int
    evaluation: int
    out_of_reach: int


@dataclass(frozen=True)
class DataSummary:
    """What a data directory holds.

    source: the product file.  products, with_options: how many.
    goals: by kind; kinds of which there are none have zeros.
    without_product: instructions for products that are not among the products, by kind.
    texts: human instructions that do not say which product they are for.
    skipped: why records were left out, one line each.
    """

    source: str
    products: int
    with_options: int
    goals: dict[str, GoalCounts]
    without_product: dict[str, int]
    texts: int
    skipped: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """A report, line by line."""
        yield f"products: {self.products} ({self.with_options} with options), from {self.source}"
        for kind, counts in self.goals.items():
            left = self.without_product.get(kind, 0)
            note = f"; {left} instructions are for other products" if left else ""
            if counts.out_of_reach:
                note += f"; {counts.out_of_reach} of eval cannot be won with the goal's own product"
            yield f"{kind} goals: {counts.total} ({counts.train} train, {counts.evaluation} eval){note}"
        if self.texts:
            yield f"human instructions without a product, which are no goals: {self.texts}"
        if self.skipped:
            yield f"products left out: {len(self.skipped)}"
            yield from (f"  {reason}" for reason in self.skipped[:SHOWN_SKIPPED])
            if len(self.skipped) > SHOWN_SKIPPED:
                yield f"  and {len(self.skipped) - SHOWN_SKIPPED} more"


def check_data(data: str | os.PathLike[str] | None = None) -> DataSummary:
    """Load a data directory, or what WEBSHOP_DATA says, and count.

    Raises what `load_catalogue` raises, with what to do; ImportError where the search's packages are missing.
    """
    source = data_source(data)
    catalogue = load_catalogue(source)
    catalogue.search("anything")  # the packages it needs are part of what must work
    return DataSummary(
        source=catalogue.source,
        products=len(catalogue.products),
        with_options=sum(bool(product.options) for product in catalogue.products),
        goals={kind: _counts(catalogue.products, kind) for kind in GOAL_KINDS},
        without_product=dict(catalogue.without_product),
        texts=0 if source == OWN else _texts_alone(Path(source)),
        skipped=catalogue.skipped,
    )


def _counts(products: Sequence[Product], kind: str) -> GoalCounts:
    try:
        goals = Goals(products, kind)
    except ValueError:
        return GoalCounts(0, 0, 0, 0)
    evaluation = [goals[number] for number in goals.numbers("eval")]
    missed = sum(
        matched_options(goal.options, tuple(wanted_values(goal).values())) < len(goal.options) for goal in evaluation
    )
    return GoalCounts(len(goals), len(goals.numbers("train")), len(evaluation), missed)


def _texts_alone(path: Path) -> int:
    """Number of human instructions that come as texts alone: what they are for is not told, so they are no goals."""
    folder = path if path.is_dir() else path.parent
    count = 0
    for file in sorted(folder.glob("human_goals*.json*")):
        texts = read_json(file)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{file} must hold a list of texts; it holds a {type(texts).__name__}")
        count += len(texts)
    return count
