"""Attention of some queries of one key head: their scores, the weights of positions, and values mixed by them.

A query has a lane or a line of numbers of its own, in which everything is computed in the order of the positions. So
its bits depend neither on the queries beside it, nor on how positions and numbers are divided among threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from reader_rag.model.cpu import attention_tile, simd
from reader_rag.model.cpu.attention_sums import mix, mix_few, mix_few_seen, mix_seen, weigh, weigh_few, widen_rows
from reader_rag.model.cpu.attention_tile import KEYS, PITCH
from reader_rag.model.cpu.rounding import rounded
from reader_rag.model.cpu.simd import LANES
from reader_rag.model.cpu.softcap import cap_scores

lanes: Any = simd  # in kernels operations take no compiler's context
tiles: Any = attention_tile
FEW = 4
"""Up to this many queries are computed with positions, then numbers of a head, in the lanes."""
AT_ONCE = 64
"""Positions whose keys, then values, are widened at once: they stay in the CPU's first cache."""


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
    """Up to `LANES` queries of a key head; query n is head `n % group` of the group in row `n // group`.

    The committed positions and the rows of the pass lie in a row; a row that is not on a query's path gets no weight.

    Attributes:
        first: The first of the queries.
        count: Number of them.
        start: The first position that any of them sees.
        stop: The position behind the last that any of them sees.
        partly: The first position that is in the windows of all of them, at most `shared`.
        shared: The first position that is not on the paths of all of them.
        since: int64 [LANES], the first position that each query sees.
        seen: bool [positions from `shared` on, LANES], whether they are on the path of each query.
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
def part_of(first: Any, queries: Any, head: Any, paths: Any) -> Any:
    """The `Part` of up to `LANES` queries.

    Args:
        first: The first of them.
        queries: Number of queries of the key head in all.
        head: `KeyHead`.
        paths: `Paths` of the rows of the sequence.
    """
    group, committed = head.group, head.committed
    count = min(np.int64(LANES), queries - first)
    row_first, row_last = first // group, (first + count - 1) // group
    chain = paths.chain[row_first]
    start, partly = committed + row_last + 1, np.int64(0)
    since = np.zeros(LANES, np.int64)
    for j in range(count):
        row = (first + j) // group
        position = committed + paths.depths[row]
        chain = min(chain, paths.chain[row])
        since[j] = max(position + 1 - head.window, np.int64(0)) if head.window else np.int64(0)
        start, partly = min(start, since[j]), max(partly, since[j])
    shared, stop = committed + chain, committed + row_last + 1
    seen = np.zeros((stop - shared, LANES), np.bool_)
    for j in range(count):
        row = (first + j) // group
        for t in range(max(chain, since[j] - committed), paths.depths[row] + 1):
            seen[paths.rows[row, t] - chain, j] = True
    return Part(first, count, start, stop, min(partly, shared), shared, since, seen)


@njit(cache=True, error_model="numpy", nogil=True)
def attend_part(q: Any, part: Any, head: Any, out: Any) -> None:
    """Attention of the queries of a part.

    Args:
        q: float32 [rows of the sequence, heads * width].
        part: `Part`.
        head: `KeyHead`.
        out: Like `q`; the outputs of these queries are overwritten.
    """
    if part.count <= FEW:
        _attend_few(q, part, head, out)
    else:
        _attend_lanes(q, part, head, out)


@njit(cache=True, error_model="numpy", nogil=True)
def _place_of(part: Any, head: Any, j: Any) -> Any:
    """Row of the sequence and first column of query j of a part."""
    n = part.first + j
    return n // head.group, (head.index * head.group + n % head.group) * head.keys.shape[1]


@njit(cache=True, error_model="numpy", nogil=True)
def _is_seen(part: Any, j: Any, position: Any) -> Any:
    """Whether query j sees a position of the part."""
    return position >= part.since[j] and (position < part.shared or part.seen[position - part.shared, j])


@njit(cache=True, error_model="numpy", nogil=True)
def _attend_lanes(q: Any, part: Any, head: Any, out: Any) -> None:
    """`attend_part` with a query in each lane."""
    width, positions = head.keys.shape[1], part.stop - part.start
    some, queries = np.empty((AT_ONCE, PITCH), np.float32), np.zeros((width, LANES), np.float32)
    scores = np.empty((positions + KEYS, LANES), np.float32)  # the last tile may reach beyond the positions
    mixed, totals = np.zeros((width, LANES), np.float32), np.empty(LANES, np.float32)
    for j in range(part.count):
        row, column = _place_of(part, head, j)
        for d in range(width):
            queries[d, j] = q[row, column + d]
    for at in range(0, positions, AT_ONCE):
        here = min(np.int64(AT_ONCE), positions - at)
        widen_rows(head.keys, part.start + at, here, some)
        for n in range(0, here, KEYS):
            tiles.score(some, n, queries, head.scale, scores, at + n)
    if head.cap > 0:
        for n in range(positions):
            cap_scores(scores[n], head.cap)
    for n in range(positions):
        if part.partly <= part.start + n < part.shared:
            continue
        for j in range(LANES):
            if not _is_seen(part, j, part.start + n):
                scores[n, j] = -np.inf
    weigh(scores, positions, totals)
    for at in range(0, positions, AT_ONCE):
        here, position = min(np.int64(AT_ONCE), positions - at), part.start + at
        widen_rows(head.values, position, here, some)
        if position >= part.partly and position + here <= part.shared:
            mix(scores, at, here, some, mixed)
        else:
            mix_seen(scores, at, here, some, mixed)
    for j in range(part.count):
        row, column = _place_of(part, head, j)
        for d in range(width):
            out[row, column + d] = rounded(mixed[d, j] / totals[j], head.values)


@njit(cache=True, error_model="numpy", nogil=True)
def _attend_few(q: Any, part: Any, head: Any, out: Any) -> None:
    """`attend_part` with positions, then numbers of a head, in the lanes; the sums have the same order."""
    width, positions = head.keys.shape[1], part.stop - part.start
    some, queries = np.empty((AT_ONCE, PITCH), np.float32), np.zeros((FEW, width), np.float32)
    some[:, width : width - width % (-2 * LANES)] = 0  # read beside the numbers of a head, by whole registers
    turned = np.empty((width - width % -LANES, AT_ONCE), np.float32)
    scores = np.empty((FEW, positions - positions % -AT_ONCE), np.float32)
    mixed, totals = np.zeros((FEW, PITCH), np.float32), np.empty(LANES, np.float32)
    for j in range(part.count):
        row, column = _place_of(part, head, j)
        for d in range(width):
            queries[j, d] = q[row, column + d]
    scores[:] = 0
    for at in range(0, positions, AT_ONCE):
        widen_rows(head.keys, part.start + at, min(np.int64(AT_ONCE), positions - at), some)
        for n in range(0, AT_ONCE, LANES):
            for d in range(0, width, LANES):
                lanes.transpose(some, n, d, turned, d, n)
        mix_few(queries, 0, width, turned, scores, at, AT_ONCE)
    for j in range(part.count):
        line = scores[j, :positions]
        for n in range(line.shape[0]):
            line[n] *= head.scale
        if head.cap > 0:
            cap_scores(line, head.cap)
        for n in range(positions):
            if not (part.partly <= part.start + n < part.shared or _is_seen(part, j, part.start + n)):
                line[n] = -np.inf
    weigh_few(scores, part.count, positions, totals)
    for at in range(0, positions, AT_ONCE):
        here, position = min(np.int64(AT_ONCE), positions - at), part.start + at
        widen_rows(head.values, position, here, some)
        if position >= part.partly and position + here <= part.shared:
            mix_few(scores, at, here, some, mixed, 0, width)
        else:
            mix_few_seen(scores, at, here, some, mixed, 0, width)
    for j in range(part.count):
        row, column = _place_of(part, head, j)
        for d in range(width):
            out[row, column + d] = rounded(mixed[j, d] / totals[j], head.values)
