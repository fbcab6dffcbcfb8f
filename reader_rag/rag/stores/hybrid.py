"""Retrieval by words: BM25 over one tenant's nodes, and the fusion of its ranking with that of the vectors."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bm25s import BM25

RANK_OFFSET = 60
"""The constant of reciprocal rank fusion: how little the first ranks differ (Cormack, Clarke and Büttcher, 2009)."""

# Scripts that are written without spaces count by characters, everything else by words.
_SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")


def words_of(text: str) -> list[str]:
    """The words of a text: case, compatible forms and punctuation make no difference; no stemming, no stop words.

    Args:
        text: Text in any language.
    """
    normal = unicodedata.normalize("NFKC", text).casefold()
    return [sys.intern(word) for word in _WORD.findall(normal)]


class WordIndex:
    """BM25 scores (Lucene's, k1=1.5, b=0.75) of texts with int64 ids.

    Statistics of words come from these texts alone. They are computed at the first search after a change.
    """

    def __init__(self) -> None:
        self._words: dict[int, list[str]] = {}
        self._ids = np.empty(0, dtype=np.int64)
        self._bm25: BM25 | None = None  # of `_ids`; None: texts have changed, or none has a word

    def __len__(self) -> int:
        return len(self._words)

    def add(self, ids: Iterable[int], texts: Iterable[str]) -> None:
        """Add texts.

        Args:
            ids: Id of each text, each of them new.
            texts: The texts.
        """
        self._words.update((id_, words_of(text)) for id_, text in zip(ids, texts, strict=True))
        self._bm25 = None

    def remove(self, ids: Iterable[int]) -> None:
        """Remove texts; unknown ids are ignored.

        Args:
            ids: Ids of the texts.
        """
        for id_ in ids:
            self._words.pop(id_, None)
        self._bm25 = None

    def search(self, question: str, k: int, allowed: Iterable[int] | None) -> list[tuple[int, float]]:
        """The texts with the highest scores, highest first; of equal scores those with lower ids first.

        Args:
            question: Its words are searched.
            k: Most results; fewer are returned where fewer texts have a word of the question.
            allowed: Search only these ids; None searches all.

        Returns:
            (id, BM25 score) pairs, each with a score above 0.
        """
        asked = words_of(question)
        if not asked or not any(self._words.values()):
            return []
        if self._bm25 is None:
            self._bm25 = self._indexed()
        scores = self._bm25.get_scores(asked)
        found = scores > 0
        if allowed is not None:
            found &= np.isin(self._ids, np.fromiter(allowed, dtype=np.int64))
        places = np.flatnonzero(found)
        best = places[np.lexsort((self._ids[places], -scores[places]))[:k]]
        return [(int(self._ids[place]), float(scores[place])) for place in best]

    def _indexed(self) -> BM25:
        from bm25s import BM25  # it imports numba; only hybrid retrieval needs it

        bm25 = BM25(method="lucene", k1=1.5, b=0.75)
        bm25.index(list(self._words.values()), show_progress=False)
        self._ids = np.fromiter(self._words, dtype=np.int64)
        return bm25


def fuse(by_vector: Sequence[int], by_words: Sequence[int], alpha: float) -> list[tuple[int, float]]:
    """Join two rankings by weighted reciprocal rank fusion.

    An id at rank r (from 1) of a ranking gets the ranking's weight times 61 / (60 + r); one that is first in both gets
    1. Scales of the two scores make no difference.

    Args:
        by_vector: Ids in the order of their vectors' similarity.
        by_words: Ids in the order of their BM25 scores.
        alpha: Weight of the vectors, 0..1; that of the words is `1 - alpha`.

    Returns:
        (id, score) pairs with scores above 0, highest first; of equal scores the lower id first.
    """
    scores: dict[int, float] = {}
    for weight, ranking in ((alpha, by_vector), (1.0 - alpha, by_words)):
        for rank, id_ in enumerate(ranking, start=1):
            scores[id_] = scores.get(id_, 0.0) + weight * (RANK_OFFSET + 1) / (RANK_OFFSET + rank)
    return sorted(((id_, score) for id_, score in scores.items() if score > 0), key=lambda pair: (-pair[1], pair[0]))
