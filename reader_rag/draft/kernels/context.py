"""Loops of the context index, in numba: compiled once, cached on disk, run without the GIL.

With `NUMBA_DISABLE_JIT=1` the same functions run as plain Python.

A *corpus* is an append-only int32 token array with, for every position, the previous position of the same token
(`previous`, -1: none) and a hash table from a token to its latest position (`table`). Negative tokens separate
texts: they are never indexed and never equal to a token of the sequence.

A *match* is a position in a corpus whose preceding tokens equal the last tokens of the sequence. It is stored as the
position of the token that would come next, and the number of equal tokens before it (the match length).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reader_rag.draft.kernels.arrays import CorpusArrays
from reader_rag.draft.kernels.compile import inlined, loop

EMPTY = -1
"""Key of a free slot of a hash table."""

LARGEST = np.iinfo(np.int32).max

BACKWARD_LIMIT = 64
"""Most tokens compared backwards for a match that was not followed from the step before."""


@inlined
def find_slot(table: Any, token: int) -> int:
    """The slot of `table` [2, slots] that holds `token`, or the free one where it belongs."""
    mask: int = table.shape[1] - 1
    i = (int(token) * 0x9E3779B1) & mask
    while table[0, i] != EMPTY and table[0, i] != token:
        i = (i + 1) & mask
    return i


@loop
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


@loop
def rehash(old: Any, new: Any) -> None:
    """Move all entries of hash table `old` into the larger, empty `new`."""
    for k in range(old.shape[1]):
        if old[0, k] != EMPTY:
            i = find_slot(new, old[0, k])
            new[0, i] = old[0, k]
            new[1, i] = old[1, k]


@loop
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


@loop
def advance(corpus: Any, sequence: Any, length: int, matches: Any, count: int, scratch: Any) -> int:
    """Bring the matches of `sequence[:length - 1]` up to date with its last token.

    Matches that the token extends live on, however old they are; the rest of the room goes to the most recent other
    occurrences of the token. So a long match is not lost among many short ones.

    Args:
        corpus: `CorpusArrays` that are searched. A match at `size` has no next token and is not kept.
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
        if position + 1 < corpus.size and corpus.tokens[position] == token:
            scratch[0, survivors] = position + 1
            scratch[1, survivors] = matches[1, k] + 1
            survivors += 1

    out = 0
    k = 0
    room = limit - survivors
    i = find_slot(corpus.table, token)
    at = corpus.table[1, i] if corpus.table[0, i] != EMPTY else -1
    while at >= 0 and room > 0:
        position = at + 1
        at = corpus.previous[at]
        if position >= corpus.size:
            continue
        matches[0, out] = position
        if k < survivors and scratch[0, k] == position:
            matches[1, out] = scratch[1, k]
            k += 1
        else:
            matches[1, out] = _common_suffix(corpus.tokens, position, sequence, length)
            room -= 1
        out += 1
    while k < survivors:
        matches[0, out] = scratch[0, k]
        matches[1, out] = scratch[1, k]
        k += 1
        out += 1
    return out


@loop
def follow(sequence: Any, new: Any, first: int, own: Any, passages: Any, others: Any, scratch: Any) -> Any:
    """Append tokens to the sequence and bring the matches in it and in the passages up to date.

    Args:
        sequence: A tuple like `CorpusArrays`, with room for `new`; updated.
        new: int64 [n], the tokens.
        first: Length of the sequence, in tokens, up to which matches are not followed.
        own: (int32 [2, limit], matches in the sequence; how many there are); the array is updated.
        passages: A tuple like `CorpusArrays`.
        others: The matches in the passages, like `own`.
        scratch: int32 [2, limit], overwritten.

    Returns:
        (tokens that were not in the table before, matches in the sequence, matches in the passages). Nothing is changed
        and the first is -1 if a token is negative or does not fit 32 bits.
    """
    matches, count = own
    other_matches, other_count = others
    for token in new:
        if token < 0 or token > LARGEST:
            return -1, count, other_count
    tokens, previous, table, length = sequence
    added = append(tokens, previous, table, length, new)
    end = length + new.shape[0]
    grown, other = CorpusArrays(tokens, previous, table, end), CorpusArrays(*passages)
    for at in range(max(length, first) + 1, end + 1):
        count = advance(grown, tokens, at, matches, count, scratch)
        if other.size:
            other_count = advance(other, tokens, at, other_matches, other_count, scratch)
    return added, count, other_count
