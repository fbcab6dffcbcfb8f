"""Loops that draft chains, in numba: one continuation for each sequence, the most probable token at each position.

A chain is what an engine verifies that takes no tree. The children of a node and their probabilities are found as
for trees (see `kernels.tree`). Growing a tree best first and keeping its first branch would spend the nodes on branches
that are thrown away.
"""

from __future__ import annotations

from typing import Any

from reader_rag.datastore.kernels.layout import MAX_MATCH, MatchBuffers
from reader_rag.datastore.kernels.search import find_matches
from reader_rag.draft.kernels.arrays import Chain, Corpora, Estimator, Node, RowArrays, RowCandidates
from reader_rag.draft.kernels.compile import allocating, loop
from reader_rag.draft.kernels.rows import DRAFTED, MATCHES, OTHER_MATCHES, PROMPT, SIZE, tokens_of
from reader_rag.draft.kernels.successors import prepare
from reader_rag.draft.kernels.tree import find_children, list_members
from reader_rag.draft.kernels.workspace import (
    CHANCE,
    FOUND_TOKEN,
    GROUP,
    MEMBER_POSITION,
    MEMBER_SOURCE,
    ORDER,
    SCRATCH,
    Workspace,
)


@loop
def grow(corpora: Any, members: int, estimator: Any, longest: int, floor: float, workspace: Any, chain: Any) -> int:
    """Follow the most probable token from position to position.

    Where something is copied the prior is not used: the corrections of copies that it agrees with were counted with
    what a table learned from the model (see `calibration`), and there is no such table here.

    Args:
        corpora: `Corpora`.
        members: Matches, as `list_members` left them in the workspace.
        estimator: `Estimator`.
        longest: Most tokens.
        floor: Least probability of the whole chain.
        workspace: `Workspace`; updated.
        chain: `Chain`; overwritten.

    Returns:
        Tokens of the chain.
    """
    ints, floats = workspace.ints, workspace.floats
    text, length = corpora.tokens[0], corpora.sizes[0]
    token, before = int(text[length - 1]), int(text[length - 2]) if length > 1 else -1
    above = 1.0
    stop = members
    prepare(ints[SCRATCH])
    for depth in range(longest):
        prior = estimator.prior[:0] if stop else estimator.prior
        known = Estimator(estimator.keys, estimator.entries, prior, estimator.scoring, estimator.counts)
        groups, found = find_children(corpora, Node(depth, 0, stop, before, token), known, floor / above, workspace)
        best = -1
        for child in range(found):
            if best < 0 or floats[CHANCE, child] > floats[CHANCE, best]:
                best = child
        if best < 0 or above * floats[CHANCE, best] < floor:
            return depth
        above *= floats[CHANCE, best]
        before, token = token, int(ints[FOUND_TOKEN, best])
        chain.tokens[depth] = token
        chain.chances[depth] = floats[CHANCE, best]
        chain.paths[depth] = above
        kept = 0
        if best < groups:
            for i in range(stop):
                member = ints[ORDER, i]
                source, at = ints[MEMBER_SOURCE, member], ints[MEMBER_POSITION, member] + depth + 1
                # Where its text ends there is nothing more to copy.
                if ints[GROUP, i] == best and at < corpora.sizes[source] and corpora.tokens[source][at] >= 0:
                    ints[ORDER, kept] = member
                    kept += 1
        stop = kept
    return longest


@allocating
def draft(
    found: Any, limits: Any, rows: Any, others: Any, candidates: Any, model: Any, workspace: Any, drafts: Any
) -> None:
    """Draft a chain for each of some rows.

    Args:
        found: int64 [n], the state of each row.
        limits: int64 [n], most tokens of each chain.
        rows: A tuple like `RowArrays`; its chains are updated.
        others: (int32 [>= size], outputs of ended requests; size).
        candidates: A tuple like `RowCandidates`, of these rows.
        model: (a tuple like `Estimator`, least probability of a whole chain).
        workspace: A tuple like `Workspace`, one for each thread; updated.
        drafts: (float64 [n, longest], the probability of each chain up to each token; int64 [n], tokens of each chain);
            overwritten.
    """
    known, stored, memory = RowArrays(*rows), RowCandidates(*candidates), Workspace(*workspace)
    other_tokens, other_size = others
    fields, floor = model
    estimator = Estimator(*fields)
    paths, drafted = drafts
    for k in range(found.shape[0]):
        s = found[k]
        state = known.states[s]
        corpora = Corpora(
            (tokens_of(state), other_tokens, stored.tokens[k]),
            (state[SIZE], other_size, stored.tokens.shape[1]),
            state[PROMPT],
        )
        members = list_members(
            (known.matches[s, 0], known.matches[s, 1], stored.matches[k]),
            (state[MATCHES], state[OTHER_MATCHES], stored.counts[k]),
            memory.ints,
        )
        chain = Chain(known.chains[s], known.chances[s], paths[k])
        state[DRAFTED] = drafted[k] = grow(corpora, members, estimator, limits[k], floor, memory, chain)


@allocating
def look_up(
    found: Any,
    states: Any,
    segments: Any,
    min_match: int,
    max_tokens: int,
    search: Any,
    origins: Any,
    candidates: Any,
) -> None:
    """Search a datastore for what followed the end of each row's text.

    Args:
        found: int64 [n], the state of each row.
        states: int64 [states, COLUMNS].
        segments: A tuple like `SegmentTable`.
        min_match: Tokens that must match.
        max_tokens: Most tokens copied from behind a match.
        search: int64 [STATE_ROWS, >= segments], overwritten.
        origins: int64 [2, max_matches], overwritten.
        candidates: A tuple like `RowCandidates`, of n rows, overwritten.
    """
    rows = RowCandidates(*candidates)
    for k in range(found.shape[0]):
        state = states[found[k]]
        size = state[SIZE]
        last = tokens_of(state)[max(size - MAX_MATCH, 0) : size]
        buffers = MatchBuffers(rows.tokens[k], rows.matches[k], origins)
        rows.counts[k], _, _ = find_matches(segments, last, min_match, max_tokens, search, buffers)
