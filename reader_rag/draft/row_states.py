"""RowStates: what is known of the texts in the rows of a batch, recognised by their tokens alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.context_index import Corpus
from reader_rag.draft.kernels import rows as kernels

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]

_KEPT_CALLS = 64
"""Calls after which a text that is no longer seen has ended. Where batches take turns (pipelines), a text is seen once
in a few calls; one that comes back later is read anew, which takes microseconds."""
_SWEEP_EVERY = 16
_RESERVED = 256
"""Tokens of output that room is made for when a text is first seen."""


class RowStates:
    """The texts of a batch, from call to call.

    The engine that owns the batch moves rows about as it likes: a row may be another text than before, texts may
    change places, leave and come back. So each row is compared, token by token, with what is known: first with the
    text that it had before, then with all others. A text that is not known is read from its beginning; what is not
    seen for a while is dropped. Depends on nothing but what it is given, so that processes given the same do the same.

    Args:
        rows: Most rows of a batch.
        longest: Most tokens of a chain.
        max_tokens: Most tokens of a text that are searched: of a longer one the last, at least half as many.
        max_occurrences: Most places followed at once.
        max_beside: Tokens of ended texts' outputs that later ones are drafted from, too; 0: none are.

    Attributes:
        states: int64 [states, COLUMNS], see `row_kernels`.
        matches: int32 [states, 2, 2, max_occurrences], places in the text, and in those beside it.
        chains: int32 [states, longest], what was drafted last.
        chances: float64 [states, longest], the probability of each token of that, given those before.
        fortunes: float64 [states, 2], how chains fared lately.
        beside: Outputs of ended texts.
    """

    def __init__(
        self, rows: int, longest: int, *, max_tokens: int = 65_536, max_occurrences: int = 256, max_beside: int = 0
    ) -> None:
        states = 2 * rows  # rows of one call never take all, so that there is always one to drop
        self.states = np.zeros((states, kernels.COLUMNS), np.int64)
        self.matches = np.zeros((states, 2, 2, max_occurrences), np.int32)
        self.chains = np.zeros((states, longest), np.int32)
        self.chances = np.zeros((states, longest))
        self.fortunes = np.zeros((states, 2))
        self.beside = Corpus(0)
        self._max_tokens, self._max_beside = max_tokens, max_beside
        self._held = np.full(rows, -1, np.int64)
        self._texts: list[Corpus | None] = [None] * states
        self._seen = np.zeros(states, np.int64)
        self._calls = 0
        self._scratch = np.zeros((2, max_occurrences), np.int32)

    def __len__(self) -> int:
        """Texts that are known."""
        return int(self.states[:, kernels.LIVE].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of their indexes."""
        return self.beside.nbytes + sum(text.nbytes for text in self._texts if text is not None)

    def update(self, texts: Int32, rows: Int64, lengths: Int64, came: Int64) -> Int64:
        """Take in what the rows hold now.

        Args:
            texts: int32 [all rows, >= any length], the tokens of each row.
            rows: int64 [n], the rows that are looked at, each once.
            lengths: int64 [n], tokens of each, at least 1.
            came: int64 [n], how many of them came in this step; of a text that is new, the others are its prompt.

        Returns:
            int64 [n], the state of each row.
        """
        self._calls += 1
        found = np.empty(len(rows), np.int64)
        taken = np.zeros(len(self.states), np.bool_)
        kernels.recognise(texts, lengths, rows, self.states, self._held, taken, found)
        for k in np.flatnonzero(found < 0).tolist():
            found[k] = self._begin(int(lengths[k]), int(came[k]), taken)
            taken[found[k]] = True
        self._make_room(found, lengths)
        kernels.follow(
            texts,
            lengths,
            rows,
            found,
            self.states,
            self.matches,
            self.chains,
            self.chances,
            self.fortunes,
            self.beside.tokens,
            self.beside.previous,
            self.beside.table,
            self.beside.size,
            self._scratch,
        )
        self._held[rows] = found
        self._seen[found] = self._calls
        if self._calls % _SWEEP_EVERY == 0:
            ended = (self.states[:, kernels.LIVE] > 0) & (self._seen < self._calls - _KEPT_CALLS)
            for state in np.flatnonzero(ended).tolist():
                self._end(state)
        return found

    def clear(self) -> None:
        """Drop all texts, and what was kept of those that ended."""
        self.states[:] = 0
        self.fortunes[:] = 0.0
        self._held[:] = -1
        self._texts = [None] * len(self._texts)
        self.beside = Corpus(0)
        self._calls = 0

    def _begin(self, length: int, came: int, taken: NDArray[np.bool_]) -> int:
        """A state for a text that is not known; the one not seen for longest makes place."""
        age = np.where(self.states[:, kernels.LIVE] > 0, self._seen, -1)
        age[taken] = self._calls
        state = int(np.argmin(age))
        if self.states[state, kernels.LIVE]:
            self._end(state)
        self._reset(state, self._first(length))
        row = self.states[state]
        row[kernels.PROMPT] = max(length - came - int(row[kernels.BASE]), 0)
        row[kernels.LIVE] = 1
        self.fortunes[state] = 0.0
        return state

    def _first(self, length: int) -> int:
        """Where the index of a text of that length begins."""
        return 0 if length <= self._max_tokens else length - max(self._max_tokens // 2, 1)

    def _reset(self, state: int, base: int) -> None:
        """Empty a state's index, to begin there in the text."""
        self._texts[state] = Corpus(0)
        row = self.states[state]
        row[:] = 0
        row[kernels.BASE] = base

    def _make_room(self, found: Int64, lengths: Int64) -> None:
        """For what each row grew by, in its state; texts that have become too long are read anew from further on."""
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
                self._reset(state, self._first(length))
                row[kernels.PROMPT], row[kernels.LIVE] = max(end - int(row[kernels.BASE]), 0), live
            self._grow(state, length - int(row[kernels.BASE]))

    def _grow(self, state: int, needed: int) -> None:
        text, row = self._texts[state], self.states[state]
        assert text is not None
        text.size, text.distinct = int(row[kernels.SIZE]), int(row[kernels.DISTINCT])
        text.make_room(min(needed + _RESERVED, self._max_tokens) - text.size)
        row[kernels.TOKENS] = text.tokens.ctypes.data
        row[kernels.PREVIOUS] = text.previous.ctypes.data
        row[kernels.TABLE] = text.table.ctypes.data
        row[kernels.CAPACITY], row[kernels.SLOTS] = len(text.tokens), text.table.shape[1]

    def _end(self, state: int) -> None:
        """Drop a text; its output is kept beside the others if that is asked for."""
        text, row = self._texts[state], self.states[state]
        if self._max_beside and text is not None:
            self._keep(text.tokens[int(row[kernels.PROMPT]) : int(row[kernels.SIZE])].copy())
        self._texts[state] = None
        row[:] = 0
        self._held[self._held == state] = -1

    def _keep(self, output: Int32) -> None:
        """Put an output beside the texts; when there is no more room, the older half goes."""
        most = self._max_beside // 2
        kept = np.append(output[: max(most - 1, 0)], np.int32(-1))
        beside = self.beside
        if beside.size + len(kept) > self._max_beside:
            recent = beside.tokens[beside.size - most : beside.size]
            whole = np.flatnonzero(recent < 0)
            self.beside = Corpus(self._max_beside)
            self.beside.append(recent[int(whole[0]) + 1 :].copy() if len(whole) else recent[:0])
            self.states[:, kernels.BESIDE] = 0
        self.beside.append(kept)
