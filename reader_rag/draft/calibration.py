"""What a candidate is worth: an estimate from its votes, corrected by how right such estimates were."""

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
"""Weight of a shipped correction: so many hits expected in one's own text count as much."""
_RATIO_PRIOR = 2.0
"""Accepted and expected tokens that an acceptance ratio starts from."""
_WIDER_EXPECTED = 4.0
"""Weight of a cell's wider class where the cell itself was seen seldom."""


@dataclass(frozen=True)
class Scoring:
    """The estimate of a candidate, before it is corrected.

    An occurrence with match length L votes with `w = scale * (L + d) ** power` at depth d: the drafted tokens above it
    count as matched, since the node is only reached if they were right. A token has `its votes / (all votes + 1)`.
    What remains, `1 / (all votes + 1)`, is shared out among the successors, by the weights of the entry for the last
    two tokens (times `pair`), or else of that for the last one (times `single`) or of the prior's (times `prior`),
    against `unknown`.

    Attributes:
        scale: Votes of an occurrence of one token.
        power: Growth of the vote with the match length.
        longest: Match lengths above this vote like this one.
        unknown: Weight of all that no entry lists.
        pair: Trust in an entry for two tokens.
        single: Trust in an entry for one token.
        prior: Trust in an entry of the prior.
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
    """How right the estimates were for each kind of candidate (its cell), and the factors that correct them.

    A copied candidate's cell is: whether the longest match behind it lies in the prompt, the output, a passage or the
    datastore, that match's length, the estimate (which grows with its share of the votes), whether several occurrences
    agree on it, and whether the successors list it. That of a candidate which only the
    successors propose: the kind of their entry, and the estimate.

    Starts from counts made on texts of several kinds (`reader-rag bench calibrate`) and counts on from there.
    Not for several threads at once.

    Args:
        hits: float64 [cells], how often such a candidate was the target's own token; None: the shipped counts.
        expected: float64 [cells], the sum of their estimates, positive.
        learns: False keeps the factors as they are.

    Attributes:
        counts: float64 [3, cells]: hits, expected, and the factors, which are their ratio within bounds.
    """

    def __init__(self, hits: Float64 | None = None, expected: Float64 | None = None, *, learns: bool = True) -> None:
        if hits is None or expected is None:
            hits, expected = _shipped()
        rates = np.clip(hits / expected, kernels.LEAST_RATE, kernels.MOST_RATE)
        self.counts = np.stack([hits, expected, rates])
        self.learns = learns

    @classmethod
    def blank(cls, *, learns: bool = True) -> Calibration:
        """Estimates are taken as they are, until counts say otherwise."""
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
    """Prior counts from measured ones: rare cells lean on their wider class, and none weighs more than a few hits.

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
