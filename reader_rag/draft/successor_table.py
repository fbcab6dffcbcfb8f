"""The target's own next tokens, remembered: what it found likely after the same one or two tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.kernels import successors as kernels

BEST = kernels.BEST
"""Next tokens learned at a position."""
_WAYS = 4


class SuccessorTable:
    """For the last two tokens, and for the last one, what the target found likely when it stood there before.

    Learned from every position whose logits were computed anyway: the prompt's and every verified node's, accepted or
    not (Token Recycling, arXiv 2408.08696, here with two tokens as key too). An entry adds up the ranks of what it
    was told, older ones fading. Bounded: a new entry takes the place of the one of its set that was written longest
    ago.

    One table holds what one model said to one tenant. It may outlive a request; it is not for several threads at once.

    Args:
        capacity: Most entries, rounded up to a power of two; 136 bytes each. 0 remembers nothing.
        prior: int32 [tokens, 8], what is likely after each token before anything is learned (`Profile.tokens`); shared,
            never written.

    Attributes:
        keys: int64 [sets, ways], as the kernels take them.
        entries: int32 [sets * ways, columns], the same.
        prior: As given.

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
        """Bytes held."""
        return self.keys.nbytes + self.entries.nbytes

    def __len__(self) -> int:
        """Entries held."""
        return int((self.keys != kernels.NO_KEY).sum())

    def learn(
        self,
        before: Sequence[int] | NDArray[np.integer],
        tokens: Sequence[int] | NDArray[np.integer],
        best: Sequence[Sequence[int]] | NDArray[np.integer],
    ) -> None:
        """Remember what the target found likely.

        Args:
            before: [n], the token before each of `tokens`; negative: there is none.
            tokens: [n], the tokens behind which it stood.
            best: [n, 8], its best next tokens there, the best first.

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
        """Remember what the target found likely at consecutive positions of a text.

        Args:
            text: [length].
            start: The first position.
            best: [n, 8], its best next tokens after positions `start` to `start + n`.
        """
        tokens = np.asarray(text, np.int32)[start : start + len(best)]
        before = np.asarray(text[start - 1 : start] if start else [-1], np.int32)
        self.learn(np.concatenate([before, tokens])[: len(tokens)], tokens, best)

    def after(self, before: int, token: int) -> list[int]:
        """The likely next tokens after these two, or after the last of them; the likeliest first; empty if unknown."""
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
