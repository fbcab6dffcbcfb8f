"""The loops that turn matches and successors into draft trees, in numba; see `kernels` for those of the index.

At a node, the occurrences that are still alive there (its *members*) vote for their next token, and what probability
they leave goes to the target's own next tokens after the same two tokens, or else after the same last one, or else
to those that a *prior* lists (the *successors*). How far such estimates were right so far is kept by *cell*, a class of
alike candidates, and corrects them (see `calibration`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from reader_rag.draft.kernels.context import EMPTY, find_slot
from reader_rag.draft.kernels.successors import KEPT, ONE, PAIR, TOKENS, TOTAL, WEIGHTS, prepare, successors

# The first places of the scoring array; the votes by match length follow.
UNKNOWN, TRUST, VOTES = 0, 1, 4  # trust in each kind of entry

# Cells.
LENGTH_BUCKETS = 9
ESTIMATE_BUCKETS = 10
LISTED = 3
SUPPORT = 2
ORIGINS = 4
COPY_CELLS = ORIGINS * LENGTH_BUCKETS * ESTIMATE_BUCKETS * LISTED * SUPPORT
CELLS = COPY_CELLS + 3 * ESTIMATE_BUCKETS
LEAST_RATE, MOST_RATE = 0.25, 4.0
"""Bounds of a correction."""

_MOST = 0.995
"""Highest probability of a child."""
FORTUNE_FADE = 0.95
"""What is kept of a stream's luck from step to step."""
_FEW = 4
"""Up to so many children are searched one by one."""


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def length_bucket(length: int) -> int:
    """1, 2, 3, 4-5, 6-8, 9-12, 13-20, 21-40, more."""
    if length <= 3:
        return max(length - 1, 0)
    if length <= 12:
        return 3 if length <= 5 else (4 if length <= 8 else 5)
    return 6 if length <= 20 else (7 if length <= 40 else 8)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def estimate_bucket(estimate: float) -> int:
    """Up to 0.01, 0.03, 0.07, 0.13, 0.23, 0.4, 0.6, 0.8, 0.93, 1."""
    if estimate <= 0.23:
        if estimate <= 0.03:
            return 0 if estimate <= 0.01 else 1
        return 2 if estimate <= 0.07 else (3 if estimate <= 0.13 else 4)
    if estimate <= 0.6:
        return 5 if estimate <= 0.4 else 6
    return 7 if estimate <= 0.8 else (8 if estimate <= 0.93 else 9)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def copy_cell(origin: int, length: int, estimate: float, listed: int, agree: bool) -> int:
    """The cell of a copied candidate.

    Args:
        origin: Of the longest match behind it: 0: the prompt; 1: the output; 2: a passage beside them; 3: the
            datastore.
        length: That match.
        estimate: Its probability, uncorrected.
        listed: 0: no successors are known; 1: it is none of them; 2: it is one.
        agree: Several occurrences propose it.
    """
    at = (origin * LENGTH_BUCKETS + length_bucket(length)) * ESTIMATE_BUCKETS + estimate_bucket(estimate)
    return (at * LISTED + listed) * SUPPORT + (1 if agree else 0)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def successor_cell(kind: int, estimate: float) -> int:
    """The cell of a candidate that only the successors propose, by the kind of their entry."""
    return COPY_CELLS + kind * ESTIMATE_BUCKETS + estimate_bucket(estimate)


# Rows of the builder's int32 workspace. First the tree, node by node,
TOKEN, PARENT, DEPTH, SOURCE, POSITION, MATCH_LENGTH, _CELL = range(7)
TREE_ROWS = 6
# then those whose columns are members,
MEMBER_SOURCE, MEMBER_POSITION, MEMBER_LENGTH, ORDER, GROUP, _MOVED = range(7, 13)
# those whose columns are the children found at one node,
FOUND_TOKEN, _FOUND_SIZE, FOUND_BEST, FOUND_CELL, _FOUND_START, _FOUND_SLOT = range(13, 19)
# those whose columns are candidates,
_TOKEN, _PARENT, _START, _STOP, _DEPTH, _ORIGIN, _CANDIDATE_CELL, _RANKED = range(19, 27)
# a hash table from a token to its column among the children found, and an entry made of the prior.
_KEYS, _COLUMNS, SCRATCH = range(27, 30)
WORK_ROWS = 30
PADDING = 16
"""Columns behind those that are used, so that a column's rows do not all fall into the same set of the CPU's cache."""
# Rows of the float64 workspace: path probabilities of the candidates in their order, which become those of the nodes,
# and the nodes' estimates; then of the children found; and the candidates' estimates.
PATHS, _EXPECTED, _VOTES, ESTIMATE, CHANCE, _CANDIDATE_ESTIMATE = range(6)
MASS_ROWS = 6

