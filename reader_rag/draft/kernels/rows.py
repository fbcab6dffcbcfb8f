"""Loops over the rows of a batch of token arrays, which find the request of each row and its new tokens.

A *state* is the drafting state of one request: an index of its last tokens (`kernels.context`), the matches of its end,
and the chain that was drafted last (`kernels.chains`). States are rows of one table; their arrays are passed by
address. A row has no request id: a state belongs to a row if the row's tokens begin with the state's tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from reader_rag.draft.kernels.arrays import CorpusArrays, RowArrays
from reader_rag.draft.kernels.compile import allocating, inlined, loop
from reader_rag.draft.kernels.context import advance, append
from reader_rag.draft.kernels.tree import ACCEPTANCE_DECAY
from reader_rag.util.addresses import pointer

# Columns of the table of states: addresses and room of the index,
TOKENS, PREVIOUS, TABLE, SLOTS, CAPACITY = range(5)
# tokens and distinct tokens in it, and the position of its first token in the request,
SIZE, DISTINCT, BASE = range(5, 8)
# matches in the request and in ended outputs; end of the prompt; length of the last chain; whether the state is in use.
MATCHES, OTHER_MATCHES, PROMPT, DRAFTED, LIVE = range(8, 13)
COLUMNS = 13

LOOK_BACK = 32
"""Tokens over which matches are followed up to the end of tokens that are added at once; see `ContextIndex`."""
_COMPARED = 256
"""Tokens compared without a branch between them, so that the compiler uses wide instructions."""


@inlined
def tokens_of(state: Any) -> Any:
    """int32 [capacity], the tokens that a state's index holds."""
    return carray(pointer(state[TOKENS]), (state[CAPACITY],), np.int32)


@allocating
def _agrees(state: Any, text: Any, length: int) -> bool:
    """Whether a row holds all tokens of a state at their positions."""
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


@allocating
def find_states(texts: Any, lengths: Any, rows: Any, states: Any, held: Any, taken: Any, found: Any) -> None:
    """Find the state of each row: the one that it had before, or else the longest that agrees with its tokens.

    Args:
        texts: int32 [all rows, >= any length], the tokens of each row.
        lengths: int64 [n], tokens of each row that is looked at.
        rows: int64 [n], their indices.
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


@loop
def observe(tokens: Any, chain: Any, chances: Any, drafted: int, recent: Any) -> None:
    """Compare the chain that was drafted last with what was emitted, whether it was verified or not.

    Args:
        tokens: int32 [n], the emitted tokens.
        chain: int32 [>= drafted], the drafted tokens.
        chances: float64 [>= drafted], the probability of each of them, given those before.
        drafted: Tokens of the chain.
        recent: float64 [2], hits and expected hits of the last steps, fading; updated.
    """
    if not drafted or not tokens.shape[0]:
        return
    recent *= ACCEPTANCE_DECAY
    for depth in range(min(drafted, tokens.shape[0])):
        recent[1] += chances[depth]
        if chain[depth] != tokens[depth]:
            return
        recent[0] += 1.0


@allocating
def follow(texts: Any, lengths: Any, rows: Any, found: Any, states: Any, others: Any, scratch: Any) -> None:
    """Append to each state what its row grew by, compare its last chain with that, and follow the matches to the new
    end.

    Args:
        texts: int32 [all rows, >= any length], the tokens of each row.
        lengths: int64 [n], tokens of each row that is looked at.
        rows: int64 [n], their indices.
        found: int64 [n], the state of each; it has room.
        states: A tuple like `RowArrays`; updated.
        others: A tuple like `CorpusArrays`: outputs of ended requests, separated by negative tokens.
        scratch: int32 [2, limit], overwritten.
    """
    known, outputs = RowArrays(*states), CorpusArrays(*others)
    for k in range(rows.shape[0]):
        s = found[k]
        state = known.states[s]
        tokens = tokens_of(state)
        previous = carray(pointer(state[PREVIOUS]), (state[CAPACITY],), np.int32)
        table = carray(pointer(state[TABLE]), (2, state[SLOTS]), np.int32)
        size = state[SIZE]
        new = texts[rows[k], state[BASE] + size : lengths[k]]
        observe(new, known.chains[s], known.chances[s], state[DRAFTED], known.recent[s])
        state[DRAFTED] = 0
        state[DISTINCT] += append(tokens, previous, table, size, new)
        end = size + new.shape[0]
        text = CorpusArrays(tokens, previous, table, end)
        first = max(end - LOOK_BACK, 0)
        matches, other_matches = state[MATCHES], state[OTHER_MATCHES]
        if size < first:
            matches = other_matches = 0
        for at in range(max(size, first) + 1, end + 1):
            matches = advance(text, tokens, at, known.matches[s, 0], matches, scratch)
            if outputs.size:
                other_matches = advance(outputs, tokens, at, known.matches[s, 1], other_matches, scratch)
        state[SIZE], state[MATCHES], state[OTHER_MATCHES] = end, matches, other_matches
