"""Search kernels: one call finds the longest matches of a context in all segments that a request may search."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from reader_rag.datastore.kernels.layout import (
    BUCKET_STARTS,
    MAX_MATCH,
    POSITION_COUNT,
    POSITIONS,
    SIZE,
    TOKENS,
    TOMBSTONE_COUNT,
    TOMBSTONES,
    VOCABULARY,
    MatchBuffers,
    SegmentTable,
    token_at,
)
from reader_rag.util.addresses import pointer

# Rows of the search state, one column a segment. The range of the suffix array in which the last token's bucket lies,
# the range of entries found so far, and the match lengths of its two neighbours outside.
_BUCKET_START, _BUCKET_STOP, _START, _STOP, _LEFT_MATCH, _RIGHT_MATCH = range(6)
# The entries found at the current match length: a range to the left of those found before, and one to the right.
_LEFT_START, _LEFT_STOP, _RIGHT_START, _RIGHT_STOP = range(6, 10)
STATE_ROWS = 10

_ZERO: Any = np.int64(0)
_ONE: Any = np.int64(1)
"""Numba compiles a function anew for each literal number in a call of it."""

_MAX_CHECKED = 4096
"""Where segments have tombstones, up to so many entries are checked one by one."""
_MAX_PROBES = 64
"""Above that: entries probed for one that has no tombstone."""


@njit(cache=True, nogil=True, error_model="numpy")
def _tokens_of(segment: Any, token_type: Any) -> Any:
    """The stored text of a segment."""
    elements = 3 if token_type.itemsize == 1 else 1
    return carray(pointer(segment[TOKENS]), (segment[SIZE] * elements,), token_type.dtype)


@njit(cache=True, nogil=True, error_model="numpy")
def _positions_of(segment: Any) -> Any:
    """The suffix array of a segment, int32 [n]."""
    return carray(pointer(segment[POSITIONS]), (segment[POSITION_COUNT],), np.int32)


@njit(cache=True, nogil=True, error_model="numpy")
def _position(positions: Any, i: Any, size: Any) -> Any:
    """Entry `i` of a suffix array, clamped to the text's bounds."""
    return min(max(np.int64(positions[i]), 1), size - 1)


@njit(cache=True, nogil=True, error_model="numpy")
def _match_length(tokens: Any, position: Any, query: Any, known: Any, limit: Any) -> Any:
    """How many tokens before a position equal the query's, at most `limit`; the first `known` are known to."""
    n = known
    limit = min(limit, position)
    while n < limit and token_at(tokens, position - 1 - n) == query[n]:
        n += 1
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def _locate(segment: Any, token_type: Any, query: Any, length: int, state: Any, k: int) -> None:
    """Find where the query belongs in the suffix array of segment `k`, and fill its column of the state."""
    tokens, positions, size = _tokens_of(segment, token_type), _positions_of(segment), segment[SIZE]
    first: Any = 0
    last: Any = segment[POSITION_COUNT]
    shared = 1 if segment[BUCKET_STARTS] else 0
    if segment[BUCKET_STARTS]:
        starts = carray(pointer(segment[BUCKET_STARTS]), (segment[VOCABULARY] + 1,), np.int32)
        last = min(max(np.int64(starts[query[0] + 1]), 0), last)
        first = min(max(np.int64(starts[query[0]]), 0), last)
    low, high, left, right = first, last, shared, shared
    while low < high:
        middle = (low + high) >> 1
        position = _position(positions, middle, size)
        n = _match_length(tokens, position, query, min(left, right), length)
        if n == length or (n < position and token_at(tokens, position - 1 - n) > query[n]):
            high, right = middle, n
        else:
            low, left = middle + 1, n
    state[_BUCKET_START, k], state[_BUCKET_STOP, k] = first, last
    state[_START, k] = state[_STOP, k] = low
    state[_LEFT_MATCH, k] = left if low > first else 0
    state[_RIGHT_MATCH, k] = right if low < last else 0


@njit(cache=True, nogil=True, error_model="numpy")
def _last_match(tokens: Any, size: int, positions: Any, at: int, end: int, step: int, query: Any, length: int) -> int:
    """The last entry in a direction, before `end`, that matches `length` tokens as the entry `at` does.

    Steps double until one fails, then a binary search finds the edge.

    Args:
        tokens: The stored text.
        size: Tokens of it.
        positions: int32 [n], its suffix array.
        at: An entry that matches.
        end: The first entry that is not looked at.
        step: 1 or -1.
        query: int64 [>= length], the context backwards.
        length: Tokens that must match.
    """
    good = at
    while good + step != end and (good + step < end) == (step > 0):
        if _match_length(tokens, _position(positions, good + step, size), query, _ZERO, length) < length:
            break
        good += step
        step *= 2
    bad = good + step
    if (bad > end) if step > 0 else (bad < end):
        bad = end
    while abs(bad - good) > 1:
        middle = (good + bad) >> 1
        if _match_length(tokens, _position(positions, middle, size), query, _ZERO, length) < length:
            bad = middle
        else:
            good = middle
    return good