# Rows of the calibration's counts.
HITS, EXPECTED, RATES = 0, 1, 2

SUCCESSOR = 3
"""The source of nodes that only the successors proposed."""


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _lookup(work: Any) -> Any:
    """The hash table from a token to its column among the children found; see `kernels.find_slot`."""
    return work[_KEYS:SCRATCH, : work.shape[1] - PADDING]


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _column(work: Any, token: int, found: int, hashed: bool) -> int:
    """The column of the child `token` among the first `found`, or -1."""
    if not hashed:
        for child in range(found):
            if work[FOUND_TOKEN, child] == token:
                return child
        return -1
    lookup = _lookup(work)
    slot = find_slot(lookup, token)
    return int(lookup[1, slot]) if lookup[0, slot] == token else -1


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _group(corpora: Any, sizes: Any, depth: int, start: int, stop: int, scoring: Any, work: Any, mass: Any) -> Any:
    """Group the members `work[ORDER, start:stop]` by their next token.

    `work[GROUP, start:stop]` becomes each one's group, -1 where its text ends, and `mass[_VOTES, :groups]` their
    votes.

    Returns:
        (groups, all votes).
    """
    groups = 0
    votes = 0.0
    longest = scoring.shape[0] - 1 - VOTES
    hashed = stop - start > _FEW
    for i in range(start, stop):
        member = work[ORDER, i]
        source = work[MEMBER_SOURCE, member]
        at = work[MEMBER_POSITION, member] + depth
        token = int(corpora[source][at]) if at < sizes[source] else -1
        if token < 0:
            work[GROUP, i] = -1
            continue
        group = _column(work, token, groups, hashed)
        if group < 0:
            group = groups
            groups += 1
            work[FOUND_TOKEN, group] = token
            work[_FOUND_SIZE, group] = 0
            work[FOUND_BEST, group] = member
            mass[_VOTES, group] = 0.0
            if hashed:
                slot = find_slot(_lookup(work), token)
                work[_KEYS, slot] = token
                work[_COLUMNS, slot] = group
                work[_FOUND_SLOT, group] = slot
        weight = scoring[VOTES + min(work[MEMBER_LENGTH, member] + depth, longest)]
        votes += weight
        mass[_VOTES, group] += weight
        work[_FOUND_SIZE, group] += 1
        if work[MEMBER_LENGTH, member] > work[MEMBER_LENGTH, work[FOUND_BEST, group]]:
            work[FOUND_BEST, group] = member
        work[GROUP, i] = group
    return groups, votes


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _forget(work: Any, groups: int) -> None:
    """Empty the hash table; after all probing, since one slot emptied earlier would cut another token's probe chain."""
    for group in range(groups):
        work[_KEYS, work[_FOUND_SLOT, group]] = EMPTY


@njit(cache=True, nogil=True, error_model="numpy")
def find_children(
    corpora: Any,
    sizes: Any,
    prompt: int,
    depth: int,
    start: int,
    stop: int,
    before: int,
    token: int,
    keys: Any,
    entries: Any,
    prior: Any,
    scoring: Any,
    counts: Any,
    least: float,
    work: Any,
    mass: Any,
) -> Any:
    """The children of a node: their tokens, cells, estimates and corrected probabilities (`CHANCE`), given the node.

    Behind the groups of the members come the successors that no member proposes.

    Args:
        before: The token before `token`; negative: none.
        token: The node's.
        least: Successors less probable than this may be left out.

    The others are those of `build`.

    Returns:
        (groups, found).
    """
    groups, votes = _group(corpora, sizes, depth, start, stop, scoring, work, mass)
    hashed = stop - start > _FEW
    entry, kind = successors(keys, entries, prior, work[SCRATCH], before, token)
    known = entry[TOTAL] > 0
    for child in range(groups):
        mass[ESTIMATE, child] = mass[_VOTES, child] / (votes + 1.0)
        work[FOUND_CELL, child] = 1 if known else 0
    found = groups
    if known:
        trust = scoring[TRUST + kind]
        share = trust / ((votes + 1.0) * (scoring[UNKNOWN] * ONE + trust * entry[TOTAL]))
        for k in range(KEPT):
            following = entry[TOKENS + k]
            if following < 0:
                break
            estimate = entry[WEIGHTS + k] * share
            child = _column(work, following, groups, hashed) if groups else -1
            if child >= 0:
                mass[ESTIMATE, child] += estimate
                work[FOUND_CELL, child] = 2
                continue
            if estimate * MOST_RATE < least:
                if not groups:
                    break
                continue
            work[FOUND_TOKEN, found] = following
            work[FOUND_BEST, found] = 2 if kind == PAIR else 1
            mass[ESTIMATE, found] = estimate
            cell = successor_cell(kind, estimate)
            work[FOUND_CELL, found] = cell
            mass[CHANCE, found] = min(estimate * counts[RATES, cell], _MOST)
            found += 1
    if hashed:
        _forget(work, groups)
    for child in range(groups):
        best = work[FOUND_BEST, child]
        estimate = mass[ESTIMATE, child]
        source = work[MEMBER_SOURCE, best]
        origin = source + 1 if source else (1 if work[MEMBER_POSITION, best] + depth >= prompt else 0)
        cell = copy_cell(
            origin,
            work[MEMBER_LENGTH, best] + depth,
            estimate,
            work[FOUND_CELL, child],
            work[_FOUND_SIZE, child] > 1,
        )
        work[FOUND_CELL, child] = cell
        mass[CHANCE, child] = min(estimate * counts[RATES, cell], _MOST)
    return groups, found


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def list_members(matches: Any, followed: Any, work: Any) -> int:
    members = 0
    for source in range(3):
        places = matches[source]
        for k in range(followed[source]):
            work[MEMBER_SOURCE, members] = source
            work[MEMBER_POSITION, members] = places[0, k]
            work[MEMBER_LENGTH, members] = places[1, k]
            work[ORDER, members] = members
            members += 1
    return members


