"""The loops of the draft side, in numba: compiled once, cached on disk, run without the GIL.

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

BACKWARD_LIMIT = 64
"""Most tokens compared backwards for a match that was not followed from the step before."""


@njit(cache=True, nogil=True, inline="always")
def _slot(table: Any, token: int) -> int:
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
            i = _slot(table, token)
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
            i = _slot(new, old[0, k])
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
    i = _slot(table, token)
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


@njit(cache=True, nogil=True, inline="always")
def _before(probability: Any, a: int, b: int) -> bool:
    """Whether candidate `a` leaves the heap before `b`: the more probable, then the one with the lower slot."""
    if probability[a] != probability[b]:
        return bool(probability[a] > probability[b])
    return a < b


@njit(cache=True, nogil=True)
def _push(heap: Any, size: int, probability: Any, item: int) -> int:
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if not _before(probability, item, heap[up]):
            break
        heap[i] = heap[up]
        i = up
    heap[i] = item
    return size + 1


@njit(cache=True, nogil=True)
def _pop(heap: Any, size: int, probability: Any) -> int:
    """Remove the first item (read it as `heap[0]` before); returns the new size."""
    size -= 1
    item = heap[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and _before(probability, heap[child + 1], heap[child]):
            child += 1
        if not _before(probability, heap[child], item):
            break
        heap[i] = heap[child]
        i = child
    heap[i] = item
    return size


# Rows of the builder's int32 workspace; columns are members or, for a candidate, its first member's column.
_MEMBER_SOURCE, _MEMBER_POSITION, _MEMBER_LENGTH = 0, 1, 2
_ORDER, _GROUP, _MOVED, _HEAP = 3, 4, 5, 6
_TOKEN, _PARENT, _STOP, _DEPTH, _BEST = 7, 8, 9, 10, 11
_GROUP_TOKEN, _GROUP_SIZE, _GROUP_BEST = 12, 13, 14
WORKSPACE_ROWS = 15

# Rows of the builder's int32 output.
TOKEN, PARENT, DEPTH, SOURCE, POSITION, MATCH_LENGTH = 0, 1, 2, 3, 4, 5
OUTPUT_ROWS = 6


@njit(cache=True, nogil=True)
def _expand(
    corpora: Any,
    node: int,
    probability: float,
    depth: int,
    start: int,
    stop: int,
    weights: Any,
    escape: float,
    floor: float,
    work: Any,
    mass: Any,
    heap_size: int,
    lookup: Any,
) -> int:
    """Split the members `work[_ORDER, start:stop]` of a node by their next token; push each group as a candidate.

    Groups become neighbouring slices of the node's own slice, so that live candidates never share a member and a
    candidate can be named by the column where its slice starts.

    Returns:
        The heap's new size.
    """
    groups = 0
    total = escape
    last_weight = weights.shape[0] - 1
    mask = lookup.shape[1] - 1
    for i in range(start, stop):
        member = work[_ORDER, i]
        source = work[_MEMBER_SOURCE, member]
        at = work[_MEMBER_POSITION, member] + depth
        corpus = corpora[source]
        token = corpus[at] if at < corpus.shape[0] else -1
        if token < 0:
            work[_GROUP, i] = -1
            continue
        slot = (int(token) * 0x9E3779B1) & mask
        while lookup[0, slot] != EMPTY and lookup[0, slot] != token:
            slot = (slot + 1) & mask
        if lookup[0, slot] == EMPTY:
            lookup[0, slot] = token
            lookup[1, slot] = groups
            work[_GROUP_TOKEN, groups] = token
            work[_GROUP_SIZE, groups] = 0
            work[_GROUP_BEST, groups] = member
            mass[1, groups] = 0.0
            groups += 1
        group = lookup[1, slot]
        weight = weights[min(work[_MEMBER_LENGTH, member] + depth, last_weight)]
        total += weight
        mass[1, group] += weight
        work[_GROUP_SIZE, group] += 1
        if work[_MEMBER_LENGTH, member] > work[_MEMBER_LENGTH, work[_GROUP_BEST, group]]:
            work[_GROUP_BEST, group] = member
        work[_GROUP, i] = group

    first = start
    for group in range(groups):
        token = work[_GROUP_TOKEN, group]
        slot = (int(token) * 0x9E3779B1) & mask
        while lookup[0, slot] != token:
            slot = (slot + 1) & mask
        lookup[1, slot] = first  # from here on: where the group's next member goes
        share = probability * mass[1, group] / total
        size = work[_GROUP_SIZE, group]
        work[_TOKEN, first] = token
        work[_PARENT, first] = node
        work[_STOP, first] = first + size
        work[_DEPTH, first] = depth + 1
        work[_BEST, first] = work[_GROUP_BEST, group]
        mass[0, first] = share
        if share >= floor:
            heap_size = _push(work[_HEAP], heap_size, mass[0], first)
        first += size

    for i in range(start, stop):
        group = work[_GROUP, i]
        if group < 0:
            continue
        token = work[_GROUP_TOKEN, group]
        slot = (int(token) * 0x9E3779B1) & mask
        while lookup[0, slot] != token:
            slot = (slot + 1) & mask
        work[_MOVED, lookup[1, slot]] = work[_ORDER, i]
        lookup[1, slot] += 1
    for i in range(start, first):
        work[_ORDER, i] = work[_MOVED, i]
    # Free the slots after all probing is done: clearing one earlier would cut another token's probe chain.
    for group in range(groups):
        slot = (int(work[_GROUP_TOKEN, group]) * 0x9E3779B1) & mask
        while lookup[0, slot] != EMPTY:
            lookup[0, slot] = EMPTY
            slot = (slot + 1) & mask
    return heap_size


@njit(cache=True, nogil=True)
def build(
    sequence: Any,
    passages: Any,
    sequence_matches: Any,
    passage_matches: Any,
    weights: Any,
    escape: float,
    max_depth: int,
    floor: float,
    work: Any,
    mass: Any,
    lookup: Any,
    out: Any,
    probabilities: Any,
) -> int:
    """Grow a draft tree best first from the matches of two corpora.

    Args:
        sequence: int32 [length], prompt and output so far.
        passages: int32 [size], other texts, separated by negative tokens.
        sequence_matches: int32 [2, n].
        passage_matches: int32 [2, m].
        weights: float64 [lengths], the vote of an occurrence by match length.
        escape: Vote of "none of them".
        max_depth: Longest path.
        floor: Least path probability of a node.
        work: int32 [WORKSPACE_ROWS, >= n + m], overwritten.
        mass: float64 [2, >= n + m], overwritten.
        lookup: int32 [2, slots], slots a power of two > n + m, all keys `EMPTY`; left so.
        out: int32 [OUTPUT_ROWS, max_nodes], the tree's columns in order of falling probability.
        probabilities: float64 [max_nodes], path probabilities.

    Returns:
        The number of nodes.
    """
    corpora = (sequence, passages)
    members = 0
    for source in range(2):
        matches = sequence_matches if source == 0 else passage_matches
        for k in range(matches.shape[1]):
            work[_MEMBER_SOURCE, members] = source
            work[_MEMBER_POSITION, members] = matches[0, k]
            work[_MEMBER_LENGTH, members] = matches[1, k]
            work[_ORDER, members] = members
            members += 1

    max_nodes = out.shape[1]
    nodes = 0
    heap = work[_HEAP]
    size = _expand(corpora, -1, 1.0, 0, 0, members, weights, escape, floor, work, mass, 0, lookup)
    while size > 0 and nodes < max_nodes:
        start = heap[0]
        size = _pop(heap, size, mass[0])
        depth = work[_DEPTH, start]
        stop = work[_STOP, start]
        best = work[_BEST, start]
        out[TOKEN, nodes] = work[_TOKEN, start]
        out[PARENT, nodes] = work[_PARENT, start]
        out[DEPTH, nodes] = depth
        out[SOURCE, nodes] = work[_MEMBER_SOURCE, best]
        out[POSITION, nodes] = work[_MEMBER_POSITION, best] + depth - 1
        out[MATCH_LENGTH, nodes] = work[_MEMBER_LENGTH, best] + depth - 1
        probabilities[nodes] = mass[0, start]
        nodes += 1
        if depth < max_depth:
            size = _expand(
                corpora, nodes - 1, mass[0, start], depth, start, stop, weights, escape, floor, work, mass, size, lookup
            )
    return nodes


@njit(cache=True, nogil=True)
def ancestor_mask(parents: Any) -> Any:
    """Which nodes each node sees: itself, its ancestors and the root.

    Args:
        parents: int32 [nodes], -1: the root; parents come before children.

    Returns:
        bool [nodes + 1, nodes + 1], row and column 0 the root.
    """
    n = parents.shape[0] + 1
    mask = np.zeros((n, n), dtype=np.bool_)
    mask[0, 0] = True
    for i in range(1, n):
        parent = parents[i - 1] + 1
        mask[i, : parent + 1] = mask[parent, : parent + 1]
        mask[i, i] = True
    return mask


@njit(cache=True, nogil=True)
def paths(parents: Any, depths: Any) -> Any:
    """The rows from the root to each node.

    Args:
        parents: int32 [nodes], -1: the root; parents come before children.
        depths: int32 [nodes].

    Returns:
        int32 [nodes + 1, deepest + 1]; row 0 is the root; zeros behind a path's end.
    """
    deepest = 0
    for depth in depths:
        deepest = max(deepest, depth)
    rows = np.zeros((parents.shape[0] + 1, deepest + 1), np.int32)
    for i in range(1, rows.shape[0]):
        depth = depths[i - 1]
        rows[i, :depth] = rows[parents[i - 1] + 1, :depth]
        rows[i, depth] = i
    return rows
