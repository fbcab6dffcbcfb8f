"""Loops of the successor table, in numba.

An *entry* lists what is likely after one or two tokens. The table is set-associative: a key's entry is in one of the
few *ways* of the set that the key's hash selects.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reader_rag.draft.kernels.compile import inlined, loop

BEST = 8
"""Next tokens that a successor table learns at a time."""
KEPT = 15
"""Next tokens that it keeps of an entry."""
NO_KEY = -1

# Columns of an entry: the faded number of times it was written and the tokens, the likeliest first (-1: free), in one
# cache line; when it was written last and the tokens' weights in another. Weights are integers, so that an entry does
# not depend on how a machine rounds.
TOTAL, TOKENS, STAMP, WEIGHTS = 0, 1, 1 + KEPT, 2 + KEPT
ENTRY_COLUMNS = 2 + 2 * KEPT
ONE = 1 << 16
RANKS = (36045, 10486, 5243, 3277, 2294, 1638, 1311, 983)
"""Weight of a next token by its rank: 0.55, 0.16, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015."""
_INHERITED = 3
"""A new entry starts as the one for less: two tokens as the last of them, one token as in the prior; weighing 1 in so
many writes."""

PAIR, SINGLE, PRIOR = 0, 1, 2
"""Kinds of entries."""


@inlined
def find_entry(keys: Any, before: int, token: int) -> int:
    """The row of a successor table's entry for two tokens, or for one if `before` is negative; -1: none.

    Args:
        keys: int64 [sets, ways].
        before: The token before `token`.
        token: The last token.
    """
    sets, ways = keys.shape
    if sets == 0:
        return -1
    key = _key(before, token)
    at = _set_of(before, token, sets)
    for way in range(ways):
        if keys[at, way] == key:
            return int(at * ways + way)
    return -1


@inlined
def _key(before: int, token: int) -> int:
    return int(((np.int64(before) + np.int64(2)) << np.int64(31)) | np.int64(token))


@inlined
def _set_of(before: int, token: int, sets: int) -> int:
    """The set of a key; both products stay below 2**63, so that it is the same with and without the compiler."""
    mixed = ((int(before) + 2) * 0x9E3779B1) ^ (int(token) * 0x85EBCA6B)
    return int((mixed ^ (mixed >> 29)) & (sets - 1))


@inlined
def successors(keys: Any, entries: Any, prior: Any, scratch: Any, before: int, token: int) -> Any:
    """What follows: by the entry for two tokens, or that for the last one, or the prior.

    Args:
        keys: int64 [sets, ways].
        entries: int32 [sets * ways, ENTRY_COLUMNS].
        prior: int32 [tokens, BEST], by token id its next tokens, the likeliest first; negative: no more.
        scratch: int32 [>= ENTRY_COLUMNS], for an entry made of the prior; see `prepare`.
        before: The token before `token`; negative: none.
        token: The last token.

    Returns:
        (the entry, int32 [ENTRY_COLUMNS], of TOTAL 0 if there is none; its kind).
    """
    if before >= 0:
        row = find_entry(keys, before, token)
        if row >= 0:
            return entries[row], PAIR
    row = find_entry(keys, -1, token)
    if row >= 0:
        return entries[row], SINGLE
    scratch[TOTAL] = 0
    if token < prior.shape[0] and prior[token, 0] >= 0:
        scratch[TOTAL] = ONE
        for rank in range(BEST):
            scratch[TOKENS + rank] = prior[token, rank]
    return scratch[:ENTRY_COLUMNS], PRIOR


@inlined
def prepare(scratch: Any) -> None:
    """Write into a scratch entry what all entries made of the prior have in common."""
    scratch[:ENTRY_COLUMNS] = -1
    for rank in range(BEST):
        scratch[WEIGHTS + rank] = RANKS[rank]


@loop
def _row_to_write(keys: Any, entries: Any, prior: Any, scratch: Any, before: int, token: int, now: int) -> int:
    """The row of the entry for a key; a new entry replaces the least recently written one of its set."""
    ways = keys.shape[1]
    key = _key(before, token)
    at = _set_of(before, token, keys.shape[0])
    place = 0
    for way in range(ways):
        if keys[at, way] == key:
            place = way
            break
        if entries[at * ways + way, STAMP] < entries[at * ways + place, STAMP]:
            place = way
    entry = entries[at * ways + place]
    if keys[at, place] != key:
        wider, _ = successors(keys, entries, prior, scratch, -1, token)
        weight = ONE // _INHERITED
        share = weight / wider[TOTAL] if wider[TOTAL] > 0 else 0.0
        # `wider` may be the very entry that is written over.
        for k in range(KEPT):
            entry[TOKENS + k] = wider[TOKENS + k] if share > 0.0 else -1
            entry[WEIGHTS + k] = int(wider[WEIGHTS + k] * share) if entry[TOKENS + k] >= 0 else 0
        entry[TOTAL] = weight if share > 0.0 else 0
        keys[at, place] = key
    entry[STAMP] = now
    return at * ways + place  # type: ignore[no-any-return]


@loop
def learn(keys: Any, entries: Any, prior: Any, clock: Any, scratch: Any, before: Any, after: Any, best: Any) -> None:
    """Add what the target found likely to the entries for two tokens and for one.

    Args:
        keys: int64 [sets, ways].
        entries: int32 [sets * ways, ENTRY_COLUMNS].
        prior: int32 [tokens, BEST].
        clock: int32 [1], positions learned so far; updated.
        scratch: int32 [ENTRY_COLUMNS], overwritten.
        before: int32 [n], the token before each of `after`; negative: none.
        after: int32 [n].
        best: int32 [n, BEST], the best next tokens, the best first; negative: no more.
    """
    prepare(scratch)
    for i in range(after.shape[0]):
        clock[0] += 1
        for kind in range(2):
            if kind == 0 and before[i] < 0:
                continue
            first = int(before[i]) if kind == 0 else -1
            entry = entries[_row_to_write(keys, entries, prior, scratch, first, after[i], clock[0])]
            entry[TOTAL] += ONE - entry[TOTAL] // 5
            for k in range(KEPT):
                entry[WEIGHTS + k] -= entry[WEIGHTS + k] // 5
            for rank in range(BEST):
                token = best[i, rank]
                if token < 0:
                    break
                at = 0
                while at < KEPT - 1 and entry[TOKENS + at] != token and entry[TOKENS + at] >= 0:
                    at += 1
                weight = RANKS[rank]
                if entry[TOKENS + at] == token:
                    weight += entry[WEIGHTS + at]
                elif entry[WEIGHTS + at] >= weight:
                    continue
                while at > 0 and entry[WEIGHTS + at - 1] < weight:
                    entry[TOKENS + at] = entry[TOKENS + at - 1]
                    entry[WEIGHTS + at] = entry[WEIGHTS + at - 1]
                    at -= 1
                entry[TOKENS + at] = token
                entry[WEIGHTS + at] = weight
