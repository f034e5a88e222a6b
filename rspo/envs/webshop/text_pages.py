"""The shop's pages as the original's text mode shows them, with the original's rules of what can be done.

Parts of a page stand in quotes, joined by " [SEP] ", without the instruction. Pages do not show which options are
chosen. A search is possible from every page, and "next >" on every page of results: after the last one come empty ones.
"""

from __future__ import annotations

import re
from dataclasses import replace

from .catalogue import Product
from .pages import RESULTS_A_PAGE, SEARCH_ACTION, SUB_PAGES, Page, Pages, PageState

# As the original reads it: up to the last bracket, whatever follows it.
_ACTION = re.compile(r"(.+)\[(.+)\]")


class TextPages(Pages):
    """The pages of a catalogue in the original's text mode; all texts and values are shown whole."""

    def follow(self, state: PageState, action: str) -> PageState | None:
        found = _ACTION.match(action)
        if found is None:
            return None
        verb, text = found.group(1), found.group(2).lower()
        if verb == "search":
            return PageState("results", text)
        return self.show(state).links.get(text) if verb == "click" else None

    def link(self, name: str, value: str) -> str:
        return value

    def _show(self, state: PageState) -> Page:
        if state.kind == "search":
            # The button is listed among what can be clicked, but only a search with words does anything.
            return _page(["Search"], {}, (SEARCH_ACTION, "click[search]"))
        if state.kind == "results":
            return self._results(state)
        if state.kind == "bought":
            return _page([f"You have bought {state.code.upper()}"], {})
        product = self._catalogue.by_code[state.code]
        if state.kind == "item":
            return self._item(state, product)
        texts = {"description": (product.description,), "features": product.bullet_points, "reviews": product.reviews}
        links = {"back to search": PageState(), "< prev": replace(state, kind="item")}
        return _page(["Back to Search", "< Prev", *texts[state.kind]], links)

    def _results(self, state: PageState) -> Page:
        found = self._catalogue.search(state.query)
        shown = found[(state.number - 1) * RESULTS_A_PAGE : state.number * RESULTS_A_PAGE]
        parts = ["Back to Search", f"Page {state.number} (Total results: {len(found)})"]
        links = {"back to search": PageState()}
        if state.number > 1:
            parts.append("< Prev")
            links["< prev"] = replace(state, number=state.number - 1)
        parts.append("Next >")
        links["next >"] = replace(state, number=state.number + 1)
        for product in shown:
            parts += [product.asin, product.title, _price(product)]
            links[product.asin.lower()] = replace(state, kind="item", code=product.asin.lower())
        return _page(parts, links)

    def _item(self, state: PageState, product: Product) -> Page:
        options = [part for name, values in product.options.items() for part in (name, *values)]
        parts = ["Back to Search", "< Prev", *options, product.title, f"Price: {_price(product)}"]
        parts += [f"Rating: {product.rating or 'N.A.'}", "Description", "Features", "Reviews", "Buy Now"]
        links = {"back to search": PageState(), "< prev": PageState("results", state.query, state.number)}
        links |= {kind: replace(state, kind=kind) for kind in SUB_PAGES}
        links["buy now"] = replace(state, kind="bought")
        for name, values in product.options.items():
            for value in values:  # a value of several options is the last one's
                chosen = dict(state.chosen) | {name: value}
                in_order = tuple((option, chosen[option]) for option in product.options if option in chosen)
                links[value] = replace(state, chosen=in_order)
        return _page(parts, links)


def _page(parts: list[str], links: dict[str, PageState], actions: tuple[str, ...] = ()) -> Page:
    text = " [SEP] ".join(f"'{part.strip()}'" for part in parts if part.strip())
    return Page(text, text, links, actions)


def _price(product: Product) -> str:
    return " to ".join(f"${price}" for price in product.prices)
