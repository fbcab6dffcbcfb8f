"""The loops of the draft index, in numba: compiled once, cached on disk, run without the GIL.

With `NUMBA_DISABLE_JIT=1` the same functions run as plain Python.

A *corpus* is an append-only int32 token array with, for every position, the previous position of the same token
(`previous`, -1: none) and a hash table from a token to its latest position (`table`). Negative tokens separate
texts: they are never indexed and never equal to a token of the sequence.

A *match* is a place in a corpus whose preceding tokens equal the last tokens of the sequence. It is stored as the
position of the token that would come next, and the number of equal tokens before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float64 = NDArray[np.float64]

EMPTY = -1
"""Key of a free slot of a hash table."""

LARGEST = np.iinfo(np.int32).max

BACKWARD_LIMIT = 64
"""Most tokens compared backwards for a match that was not followed from the step before."""


@njit(cache=True, nogil=True, inline="always")
def find_slot(table: Any, token: int) -> int:
    """The slot of `table` [2, slots] that holds `token`, or the free one where it belongs."""
    mask: int = table.shape[1] - 1
    i = (int(token) * 0x9E3779B1) & mask
    while table[0, i] != EMPTY and table[0, i] != token:
        i = (i + 1) & mask
    return i


@njit(cache=True, nogil=True)
def append(tokens: Any, previous: Any, table: Any, length: int, new: Any) -> int:
    """Append `new` to a corpus with room for it.

    Args:
        tokens: int32 [capacity].
        previous: int32 [capacity].
        table: int32 [2, slots], slots a power of two with room for every distinct token.
        length: Tokens in the corpus.
        new: int32 [n]; negative: a separator.

    Returns:
        How many tokens of `new` were not in the table before.
    """
    added = 0
    for k in range(new.shape[0]):
        token = new[k]
        position = length + k
        tokens[position] = token
        previous[position] = -1
        if token >= 0:
            i = find_slot(table, token)
            if table[0, i] == EMPTY:
                table[0, i] = token
                added += 1
            else:
                previous[position] = table[1, i]
            table[1, i] = position
    return added


@njit(cache=True, nogil=True)
def rehash(old: Any, new: Any) -> None:
    """Move all entries of hash table `old` into the larger, empty `new`."""
    for k in range(old.shape[1]):
        if old[0, k] != EMPTY:
            i = find_slot(new, old[0, k])
            new[0, i] = old[0, k]
            new[1, i] = old[1, k]


@njit(cache=True, nogil=True)
def _common_suffix(tokens: Any, end: int, sequence: Any, length: int) -> int:
    """How many tokens before `tokens[end]` equal the last of `sequence[:length]`, at most `BACKWARD_LIMIT`."""
    n = 0
    while (
        n < BACKWARD_LIMIT
        and end - 1 - n >= 0
        and length - 1 - n >= 0
        and tokens[end - 1 - n] == sequence[length - 1 - n]
    ):
        n += 1
    return n


@njit(cache=True, nogil=True)
def advance(
    tokens: Any,
    previous: Any,
    table: Any,
    size: int,
    sequence: Any,
    length: int,
    matches: Any,
    count: int,
    scratch: Any,
) -> int:
    """Bring the matches of `sequence[:length - 1]` up to date with its last token.

    Matches that the token extends live on, however old they are; the rest of the room goes to the most recent other
    occurrences of the token. So a long match is not lost among many short ones.

    Args:
        tokens: int32 [capacity], the corpus that is searched.
        previous: int32 [capacity].
        table: int32 [2, slots].
        size: Tokens in the corpus. A match at `size` has nothing behind it and is not kept.
        sequence: int32 [>= length].
        length: Tokens of the sequence, the new one included.
        matches: int32 [2, limit], positions (falling) and match lengths; updated in place.
        count: Matches on entry.
        scratch: int32 [2, limit], overwritten.

    Returns:
        The new number of matches.
    """
    limit = matches.shape[1]
    token = sequence[length - 1]
    survivors = 0
    for k in range(count):
        position = matches[0, k]
        if position + 1 < size and tokens[position] == token:
            scratch[0, survivors] = position + 1
            scratch[1, survivors] = matches[1, k] + 1
            survivors += 1

    out = 0
    k = 0
    room = limit - survivors
    i = find_slot(table, token)
    at = table[1, i] if table[0, i] != EMPTY else -1
    while at >= 0 and room > 0:
        position = at + 1
        at = previous[at]
        if position >= size:
            continue
        matches[0, out] = position
        if k < survivors and scratch[0, k] == position:
            matches[1, out] = scratch[1, k]
            k += 1
        else:
            matches[1, out] = _common_suffix(tokens, position, sequence, length)
            room -= 1
        out += 1
    while k < survivors:
        matches[0, out] = scratch[0, k]
        matches[1, out] = scratch[1, k]
        k += 1
        out += 1
    return out


@njit(cache=True, nogil=True)
def follow(
    tokens: Any,
    previous: Any,
    table: Any,
    length: int,
    new: Any,
    first: int,
    matches: Any,
    count: int,
    scratch: Any,
    other_tokens: Any,
    other_previous: Any,
    other_table: Any,
    other_size: int,
    other_matches: Any,
    other_count: int,
) -> Any:
    """Append `new` to the sequence and bring the matches in it and in another corpus up to date.

    Args:
        tokens: int32 [capacity], the sequence, with room for `new`.
        previous: int32 [capacity].
        table: int32 [2, slots], see `append`.
        length: Tokens in it.
        new: int64 [n].
        first: Tokens of the sequence, `new` included, whose matches are not followed.
        matches: int32 [2, limit], see `advance`; updated.
        count: Matches on entry.
        scratch: int32 [2, limit], overwritten.
        other_tokens: int32 [capacity], the other corpus.
        other_previous: int32 [capacity].
        other_table: int32 [2, slots].
        other_size: Tokens in it.
        other_matches: int32 [2, limit]; updated.
        other_count: Matches in it on entry.

    Returns:
        (tokens that were not in the table before, matches, matches in the other corpus); nothing is changed and the
        first is -1 if a token is negative or does not fit 32 bits.
    """
    for token in new:
        if token < 0 or token > LARGEST:
            return -1, count, other_count
    added = append(tokens, previous, table, length, new)
    end = length + new.shape[0]
    for at in range(max(length, first) + 1, end + 1):
        count = advance(tokens, previous, table, end, tokens, at, matches, count, scratch)
        if other_size:
            other_count = advance(
                other_tokens, other_previous, other_table, other_size, tokens, at, other_matches, other_count, scratch
            )
    return added, count, other_count
