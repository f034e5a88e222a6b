"""Search over texts: BM25 as Lucene computes it, over words analysed as its English analyser does."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

MAX_HITS = 50

# Lucene's English stop words.
_STOP_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
))  # fmt: skip
# Letters and digits, held together by an apostrophe, by a point or colon between letters, by a point or comma between
# digits ("8.5", "women's").
_WORD = re.compile(r"[^\W_]+(?:(?:(?<=\d)[.,](?=\d)|(?<=[^\W\d_])[.:](?=[^\W\d_])|['’](?=[^\W_]))[^\W_]+)*")


class SearchIndex:
    """Finds texts by words (BM25, Lucene's variant, k1 = 0.9, b = 0.4).

    texts: one for every document.

    Raises ImportError where bm25s or PyStemmer is not installed.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise ImportError(
                f"WebShop's search needs the package {error.name!r}: pip install 'rspo[webshop]'"
            ) from error
        self._stem = Stemmer.Stemmer("porter").stemWords
        self._ranking = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
        self._size = len(texts)
        vocabulary: dict[str, int] = {}
        numbers = [[vocabulary.setdefault(word, len(vocabulary)) for word in self.words(text)] for text in texts]
        self._is_empty = not vocabulary  # nothing could be indexed, and nothing be found
        if not self._is_empty:
            self._ranking.index(bm25s.tokenization.Tokenized(numbers, vocabulary), show_progress=False)

    def words(self, text: str) -> list[str]:
        """The stems that a text is searched by, in order."""
        words = [re.sub(r"['’]s$", "", word) for word in _WORD.findall(text.lower())]
        kept = [word for word in words if word not in _STOP_WORDS]
        # Lucene's stemmer leaves words of two letters and less alone; this one would make nothing of "s".
        return [word if len(word) <= 2 else stem for word, stem in zip(kept, self._stem(kept), strict=True)]

    def find(self, query: str, limit: int = MAX_HITS) -> list[int]:
        """Numbers of the texts that share a word with the query, best first, equal ones in their order."""
        words = self.words(query)
        if not words or self._is_empty:
            return []
        scores = self._ranking.get_scores(words)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > limit:
            lowest = np.partition(scores[hits], -limit)[-limit]
            hits = hits[scores[hits] >= lowest]  # with all that tie with the last one
        order = np.argsort(-scores[hits], kind="stable")[:limit]
        return hits[order].tolist()
