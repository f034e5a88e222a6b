"""The scripted expert: a shopper who knows which product the goal was made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from .catalogue import Catalogue, Product
from .goals import Goal
from .pages import RESULTS_A_PAGE, PageState, link_of
from .reward import matched_options

# How instructions begin before they come to what is wanted, and how they end.
_OPENING = re.compile(
    r"(?:(?:hello|hi|hey|please|ok|okay)\b[\s,.!]*)*"
    r"(?:(?:can|could|would) you (?:please )?)?"
    r"(?:(?:i am|i'm|im|i will be|i would|i'd|i) )?"
    r"(?:(?:also|really|just|currently|trying to|interested in|like to|like|love to|wish to|want to|need to|in the"
    r" market) )*"
    r"(?:(?:find|show|get|give|buy|order|purchase|help|search|look|looking|searching|shopping|want|need|have|see|place"
    r" order|finding|buying|me|us|for|to|some) )+"
    r"(?:(?:a|an|the|some|one|pair of|a pair of) )*"
)
_PRICE = re.compile(r",? and price lower than [\d.]+ dollars$")


def query_of(instruction: str) -> str:
    """The words to search for: a function of the instruction alone, which an agent that reads it can learn. The
    instruction in lower case, without how it begins ("find me", "i am looking for a") and without the price bound."""
    text = _PRICE.sub("", " ".join(instruction.lower().split()))
    return _OPENING.sub("", text, count=1) or text


def expert_action(catalogue: Catalogue, goal: Goal, state: PageState, link: Callable[[str, str], str] = link_of) -> str:
    """The next action towards buying the goal's product with the goal's options, from any state but "bought".

    It searches with `query_of`, pages through the results to the product, opens it, chooses its options and buys.
    Where that query does not find the product it searches with the whole instruction, and at last with the product's
    title, which it knows from elsewhere. From anywhere else it goes back.

    link: the text of the link that chooses an option's value (name, value).
    """
    target = goal.product.asin.lower()
    if state.kind == "search":
        return f"search[{_working_query(catalogue, goal)}]"
    if state.is_at_product and state.code == target:
        if state.kind != "item":
            return "click[< prev]"
        return f"click[{next(_links_left(goal, state, link), 'buy now')}]"
    place = _place(catalogue, state.query, goal.product)
    if place is None:
        return "click[back to search]"
    if state.is_at_product:
        return "click[< prev]"
    number = place // RESULTS_A_PAGE + 1
    if number == state.number:
        return f"click[{target}]"
    return "click[next >]" if number > state.number else "click[< prev]"


@lru_cache(maxsize=1 << 14)
def _working_query(catalogue: Catalogue, goal: Goal) -> str:
    queries = (query_of(goal.instruction), goal.instruction.lower())
    found = (query for query in queries if _place(catalogue, query, goal.product) is not None)
    return next(found, " ".join(goal.product.title.lower().split()))


def _place(catalogue: Catalogue, query: str, product: Product) -> int | None:
    found = catalogue.search(query)
    return found.index(product) if product in found else None


def _links_left(goal: Goal, state: PageState, link: Callable[[str, str], str]) -> Iterator[str]:
    """Links of the option values still to be chosen."""
    chosen = dict(state.chosen)
    for name, value in wanted_values(goal).items():
        if chosen.get(name) != value:
            yield link(name, value)


@lru_cache(maxsize=1 << 14)
def wanted_values(goal: Goal) -> dict[str, str]:
    """For each option of the product that matters the value that the goal wants, or the one most like it."""
    wanted: dict[str, str] = {}
    for option in goal.options:
        if not isinstance(option, str):
            wanted[option[0]] = option[1]
            continue
        offers = [(name, value) for name, values in goal.product.options.items() for value in values]
        fitting = [offer for offer in offers if offer[1] == option] or [
            offer for offer in offers if matched_options((option,), (offer[1],))
        ]
        free = [offer for offer in fitting if offer[0] not in wanted]
        if free:
            wanted[free[0][0]] = free[0][1]
    return wanted
