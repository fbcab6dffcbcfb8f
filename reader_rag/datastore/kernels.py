"""The search of the datastore, in numba: one call for all parts that a request sees.

A *part* is a text of documents with its *places*, sorted: the positions of tokens that have one before them in their
document, in the order of the text before them read backwards. So the places behind the same last tokens lie together,
those behind one token more lie within them, and one binary search finds the longest match and, around it, all shorter
ones. Nothing has to be carried from step to step: a step that breaks a match costs what one that extends it does.

Documents are enclosed by separators, the largest value of the stored width, which equal no token. Tokens are stored in
16, 24 (three bytes, the lowest first) or 32 bits. Parts are handed over as addresses, since their number changes. Files
may be damaged: no position from one is used before it is held to bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from reader_rag.util.addresses import pointer

LONGEST = 64
"""Most tokens compared; a match of that length may be longer."""

# Columns of the table of parts.
TOKENS, SIZE, PLACES, COUNT, FIRSTS, VOCABULARY, DEAD, DEAD_COUNT = range(8)
COLUMNS = 8

# Rows of the search's state, a column for each part: the places that share the last token (or all), those found so
# far, and how far those just outside of them match.
_FIRST, _LAST, _FROM, _TO, _LEFT, _RIGHT = range(6)
# The places found at one match length, left and right of those found before.
_A, _B, _C, _D = range(6, 10)
STATE_ROWS = 10

_ZERO: Any = np.int64(0)
_ONE: Any = np.int64(1)
"""Numba compiles a function anew for each number that is written out in a call of it."""

_COUNTED = 4096
"""Where documents were removed, up to so many places are looked at one by one."""
_TRIED = 64
"""Where there are more: places looked at for one that is not of a removed document."""


@njit(cache=True, nogil=True, error_model="numpy")
def token_at(tokens: Any, i: Any) -> Any:
    """Token `i` of a stored text: uint16, uint32, or uint8 with three bytes a token."""
    if tokens.itemsize == 1:
        return np.int64(tokens[3 * i]) | np.int64(tokens[3 * i + 1]) << 8 | np.int64(tokens[3 * i + 2]) << 16
    return np.int64(tokens[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _stored(part: Any, like: Any) -> Any:
    """The text of a part."""
    each = 3 if like.itemsize == 1 else 1
    return carray(pointer(part[TOKENS]), (part[SIZE] * each,), like.dtype)


@njit(cache=True, nogil=True, error_model="numpy")
def _places(part: Any) -> Any:
    return carray(pointer(part[PLACES]), (part[COUNT],), np.int32)


@njit(cache=True, nogil=True, error_model="numpy")
def _position(places: Any, i: Any, size: Any) -> Any:
    """Place `i`, held to the text's bounds."""
    return min(max(np.int64(places[i]), 1), size - 1)


@njit(cache=True, nogil=True, error_model="numpy")
def _match(tokens: Any, position: Any, query: Any, known: Any, depth: Any) -> Any:
    """How many tokens before a position equal those of the query, of which `known` are known to."""
    n = known
    depth = min(depth, position)
    while n < depth and token_at(tokens, position - 1 - n) == query[n]:
        n += 1
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def _search(part: Any, like: Any, query: Any, depth: int, state: Any, k: int) -> None:
    """Find where the query belongs among the places of part `k`; fills its column of the state."""
    tokens, places, size = _stored(part, like), _places(part), part[SIZE]
    first: Any = 0
    last: Any = part[COUNT]
    shared = 1 if part[FIRSTS] else 0
    if part[FIRSTS]:
        firsts = carray(pointer(part[FIRSTS]), (part[VOCABULARY] + 1,), np.int32)
        last = min(max(np.int64(firsts[query[0] + 1]), 0), last)
        first = min(max(np.int64(firsts[query[0]]), 0), last)
    low, high, left, right = first, last, shared, shared
    while low < high:
        middle = (low + high) >> 1
        position = _position(places, middle, size)
        n = _match(tokens, position, query, min(left, right), depth)
        if n == depth or (n < position and token_at(tokens, position - 1 - n) > query[n]):
            high, right = middle, n
        else:
            low, left = middle + 1, n
    state[_FIRST, k], state[_LAST, k] = first, last
    state[_FROM, k] = state[_TO, k] = low
    state[_LEFT, k] = left if low > first else 0
    state[_RIGHT, k] = right if low < last else 0


