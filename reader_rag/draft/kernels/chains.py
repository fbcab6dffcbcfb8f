"""The loops that draft chains: one continuation for each text, the most probable token at each place.

A chain is what an engine can verify that takes no tree. The children of a place and their probabilities are found as
for trees (see `tree_kernels`). Growing a tree best first and keeping its first branch would spend the nodes on branches
that are thrown away.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from reader_rag.datastore.kernels import LONGEST, collect
from reader_rag.draft.kernels.rows import (
    BESIDE,
    DRAFTED,
    FOLLOWED,
    PROMPT,
    SIZE,
    tokens_of,
)
from reader_rag.draft.kernels.successors import prepare
from reader_rag.draft.kernels.tree import (
    CHANCE,
    FOUND_TOKEN,
    GROUP,
    MEMBER_POSITION,
    MEMBER_SOURCE,
    ORDER,
    SCRATCH,
    find_children,
    list_members,
)


@njit(cache=True, nogil=True, error_model="numpy")
def grow(
    corpora: Any,
    sizes: Any,
    prompt: int,
    members: int,
    keys: Any,
    entries: Any,
    prior: Any,
    scoring: Any,
    counts: Any,
    longest: int,
    floor: float,
    work: Any,
    mass: Any,
    chain: Any,
    chances: Any,
    paths: Any,
) -> int:
    """Follow the most probable token from place to place.

    Where something is copied the prior has no say: the corrections of copies that it agrees with were counted beside
    what a table learned from the model (see `calibration`), which nobody has here.

    Args:
        corpora: Three of int32 [>= size]: the text, texts beside it, and what the datastore holds behind its matches.
        sizes: Tokens of each; at least one in the text.
        prompt: How many of the text's are the prompt's.
        members: Matches, as `tree_kernels.list_members` left them in `work`.
        keys: As in `tree_kernels.build`, like those that follow.
        entries: The same.
        prior: The same.
        scoring: The same.
        counts: The same.
        longest: Most tokens.
        floor: Least probability of the whole chain.
        work: The same.
        mass: The same.
        chain: int32 [>= longest], overwritten.
        chances: float64 [>= longest], overwritten: the probability of each token, given those before.
        paths: float64 [>= longest], overwritten: the probability of the chain up to each.

    Returns:
        Tokens of the chain.
    """
    text, length = corpora[0], sizes[0]
    token, before = int(text[length - 1]), int(text[length - 2]) if length > 1 else -1
    above = 1.0
    stop = members
    prepare(work[SCRATCH])
    for depth in range(longest):
        known = prior[:0] if stop else prior
        groups, found = find_children(
            corpora, sizes, prompt, depth, 0, stop, before, token, keys, entries, known, scoring, counts,
            floor / above, work, mass,
        )  # fmt: skip
        best = -1
        for child in range(found):
            if best < 0 or mass[CHANCE, child] > mass[CHANCE, best]:
                best = child
        if best < 0 or above * mass[CHANCE, best] < floor:
            return depth
        above *= mass[CHANCE, best]
        before, token = token, int(work[FOUND_TOKEN, best])
        chain[depth] = token
        chances[depth] = mass[CHANCE, best]
        paths[depth] = above
        kept = 0
        if best < groups:
            for i in range(stop):
                member = work[ORDER, i]
                source, at = work[MEMBER_SOURCE, member], work[MEMBER_POSITION, member] + depth + 1
                # Where its text ends there is nothing more to copy.
                if work[GROUP, i] == best and at < sizes[source] and corpora[source][at] >= 0:
                    work[ORDER, kept] = member
                    kept += 1
        stop = kept
    return longest


@njit(cache=True, nogil=True, error_model="numpy")
def draft(
    found: Any,
    limits: Any,
    states: Any,
    matches: Any,
    chains: Any,
    chances: Any,
    beside: Any,
    beside_size: int,
    stored: Any,
    stored_matches: Any,
    stored_followed: Any,
    keys: Any,
    entries: Any,
    prior: Any,
    scoring: Any,
    counts: Any,
    floor: float,
    work: Any,
    mass: Any,
    paths: Any,
    drafted: Any,
) -> None:
    """Draft a chain for each of some rows.

    Args:
        found: int64 [n], the state of each row.
        limits: int64 [n], most tokens of each chain.
        states: int64 [states, COLUMNS], see `row_kernels`; updated.
        matches: int32 [states, 2, 2, limit].
        chains: int32 [states, longest]; updated.
        chances: float64 [states, longest]; updated.
        beside: int32 [>= beside_size], other texts.
        beside_size: Tokens of them.
        stored: int32 [n, tokens], what the datastore holds behind each row's matches.
        stored_matches: int32 [n, 2, most].
        stored_followed: int64 [n].
        keys: See `grow`, like those that follow.
        entries: The same.
        prior: The same.
        scoring: The same.
        counts: The same.
        floor: The same.
        work: The same; one for each thread.
        mass: The same.
        paths: float64 [n, longest], overwritten.
        drafted: int64 [n], overwritten: tokens of each chain.
    """
    for k in range(found.shape[0]):
        s = found[k]
        state = states[s]
        corpora = (tokens_of(state), beside, stored[k])
        sizes = (state[SIZE], beside_size, stored.shape[1])
        members = list_members(
            (matches[s, 0], matches[s, 1], stored_matches[k]),
            (state[FOLLOWED], state[BESIDE], stored_followed[k]),
            work,
        )
        state[DRAFTED] = drafted[k] = grow(
            corpora, sizes, state[PROMPT], members, keys, entries, prior, scoring, counts,
            limits[k], floor, work, mass, chains[s], chances[s], paths[k],
        )  # fmt: skip


@njit(cache=True, nogil=True, error_model="numpy")
def look_up(
    found: Any,
    states: Any,
    parts: Any,
    count: int,
    like: Any,
    least: int,
    reach: int,
    separator: int,
    search: Any,
    origins: Any,
    stored: Any,
    stored_matches: Any,
    stored_followed: Any,
) -> None:
    """Search a datastore for what followed the end of each row's text.

    Args:
        found: int64 [n], the state of each row.
        states: int64 [states, COLUMNS].
        parts: As in `datastore.kernels.collect`, like those that follow.
        count: The same.
        like: The same.
        least: The same.
        reach: The same.
        separator: The same.
        search: int64 [STATE_ROWS, >= count], overwritten.
        origins: int64 [2, most], overwritten.
        stored: int32 [n, most * (reach + 1)], overwritten.
        stored_matches: int32 [n, 2, most], overwritten.
        stored_followed: int64 [n], overwritten.
    """
    for k in range(found.shape[0]):
        state = states[found[k]]
        size = state[SIZE]
        last = tokens_of(state)[max(size - LONGEST, 0) : size]
        stored_followed[k], _, _ = collect(
            parts, count, like, last, last.shape[0], least, reach, separator, search, stored[k], stored_matches[k],
            origins,
        )  # fmt: skip