@njit(cache=True, nogil=True, error_model="numpy")
def _widen(segment: Any, token_type: Any, query: Any, length: int, state: Any, k: int) -> Any:
    """Extend the range of segment `k` by all entries that match `length` tokens.

    Returns:
        How many were added, in the ranges from `state[_LEFT_START]` and from `state[_RIGHT_START]`.
    """
    tokens, positions, size = _tokens_of(segment, token_type), _positions_of(segment), segment[SIZE]
    first, last, start, stop = state[_BUCKET_START, k], state[_BUCKET_STOP, k], state[_START, k], state[_STOP, k]
    new_start, new_stop = start, stop
    if length == 1 and segment[BUCKET_STARTS]:
        new_start, new_stop = first, last
        state[_LEFT_MATCH, k] = state[_RIGHT_MATCH, k] = 0
    else:
        if state[_LEFT_MATCH, k] == length:
            new_start = _last_match(tokens, size, positions, start - 1, first - 1, -_ONE, query, length)
            state[_LEFT_MATCH, k] = 0
            if new_start > first:
                position = _position(positions, new_start - 1, size)
                state[_LEFT_MATCH, k] = _match_length(tokens, position, query, _ZERO, length - 1)
        if state[_RIGHT_MATCH, k] == length:
            new_stop = _last_match(tokens, size, positions, stop, last, _ONE, query, length) + 1
            state[_RIGHT_MATCH, k] = 0
            if new_stop < last:
                position = _position(positions, new_stop, size)
                state[_RIGHT_MATCH, k] = _match_length(tokens, position, query, _ZERO, length - 1)
    state[_LEFT_START, k], state[_LEFT_STOP, k] = new_start, start
    state[_RIGHT_START, k], state[_RIGHT_STOP, k] = stop, new_stop
    state[_START, k], state[_STOP, k] = new_start, new_stop
    return (start - new_start) + (new_stop - stop)


@njit(cache=True, nogil=True, error_model="numpy")
def _is_removed(segment: Any, position: int) -> bool:
    """Whether a position lies in a document with a tombstone."""
    ranges = carray(pointer(segment[TOMBSTONES]), (segment[TOMBSTONE_COUNT], 2), np.int64)
    low, high = 0, segment[TOMBSTONE_COUNT]
    while low < high:
        middle = (low + high) >> 1
        if ranges[middle, 0] <= position:
            low = middle + 1
        else:
            high = middle
    return low > 0 and position < ranges[low - 1, 1]


