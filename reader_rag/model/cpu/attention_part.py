"""Attention of some queries of one key head: their scores, the weights of positions, and values mixed by them.

A query has a lane or a line of numbers of its own, in which everything is computed in the order of the positions. So
its bits depend neither on the queries beside it, nor on how positions and numbers are divided among threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from reader_rag.model.cpu.attention_sums import SUMS, mix, mix_seen, weigh
from reader_rag.model.cpu.attention_tile import AT_ONCE, PITCH, TILE, add_products, transpose_keys
from reader_rag.model.cpu.rounding import rounded
from reader_rag.model.cpu.simd import LANES
from reader_rag.model.cpu.softcap import cap_scores

MOST_QUERIES = 48
"""Most queries of a part: the work on keys and values that they share is little beside their own."""


class KeyHead(NamedTuple):
    """One key head of one sequence.

    Attributes:
        index: Which head.
        group: Query heads that share it.
        committed: Committed positions.
        keys: [capacity, width].
        values: [capacity, width].
        window: Positions that a row sees, its own included; 0: all.
        scale: Of the scores, float32.
        cap: Soft cap of the scores, float32; 0: none.
    """

    index: Any
    group: Any
    committed: Any
    keys: Any
    values: Any
    window: Any
    scale: Any
    cap: Any


class Part(NamedTuple):
    """Queries of a key head that are computed together; query n is head `n % group` of the group in row `n // group`.

    The committed positions and the rows of the pass lie in a row; a row that is not on a query's path gets no weight.

    Attributes:
        first: The first of the queries.
        count: Number of them.
        start: The first position that any of them sees.
        stop: The position behind the last that any of them sees.
        partly: The first position that is in the windows of all of them, at most `shared`.
        shared: The first position that is not on the paths of all of them.
        since: int64 [count], the first position that each query sees.
        seen: bool [positions from `shared` on, count], whether they are on the path of each query.
    """

    first: Any
    count: Any
    start: Any
    stop: Any
    partly: Any
    shared: Any
    since: Any
    seen: Any


@njit(cache=True, error_model="numpy", nogil=True)
def part_of(first: Any, count: Any, head: Any, paths: Any) -> Any:
    """A `Part`.

    Args:
        first: The first of its queries.
        count: Number of them.
        head: `KeyHead`.
        paths: `Paths` of the rows of the sequence.
    """
    group, committed = head.group, head.committed
    row_first, row_last = first // group, (first + count - 1) // group
    chain = paths.chain[row_first]
    start, partly = committed + row_last + 1, np.int64(0)
    since = np.zeros(count, np.int64)
    for j in range(count):
        row = (first + j) // group
        position = committed + paths.depths[row]
        chain = min(chain, paths.chain[row])
        since[j] = max(position + 1 - head.window, np.int64(0)) if head.window else np.int64(0)
        start, partly = min(start, since[j]), max(partly, since[j])
    shared, stop = committed + chain, committed + row_last + 1
    seen = np.zeros((stop - shared, count), np.bool_)
    for j in range(count):
        row = (first + j) // group
        for t in range(max(chain, since[j] - committed), paths.depths[row] + 1):
            seen[paths.rows[row, t] - chain, j] = True
    return Part(first, count, start, stop, min(partly, shared), shared, since, seen)


@njit(cache=True, error_model="numpy", nogil=True)
def _place_of(part: Any, head: Any, j: Any) -> Any:
    """Row of the sequence and first column of query j of a part."""
    n = part.first + j
    return n // head.group, (head.index * head.group + n % head.group) * head.keys.shape[1]


@njit(cache=True, error_model="numpy", nogil=True)
def _hide(scores: Any, part: Any, start: Any, stop: Any) -> None:
    """Give positions `start` to `stop - 1` no weight for the queries that do not see them."""
    for j in range(part.count):
        for position in range(start, stop):
            if position < part.since[j] or (position >= part.shared and not part.seen[position - part.shared, j]):
                scores[j, position - part.start] = -np.inf


@njit(cache=True, error_model="numpy", nogil=True)
def attend_part(q: Any, part: Any, head: Any, out: Any) -> None:
    """Attention of the queries of a part.

    Args:
        q: float32 [rows of the sequence, heads * width].
        part: `Part`.
        head: `KeyHead`.
        out: Like `q`; the outputs of these queries are overwritten.
    """
    width, positions, count = head.keys.shape[1], part.stop - part.start, part.count
    wide = width - width % -TILE
    queries, mixed = np.empty((count, width), np.float32), np.zeros((count, wide), np.float32)
    scores = np.zeros((count - count % -SUMS, positions - positions % -AT_ONCE), np.float32)
    totals = np.empty(count - count % -SUMS, np.float32)
    room, turned = np.empty((AT_ONCE, PITCH), np.float32), np.empty((width - width % (-2 * LANES), AT_ONCE), np.float32)
    for j in range(count):
        row, column = _place_of(part, head, j)
        queries[j] = q[row, column : column + width]
    for at in range(0, positions, AT_ONCE):
        transpose_keys(head.keys, part.start + at, min(np.int64(AT_ONCE), positions - at), room, turned)
        for n in range(0, AT_ONCE, TILE):
            add_products(queries, 0, width, turned, n, scores, at + n)
    for j in range(count):
        line = scores[j, :positions]
        for n in range(positions):
            line[n] *= head.scale
        if head.cap > 0:
            cap_scores(line, head.cap)
    # All queries see the positions from `every` to `some`.
    every = max(part.start, part.partly)
    some = max(every, part.shared)
    _hide(scores, part, part.start, every)
    _hide(scores, part, some, part.stop)
    weigh(scores, count, positions, totals)
    room[:, width:wide] = 0  # read beside the numbers of a head, by whole registers
    mix_seen(scores, 0, head.values, part.start, every - part.start, room, mixed)
    mix(scores, every - part.start, head.values, every, some - every, room, mixed)
    mix_seen(scores, some - part.start, head.values, some, part.stop - some, room, mixed)
    for j in range(count):
        row, column = _place_of(part, head, j)
        for d in range(width):
            out[row, column + d] = rounded(mixed[j, d] / totals[j], head.values)
