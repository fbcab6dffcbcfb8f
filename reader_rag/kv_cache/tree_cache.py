"""The preallocated key/value cache of one sequence: write a tree, commit a path.

`transformers` calls `past_key_values.update(keys, values, layer)` on any `Cache`, so one made of our own layers works
with unpatched models. Every layer stores all positions, sliding ones too: the mask limits what a query attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

States = list[tuple[Any, Any] | None]
"""Copies of keys and values, arrays or tensors with their positions on axis 2: a pair for each layer, None for one that
holds nothing of its own, or one pair for all layers of a cache `in_one_piece`."""


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer, [batch, heads, capacity, width], the first `length` of them committed.

    A forward pass writes its positions behind the committed ones and attends to both. The next pass overwrites them
    unless `commit` commits them.

    Args:
        capacity: Most positions, committed and written.

    Attributes:
        length: Committed positions.
        shown: Positions that `update` returns, whatever they hold, so that attention always runs over the same shape;
            None returns the committed and the new ones.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self.length = 0
        self.shown: int | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the shapes and dtype of the first keys and values (their widths may differ)."""
        batch, heads = key_states.shape[:2]
        # Zeros, not empty: masked positions are multiplied by 0, and 0 * garbage may be NaN.
        self.keys = key_states.new_zeros(batch, heads, self.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(batch, value_states.shape[1], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind the committed positions.

        Args:
            key_states: [batch, heads, new, width].
            value_states: [batch, heads, new, width].

        Returns:
            Views of keys and values, committed and new, or `shown` positions of them.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            raise IndexError(f"{end} positions do not fit a cache of {self.capacity}")
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        shown = self.shown or end
        return self.keys[:, :, :shown], self.values[:, :, :shown]

    def commit(self, rows: torch.Tensor | None, count: int) -> None:
        """Commit `count` of the written positions.

        Args:
            rows: int64 [count], which written positions, in order; None: the first `count`.
        """
        assert self.keys is not None
        assert self.values is not None
        if rows is not None:
            start, end = self.length, self.length + count
            # index_select copies before the assignment, so overlapping ranges are safe.
            self.keys[:, :, start:end] = self.keys.index_select(2, rows + start)
            self.values[:, :, start:end] = self.values.index_select(2, rows + start)
        self.length += count

    def drop(self) -> None:
        """Free keys and values: they were moved to a batch, or are no longer needed."""
        self.keys = self.values = None
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Committed positions."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key positions seen by a pass of `query_length`, offset of the first)."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """The capacity."""
        return self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes


class SharedCache(Protocol):
    """A cache of several sequences that holds keys and values of a `TreeCache`: `BatchCache`."""

    def commit(self, sequence: TreeCache, rows: Sequence[int]) -> None:
        """Commit these rows of the sequence's last pass."""

    def leave(self, sequence: TreeCache) -> None:
        """Free what is allocated for the sequence."""

    def set_committed(self, sequence: TreeCache, length: int) -> None:
        """Treat the first `length` positions of the sequence as committed, whatever they contain."""

    def roll_back(self, sequence: TreeCache, length: int) -> None:
        """Drop committed positions of the sequence from this one on."""

    def bytes_of(self, sequence: TreeCache) -> int:
        """Bytes allocated for the sequence."""

    def states(self, sequence: TreeCache, start: int, stop: int) -> States:
        """Copies of the keys and values of committed positions `start` to `stop - 1`."""


class TreeCache(Cache):
    """A cache of `TreeLayer`s.

    Args:
        layers: Number of layers.
        capacity: Most positions: prompt, output and one tree.

    Attributes:
        capacity: Most positions.
        batch: The cache that has the keys and values once the sequence is decoded in a batch; its own layers then have
            the number of committed positions only. None: its layers have them.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.batch: SharedCache | None = None
        self.tree_layers = [TreeLayer(capacity) for _ in range(layers)]
        self._arrays: tuple[NDArray[Any], NDArray[Any]] | None = None
        super().__init__(layers=list(self.tree_layers))

    @classmethod
    def in_one_piece(cls, layers: int, capacity: int, heads: int, width: int, dtype: torch.dtype) -> TreeCache:
        """A cache in the CPU's memory whose layers are slices of two arrays (see `arrays`).

        Args:
            layers: Number of layers.
            capacity: Most positions.
            heads: Key heads.
            width: Of a head.
            dtype: float32, bfloat16 or float16.
        """
        cache = cls(layers, capacity)
        # As bits where NumPy knows no such type. Zeros: see `TreeLayer.lazy_initialization`.
        stored = {torch.bfloat16: np.uint16, torch.float16: np.int16}.get(dtype, np.float32)
        keys, values = (np.zeros((layers, heads, capacity, width), stored) for _ in range(2))
        for n, layer in enumerate(cache.tree_layers):
            layer.keys = torch.from_numpy(keys[n : n + 1]).view(dtype)
            layer.values = torch.from_numpy(values[n : n + 1]).view(dtype)
            layer.is_initialized = True
        cache._arrays = keys, values
        return cache

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of a cache `in_one_piece`, [layers, heads, capacity, width]: float32, uint16 with the
        bits of bfloat16, or int16 with those of float16."""
        assert self._arrays is not None
        return self._arrays

    @property
    def length(self) -> int:
        """Committed positions."""
        return self.tree_layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values."""
        if self.batch is not None:
            return self.batch.bytes_of(self)
        return sum(layer.nbytes for layer in self.tree_layers)

    @torch.inference_mode()
    def states(self, start: int, stop: int) -> States:
        """Copies of the keys and values of committed positions, for `restore`.

        Args:
            start: The first position.
            stop: One past the last.
        """
        if self.batch is not None:
            return self.batch.states(self, start, stop)
        if self._arrays is not None:
            keys, values = self._arrays
            return [(keys[:, :, start:stop].copy(), values[:, :, start:stop].copy())]
        copies: States = []
        for layer in self.tree_layers:
            if layer.keys is None or layer.values is None:
                copies.append(None)
            else:
                copies.append((layer.keys[:, :, start:stop].clone(), layer.values[:, :, start:stop].clone()))
        return copies

    @torch.inference_mode()
    def restore(self, blocks: Sequence[States]) -> None:
        """Fill an empty cache with copies of the first positions of another cache of the same model.

        Args:
            blocks: Copies made by `states`, of consecutive positions from 0 on.
        """
        assert self.length == 0
        for block in blocks:
            count = next(pair[0].shape[2] for pair in block if pair is not None)
            if self._arrays is not None:
                start = self.length
                for array, copied in zip(self._arrays, block[0] or (), strict=True):
                    array[:, :, start : start + count] = copied
            for n, layer in enumerate(self.tree_layers):
                pair = block[n] if self._arrays is None else None
                if pair is not None:
                    layer.update(*pair)
                layer.length += count

    def set_committed(self, length: int) -> None:
        """Treat the first `length` positions as committed, whatever they contain; for timing."""
        if self.batch is not None:
            self.batch.set_committed(self, length)
        for layer in self.tree_layers:
            layer.length = length

    def roll_back(self, length: int) -> None:
        """Drop committed positions.

        Args:
            length: How many of the first positions stay.

        Raises:
            ValueError: It has fewer positions.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"no roll back to {length} of {self.length} positions")
        if self.batch is not None:
            self.batch.roll_back(self, length)
        for layer in self.tree_layers:
            layer.length = length

    def show(self, positions: int | None) -> None:
        """Make the next passes attend over so many positions, whatever they contain; None: over those written."""
        for layer in self.tree_layers:
            layer.shown = positions

    @torch.inference_mode()
    def commit(self, rows: list[int]) -> None:
        """Commit positions of the last forward pass, in the given order; the others are dropped.

        Args:
            rows: Indexes into the pass's input.
        """
        if self.batch is not None:
            self.batch.commit(self, rows)
            for layer in self.tree_layers:
                layer.length += len(rows)
            return
        leading = rows == list(range(len(rows)))
        if self._arrays is not None:
            start, count = self.length, len(rows)
            if not leading:
                moved = np.array(rows) + start
                for array in self._arrays:
                    array[:, :, start : start + count] = array[:, :, moved]
            for layer in self.tree_layers:
                layer.length += count
            return
        for layer in self.tree_layers:
            if not layer.is_initialized:
                layer.length += len(rows)  # a layer that shares another's keys writes nothing of its own
                continue
            assert layer.keys is not None
            index = None if leading else torch.tensor(rows, device=layer.keys.device)
            layer.commit(index, len(rows))

    def release(self) -> None:
        """Free all memory at once; the sequence is decoded no further."""
        if self.batch is not None:
            self.batch.leave(self)
            self.batch = None
        self._arrays = None
        for layer in self.tree_layers:
            layer.drop()
            layer.length = 0
