"""Calibration cells: classes of alike candidates, and the factor that corrects the estimates of each."""

from __future__ import annotations

from typing import Any

from reader_rag.draft.kernels.compile import inlined

LENGTH_BUCKETS = 9
ESTIMATE_BUCKETS = 10
LISTED = 3
SUPPORT = 2
ORIGINS = 4
COPY_CELLS = ORIGINS * LENGTH_BUCKETS * ESTIMATE_BUCKETS * LISTED * SUPPORT
CELLS = COPY_CELLS + 3 * ESTIMATE_BUCKETS

BOTH, SEARCHED, PROPOSED = 0, 1, 2
"""Kinds of candidates at a node where a source from outside proposes too: proposed by both, or by one of them only."""
JOINT_CELLS = 3 * ESTIMATE_BUCKETS * ESTIMATE_BUCKETS

HITS, EXPECTED, RATES = 0, 1, 2
"""Rows of the counts: candidates that the target emitted, the sum of their estimates, the correction factors."""
LEAST_RATE, MOST_RATE = 0.25, 4.0
"""Bounds of a correction factor."""


@inlined
def length_bucket(length: int) -> int:
    """The bucket of a match length: 1, 2, 3, 4-5, 6-8, 9-12, 13-20, 21-40, more."""
    if length <= 3:
        return max(length - 1, 0)
    if length <= 12:
        return 3 if length <= 5 else (4 if length <= 8 else 5)
    return 6 if length <= 20 else (7 if length <= 40 else 8)


@inlined
def estimate_bucket(estimate: float) -> int:
    """The bucket of an estimate: up to 0.01, 0.03, 0.07, 0.13, 0.23, 0.4, 0.6, 0.8, 0.93, 1."""
    if estimate <= 0.23:
        if estimate <= 0.03:
            return 0 if estimate <= 0.01 else 1
        return 2 if estimate <= 0.07 else (3 if estimate <= 0.13 else 4)
    if estimate <= 0.6:
        return 5 if estimate <= 0.4 else 6
    return 7 if estimate <= 0.8 else (8 if estimate <= 0.93 else 9)


@inlined
def copy_cell(origin: int, length: int, estimate: float, listed: int, agree: bool) -> int:
    """The cell of a copied candidate.

    Args:
        origin: Corpus of the longest match behind it: 0 prompt, 1 output, 2 passage, 3 datastore.
        length: Length of that match, in tokens.
        estimate: Its probability, uncorrected.
        listed: 0: no successors are known; 1: it is none of them; 2: it is one of them.
        agree: Whether several occurrences propose it.
    """
    at = (origin * LENGTH_BUCKETS + length_bucket(length)) * ESTIMATE_BUCKETS + estimate_bucket(estimate)
    return (at * LISTED + listed) * SUPPORT + (1 if agree else 0)


@inlined
def successor_cell(kind: int, estimate: float) -> int:
    """The cell of a candidate that only the successors propose.

    Args:
        kind: Kind of the successor entry: `PAIR`, `SINGLE` or `PRIOR`.
        estimate: Its probability, uncorrected.
    """
    return COPY_CELLS + kind * ESTIMATE_BUCKETS + estimate_bucket(estimate)


@inlined
def joint_cell(kind: int, chance: float, other: float) -> int:
    """The cell of a candidate at a node where a source from outside proposes too.

    Args:
        kind: `BOTH`, `SEARCHED` or `PROPOSED`.
        chance: Its probability by search, or where only the proposal has it, by the proposal.
        other: `BOTH`: its probability by the proposal. Else the sum of the probabilities of what the other has there.
    """
    return (kind * ESTIMATE_BUCKETS + estimate_bucket(chance)) * ESTIMATE_BUCKETS + estimate_bucket(other)


@inlined
def count(counts: Any, cell: int, estimate: float, hit: bool) -> None:
    """Add one candidate to the counts of its cell and update the cell's correction factor.

    Args:
        counts: float64 [3, CELLS] or [3, JOINT_CELLS]; updated.
        cell: The candidate's cell.
        estimate: Its probability, uncorrected.
        hit: Whether the target emitted it.
    """
    counts[EXPECTED, cell] += estimate
    if hit:
        counts[HITS, cell] += 1.0
    counts[RATES, cell] = min(max(counts[HITS, cell] / counts[EXPECTED, cell], LEAST_RATE), MOST_RATE)