@njit(cache=True, nogil=True, error_model="numpy")
def _edge(tokens: Any, size: int, places: Any, at: int, end: int, step: int, query: Any, length: int) -> int:
    """The last place in a direction, before `end`, that matches `length` tokens, as the one at `at` does."""
    good = at
    while good + step != end and (good + step < end) == (step > 0):
        if _match(tokens, _position(places, good + step, size), query, _ZERO, length) < length:
            break
        good += step
        step *= 2
    bad = good + step
    if (bad > end) if step > 0 else (bad < end):
        bad = end
    while abs(bad - good) > 1:
        middle = (good + bad) >> 1
        if _match(tokens, _position(places, middle, size), query, _ZERO, length) < length:
            bad = middle
        else:
            good = middle
    return good


@njit(cache=True, nogil=True, error_model="numpy")
def _widen(part: Any, like: Any, query: Any, length: int, state: Any, k: int) -> Any:
    """Take in all places of part `k` that match `length` tokens.

    Returns:
        How many there are besides those taken in before: `state[_A:_D]`, two ranges.
    """
    tokens, places, size = _stored(part, like), _places(part), part[SIZE]
    first, last, start, stop = state[_FIRST, k], state[_LAST, k], state[_FROM, k], state[_TO, k]
    new_start, new_stop = start, stop
    if length == 1 and part[FIRSTS]:
        new_start, new_stop = first, last
        state[_LEFT, k] = state[_RIGHT, k] = 0
    else:
        if state[_LEFT, k] == length:
            new_start = _edge(tokens, size, places, start - 1, first - 1, -_ONE, query, length)
            state[_LEFT, k] = 0
            if new_start > first:
                state[_LEFT, k] = _match(tokens, _position(places, new_start - 1, size), query, _ZERO, length - 1)
        if state[_RIGHT, k] == length:
            new_stop = _edge(tokens, size, places, stop, last, _ONE, query, length) + 1
            state[_RIGHT, k] = 0
            if new_stop < last:
                state[_RIGHT, k] = _match(tokens, _position(places, new_stop, size), query, _ZERO, length - 1)
    state[_A, k], state[_B, k], state[_C, k], state[_D, k] = new_start, start, stop, new_stop
    state[_FROM, k], state[_TO, k] = new_start, new_stop
    return (start - new_start) + (new_stop - stop)


@njit(cache=True, nogil=True, error_model="numpy")
def _is_dead(part: Any, position: int) -> bool:
    """Whether a position lies in a removed document."""
    ranges = carray(pointer(part[DEAD]), (part[DEAD_COUNT], 2), np.int64)
    low, high = 0, part[DEAD_COUNT]
    while low < high:
        middle = (low + high) >> 1
        if ranges[middle, 0] <= position:
            low = middle + 1
        else:
            high = middle
    return low > 0 and position < ranges[low - 1, 1]


