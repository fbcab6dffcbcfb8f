"""RowStates: drafting states of the requests in the rows of a batch, recognised by their tokens alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.context_index import Corpus
from reader_rag.draft.kernels import rows as kernels

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]

_KEPT_CALLS = 64
"""Calls after which a request that is no longer seen has ended. Where batches take turns (pipelines), a request is seen
once in a few calls; one that comes back later is indexed anew, which takes microseconds."""
_SWEEP_EVERY = 16
_RESERVED = 256
"""Tokens of output that room is made for when a request is first seen."""


class RowStates:
    """Drafting states of the requests of a batch, kept from call to call.

    The engine that owns the batch moves rows as it likes: a row may hold another request than before, requests may
    change rows, leave and come back. So the tokens of each row are compared with what is known: first with the request
    that the row held before, then with all others. An unknown request is indexed from its first token; one that is not
    seen for a while is dropped. The result depends on the calls alone, so processes that receive the same calls do the
    same.

    Args:
        rows: Most rows of a batch.
        longest: Most tokens of a chain.
        max_tokens: Most tokens of a request that are indexed; of a longer one the last, at least half as many.
        max_occurrences: Most matches followed at once, in the request's own tokens and in ended outputs each.
        max_ended_tokens: Tokens of ended requests' outputs that later requests are drafted from, too; 0: none.

    Attributes:
        states: int64 [states, COLUMNS], see `kernels.rows`.
        matches: int32 [states, 2, 2, max_occurrences], positions and match lengths, in the request's own tokens and in
            ended outputs.
        chains: int32 [states, longest], what was drafted last.
        chances: float64 [states, longest], the probability of each token of that, given those before.
        recent: float64 [states, 2], hits and expected hits of the last chains, fading.
        ended: Outputs of ended requests.
    """

    def __init__(
        self,
        rows: int,
        longest: int,
        *,
        max_tokens: int = 65_536,
        max_occurrences: int = 256,
        max_ended_tokens: int = 0,
    ) -> None:
        states = 2 * rows  # rows of one call never take all, so that there is always one to drop
        self.states = np.zeros((states, kernels.COLUMNS), np.int64)
        self.matches = np.zeros((states, 2, 2, max_occurrences), np.int32)
        self.chains = np.zeros((states, longest), np.int32)
        self.chances = np.zeros((states, longest))
        self.recent = np.zeros((states, 2))
        self.ended = Corpus(0)
        self._max_tokens, self._max_ended_tokens = max_tokens, max_ended_tokens
        self._held = np.full(rows, -1, np.int64)
        self._corpora: list[Corpus | None] = [None] * states
        self._seen = np.zeros(states, np.int64)
        self._calls = 0
        self._scratch = np.zeros((2, max_occurrences), np.int32)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The fields of `kernels.arrays.RowArrays`."""
        return self.states, self.matches, self.chains, self.chances, self.recent

    def __len__(self) -> int:
        """Requests that are known."""
        return int(self.states[:, kernels.LIVE].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of their indexes."""
        return self.ended.nbytes + sum(text.nbytes for text in self._corpora if text is not None)

    def update(self, tokens: Int32, rows: Int64, lengths: Int64, emitted: Int64) -> Int64:
        """Follow what the rows hold now.

        Args:
            tokens: int32 [all rows, >= any length], the tokens of each row.
            rows: int64 [n], the rows that are looked at, each once.
            lengths: int64 [n], tokens of each, at least 1.
            emitted: int64 [n], how many of them the last step emitted; of a new request, the others are its prompt.

        Returns:
            int64 [n], the state of each row.
        """
        self._calls += 1
        found = np.empty(len(rows), np.int64)
        taken = np.zeros(len(self.states), np.bool_)
        kernels.find_states(tokens, lengths, rows, self.states, self._held, taken, found)
        for k in np.flatnonzero(found < 0).tolist():
            found[k] = self._begin(int(lengths[k]), int(emitted[k]), taken)
            taken[found[k]] = True
        self._make_room(found, lengths)
        kernels.follow(tokens, lengths, rows, found, self.arrays, self.ended.arrays, self._scratch)
        self._held[rows] = found
        self._seen[found] = self._calls
        if self._calls % _SWEEP_EVERY == 0:
            ended = (self.states[:, kernels.LIVE] > 0) & (self._seen < self._calls - _KEPT_CALLS)
            for state in np.flatnonzero(ended).tolist():
                self._end(state)
        return found

    def clear(self) -> None:
        """Drop all requests, and the outputs of those that ended."""
        self.states[:] = 0
        self.recent[:] = 0.0
        self._held[:] = -1
        self._corpora = [None] * len(self._corpora)
        self.ended = Corpus(0)
        self._calls = 0

    def _begin(self, length: int, emitted: int, taken: NDArray[np.bool_]) -> int:
        """A state for an unknown request; replaces the least recently seen one."""
        age = np.where(self.states[:, kernels.LIVE] > 0, self._seen, -1)
        age[taken] = self._calls
        state = int(np.argmin(age))
        if self.states[state, kernels.LIVE]:
            self._end(state)
        self._reset(state, self._index_start(length))
        row = self.states[state]
        row[kernels.PROMPT] = max(length - emitted - int(row[kernels.BASE]), 0)
        row[kernels.LIVE] = 1
        self.recent[state] = 0.0
        return state

    def _index_start(self, length: int) -> int:
        """The first token of a request of that length that is indexed."""
        return 0 if length <= self._max_tokens else length - max(self._max_tokens // 2, 1)

    def _reset(self, state: int, base: int) -> None:
        """Empty a state's index; the new one begins at token `base` of the request."""
        self._corpora[state] = Corpus(0)
        row = self.states[state]
        row[:] = 0
        row[kernels.BASE] = base

    def _make_room(self, found: Int64, lengths: Int64) -> None:
        """Make room in each state for the new tokens of its row; requests that became too long are indexed anew."""
        held = self.states[found]
        needed = lengths - held[:, kernels.BASE]
        distinct = held[:, kernels.DISTINCT] + needed - held[:, kernels.SIZE]
        short = (
            (needed > self._max_tokens)
            | (needed > held[:, kernels.CAPACITY])
            | (2 * np.minimum(distinct, needed) > held[:, kernels.SLOTS])
        )
        for k in np.flatnonzero(short).tolist():
            state, length = int(found[k]), int(lengths[k])
            row = self.states[state]
            if needed[k] > self._max_tokens:
                end, live = int(row[kernels.BASE] + row[kernels.PROMPT]), row[kernels.LIVE]
                self._reset(state, self._index_start(length))
                row[kernels.PROMPT], row[kernels.LIVE] = max(end - int(row[kernels.BASE]), 0), live
            self._grow(state, length - int(row[kernels.BASE]))

    def _grow(self, state: int, needed: int) -> None:
        text, row = self._corpora[state], self.states[state]
        assert text is not None
        text.size, text.distinct = int(row[kernels.SIZE]), int(row[kernels.DISTINCT])
        text.make_room(min(needed + _RESERVED, self._max_tokens) - text.size)
        row[kernels.TOKENS] = text.tokens.ctypes.data
        row[kernels.PREVIOUS] = text.previous.ctypes.data
        row[kernels.TABLE] = text.table.ctypes.data
        row[kernels.CAPACITY], row[kernels.SLOTS] = len(text.tokens), text.table.shape[1]

    def _end(self, state: int) -> None:
        """Drop a request; keep its output if ended outputs are kept."""
        text, row = self._corpora[state], self.states[state]
        if self._max_ended_tokens and text is not None:
            self._keep_output(text.tokens[int(row[kernels.PROMPT]) : int(row[kernels.SIZE])].copy())
        self._corpora[state] = None
        row[:] = 0
        self._held[self._held == state] = -1

    def _keep_output(self, output: Int32) -> None:
        """Keep an output; where there is no more room, evict the older half."""
        most = self._max_ended_tokens // 2
        kept = np.append(output[: max(most - 1, 0)], np.int32(-1))
        ended = self.ended
        if ended.size + len(kept) > self._max_ended_tokens:
            recent = ended.tokens[ended.size - most : ended.size]
            whole = np.flatnonzero(recent < 0)
            self.ended = Corpus(self._max_ended_tokens)
            self.ended.append(recent[int(whole[0]) + 1 :].copy() if len(whole) else recent[:0])
            self.states[:, kernels.OTHER_MATCHES] = 0
        self.ended.append(kept)