@njit(cache=True, nogil=True, error_model="numpy")
def observe(counts: Any, work: Any, mass: Any, nodes: int, tokens: Any, fortune: Any) -> None:
    """Count, for every child of an accepted node of the last tree, what was expected of it and whether it came.

    Args:
        counts: As in `build`; updated.
        work: As `build` left it.
        mass: As `build` left it.
        nodes: Of the tree.
        tokens: int32 [n], the tokens that came.
        fortune: float64 [2], hits and expected hits (corrected) of the last steps, fading; updated.
    """
    parent = -1
    fortune *= FORTUNE_FADE
    for token in tokens:
        accepted = -1
        for node in range(parent + 1, nodes):
            if work[PARENT, node] != parent:
                continue
            cell = work[_CELL, node]
            fortune[1] += mass[PATHS, node] / (mass[PATHS, parent] if parent >= 0 else 1.0)
            counts[EXPECTED, cell] += mass[_EXPECTED, node]
            if work[TOKEN, node] == token:
                counts[HITS, cell] += 1.0
                fortune[0] += 1.0
                accepted = node
            counts[RATES, cell] = min(max(counts[HITS, cell] / counts[EXPECTED, cell], LEAST_RATE), MOST_RATE)
        if accepted < 0:
            return
        parent = accepted


