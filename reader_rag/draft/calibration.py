"""Scoring and Calibration: the estimated probability of a candidate, and its correction by counted hits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.kernels import cells as kernels

Float64 = NDArray[np.float64]

_PRIORS = Path(__file__).with_name("priors.npz")
_MOST_EXPECTED = 6.0
"""Weight of a shipped correction, in expected hits of the request's own candidates."""
_RATIO_PRIOR = 2.0
"""Accepted and expected tokens that an acceptance ratio starts from."""
_WIDER_EXPECTED = 4.0
"""Weight of a cell's wider class, in expected hits of the cell itself."""


@dataclass(frozen=True)
class Scoring:
    """How a candidate's probability is estimated, before it is corrected.

    An occurrence with match length L votes with `w = scale * (L + d) ** power` at depth d: the drafted tokens above it
    count as matched, since the node is only reached if they were right. A token has `its votes / (all votes + 1)`.
    What remains, `1 / (all votes + 1)`, is shared out among the successors, by the weights of the entry for the last
    two tokens (times `pair`), or else of that for the last one (times `single`) or of the prior's (times `prior`),
    against `unknown`.

    Attributes:
        scale: Votes of an occurrence with a match of one token.
        power: Exponent of the match length.
        longest: Match length, in tokens, above which votes do not grow.
        unknown: Weight of all tokens that no entry lists.
        pair: Factor of the weights of an entry for two tokens.
        single: Factor of the weights of an entry for one token.
        prior: Factor of the weights of an entry of the prior.
    """

    scale: float = 0.1
    power: float = 1.4
    longest: int = 128
    unknown: float = 1.0
    pair: float = 3.0
    single: float = 1.5
    prior: float = 0.2

    @cached_property
    def array(self) -> Float64:
        """float64 [4 + longest + 1]: unknown, pair, single, prior, and the votes by match length."""
        votes = self.scale * np.arange(self.longest + 1, dtype=np.float64) ** self.power
        return np.concatenate([[self.unknown, self.pair, self.single, self.prior], votes])


class Calibration:
    """Counts of expected and actual hits for each class of candidates (a cell), and the factors that follow from them.

    The cell of a copied candidate: the corpus of its longest match (prompt, output, passage or datastore), the match
    length, the estimate, whether several occurrences agree on it, and whether the successors list it. The cell of a
    candidate that only the successors propose: the kind of their entry, and the estimate.

    The counts start from those that `reader-rag bench calibrate` measured on texts of several kinds. Not thread-safe.

    Args:
        hits: float64 [cells], candidates that the target emitted; None: the shipped counts.
        expected: float64 [cells], the sum of their estimates, positive.
        learns: Whether verified drafts are counted.

    Attributes:
        counts: float64 [3, cells]: hits, expected, and the factors, which are their ratio within bounds.
    """

    def __init__(self, hits: Float64 | None = None, expected: Float64 | None = None, *, learns: bool = True) -> None:
        if hits is None or expected is None:
            hits, expected = _shipped()
        rates = np.clip(hits / expected, kernels.LEAST_RATE, kernels.MOST_RATE)
        self.counts = np.stack([hits, expected, rates])
        self.learns = learns

    @staticmethod
    def blank_counts(cells: int) -> Float64:
        """Counts of so many cells that correct nothing at first.

        Args:
            cells: Number of cells.

        Returns:
            float64 [3, cells], as `counts`.
        """
        return np.stack([np.full(cells, _WIDER_EXPECTED), np.full(cells, _WIDER_EXPECTED), np.ones(cells)])

    @classmethod
    def blank(cls, *, learns: bool = True) -> Calibration:
        """Counts that correct nothing at first.

        Args:
            learns: Whether verified drafts are counted.
        """
        one = np.full(kernels.CELLS, _WIDER_EXPECTED)
        return cls(one, one, learns=learns)


def acceptance_ratio(recent: Float64) -> Float64:
    """Accepted over expected tokens of the last drafts, at most 1.0; 1.0 before the first one.

    Args:
        recent: float64 [..., 2], accepted and expected tokens of the last steps, fading.

    Returns:
        float64 [...].
    """
    accepted, expected = recent[..., 0], recent[..., 1]
    ratio: Float64 = np.minimum((accepted + _RATIO_PRIOR) / (expected + _RATIO_PRIOR), 1.0)
    return ratio


def smoothed(hits: Float64, expected: Float64) -> tuple[Float64, Float64]:
    """Initial counts from measured ones: rare cells lean on their wider class, and each weighs at most a few hits.

    Args:
        hits: float64 [cells].
        expected: float64 [cells].

    Returns:
        (hits, expected) for `Calibration`, all of `expected` positive.
    """
    rates = np.empty(kernels.CELLS)
    copied, others = slice(0, kernels.COPY_CELLS), slice(kernels.COPY_CELLS, kernels.CELLS)
    shape = (kernels.ORIGINS, kernels.LENGTH_BUCKETS, kernels.ESTIMATE_BUCKETS, kernels.LISTED, kernels.SUPPORT)
    # From wide to narrow: the estimate alone; then what is listed, the length, the origin, and agreement with it.
    wider = (0, 1, 3, 4), (0, 1, 4), (0, 4), (4,)
    rates[copied] = _narrowed(hits[copied].reshape(shape), expected[copied].reshape(shape), *wider)
    wide = (3, kernels.ESTIMATE_BUCKETS)
    rates[others] = _narrowed(hits[others].reshape(wide), expected[others].reshape(wide), (0,))
    weight = np.clip(expected, 1.0, _MOST_EXPECTED)
    return rates * weight, weight


def _narrowed(hits: Float64, expected: Float64, *summed: tuple[int, ...]) -> Float64:
    rate = np.ones(hits.shape)
    for axes in (*summed, ()):
        come, due = hits.sum(axis=axes, keepdims=True), expected.sum(axis=axes, keepdims=True)
        rate = (come + _WIDER_EXPECTED * rate) / (due + _WIDER_EXPECTED)
    return rate.ravel()


@cache
def _shipped() -> tuple[Float64, Float64]:
    with np.load(_PRIORS, allow_pickle=False) as counts:
        return smoothed(counts["hits"], counts["expected"])
