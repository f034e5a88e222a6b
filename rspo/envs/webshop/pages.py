"""The shop's pages: what each shows and where its links lead.

search page -> result pages of 10 -> product page -> description, features, reviews; and "buy now" ends it. A product's
options are links of its page; they choose a value, and the page stays. One goes back with "< prev" (from a product to
the result page it was found on, from a sub-page to the product, from a result page to the one before) or with "back to
search". Opening a product forgets the options chosen before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .catalogue import Catalogue, Product

RESULTS_A_PAGE = 10
SEARCH_ACTION = "search[<your query>]"
"""Stands among the admissible actions for any search; as an action itself it is not valid."""

COMPACT_TITLE_WORDS = 8
COMPACT_TEXT_WORDS = 40
COMPACT_VALUES = 12

MAX_QUERY = 500
"""Characters of a query; a longer one is not possible."""
SUB_PAGES = ("description", "features", "reviews")
_OTHER_LINKS = frozenset(("back to search", "< prev", "next >", "buy now", *SUB_PAGES))
_ACTION = re.compile(r"(search|click) ?\[(.*)\]")


@dataclass(frozen=True, slots=True)
class PageState:
    """Where one is in the shop.

    kind: "search", "results", "item", one of SUB_PAGES, or "bought".
    query, number: of the results, also those a product was opened from; pages count from 1.
    code: of the product, in lower case.
    chosen: (option, value) pairs, in the order of the product's options.
    """

    kind: str = "search"
    query: str = ""
    number: int = 1
    code: str = ""
    chosen: tuple[tuple[str, str], ...] = ()

    @property
    def is_at_product(self) -> bool:
        return self.kind == "item" or self.kind in SUB_PAGES


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows: text, `anchor` (what tells states apart), links by their text; `listed`: what can be done,
    where that is not a click on each link."""

    text: str
    anchor: str
    links: dict[str, PageState]
    listed: tuple[str, ...] = ()

    @property
    def actions(self) -> tuple[str, ...]:
        """What can be done: clicks, and SEARCH_ACTION where that is all."""
        return self.listed or tuple(f"click[{text}]" for text in self.links) or (SEARCH_ACTION,)


def parse_action(action: str) -> tuple[str, str] | None:
    """("search" or "click", what stands in the brackets), in lower case and with single spaces; None for anything else
    and for a search that has brackets itself, such as two actions in one."""
    found = _ACTION.fullmatch(" ".join(action.lower().split()))
    if found is None or (found.group(1) == "search" and set("[]") & set(found.group(2))):
        return None
    return found.group(1), found.group(2).strip()


