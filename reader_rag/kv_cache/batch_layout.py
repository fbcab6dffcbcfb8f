"""Layouts of the batch cache: which column has which entry of a sequence, and the moves between two layouts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.kv_cache.tree_cache import TreeCache

SequenceRef = weakref.ref[TreeCache]

EMPTY = -1
"""Value of a column without an entry of its row's sequence."""


class Layout:
    """The columns of every sequence's entries.

    Attributes:
        sequences: Weak references to the sequences' caches, one for each row; a dead one is removed at the next pass.
        entries: int32 [rows, columns], the entry in each column: a position of the sequence; -1: none; -2 - j: row j
            of the sequence's last pass, which is not committed.
    """

    def __init__(self, sequences: list[SequenceRef], entries: NDArray[np.int32]) -> None:
        self.sequences = sequences
        self.entries = entries

    @classmethod
    def empty(cls) -> Layout:
        """A layout without sequences."""
        return cls([], np.zeros((0, 0), np.int32))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of committed positions of each sequence."""
        lengths: NDArray[np.int64] = np.count_nonzero(self.entries >= 0, axis=1)
        return lengths

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of entries of each sequence, committed or not."""
        counts: NDArray[np.int64] = np.count_nonzero(self.entries != EMPTY, axis=1)
        return counts

    @property
    def used(self) -> NDArray[np.int64]:
        """The first column after all entries of each sequence."""
        columns = self.entries.shape[1]
        last = (self.entries[:, ::-1] != EMPTY).argmax(1) if columns else 0
        used: NDArray[np.int64] = np.where(self.counts > 0, columns - last, 0)
        return used

    def forget(self, sequence: SequenceRef) -> None:
        """Drop the uncommitted entries of a sequence."""
        if sequence in self.sequences:
            row = self.entries[self.sequences.index(sequence)]
            row[row < EMPTY] = EMPTY

    def commit(self, sequence: SequenceRef, rows: Sequence[int], length: int) -> None:
        """Commit the given rows of a sequence's last pass after its `length` committed positions."""
        if sequence not in self.sequences:
            return
        row = self.entries[self.sequences.index(sequence)]
        (written,) = np.nonzero(row < EMPTY)
        columns = {-2 - int(row[column]): column for column in written}
        row[written] = EMPTY
        row[[columns[index] for index in rows]] = np.arange(length, length + len(rows))

    def roll_back(self, sequence: SequenceRef, length: int) -> None:
        """Drop the committed positions of a sequence from this one on."""
        if sequence in self.sequences:
            row = self.entries[self.sequences.index(sequence)]
            row[row >= length] = EMPTY

    def packed(self) -> Layout:
        """A layout of the same entries in the same order, without empty columns between them."""
        entries = np.full_like(self.entries, EMPTY)
        rows, columns = np.nonzero(self.entries != EMPTY)
        counts = self.counts
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        entries[rows, np.arange(len(rows)) - firsts] = self.entries[rows, columns]
        return Layout(self.sequences, entries)

    def joined(self, sequences: Sequence[SequenceRef], lengths: Sequence[int]) -> Layout:
        """A layout with further sequences in further rows, of which `lengths` positions are committed."""
        joined = self.within(max([self.entries.shape[1], *lengths]))
        rows = [
            np.where(np.arange(joined.entries.shape[1]) < n, np.arange(joined.entries.shape[1]), -1) for n in lengths
        ]
        return Layout([*self.sequences, *sequences], np.vstack([joined.entries, *rows]).astype(np.int32))

    def without(self, sequences: Sequence[SequenceRef]) -> Layout:
        """A layout without some sequences; the last rows move into their rows."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence not in sequences]
        count = len(rows)
        behind = [row for row in rows if row >= count]
        order = [row if self.sequences[row] not in sequences else behind.pop() for row in range(count)]
        return Layout([self.sequences[row] for row in order], self.entries[order])

    def within(self, columns: int) -> Layout:
        """A layout of the same entries with another number of columns, enough for all entries."""
        entries = np.full((len(self.sequences), columns), EMPTY, np.int32)
        shared = min(columns, self.entries.shape[1])
        entries[:, :shared] = self.entries[:, :shared]
        return Layout(self.sequences, entries)


class Moves:
    """The moves that change a layer from one layout to another with the entries in the same order.

    Args:
        old: The layout before.
        new: The layout after; without empty columns between entries if any entry changes its column.

    Attributes:
        new: As given.
        origins: For each new row its old one; -1: it joins.
        used: The first new column behind all entries that were there before.
        moved: int64 [2, entries], old rows and old columns of entries whose column changes.
        to: int64 [entries], their new columns.
    """

    def __init__(self, old: Layout, new: Layout) -> None:
        rows = {id(sequence): row for row, sequence in enumerate(old.sequences)}
        self.new = new
        self.origins = [rows.get(id(sequence), -1) for sequence in new.sequences]
        kept = [row for row, origin in enumerate(self.origins) if origin >= 0]
        width = max(old.entries.shape[1], new.entries.shape[1])
        sources = old.within(width).entries[[self.origins[row] for row in kept]] != EMPTY
        targets = new.within(width).entries[kept] != EMPTY
        self.used = int(targets.any(0).nonzero()[0].max(initial=-1)) + 1
        # Where they first differ; before it lies, in both, as much of every row.
        differ = (sources != targets).any(0)
        first = int(differ.argmax()) if differ.any() else width
        found, columns = np.nonzero(sources[:, first:])
        to = np.nonzero(targets[:, first:])[1]
        moved = columns != to
        self.moved = np.stack([np.array([self.origins[row] for row in kept], np.int64)[found[moved]], columns[moved]])
        self.moved[1] += first
        self.to = to[moved] + first
        self._old = old
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def columns(self, row: int) -> NDArray[np.int64]:
        """The columns of all entries of an old row."""
        columns: NDArray[np.int64] = np.nonzero(self._old.entries[row] != EMPTY)[0]
        return columns

    def indexes(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Old rows, old columns and new columns of what moves, there."""
        if device not in self._on:
            rows, columns, to = torch.from_numpy(np.vstack([self.moved, self.to])).to(device)
            self._on[device] = rows, columns, to
        return self._on[device]