@njit(cache=True, nogil=True, error_model="numpy")
def build(
    sequence: Any,
    length: int,
    prompt: int,
    passages: Any,
    size: int,
    sequence_matches: Any,
    followed: int,
    passage_matches: Any,
    passage_followed: int,
    stored: Any,
    stored_size: int,
    stored_matches: Any,
    stored_followed: int,
    keys: Any,
    entries: Any,
    prior: Any,
    scoring: Any,
    counts: Any,
    work: Any,
    mass: Any,
    max_nodes: int,
    max_depth: int,
    floor: float,
) -> int:
    """Grow a draft tree best first from the matches of three corpora and from successors.

    Args:
        sequence: int32 [>= length], prompt and output so far.
        length: At least one token.
        prompt: How many of them are the prompt's.
        passages: int32 [>= size], other texts, separated by negative tokens.
        size: Tokens of them.
        sequence_matches: int32 [2, >= followed], positions and match lengths.
        followed: Matches in the sequence.
        passage_matches: int32 [2, >= passage_followed].
        passage_followed: Matches in the passages.
        stored: int32 [>= stored_size], what the datastore holds behind its matches, each text ended by a negative
            token.
        stored_size: Tokens of them.
        stored_matches: int32 [2, >= stored_followed].
        stored_followed: Matches in them.
        keys: int64 [sets, ways], of the successor table; no sets: none.
        entries: int32 [sets * ways, ENTRY_COLUMNS].
        prior: int32 [tokens, BEST], by token id its next tokens; see `successors`.
        scoring: float64 [VOTES + lengths], see `Scoring`.
        counts: float64 [3, CELLS]; the RATES correct the estimate of a candidate by its cell.
        work: int32 [WORK_ROWS, width + PADDING], overwritten; width a power of two, > 2 * all matches, >= all matches
            + KEPT, > max_nodes. The hash table in it is empty (`EMPTY`), and left so. The tree's columns are
            `work[:TREE_ROWS, :nodes]`, in order of falling probability,
        mass: float64 [MASS_ROWS, width + PADDING], overwritten; and `mass[PATHS, :nodes]` the path probabilities.
        max_nodes: Most nodes, at least 1.
        max_depth: Longest path.
        floor: Least path probability of a node.

    Returns:
        The number of nodes.
    """
    corpora, sizes = (sequence, passages, stored), (length, size, stored_size)
    # The best `max_nodes` candidates so far, in order; those before `nodes` are in the tree. Any other can never be.
    paths, ranked = mass[PATHS], work[_RANKED]
    ordered = nodes = depth = start = 0
    prepare(work[SCRATCH])
    matches = (sequence_matches, passage_matches, stored_matches)
    stop = list_members(matches, (followed, passage_followed, stored_followed), work)
    token, before, above = int(sequence[length - 1]), int(sequence[length - 2]) if length > 1 else -1, 1.0
    while True:
        # No candidate below the least of `max_nodes` others is ever taken, and no child is above its parent.
        bar = floor if ordered < max_nodes else max(floor, paths[max_nodes - 1])
        if depth < max_depth and above * _MOST >= bar:
            groups, found = find_children(
                corpora, sizes, prompt, depth, start, stop, before, token, keys, entries, prior, scoring, counts,
                bar / above, work, mass,
            )  # fmt: skip
            # Groups become neighbouring slices of the node's own, so that candidates never share a member.
            first = start
            for group in range(groups):
                work[_FOUND_START, group] = first
                first += work[_FOUND_SIZE, group]
            for child in range(found):
                path = above * mass[CHANCE, child]
                if path < floor:
                    continue
                if ordered < max_nodes:
                    c = ordered
                    ordered += 1
                elif path > paths[max_nodes - 1]:
                    c = ranked[max_nodes - 1]
                else:
                    continue
                at = ordered - 1
                while at > nodes and paths[at - 1] < path:
                    paths[at] = paths[at - 1]
                    ranked[at] = ranked[at - 1]
                    at -= 1
                paths[at] = path
                ranked[at] = c
                work[_TOKEN, c] = work[FOUND_TOKEN, child]
                work[_PARENT, c] = nodes - 1
                work[_DEPTH, c] = depth + 1
                work[_ORIGIN, c] = work[FOUND_BEST, child]
                work[_CANDIDATE_CELL, c] = work[FOUND_CELL, child]
                mass[_CANDIDATE_ESTIMATE, c] = mass[ESTIMATE, child]
                work[_START, c] = work[_STOP, c] = 0
                if child < groups:
                    work[_START, c] = work[_FOUND_START, child]
                    work[_STOP, c] = work[_FOUND_START, child] + work[_FOUND_SIZE, child]
            if groups and stop > start + 1:
                for i in range(start, stop):
                    group = work[GROUP, i]
                    if group >= 0:
                        work[_MOVED, work[_FOUND_START, group]] = work[ORDER, i]
                        work[_FOUND_START, group] += 1
                for i in range(start, first):
                    work[ORDER, i] = work[_MOVED, i]
        if nodes == ordered:
            return nodes
        c = ranked[nodes]
        above = paths[nodes]
        token, depth = int(work[_TOKEN, c]), int(work[_DEPTH, c])
        start, stop = int(work[_START, c]), int(work[_STOP, c])
        parent, origin = work[_PARENT, c], work[_ORIGIN, c]
        before = int(work[TOKEN, parent] if parent >= 0 else sequence[length - 1])
        work[TOKEN, nodes] = token
        work[PARENT, nodes] = parent
        work[DEPTH, nodes] = depth
        work[_CELL, nodes] = work[_CANDIDATE_CELL, c]
        mass[_EXPECTED, nodes] = mass[_CANDIDATE_ESTIMATE, c]
        if stop > start:
            work[SOURCE, nodes] = work[MEMBER_SOURCE, origin]
            work[POSITION, nodes] = work[MEMBER_POSITION, origin] + depth - 1
            work[MATCH_LENGTH, nodes] = work[MEMBER_LENGTH, origin] + depth - 1
        else:
            work[SOURCE, nodes] = SUCCESSOR
            work[POSITION, nodes] = -1
            work[MATCH_LENGTH, nodes] = origin
        nodes += 1


@njit(cache=True, nogil=True, error_model="numpy")
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


@njit(cache=True, nogil=True, error_model="numpy")
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
