"""SuccessorTable: the target's own likely next tokens after one and two tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.kernels import successors as kernels

BEST = kernels.BEST
"""Next tokens learned at a position."""
_WAYS = 4


class SuccessorTable:
    """By the last two tokens, and by the last one, the tokens that the target found likely next.

    Learned from every position whose logits were computed anyway: the prompt's and every verified node's, accepted or
    not (Token Recycling, arXiv 2408.08696, here with two tokens as key too). An entry adds up weights by rank; older
    ones decay. Bounded: a new entry replaces the least recently written one of its set.

    A table belongs to one model and one tenant, and may outlive a request. Not thread-safe.

    Args:
        capacity: Most entries, rounded up to a power of two; 136 bytes each. 0 learns nothing.
        prior: int32 [tokens, 8], what is likely after each token before anything is learned (`Profile.tokens`); never
            written.

    Attributes:
        keys: int64 [sets, ways], see `kernels.successors`.
        entries: int32 [sets * ways, columns], see `kernels.successors`.
        prior: int32 [tokens, 8], as given; no rows without one.

    Example:
        >>> table = SuccessorTable()
        >>> table.learn([5], [6], [[7, 8, 9, 10, 11, 12, 13, 14]])
        >>> table.after(5, 6)[:3], table.after(4, 6)[:3]   # the second knows the last token only
        ([7, 8, 9], [7, 8, 9])
    """

    def __init__(self, capacity: int = 1 << 15, prior: NDArray[np.int32] | None = None) -> None:
        sets = 1 << (-(-capacity // _WAYS) - 1).bit_length() if capacity else 0
        self.keys = np.full((sets, _WAYS), kernels.NO_KEY, np.int64)
        self.entries = _aligned(sets * _WAYS, kernels.ENTRY_COLUMNS)
        self.prior = np.zeros((0, BEST), np.int32) if prior is None else prior
        self._clock = np.zeros(1, np.int32)
        self._scratch = np.zeros(kernels.ENTRY_COLUMNS, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and entries."""
        return self.keys.nbytes + self.entries.nbytes

    def __len__(self) -> int:
        """Entries in use."""
        return int((self.keys != kernels.NO_KEY).sum())

    def learn(
        self,
        before: Sequence[int] | NDArray[np.integer],
        tokens: Sequence[int] | NDArray[np.integer],
        best: Sequence[Sequence[int]] | NDArray[np.integer],
    ) -> None:
        """Add the target's best next tokens at any positions.

        Args:
            before: [n], the token before each of `tokens`; negative: there is none.
            tokens: [n], the last token of each position.
            best: [n, 8], the best next tokens there, the best first.

        Raises:
            ValueError: They are not equally many.
        """
        rows = np.asarray(best, np.int32).reshape(-1, BEST)
        if not len(before) == len(tokens) == len(rows):
            raise ValueError(f"{len(before)} tokens before {len(tokens)} tokens, with {len(rows)} rows of next ones")
        if not len(self.keys):
            return
        kernels.learn(
            self.keys,
            self.entries,
            self.prior,
            self._clock,
            self._scratch,
            np.asarray(before, np.int32),
            np.asarray(tokens, np.int32),
            rows,
        )

    def learn_text(
        self, text: Sequence[int] | NDArray[np.integer], start: int, best: Sequence[Sequence[int]] | NDArray[np.integer]
    ) -> None:
        """Add the target's best next tokens at consecutive positions of a text.

        Args:
            text: [length], token ids.
            start: The first position.
            best: [n, 8], the best next tokens after positions `start` to `start + n`.
        """
        tokens = np.asarray(text, np.int32)[start : start + len(best)]
        before = np.asarray(text[start - 1 : start] if start else [-1], np.int32)
        self.learn(np.concatenate([before, tokens])[: len(tokens)], tokens, best)

    def after(self, before: int, token: int) -> list[int]:
        """The likely next tokens after two tokens, or else after the last one, the likeliest first; empty if unknown.

        Args:
            before: The token before `token`; negative: none.
            token: The last token.
        """
        kernels.prepare(self._scratch)
        entry, _ = kernels.successors(self.keys, self.entries, self.prior, self._scratch, before, token)
        if not entry[kernels.TOTAL]:
            return []
        tokens = entry[kernels.TOKENS : kernels.STAMP].tolist()
        return [token for token in tokens if token >= 0]


def _aligned(rows: int, columns: int) -> NDArray[np.int32]:
    """int32 [rows, columns] of -1, beginning at a cache line's first byte."""
    line = 64 // np.dtype(np.int32).itemsize
    raw = np.full(rows * columns + line, -1, np.int32)
    start = -(raw.ctypes.data // raw.itemsize) % line
    return raw[start : start + rows * columns].reshape(rows, columns)