@njit(cache=True, nogil=True, error_model="numpy")
def _sample_checked(rows: Any, total: int, state: Any, origins: Any, found: int) -> Any:
    """Sample the entries of one match length evenly, after checking each of them for a tombstone.

    Args:
        rows: int64 [segments, COLUMNS].
        total: Entries of this match length, removed ones included.
        state: int64 [STATE_ROWS, >= segments].
        origins: int64 [2, max_matches], extended from `found` on.
        found: Matches in `origins` before.

    Returns:
        (entries without a tombstone, matches in `origins` now).
    """
    kept = np.empty((2, total), np.int64)
    n = 0
    for k in range(rows.shape[0]):
        segment = rows[k]
        positions, size = _positions_of(segment), segment[SIZE]
        for side in range(2):
            for i in range(state[_LEFT_START + 2 * side, k], state[_LEFT_STOP + 2 * side, k]):
                position = _position(positions, i, size)
                if not segment[TOMBSTONE_COUNT] or not _is_removed(segment, position):
                    kept[0, n], kept[1, n] = k, position
                    n += 1
    taken = min(origins.shape[1] - found, n)
    for t in range(taken):
        origins[0, found + t] = kept[0, (2 * t + 1) * n // (2 * taken)]
        origins[1, found + t] = kept[1, (2 * t + 1) * n // (2 * taken)]
    return n, found + taken


@njit(cache=True, nogil=True, error_model="numpy")
def _sample(rows: Any, total: int, state: Any, origins: Any, found: int) -> int:
    """Sample the entries of one match length evenly; in place of one with a tombstone a neighbour is tried.

    Args:
        rows: int64 [segments, COLUMNS].
        total: Entries of this match length, removed ones included.
        state: int64 [STATE_ROWS, >= segments].
        origins: int64 [2, max_matches], extended from `found` on.
        found: Matches in `origins` before.

    Returns:
        Matches in `origins` now.
    """
    taken = min(origins.shape[1] - found, total)
    t, before = 0, 0
    for k in range(rows.shape[0]):
        segment = rows[k]
        positions, size = _positions_of(segment), segment[SIZE]
        for side in range(2):
            start, stop = state[_LEFT_START + 2 * side, k], state[_LEFT_STOP + 2 * side, k]
            while t < taken:
                i = start + (2 * t + 1) * total // (2 * taken) - before
                if i >= stop:
                    break
                t += 1
                position = _position(positions, i, size)
                if segment[TOMBSTONE_COUNT] and _is_removed(segment, position):
                    end = min(stop, start + (2 * t + 1) * total // (2 * taken) - before, i + _MAX_PROBES)
                    position = 0
                    for other in range(i + 1, end):
                        position = _position(positions, other, size)
                        if not _is_removed(segment, position):
                            break
                        position = 0
                    if not position:
                        continue
                origins[0, found], origins[1, found] = k, position
                found += 1
            before += stop - start
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def find_matches(segments: Any, context: Any, min_match: int, max_tokens: int, state: Any, buffers: Any) -> Any:
    """Find positions whose preceding tokens equal the end of a context, and copy the tokens that follow them.

    The longest matches come first, then shorter ones until the buffers are full; of the last length that fits, a
    sample, evenly spread over all segments.

    Args:
        segments: A tuple like `SegmentTable`. Numba takes a plain tuple from Python faster than a NamedTuple.
        context: int32 [n], token ids; the last `MAX_MATCH` count, after the last one that is no token.
        min_match: Tokens that must match, at least 1.
        max_tokens: Most tokens copied from behind a match.
        state: int64 [STATE_ROWS, >= segments], overwritten.
        buffers: A tuple like `MatchBuffers`, overwritten.

    Returns:
        (matches, length of the longest match, its occurrences). Where documents were removed and a match has more than
        4096 occurrences, the removed ones are counted as well.
    """
    table, found = SegmentTable(*segments), MatchBuffers(*buffers)
    rows, token_type, separator = table.rows, table.token_type, table.separator
    query = np.empty(MAX_MATCH, np.int64)
    size = context.shape[0]
    length: Any = _ZERO
    while length < min(size, MAX_MATCH) and 0 <= context[size - 1 - length] < separator:
        query[length] = context[size - 1 - length]
        length += 1
    if length < min_match:
        return 0, 0, 0
    removed = False
    for k in range(rows.shape[0]):
        if rows[k, BUCKET_STARTS] and query[0] >= rows[k, VOCABULARY]:
            state[:, k] = 0
            continue
        _locate(rows[k], token_type, query, length, state, k)
        removed = removed or rows[k, TOMBSTONE_COUNT] > 0

    count = longest = occurrences = _ZERO
    while count < found.origins.shape[1]:
        level = _ZERO
        for k in range(rows.shape[0]):
            level = max(level, state[_LEFT_MATCH, k], state[_RIGHT_MATCH, k])
        if level < min_match:
            break
        total = _ZERO
        for k in range(rows.shape[0]):
            if max(state[_LEFT_MATCH, k], state[_RIGHT_MATCH, k]) == level:
                total += _widen(rows[k], token_type, query, level, state, k)
            else:
                state[_LEFT_START : _RIGHT_STOP + 1, k] = 0
        before = count
        if removed and total <= _MAX_CHECKED:
            total, count = _sample_checked(rows, total, state, found.origins, count)
        else:
            count = _sample(rows, total, state, found.origins, count)
        for n in range(before, count):
            found.matches[0, n] = n * (max_tokens + 1)
            found.matches[1, n] = level
        if not longest and count:
            longest, occurrences = level, total

    for n in range(count):
        segment = rows[found.origins[0, n]]
        tokens, position, at = _tokens_of(segment, token_type), found.origins[1, n], n * (max_tokens + 1)
        for i in range(min(max_tokens, segment[SIZE] - position)):
            token = token_at(tokens, position + i)
            if token >= table.vocabulary:  # a separator, or damage
                break
            found.continuations[at] = token
            at += 1
        found.continuations[at] = -1
    return count, longest, occurrences


@njit(cache=True, nogil=True, error_model="numpy")
def find_range(segments: Any, k: int, query: Any, state: Any) -> Any:
    """Find all entries of one segment's suffix array whose preceding tokens equal a query.

    Args:
        segments: A tuple like `SegmentTable`.
        k: Row of the segment.
        query: int64 [1 to `MAX_MATCH`], the tokens backwards.
        state: int64 [STATE_ROWS, >= segments], column `k` is overwritten.

    Returns:
        (first entry, the one behind the last).
    """
    table, length = SegmentTable(*segments), query.shape[0]
    segment = table.rows[k]
    for token in query:
        if not 0 <= token < table.separator:
            return 0, 0
    if segment[BUCKET_STARTS] and query[0] >= segment[VOCABULARY]:
        return 0, 0
    _locate(segment, table.token_type, query, length, state, k)
    if max(state[_LEFT_MATCH, k], state[_RIGHT_MATCH, k]) < length:
        return 0, 0
    _widen(segment, table.token_type, query, length, state, k)
    return state[_START, k], state[_STOP, k]
