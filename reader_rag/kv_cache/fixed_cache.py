"""The key/value cache of the fixed step: buffers that stay where they are, one row for each sequence.

A layer's keys and values are [rows, heads, columns + 1, width]. Position n of a sequence is in column n of its row, and
a pass writes its positions behind the committed ones. Which row, which columns and what of the last pass is committed
are contents of tensors, so that a recorded pass can be replayed for other sequences. The last column is a scratch
column: what belongs to no sequence is written there, and nothing reads it.

Rows and columns are powers of two. They change only when a sequence joins that does not fit; then the buffers are
allocated anew, and `generation` changes, since what was recorded refers to the old ones:

    bytes = rows * (columns + 1) * bytes of a position

While buffers are exchanged, the old ones are there too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from reader_rag.kv_cache.tree_cache import States, TreeCache


class Slots(NamedTuple):
    """Where the running pass writes, and what it attends to.

    Attributes:
        rows: int64 [sequences, 1], the row of each sequence.
        columns: int64 [sequences, width], the column of each of its positions.
        first: The first of the rows, which lie side by side.
        shown: Columns attended to, from the first on.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    first: int
    shown: int


class Placement(Protocol):
    """What all layers of the cache have in common.

    Attributes:
        slots: Of the running pass; None: none runs.
    """

    slots: Slots | None


class FixedLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, columns + 1, width]; allocated by `FixedCache`."""

    is_sliding = False

    def __init__(self, cache: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.proxy(cache)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: sequences bring keys and values of every layer that has some."""

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """Keys and values; empty for a layer that holds none of its own."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what the running pass computed.

        Args:
            key_states: [sequences, heads, width, size].
            value_states: [sequences, heads, width, size].

        Returns:
            Keys and values of the pass's sequences, [sequences, heads, shown, size].
        """
        slots = self._cache.slots
        rows = slice(slots.first, slots.first + key_states.shape[0])
        for states, new in zip(self.states, (key_states, value_states), strict=True):
            states.transpose(1, 2)[slots.rows, slots.columns] = new.transpose(1, 2)
        keys, values = self.states
        return keys[rows, :, : slots.shown], values[rows, :, : slots.shown]

    def get_seq_length(self) -> int:
        """Columns that the running pass attends to: a number of its shape, whatever the sequences' lengths."""
        slots = self._cache.slots
        return 0 if slots is None else int(slots.shown - slots.columns.shape[1])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns seen by a pass of `query_length`, offset of the first)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Columns allocated, the scratch column not counted."""
        return 0 if self.keys is None else self.keys.shape[2] - 1


class FixedCache(Cache):
    """Keys and values of sequences that are decoded by the fixed step.

    Sequences are `TreeCache`s. One joins with its first fixed step; `give_back` moves it to its own layers again.

    Args:
        layers: Number of layers.
        max_bytes: Most bytes of the buffers; None: as many as the sequences need.

    Attributes:
        rows: Rows allocated.
        columns: Columns allocated, without the scratch column.
        generation: How often buffers were allocated.
        slots: Of the running pass; None: none runs.
        lock: Held during a pass.
    """

    def __init__(self, layers: int, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.rows = self.columns = self.generation = 0
        self.slots: Slots | None = None
        self.lock = threading.RLock()
        self._members: list[weakref.ref[TreeCache] | None] = []
        self._moves: dict[int, list[tuple[int, int]]] = {}
        self.fixed_layers = [FixedLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.fixed_layers))

    @property
    def sequences(self) -> int:
        """Sequences in the cache."""
        return sum(self._member(row) is not None for row in range(self.rows))

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(states.nbytes for layer in self.fixed_layers for states in layer.states)

    def _member(self, row: int) -> TreeCache | None:
        ref = self._members[row]
        return None if ref is None else ref()

    def row_of(self, sequence: TreeCache) -> int | None:
        """The row of a sequence; None: it is not in the cache."""
        return next((row for row in range(self.rows) if self._member(row) is sequence), None)

    def join(self, sequences: Sequence[TreeCache], width: int) -> list[int] | None:
        """The rows of sequences, which join if they are not in the cache; rows are kept together at the front.

        Args:
            sequences: Each once.
            width: Positions behind the committed ones that a pass may write, at most.

        Returns:
            A row for each; None: they do not fit into `max_bytes`, and nothing has changed.
        """
        with self.lock:
            joining = [sequence for sequence in sequences if self.row_of(sequence) is None]
            if joining and not self._make_room(joining, width):
                return None
            for sequence in joining:
                self._take(sequence, next(row for row in range(self.rows) if self._member(row) is None))
            self._close_gaps()
            rows = [self.row_of(sequence) for sequence in sequences]
            return [row for row in rows if row is not None]

    def _make_room(self, joining: Sequence[TreeCache], width: int) -> bool:
        """Allocate for sequences that join; False if that needs more than `max_bytes`."""
        members = [member for row in range(self.rows) if (member := self._member(row)) is not None]
        needed_rows = power_of_two(len(members) + len(joining))
        needed = power_of_two(max(sequence.capacity for sequence in (*members, *joining)) + width)
        if needed_rows <= self.rows and needed <= self.columns:
            return True
        pairs = self._pairs_of(joining[0])
        each = sum(_position_bytes(pair) for pair in pairs if pair is not None)
        rows, columns = max(needed_rows, self.rows), max(needed, self.columns)
        if self.max_bytes is not None and rows * (columns + 1) * each > self.max_bytes:
            rows, columns = needed_rows, needed
            if rows * (columns + 1) * each > self.max_bytes:
                return False
        self._allocate(pairs, members, rows, columns)
        return True

    def _allocate(self, like: States, members: Sequence[TreeCache], rows: int, columns: int) -> None:
        """Move the members to new buffers, in order. All is allocated before anything is changed."""
        kept = []
        for member in members:
            row = self.row_of(member)
            assert row is not None
            self._apply_moves(row)
            kept.append(row)
        made = [None if pair is None else _zeros(pair, rows, columns) for pair in like]
        shared = min(self.columns, columns)
        for layer, pair in zip(self.fixed_layers, made, strict=True):
            if pair is None:
                continue
            for source, target in zip(layer.states, pair, strict=bool(layer.states)):
                for to, row in enumerate(kept):
                    target[to, :, :shared] = source[row, :, :shared]
            layer.keys, layer.values = pair
            layer.is_initialized = True
        self.rows, self.columns = rows, columns
        self._members = [*map(weakref.ref, members), *[None] * (rows - len(members))]
        self._moves.clear()
        self.generation += 1

    def _pairs_of(self, sequence: TreeCache) -> States:
        """Keys and values of a sequence that is not in this cache, [1, heads, positions, width]."""
        if sequence.batch is not None:
            return sequence.states(0, sequence.length)
        return [
            None if layer.keys is None or layer.values is None else (layer.keys, layer.values)
            for layer in sequence.tree_layers
        ]

    @torch.inference_mode()
    def _take(self, sequence: TreeCache, row: int) -> None:
        length = sequence.length
        for layer, pair in zip(self.fixed_layers, self._pairs_of(sequence), strict=True):
            for states, own in zip(layer.states, pair or (), strict=True):
                states[row, :, :length] = own[0, :, :length]
                states[row, :, length:] = 0  # nothing of who was here before, not even times 0
        if sequence.batch is not None:
            sequence.batch.leave(sequence)
        for tree_layer in sequence.tree_layers:
            tree_layer.drop()
        self._members[row] = weakref.ref(sequence)
        self._moves.pop(row, None)
        sequence.batch = self

    @torch.inference_mode()
    def _close_gaps(self) -> None:
        """Move sequences into free rows before them where that halves the rows of a pass."""
        taken = [row for row in range(self.rows) if self._member(row) is not None]
        while taken and taken[-1] >= power_of_two(len(taken)):
            row = taken.pop()
            free = next(other for other in range(row) if self._member(other) is None)
            member = self._member(row)
            assert member is not None
            self._apply_moves(row)
            for layer in self.fixed_layers:
                for states in layer.states:
                    states[free] = states[row]
            self._members[free], self._members[row] = self._members[row], None
            self._moves.pop(free, None)
            taken = sorted([*taken, free])

    def moves_of(self, row: int) -> list[tuple[int, int]]:
        """What of the last pass is committed but not moved yet: (from column, to column), for the next pass."""
        return self._moves.get(row, [])

    def moved(self, rows: Sequence[int]) -> None:
        """Note that a pass has made the moves of these rows."""
        for row in rows:
            self._moves.pop(row, None)

    def read(self, rows: torch.Tensor, columns: torch.Tensor) -> list[torch.Tensor]:
        """Copies of columns of all layers.

        Args:
            rows: int64 [sequences, 1].
            columns: int64 [sequences, n].
        """
        return [view[rows, columns] for view in self._views()]

    def write(self, rows: torch.Tensor, columns: torch.Tensor, entries: Sequence[torch.Tensor]) -> None:
        """Overwrite columns of all layers.

        Args:
            rows: int64 [sequences, 1].
            columns: int64 [sequences, n].
            entries: What `read` returned.
        """
        for view, entry in zip(self._views(), entries, strict=True):
            view[rows, columns] = entry

    def _views(self) -> list[torch.Tensor]:
        """Keys and values of all layers, [rows, columns + 1, heads, width]."""
        return [states.transpose(1, 2) for layer in self.fixed_layers for states in layer.states]

    @torch.inference_mode()
    def _apply_moves(self, row: int) -> None:
        moves = self._moves.pop(row, None)
        if not moves:
            return
        device = next(layer.states[0].device for layer in self.fixed_layers if layer.states)
        sources, targets = (torch.tensor([column], device=device) for column in zip(*moves, strict=True))
        rows = torch.tensor([[row]], device=device)
        self.write(rows, targets, self.read(rows, sources))

    # -- the sequences' side --

    def commit(self, sequence: TreeCache, rows: Sequence[int]) -> None:
        """Commit these positions of the sequence's last pass, in order; the next pass moves them."""
        with self.lock:
            row = self.row_of(sequence)
            assert row is not None
            self._apply_moves(row)
            start = sequence.length
            moves = [(start + index, start + n) for n, index in enumerate(rows) if index != n]
            if moves:
                self._moves[row] = moves

    def leave(self, sequence: TreeCache) -> None:
        """Free a sequence's row, while a pass runs too: nothing else reads that row."""
        row = self.row_of(sequence)
        if row is not None:
            self._members[row] = None

    def give_back(self, sequence: TreeCache) -> None:
        """Move a sequence's keys and values to its own layers; where that fails, they stay here."""
        with self.lock:
            length = sequence.length
            states = self.states(sequence, 0, length)
            sequence.batch = None
            sequence.set_committed(0)
            try:
                sequence.restore([states])
            except BaseException:
                for layer in sequence.tree_layers:
                    layer.drop()
                sequence.set_committed(length)
                sequence.batch = self
                raise
            self.leave(sequence)

    def set_committed(self, sequence: TreeCache, length: int) -> None:
        """Treat the first `length` positions of a sequence as committed, whatever they contain."""
        with self.lock:
            row = self.row_of(sequence)
            assert row is not None
            self._moves.pop(row, None)

    def roll_back(self, sequence: TreeCache, length: int) -> None:
        """Drop committed positions of a sequence from this one on; those that stay are moved into place."""
        with self.lock:
            row = self.row_of(sequence)
            assert row is not None
            self._apply_moves(row)

    @torch.inference_mode()
    def states(self, sequence: TreeCache, start: int, stop: int) -> States:
        """Copies of the keys and values of committed positions `start` to `stop - 1` of a sequence."""
        with self.lock:
            row = self.row_of(sequence)
            assert row is not None
            self._apply_moves(row)
            copies: States = []
            for layer in self.fixed_layers:
                pair = [states[row : row + 1, :, start:stop].clone() for states in layer.states]
                copies.append((pair[0], pair[1]) if pair else None)
            return copies

    def bytes_of(self, sequence: TreeCache) -> int:
        """Bytes allocated for a sequence: an equal share."""
        return self.nbytes // max(self.sequences, 1)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def _zeros(pair: tuple[Any, Any], rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with a scratch column, of the types and widths of a pair [any, heads, any, width].

    Zeros, not empty: masked columns are multiplied by 0, and 0 * garbage may be NaN.
    """
    keys, values = (like.new_zeros(rows, like.shape[1], columns + 1, like.shape[3]) for like in pair)
    return keys, values


def _position_bytes(pair: tuple[Any, Any]) -> int:
    return sum(int(states.shape[1] * states.shape[3] * states.element_size()) for states in pair)