class Pages:
    """The pages of a catalogue, made when first seen.

    compact: short texts, for small models: titles of COMPACT_TITLE_WORDS words, texts of COMPACT_TEXT_WORDS, and
        COMPACT_VALUES values of an option.
    text_limit: characters of a description, of features or of reviews that are shown.
    value_limit: values of an option that are shown; the others can be clicked all the same.
    """

    def __init__(self, catalogue: Catalogue, *, compact: bool, text_limit: int, value_limit: int) -> None:
        self._catalogue = catalogue
        self._compact = compact
        self._text_limit = text_limit
        self._value_limit = min(value_limit, COMPACT_VALUES) if compact else value_limit
        self.show = lru_cache(maxsize=2048)(self._show)

    def follow(self, state: PageState, action: str) -> PageState | None:
        """Where an action leads; None where it is none that is possible here."""
        parsed = parse_action(action)
        if parsed is None:
            return None
        verb, text = parsed
        if verb == "click":
            return self.show(state).links.get(text)
        if state.kind != "search" or not 0 < len(text) <= MAX_QUERY or f"search[{text}]" == SEARCH_ACTION:
            return None
        return PageState("results", text)

    def link(self, name: str, value: str) -> str:
        """The text of the link that chooses an option's value."""
        return link_of(name, value)

    def _show(self, state: PageState) -> Page:
        """A state's page. (Called through `show`, which remembers pages.)"""
        if state.kind == "search":
            return Page(_SEARCH_COMPACT if self._compact else _SEARCH, "search page", {})
        if state.kind == "results":
            return self._results(state)
        product = self._catalogue.by_code[state.code]
        if state.kind == "item":
            return self._item(state, product)
        chosen = ", ".join(f"{name}: {value}" for name, value in state.chosen) or "no options"
        anchor = f"{state.kind} {state.code} ({chosen})"
        if state.kind == "bought":
            text = f"bought {state.code}" if self._compact else f"You have bought {state.code} ({chosen})."
            return Page(text, anchor, {})
        item = replace(state, kind="item")
        links = {"back to search": PageState(), "< prev": item}
        return Page(self._sub_page(state.kind, product), anchor, links)

    def _results(self, state: PageState) -> Page:
        found = self._catalogue.search(state.query)
        shown = found[(state.number - 1) * RESULTS_A_PAGE : state.number * RESULTS_A_PAGE]
        pages = -(-len(found) // RESULTS_A_PAGE)
        links = {"back to search": PageState()}
        if state.number > 1:
            links["< prev"] = replace(state, number=state.number - 1)
        if state.number < pages:
            links["next >"] = replace(state, number=state.number + 1)
        links |= {p.asin.lower(): replace(state, kind="item", code=p.asin.lower()) for p in shown}
        return Page(
            "\n".join(self._result_lines(state, shown, len(found), pages)),
            f"results for {state.query}, page {state.number}",
            links,
        )

    def _result_lines(self, state: PageState, shown: tuple[Product, ...], total: int, pages: int) -> Iterator[str]:
        if self._compact:
            yield f"results {state.number} of {pages}" if total else "no results"
            for product in shown:
                yield f"{product.asin.lower()} {self._title(product)} {product.price_tag}"
            return
        if not total:
            yield f'Nothing in the shop fits "{state.query}".'
            return
        yield f'Search results for "{state.query}", page {state.number} of {pages} ({total} products in all):'
        for product in shown:
            yield f"{product.asin.lower()}: {self._title(product)} ({product.price_tag})"

    def _item(self, state: PageState, product: Product) -> Page:
        chosen = dict(state.chosen)
        links = {"back to search": PageState(), "< prev": PageState("results", state.query, state.number)}
        links |= {kind: replace(state, kind=kind) for kind in SUB_PAGES}
        links["buy now"] = replace(state, kind="bought")
        for name, values in product.options.items():
            for value in values:
                links.setdefault(link_of(name, value), _choose(state, product, value))
        anchor = f"item {state.code} ({', '.join(f'{name}: {value}' for name, value in state.chosen) or 'no options'})"
        return Page("\n".join(self._item_lines(product, chosen)), anchor, links)

    def _item_lines(self, product: Product, chosen: dict[str, str]) -> Iterator[str]:
        code = product.asin.lower()
        if self._compact:
            yield f"item {code} {self._title(product)} {product.price_tag}"
            for name, values in product.options.items():
                yield f"{name}{f' = {chosen[name]}' if name in chosen else ''}: {self._values(name, values)}"
            return
        yield f"Product {code}: {self._title(product)}"
        yield f"Price: {product.price_tag}.{f' Rating: {product.rating}.' if product.rating else ''}"
        for name, values in product.options.items():
            status = f"you have chosen {chosen[name]}" if name in chosen else "nothing chosen yet"
            yield f"Option {name} ({status}): {self._values(name, values)}"
        yield f"More about it: {', '.join(SUB_PAGES)}."

    def _values(self, name: str, values: tuple[str, ...]) -> str:
        shown = " ".join(f"[{link_of(name, value)}]" for value in values[: self._value_limit])
        left = len(values) - self._value_limit
        return f"{shown} and {left} more" if left > 0 else shown

    def _title(self, product: Product) -> str:
        words = product.title.split()
        if self._compact:
            words = product.title.lower().split()[:COMPACT_TITLE_WORDS]
        return " ".join(words) or "(without a title)"

    def _sub_page(self, kind: str, product: Product) -> str:
        parts = {"description": (product.description,), "features": product.bullet_points, "reviews": product.reviews}
        texts = [" ".join(text.split()) for text in parts[kind]]
        texts = [text for text in texts if text]
        heading = f"{kind} of {product.asin.lower()}:"
        if self._compact:
            words = " ".join(texts).lower().split()
            return " ".join([heading, *(words[:COMPACT_TEXT_WORDS] or ["none"])])
        heading = heading.capitalize()
        text = "\n".join(f"- {text}" for text in texts) if len(texts) > 1 else "".join(texts)
        if len(text) > self._text_limit:
            text = f"{text[: self._text_limit].rstrip()} ... (cut)"
        return f"{heading}\n{text}" if text else f"{heading} there are none."


def link_of(name: str, value: str) -> str:
    """The text of the link that chooses an option's value; with the option's name where the page has another link of
    that text."""
    text = " ".join(value.split())
    return f"{name}: {text}" if text in _OTHER_LINKS else text


def _choose(state: PageState, product: Product, value: str) -> PageState:
    """The state after a click on a value. It goes to the first option that offers it and has no value yet, else to the
    first that offers it."""
    chosen = dict(state.chosen)
    offering = [name for name, values in product.options.items() if value in values]
    chosen[next((name for name in offering if name not in chosen), offering[0])] = value
    return replace(state, kind="item", chosen=tuple((name, chosen[name]) for name in product.options if name in chosen))


_SEARCH = "Search page of the shop. You can search with words of your own: search[words]."
_SEARCH_COMPACT = "search page"
