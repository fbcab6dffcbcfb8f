"""The loops over the rows of a batch whose texts come as one array: whose text a row is, and what it grew by.

A *state* is what is known of one text: an index of its last tokens (see `kernels`), the matches of its end, and the
chain that was drafted last (see `chain_kernels`). States are rows of one table, their arrays handed over by address.
Nothing tells which text a row holds but its tokens: a state belongs to a row if the row begins with the state's tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from reader_rag.draft.kernels.context import advance, append
from reader_rag.draft.kernels.tree import FORTUNE_FADE
from reader_rag.util.addresses import pointer

# Columns of the table of states: addresses and room of the index,
TOKENS, PREVIOUS, TABLE, SLOTS, CAPACITY = range(5)
# what is in it, and where in the text it begins,
SIZE, DISTINCT, BASE = range(5, 8)
# matches followed, in the text and beside it; where the prompt ended; length of the chain drafted last; is it in use?
FOLLOWED, BESIDE, PROMPT, DRAFTED, LIVE = range(8, 13)
COLUMNS = 13

LOOK_BACK = 32
"""Tokens over which matches are followed up to the end of a text that is read at once; see `context`."""
_COMPARED = 256
"""Tokens compared at once: without a way out in between, so that it is done with wide instructions."""


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def tokens_of(state: Any) -> Any:
    """int32 [capacity], the tokens that a state's index holds."""
    return carray(pointer(state[TOKENS]), (state[CAPACITY],), np.int32)


@njit(cache=True, nogil=True, error_model="numpy")
def _agrees(state: Any, text: Any, length: int) -> bool:
    """Whether all tokens of a state stand in the text, where they stood before."""
    size, base = state[SIZE], state[BASE]
    if base + size > length:
        return False
    tokens = tokens_of(state)
    if size and tokens[size - 1] != text[base + size - 1]:
        return False
    stop = size
    while stop > 0:
        start = max(stop - _COMPARED, 0)
        ours, theirs = tokens[start:stop], text[base + start : base + stop]
        differs = np.int32(0)
        for i in range(stop - start):
            differs |= ours[i] ^ theirs[i]
        if differs:
            return False
        stop = start
    return True


@njit(cache=True, nogil=True, error_model="numpy")
def recognise(texts: Any, lengths: Any, rows: Any, states: Any, held: Any, taken: Any, found: Any) -> None:
    """Find the state of each row: the one that the row had before, or else the longest that agrees with its text.

    Args:
        texts: int32 [all rows, >= any length].
        lengths: int64 [n], tokens of each.
        rows: int64 [n], the rows that are looked at.
        states: int64 [states, COLUMNS].
        held: int64 [all rows], the state that each row had last; negative: none.
        taken: bool [states], all False; becomes True for those that are found.
        found: int64 [n], overwritten: a state for each, -1: none agrees.
    """
    missing = 0
    for k in range(rows.shape[0]):
        state = held[rows[k]]
        found[k] = -1
        if (
            state >= 0
            and states[state, LIVE]
            and not taken[state]
            and _agrees(states[state], texts[rows[k]], lengths[k])
        ):
            found[k] = state
            taken[state] = True
        else:
            missing += 1
    if not missing:
        return
    for k in range(rows.shape[0]):
        if found[k] >= 0:
            continue
        best, longest = -1, -1
        for state in range(states.shape[0]):
            length = states[state, BASE] + states[state, SIZE]
            if (
                states[state, LIVE]
                and not taken[state]
                and length > longest
                and _agrees(states[state], texts[rows[k]], lengths[k])
            ):
                best, longest = state, length
        if best >= 0:
            found[k] = best
            taken[best] = True


@njit(cache=True, nogil=True, error_model="numpy")
def observe(tokens: Any, chain: Any, chances: Any, drafted: int, fortune: Any) -> None:
    """Note how the chain that was drafted last fared, verified or not.

    Args:
        tokens: int32 [n], what came.
        chain: int32 [>= drafted].
        chances: float64 [>= drafted], the probability of each of its tokens, given those before.
        drafted: Tokens of the chain.
        fortune: float64 [2], hits and expected hits of the last steps, fading; updated.
    """
    if not drafted or not tokens.shape[0]:
        return
    fortune *= FORTUNE_FADE
    for depth in range(min(drafted, tokens.shape[0])):
        fortune[1] += chances[depth]
        if chain[depth] != tokens[depth]:
            return
        fortune[0] += 1.0


@njit(cache=True, nogil=True, error_model="numpy")
def follow(
    texts: Any,
    lengths: Any,
    rows: Any,
    found: Any,
    states: Any,
    matches: Any,
    chains: Any,
    chances: Any,
    fortunes: Any,
    beside: Any,
    beside_previous: Any,
    beside_table: Any,
    beside_size: int,
    scratch: Any,
) -> None:
    """Append to each state what its row grew by, judge its last chain by that, and follow the matches to the new end.

    Args:
        texts: int32 [all rows, >= any length].
        lengths: int64 [n].
        rows: int64 [n].
        found: int64 [n], the state of each; it has room.
        states: int64 [states, COLUMNS]; updated.
        matches: int32 [states, 2, 2, limit], in the text and beside it, see `kernels.advance`; updated.
        chains: int32 [states, longest], see `observe`.
        chances: float64 [states, longest].
        fortunes: float64 [states, 2]; updated.
        beside: int32 [>= beside_size], other texts, separated by negative tokens.
        beside_previous: int32 [the same].
        beside_table: int32 [2, slots].
        beside_size: Tokens of them.
        scratch: int32 [2, limit], overwritten.
    """
    for k in range(rows.shape[0]):
        s = found[k]
        state = states[s]
        tokens = tokens_of(state)
        previous = carray(pointer(state[PREVIOUS]), (state[CAPACITY],), np.int32)
        table = carray(pointer(state[TABLE]), (2, state[SLOTS]), np.int32)
        size = state[SIZE]
        new = texts[rows[k], state[BASE] + size : lengths[k]]
        observe(new, chains[s], chances[s], state[DRAFTED], fortunes[s])
        state[DRAFTED] = 0
        state[DISTINCT] += append(tokens, previous, table, size, new)
        end = size + new.shape[0]
        first = max(end - LOOK_BACK, 0)
        followed, others = state[FOLLOWED], state[BESIDE]
        if size < first:
            followed = others = 0
        for at in range(max(size, first) + 1, end + 1):
            followed = advance(tokens, previous, table, end, tokens, at, matches[s, 0], followed, scratch)
            if beside_size:
                others = advance(
                    beside, beside_previous, beside_table, beside_size, tokens, at, matches[s, 1], others, scratch
                )
        state[SIZE], state[FOLLOWED], state[BESIDE] = end, followed, others