@njit(cache=True, nogil=True, error_model="numpy")
def _gather_alive(parts: Any, count: int, total: int, state: Any, origins: Any, found: int, most: int) -> Any:
    """Sample the places of a level, looking at each of them: those of removed documents do not count.

    Returns:
        (places that count, places in `origins`).
    """
    alive = np.empty((2, total), np.int64)
    n = 0
    for k in range(count):
        part = parts[k]
        places, size = _places(part), part[SIZE]
        for side in range(2):
            for i in range(state[_A + 2 * side, k], state[_B + 2 * side, k]):
                position = _position(places, i, size)
                if not part[DEAD_COUNT] or not _is_dead(part, position):
                    alive[0, n], alive[1, n] = k, position
                    n += 1
    taken = min(most - found, n)
    for t in range(taken):
        origins[0, found + t] = alive[0, (2 * t + 1) * n // (2 * taken)]
        origins[1, found + t] = alive[1, (2 * t + 1) * n // (2 * taken)]
    return n, found + taken


@njit(cache=True, nogil=True, error_model="numpy")
def _gather(parts: Any, count: int, total: int, state: Any, origins: Any, found: int, most: int) -> int:
    """Sample the places of a level evenly; near one of a removed document another is looked for.

    Returns:
        Places in `origins`.
    """
    taken = min(most - found, total)
    t, before = 0, 0
    for k in range(count):
        part = parts[k]
        places, size = _places(part), part[SIZE]
        for side in range(2):
            start, stop = state[_A + 2 * side, k], state[_B + 2 * side, k]
            while t < taken:
                i = start + (2 * t + 1) * total // (2 * taken) - before
                if i >= stop:
                    break
                t += 1
                position = _position(places, i, size)
                if part[DEAD_COUNT] and _is_dead(part, position):
                    end = min(stop, start + (2 * t + 1) * total // (2 * taken) - before, i + _TRIED)
                    position = 0
                    for other in range(i + 1, end):
                        position = _position(places, other, size)
                        if not _is_dead(part, position):
                            break
                        position = 0
                    if not position:
                        continue
                origins[0, found], origins[1, found] = k, position
                found += 1
            before += stop - start
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def collect(
    parts: Any,
    count: int,
    like: Any,
    sequence: Any,
    length: int,
    least: int,
    reach: int,
    separator: int,
    state: Any,
    continuations: Any,
    found_places: Any,
    origins: Any,
) -> Any:
    """Find places whose preceding tokens equal the last of a sequence, and copy what follows them.

    The longest matches come first, then shorter ones until there is no more room; of the last length that finds room,
    a sample, evenly spread over all parts.

    Args:
        parts: int64 [>= count, COLUMNS].
        count: Parts.
        like: An empty array of the stored type.
        sequence: int32 [>= length].
        length: Tokens of the sequence; the last `LONGEST` count.
        least: Shortest match that counts, at least 1.
        reach: Most tokens copied behind a place.
        separator: The stored separator.
        state: int64 [STATE_ROWS, >= count], overwritten.
        continuations: int32 [most * (reach + 1)]; filled with the tokens behind each place and -1.
        found_places: int32 [2, most]; filled with where each place's tokens begin in `continuations`, and its match
            length.
        origins: int64 [2, most]; filled with each place's part and position.

    Returns:
        (places, length of the longest match, its occurrences). Where documents were removed and there are thousands
        of occurrences, those removed are counted, too.
    """
    query = np.empty(LONGEST, np.int64)
    depth: Any = _ZERO
    while depth < min(length, LONGEST) and 0 <= sequence[length - 1 - depth] < separator:
        query[depth] = sequence[length - 1 - depth]
        depth += 1
    if depth < least:
        return 0, 0, 0
    removed = False
    for k in range(count):
        if parts[k, FIRSTS] and query[0] >= parts[k, VOCABULARY]:
            state[:, k] = 0
            continue
        _search(parts[k], like, query, depth, state, k)
        removed = removed or parts[k, DEAD_COUNT] > 0

    most = origins.shape[1]
    found = longest = occurrences = _ZERO
    while found < most:
        level = _ZERO
        for k in range(count):
            level = max(level, state[_LEFT, k], state[_RIGHT, k])
        if level < least:
            break
        total = _ZERO
        for k in range(count):
            if max(state[_LEFT, k], state[_RIGHT, k]) == level:
                total += _widen(parts[k], like, query, level, state, k)
            else:
                state[_A, k] = state[_B, k] = state[_C, k] = state[_D, k] = 0
        before = found
        if removed and total <= _COUNTED:
            total, found = _gather_alive(parts, count, total, state, origins, found, most)
        else:
            found = _gather(parts, count, total, state, origins, found, most)
        for n in range(before, found):
            found_places[0, n] = n * (reach + 1)
            found_places[1, n] = level
        if not longest and found:
            longest, occurrences = level, total

    for n in range(found):
        part = parts[origins[0, n]]
        text, position, at = _stored(part, like), origins[1, n], n * (reach + 1)
        for i in range(min(reach, part[SIZE] - position)):
            token = token_at(text, position + i)
            if token == separator:
                break
            continuations[at] = token
            at += 1
        continuations[at] = -1
    return found, longest, occurrences


@njit(cache=True, nogil=True, error_model="numpy")
def find_range(part: Any, like: Any, query: Any, separator: int, state: Any) -> Any:
    """All places of a part behind a run of tokens.

    Args:
        part: int64 [COLUMNS].
        like: An empty array of the stored type.
        query: int64 [n], the tokens backwards, at most `LONGEST`.
        separator: The stored separator.
        state: int64 [STATE_ROWS, >= 1], overwritten.

    Returns:
        (first place, place behind the last).
    """
    depth = query.shape[0]
    for token in query:
        if not 0 <= token < separator:
            return 0, 0
    if part[FIRSTS] and query[0] >= part[VOCABULARY]:
        return 0, 0
    _search(part, like, query, depth, state, 0)
    if max(state[_LEFT, 0], state[_RIGHT, 0]) < depth:
        return 0, 0
    _widen(part, like, query, depth, state, 0)
    return state[_FROM, 0], state[_TO, 0]


@njit(cache=True, nogil=True, error_model="numpy")
def encode_backwards(tokens: Any, count: int, codes: Any, width: int, out: Any) -> None:
    """Write a text backwards, each token as a number of `width` bytes, the highest first.

    Args:
        tokens: Stored text.
        count: Tokens of it.
        codes: int64 [separator + 1], what is written for each token, in the tokens' order; empty: the token itself.
        width: Bytes of a code.
        out: uint8 [count * width], overwritten.
    """
    coded = codes.shape[0] > 0
    for i in range(count):
        token = token_at(tokens, count - 1 - i)
        code = codes[token] if coded else token
        for b in range(width):
            out[i * width + b] = (code >> (8 * (width - 1 - b))) & 255


@njit(cache=True, nogil=True, error_model="numpy")
def pick_places(order: Any, width: int, tokens: Any, count: int, separator: int, out: Any) -> int:
    """Turn the suffix array of `encode_backwards` into places.

    Args:
        order: Integers [count * width], the suffix array of the bytes.
        width: Bytes of a code.
        tokens: Stored text.
        count: Tokens of it.
        separator: Its separator.
        out: int32, overwritten; may be `order` itself.

    Returns:
        The number of places: positions of tokens that have one before them in their document.
    """
    n = 0
    for i in range(order.shape[0]):
        at = np.int64(order[i])
        if at % width:
            continue
        position = count - at // width
        if (
            0 < position < count
            and token_at(tokens, position - 1) != separator
            and token_at(tokens, position) != separator
        ):
            out[n] = position
            n += 1
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def mark_tokens(tokens: Any, count: int, present: Any) -> None:
    """Set `present[token]` for every token of a stored text."""
    for i in range(count):
        present[token_at(tokens, i)] = True


@njit(cache=True, nogil=True, error_model="numpy")
def find_firsts(tokens: Any, count: int, separator: int, firsts: Any) -> None:
    """Note where in the places those behind each token begin.

    Args:
        tokens: Stored text.
        count: Tokens of it.
        separator: Its separator.
        firsts: int32 [vocabulary + 1], overwritten; those behind token t are `firsts[t]` to `firsts[t + 1]`.
    """
    firsts[:] = 0
    before = separator
    for i in range(count):
        token = token_at(tokens, i)
        if before != separator and token != separator:
            firsts[before + 1] += 1
        before = token
    for t in range(1, firsts.shape[0]):
        firsts[t] += firsts[t - 1]


@njit(cache=True, nogil=True, error_model="numpy")
def keep_places(places: Any, starts: Any, shifts: Any, out: Any) -> int:
    """The places of the documents that are kept, in the same order.

    Args:
        places: int32 [count].
        starts: int64 [documents], where each document begins, rising.
        shifts: int64 [documents], how far each moves down; negative: it is dropped.
        out: int32 [>= places kept], overwritten.

    Returns:
        How many are kept.
    """
    n = 0
    for i in range(places.shape[0]):
        position = np.int64(places[i])
        low, high = 0, starts.shape[0]
        while low < high:
            middle = (low + high) >> 1
            if starts[middle] <= position:
                low = middle + 1
            else:
                high = middle
        if low and shifts[low - 1] >= 0:
            out[n] = position - shifts[low - 1]
            n += 1
    return n
