"""The key/value cache of a batch of sequences, one in each row, for one padded forward pass of the model.

A layer's keys and values are [rows, heads, columns, width]. A `Layout` that all layers share says which sequence has
which row, and which of its positions is in which column; attention masks are made from it. A pass writes behind all
committed positions, so one that raises loses nothing. Two policies decide where a pass writes, and when committed
entries are moved:

offset: every row writes behind its own last position, a scatter. The next pass first moves committed entries together.
column: all rows write from one column on, a slice. Committed entries stay in place, and rows that committed fewer than
    others have holes. When the columns run out, all rows are moved together (a rearrangement); after that an entry is
    moved only when the cache grows.

A new allocation has a quarter more columns than the longest sequence, so an entry is copied a constant number of times
however long its sequence gets. Between all calls

    columns <= 1.25 * longest sequence + widest pass
    bytes <= (1.25 * longest sequence + widest pass) * sequences * bytes of a position
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from reader_rag.kv_cache.batch_layer import BatchLayer, Pass
from reader_rag.kv_cache.batch_layout import EMPTY, Layout, Moves, SequenceRef
from reader_rag.kv_cache.tree_cache import States, TreeCache, TreeLayer
from reader_rag.util.out_of_memory import is_out_of_memory

Policy = Literal["offset", "column"]

ROOM = 1.25
"""Most columns allocated for each position of the longest sequence."""
_TIGHT = 1.125
"""Columns allocated for each position after rows were freed, so that the next change need not move all rows again."""
_WORTH = 1 / 16
"""Share of the longest sequence: a rearrangement that leaves fewer free columns allocates more columns too."""
_OFFSET_FROM = 16
"""Fewest sequences for which writing by offset is as fast as by column, and moves fewer bytes: measured on a CPU, where
the cache and its attention take up to a seventh less by column in smaller batches (docs/batches.md)."""


def default_policy(sequences: int) -> Policy:
    """The policy for a batch of so many sequences."""
    return "offset" if sequences >= _OFFSET_FROM else "column"


class BatchCache(Cache):
    """Keys and values of a batch of sequences.

    Its sequences are `TreeCache`s. They join with their first common pass, and commit positions as they do alone.

    Args:
        layers: Number of layers.
        policy: "offset" or "column"; None: at every pass that of `default_policy`.

    Attributes:
        policy: The policy of the last pass; either can follow the other.
        rows: Rows allocated; those from `sequences` on are free.
        columns: Columns allocated.
        step: Width of the widest pass since the cache was last empty.
        now: The pass that is running, or None.
        bytes_moved: Bytes copied within the cache or into it: by joining, leaving, growing, committing and rearranging.
        rearrangements: How often all rows were rearranged (policy "column").
    """

    def __init__(self, layers: int, policy: Policy | None = None) -> None:
        self.policy: Policy = policy or default_policy(0)
        self._fixed_policy = policy
        self.rows = self.columns = self.step = 0
        self.now: Pass | None = None
        self.bytes_moved = self.rearrangements = 0
        self._layout = Layout.empty()
        self._left: list[SequenceRef] = []
        self._lock = threading.RLock()
        self.batch_layers = [BatchLayer(self, self._layout) for _ in range(layers)]
        super().__init__(layers=list(self.batch_layers))

    @property
    def sequences(self) -> int:
        """Sequences in the cache."""
        return len(self._layout.sequences)

    @property
    def longest(self) -> int:
        """Committed positions of the longest sequence."""
        return int(self._layout.lengths.max(initial=0))

    @property
    def most_columns(self) -> int:
        """Most columns that may be allocated for the current sequences."""
        return int(ROOM * self.longest) + self.step

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(layer.nbytes for layer in self.batch_layers)

    @property
    def positions(self) -> NDArray[np.int32]:
        """[sequences, columns], the position of what each column holds; -1: nothing that is committed."""
        entries = self._layout.entries
        return np.where(entries < 0, np.int32(EMPTY), entries)

    def row_of(self, sequence: TreeCache) -> int:
        """The row of a sequence."""
        return self._layout.sequences.index(weakref.ref(sequence))

    @contextmanager
    def pass_over(self, sequences: Sequence[TreeCache], rows: Sequence[int]) -> Iterator[Pass]:
        """Prepare a forward pass; what its sequences wrote in their last passes and did not commit is dropped.

        Sequences that are not in the cache join. Those without a part in the pass stay as they are.

        Args:
            sequences: The sequences of the pass, each once.
            rows: Rows of each; the pass is padded to the largest number.

        Raises:
            IndexError: A sequence exceeds the capacity of its `TreeCache`.
        """
        for sequence, count in zip(sequences, rows, strict=True):
            if sequence.length + count > sequence.capacity:
                raise IndexError(f"{sequence.length + count} positions do not fit a cache of {sequence.capacity}")
        with self._lock:
            self.now = self._begin(sequences, rows)
            try:
                yield self.now
            finally:
                self.now = None
                self._sweep()

    @torch.inference_mode()
    def _begin(self, sequences: Sequence[TreeCache], counts: Sequence[int]) -> Pass:
        self._sweep()
        refs, width = [weakref.ref(sequence) for sequence in sequences], max(counts)
        for layout in self._layouts:
            for ref in refs:
                layout.forget(ref)
        self.step = max(self.step, width)
        joining = [sequence for sequence, ref in zip(sequences, refs, strict=True) if ref not in self._layout.sequences]
        layout = self._layout
        if joining:
            layout = layout.joined(
                [weakref.ref(sequence) for sequence in joining], [sequence.length for sequence in joining]
            )
        for sequence in joining:
            sequence.batch = self
        self.policy = self._fixed_policy or default_policy(len(layout.sequences))
        rows = np.array([layout.sequences.index(ref) for ref in refs])
        self._make_room(layout, rows, width)
        layout = self._layout
        used = layout.used[rows]
        starts = used if self.policy == "offset" else np.full(len(rows), used.max())
        for row, start, count in zip(rows, starts, counts, strict=True):
            layout.entries[row, start : start + count] = -2 - np.arange(count)
        return Pass(layout, rows, starts, width)

    def _make_room(self, layout: Layout, rows: NDArray[np.int64], width: int) -> None:
        """Take a layout that these rows can write `width` columns in; it, or one without its holes."""
        used, counts, longest = layout.used, layout.counts, int(layout.lengths.max())
        most = int(ROOM * longest) + self.step
        joins = len(layout.sequences) > self.sequences
        room = self.columns if len(layout.sequences) <= self.rows else most
        packs = self._interrupted
        if self.policy == "offset":
            packs |= bool((used[rows] != counts[rows]).any())
        else:
            packs |= max(int(used[rows].max()) + width, int(used.max())) > room
            self.rearrangements += int(packs)
        used = counts if packs else used
        need = max(int(used[rows].max()) + width, int(used.max()))
        if packs and self.policy == "column":
            need += int(_WORTH * longest)
        if len(layout.sequences) > self.rows:
            self.rows, self.columns = len(layout.sequences), max(need, int(_TIGHT * longest) + self.step)
        elif need > self.columns or self._too_large(len(layout.sequences), most):
            self.rows, self.columns = len(layout.sequences), most
        elif not (packs or joins):
            return
        self._arrange(layout.packed() if packs else layout)

    def _too_large(self, sequences: int, most: int) -> bool:
        return self.columns > most or self.rows * self.columns > sequences * most

    @property
    def _interrupted(self) -> bool:
        """Whether an arrangement failed midway, so that the layers have different layouts."""
        return any(layer.layout is not self._layout for layer in self.batch_layers)

    @property
    def _layouts(self) -> list[Layout]:
        """The layouts of all layers: one, except after an arrangement that failed midway."""
        layouts = {id(layer.layout): layer.layout for layer in self.batch_layers}
        return list((layouts | {id(self._layout): self._layout}).values())

    def _arrange(self, layout: Layout) -> None:
        """Move all layers, one after the other, to a layout; what is allocated, to `rows` and `columns`."""
        assert layout.used.max() <= self.columns
        layout = layout.within(self.columns)
        sequences = [sequence() for sequence in layout.sequences]
        self._layout = layout  # from here on, so that one that fails is completed by the next
        moves: dict[int, Moves] = {}
        for n, layer in enumerate(self.batch_layers):
            old = layer.layout
            if id(old) not in moves:
                moves[id(old)] = Moves(old, layout)
            own = [sequence.tree_layers[n] if sequence is not None else TreeLayer(0) for sequence in sequences]
            self.bytes_moved += layer.arrange(moves[id(old)], own)

    @torch.inference_mode()
    def commit(self, sequence: TreeCache, rows: Sequence[int]) -> None:
        """Commit these rows of a sequence's last pass, in the given order. Nothing is moved yet."""
        with self._lock:
            for layout in self._layouts:
                layout.commit(weakref.ref(sequence), rows, sequence.length)

    @torch.inference_mode()
    def roll_back(self, sequence: TreeCache, length: int) -> None:
        """Drop committed positions of a sequence from this one on; their columns are written anew."""
        with self._lock:
            for layout in self._layouts:
                layout.roll_back(weakref.ref(sequence), length)

    def leave(self, sequence: TreeCache) -> None:
        """Free a sequence's row: at once, or at the end of the pass that another thread runs."""
        self._left.append(weakref.ref(sequence))
        if self._lock.acquire(blocking=False):
            try:
                if self.now is None:
                    self._sweep()
            finally:
                self._lock.release()

    @torch.inference_mode()
    def _sweep(self) -> None:
        """Free the rows of sequences that left or were garbage collected."""
        left = [self._left.pop() for _ in range(len(self._left))]
        gone = [sequence for sequence in self._layout.sequences if sequence in left or sequence() is None]
        if not gone:
            return
        layout = self._layout.without(gone)
        if not layout.sequences:
            self.rows = self.columns = self.step = 0
            self._layout = Layout.empty()
            for layer in self.batch_layers:
                layer.keys = layer.values = None
                layer.is_initialized = False
                layer.layout = self._layout
            return
        try:
            self._shrink(layout, int(layout.lengths.max()))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # No entry is lost; the next pass tries again.

    def _shrink(self, layout: Layout, longest: int) -> None:
        """Take a layout, and give back columns and rows where more is allocated than its longest sequence may have."""
        packs = self._interrupted
        if self._too_large(len(layout.sequences), int(ROOM * longest) + self.step):
            self.rows, self.columns = len(layout.sequences), min(self.columns, int(_TIGHT * longest) + self.step)
            packs |= int(layout.used.max()) > self.columns
        self.rearrangements += int(packs and self.policy == "column")
        self._arrange(layout.packed() if packs else layout)

    @torch.inference_mode()
    def set_committed(self, sequence: TreeCache, length: int) -> None:
        """Treat the first `length` columns of a sequence's row as its committed positions, whatever they contain."""
        with self._lock:
            row = self.row_of(sequence)
            for layout in self._layouts:
                if weakref.ref(sequence) in layout.sequences:
                    layout.entries[layout.sequences.index(weakref.ref(sequence))] = EMPTY
            longest = max(self.longest, length)
            if length > self.columns:
                self.rows, self.columns = self.sequences, int(ROOM * longest) + self.step
            self._shrink(self._layout, longest)
            self._layout.entries[row, :length] = np.arange(length)

    @torch.inference_mode()
    def states(self, sequence: TreeCache, start: int, stop: int) -> States:
        """Copies of the keys and values of committed positions `start` to `stop - 1` of a sequence."""
        with self._lock:
            return [layer.states_of(weakref.ref(sequence), start, stop) for layer in self.batch_layers]

    def bytes_of(self, sequence: TreeCache) -> int:
        """Bytes allocated for a sequence: an equal share."""
        return self.nbytes // max(self.sequences, 1)
