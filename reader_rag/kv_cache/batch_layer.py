"""One layer of the key/value cache of a batch, and what one forward pass writes and reads in it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import CacheLayerMixin

from reader_rag.kv_cache.batch_layout import Layout, Moves, SequenceRef
from reader_rag.kv_cache.tree_cache import TreeLayer


class Pass:
    """One forward pass over some of a cache's sequences, in the order of their rows.

    Attributes:
        order: Index, in the order of the call, of the sequence in each row of the pass.
        keys: int32 [sequences, shown], the position of what each column holds; -1: nothing that may be seen.
        starts: int64 [sequences], the column that each sequence's first row is written to.
        width: Rows of each sequence.
    """

    def __init__(self, layout: Layout, rows: NDArray[np.int64], starts: NDArray[np.int64], width: int) -> None:
        self.order = np.argsort(rows)
        self.starts = starts[self.order]
        self.width = width
        self.shown = int(starts.max()) + width
        self._rows = rows[self.order]
        self.keys = layout.entries[self._rows, : self.shown]
        self._shared = bool((starts == starts[0]).all())
        # Rows that lie side by side are seen where they are. Others are copied, a layer at a time: what rows that sit
        # out cost instead, as padding, is the whole model's pass over them, and it would overwrite what they wrote.
        adjacent = bool((np.diff(self._rows) == 1).all())
        self._slice = slice(int(self._rows[0]), int(self._rows[-1]) + 1) if adjacent else None
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, states: torch.Tensor, new: torch.Tensor) -> None:
        """Write [sequences, heads, width, size] into a layer's keys or values."""
        if self._shared and self._slice is not None:
            start = int(self.starts[0])
            states[self._slice, :, start : start + self.width] = new
            return
        rows, columns = self._indexes(states.device)
        states.transpose(1, 2)[rows[:, None], columns] = new.transpose(1, 2)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """The columns shown of a layer's keys or values, [sequences, heads, shown, size]."""
        if self._slice is not None:
            return states[self._slice, :, : self.shown]
        return states[:, :, : self.shown].index_select(0, self._indexes(states.device)[0])

    def _indexes(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._on:
            columns = self.starts[:, None] + np.arange(self.width)
            self._on[device] = torch.from_numpy(self._rows).to(device), torch.from_numpy(columns).to(device)
        return self._on[device]


class Allocation(Protocol):
    """What all layers of a batch's cache have in common.

    Attributes:
        rows: Rows allocated.
        columns: Columns allocated.
        now: The pass that has begun.
    """

    rows: int
    columns: int
    now: Pass | None


class BatchLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, columns, width]; rows behind those of the layout are free.

    Attributes:
        layout: Where their entries lie.
    """

    is_sliding = False

    def __init__(self, cache: Allocation, layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout = layout
        self._cache = weakref.proxy(cache)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the shapes and dtype of these keys and values (their widths may differ)."""
        self._set([self._made(key_states), self._made(value_states)])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what the pass that has begun computed.

        Args:
            key_states: [sequences, heads, width, size].
            value_states: [sequences, heads, width, size].

        Returns:
            Keys and values, committed and new, [sequences, heads, shown, size].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        now = self._cache.now
        assert now is not None
        keys, values = self._states
        now.write(keys, key_states)
        now.write(values, value_states)
        return now.read(keys), now.read(values)

    def arrange(self, moves: Moves, own: Sequence[TreeLayer]) -> int:
        """Move everything to where another layout has it, and take in what joins. One that raises changes nothing.

        Args:
            moves: From this layer's layout to the other.
            own: The own layers of the new layout's sequences, for those that join. They lose their tensors.

        Returns:
            Bytes moved.
        """
        size = 0
        joining = [row for row, origin in enumerate(moves.origins) if origin < 0 and own[row].is_initialized]
        if self.is_initialized or joining:
            old = self._states if self.is_initialized else []
            shape = (self._cache.rows, self._cache.columns)
            if old and (old[0].shape[0], old[0].shape[2]) == shape:
                size = _moved_within(old, moves)
                new = old
            else:
                like = old or [_tensors(own[joining[0]])[k] for k in range(2)]
                # All is allocated before anything is changed.
                new = [self._made(states) for states in like]
                size = sum(_copied(source, target, moves) for source, target in zip(old, new, strict=bool(old)))
            for row, origin in enumerate(moves.origins):
                if origin < 0:
                    size += _taken(own[row], [states[row] for states in new])
            self._set(new)
        self.layout = moves.new
        return size

    def states_of(self, sequence: SequenceRef, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A sequence's keys and values of those positions, copies [1, heads, stop - start, size]; None: it has none."""
        if not self.is_initialized:
            return None
        row = self.layout.sequences.index(sequence)
        entries = self.layout.entries[row]
        (columns,) = np.nonzero((entries >= start) & (entries < stop))
        index = torch.from_numpy(columns[np.argsort(entries[columns])])
        keys, values = (states[row : row + 1].index_select(2, index.to(states.device)) for states in self._states)
        return keys, values

    @property
    def _states(self) -> list[torch.Tensor]:
        return _tensors(self)

    def _set(self, states: list[torch.Tensor]) -> None:
        self.keys, self.values = states
        self.is_initialized = True

    def _made(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: masked columns are multiplied by 0, and 0 * garbage may be NaN.
        return like.new_zeros(self._cache.rows, like.shape[1], self._cache.columns, like.shape[3])

    def get_seq_length(self) -> int:
        """Columns that the pass which has begun shows before its own."""
        now = self._cache.now
        return 0 if now is None else now.shown - now.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns seen by a pass of `query_length`, offset of the first)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Columns allocated."""
        return int(self._cache.columns)  # of a weak proxy, which has no type

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(states.nbytes for states in self._states) if self.is_initialized else 0


def _tensors(layer: TreeLayer | BatchLayer) -> list[torch.Tensor]:
    """Keys and values of a layer."""
    assert layer.keys is not None
    assert layer.values is not None
    return [layer.keys, layer.values]


def _moved_within(pair: Sequence[torch.Tensor], moves: Moves) -> int:
    """Move entries of keys and values within their tensors; bytes moved."""
    size = 0
    if moves.to.size:
        rows, columns, to = moves.indexes(pair[0].device)
        taken = [states.transpose(1, 2)[rows, columns] for states in pair]  # both, before anything is changed
        for states, entries in zip(pair, taken, strict=True):
            states.transpose(1, 2)[rows, to] = entries
            size += entries.nbytes
    for row, origin in enumerate(moves.origins):
        if origin not in (row, -1):
            for states in pair:
                states[row] = states[origin]
                size += states[row].nbytes
    return size


def _copied(source: torch.Tensor, target: torch.Tensor, moves: Moves) -> int:
    """Copy the entries of keys or values into a new tensor; bytes moved."""
    kept = [(row, origin) for row, origin in enumerate(moves.origins) if origin >= 0]
    if moves.to.size:
        size = 0
        for row, origin in kept:
            entries = source[origin].index_select(1, torch.from_numpy(moves.columns(origin)).to(source.device))
            target[row, :, : entries.shape[1]] = entries
            size += entries.nbytes
        return size
    if kept == [(row, row) for row in range(len(kept))]:
        target[: len(kept), :, : moves.used] = source[: len(kept), :, : moves.used]
    else:
        for row, origin in kept:
            target[row, :, : moves.used] = source[origin, :, : moves.used]
    return target[: len(kept), :, : moves.used].nbytes


def _taken(layer: TreeLayer, row: Sequence[torch.Tensor]) -> int:
    """Copy a sequence's own keys and values into a row [heads, columns, size] of each and free them; bytes moved."""
    size = 0
    for n, states in enumerate(row):
        taken = 0
        if layer.is_initialized:
            taken = layer.length
            own = _tensors(layer)[n][0, :, :taken]
            states[:, :taken] = own
            size += own.nbytes
        states[:, taken:] = 0  # nothing of who was here before, not even times 0
    layer.drop()
    return size
