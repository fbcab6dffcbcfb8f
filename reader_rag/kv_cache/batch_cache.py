"""The key/value cache of several texts, one a row, over which one padded forward pass runs.

A layer's keys and values are [rows, heads, columns, width]. Which text lies in which row, and which of its positions in
which column, is said by a layout that all layers share; masks are made of it. A pass writes behind all that is
committed, so one that raises loses nothing. Two policies where a pass writes, and when what it left is moved:

offset: every row writes behind its own last position, a scatter; before the next pass what was kept is moved together.
column: all rows write from one column on, a slice; what was kept stays where it is, and rows that kept less than others
    have holes. When the columns run out, all rows are moved together (a rearrangement); an entry is then never moved
    again but by growth.

Columns are allocated anew a quarter beyond the longest text, so that an entry is copied a constant number of times
however long its text gets. Of what is allocated holds, between all calls,

    columns <= 1.25 * longest text + widest pass
    bytes <= (1.25 * longest text + widest pass) * texts * bytes of a position
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from reader_rag.kv_cache.batch_layout import EMPTY, Layout, Moves, Text
from reader_rag.kv_cache.tree_cache import States, TreeCache, TreeLayer
from reader_rag.util.out_of_memory import is_out_of_memory

Policy = Literal["offset", "column"]

ROOM = 1.25
"""Columns that may be allocated to the longest text's positions; see the module's docstring."""
_TIGHT = 1.125
"""The same where rows have left, so that the next to leave or join need not move all of them again."""
_WORTH = 1 / 16
"""Of the longest text: a rearrangement that leaves fewer columns free than that grows the columns too."""
_OFFSET_FROM = 16
"""Texts from which on writing by offset is as fast as by column, for fewer bytes moved: measured on a CPU, where the
cache and its attention take up to a seventh less by column in smaller batches (docs/batches.md)."""


def default_policy(texts: int) -> Policy:
    """The policy for so many texts."""
    return "offset" if texts >= _OFFSET_FROM else "column"


class Pass:
    """One forward pass over some of a cache's texts, in the order of their rows.

    Attributes:
        order: Which of the texts asked for comes first, second, ...
        keys: int32 [texts, shown], the position of what each column holds; -1: nothing that may be seen.
        starts: int64 [texts], the column that each text's first row is written to.
        width: Rows of each text.
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
        """Write [texts, heads, width, size] into a layer's keys or values."""
        if self._shared and self._slice is not None:
            start = int(self.starts[0])
            states[self._slice, :, start : start + self.width] = new
            return
        rows, columns = self._indexes(states.device)
        states.transpose(1, 2)[rows[:, None], columns] = new.transpose(1, 2)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """The columns shown of a layer's keys or values, [texts, heads, shown, size]."""
        if self._slice is not None:
            return states[self._slice, :, : self.shown]
        return states[:, :, : self.shown].index_select(0, self._indexes(states.device)[0])

    def _indexes(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._on:
            columns = self.starts[:, None] + np.arange(self.width)
            self._on[device] = torch.from_numpy(self._rows).to(device), torch.from_numpy(columns).to(device)
        return self._on[device]


class BatchLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, columns, width]; rows behind those of the layout are free.

    Attributes:
        layout: Where their entries lie.
    """

    is_sliding = False

    def __init__(self, cache: BatchCache, layout: Layout) -> None:
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
            key_states: [texts, heads, width, size].
            value_states: [texts, heads, width, size].

        Returns:
            Keys and values, committed and new, [texts, heads, shown, size].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        now: Pass = self._cache.now
        keys, values = self._states
        now.write(keys, key_states)
        now.write(values, value_states)
        return now.read(keys), now.read(values)

    def arrange(self, moves: Moves, own: Sequence[TreeLayer]) -> int:
        """Move everything to where another layout has it, and take in what joins. One that raises changes nothing.

        Args:
            moves: From this layer's layout to the other.
            own: The layers that the new layout's texts have of their own, for those that join. They lose their tensors.

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

    def states_of(self, text: Text, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies [1, heads, stop - start, size] of a text's keys and values of those positions; None: it has none."""
        if not self.is_initialized:
            return None
        row = self.layout.texts.index(text)
        entries = self.layout.entries[row]
        (columns,) = np.nonzero((entries >= start) & (entries < stop))
        index = torch.from_numpy(columns[np.argsort(entries[columns])])
        keys, values = (states[row : row + 1].index_select(2, index.to(states.device)) for states in self._states)
        return keys, values

    @property
    def _states(self) -> list[torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return [self.keys, self.values]

    def _set(self, states: list[torch.Tensor]) -> None:
        self.keys, self.values = states
        self.is_initialized = True

    def _made(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: masked columns are multiplied by 0, and 0 * garbage may be NaN.
        return like.new_zeros(self._cache.rows, like.shape[1], self._cache.columns, like.shape[3])

    def get_seq_length(self) -> int:
        """Columns that the pass which has begun shows before its own."""
        now: Pass | None = self._cache.now
        return 0 if now is None else now.shown - now.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns seen by a pass of `query_length`, offset of the first)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Columns allocated."""
        return int(self._cache.columns)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(states.nbytes for states in self._states) if self.is_initialized else 0


def _tensors(layer: TreeLayer) -> list[torch.Tensor]:
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
    """Copy a text's own keys and values into a row [heads, columns, size] of each, and give them back; bytes moved."""
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


class BatchCache(Cache):
    """Keys and values of several texts.

    Its texts are `TreeCache`s, which join with their first common pass and say how much of it is kept as ever.

    Args:
        layers: Number of layers.
        policy: See the module's docstring; None: at every pass what `default_policy` says.

    Attributes:
        policy: The one in force; either goes on from what the other left.
        rows: Rows allocated; those behind `texts` are free.
        columns: Columns allocated.
        step: The widest pass since it was empty.
        now: The pass that has begun.
        bytes_moved: Bytes copied from one place to another: by joining, leaving, growing, committing and rearranging.
        rearrangements: How often all rows were rearranged (policy "column").
    """

    def __init__(self, layers: int, policy: Policy | None = None) -> None:
        self.policy: Policy = policy or default_policy(0)
        self._asked = policy
        self.rows = self.columns = self.step = 0
        self.now: Pass | None = None
        self.bytes_moved = self.rearrangements = 0
        self._layout = Layout.empty()
        self._left: list[Text] = []
        self._lock = threading.RLock()
        self.batch_layers = [BatchLayer(self, self._layout) for _ in range(layers)]
        super().__init__(layers=list(self.batch_layers))

    @property
    def texts(self) -> int:
        """Texts held."""
        return len(self._layout.texts)

    @property
    def longest(self) -> int:
        """Committed positions of the longest text."""
        return int(self._layout.lengths.max(initial=0))

    @property
    def most_columns(self) -> int:
        """Columns that may be allocated; see the module's docstring."""
        return int(ROOM * self.longest) + self.step

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values."""
        return sum(layer.nbytes for layer in self.batch_layers)

    @property
    def positions(self) -> NDArray[np.int32]:
        """[texts, columns], the position of what each column holds; -1: nothing that is committed."""
        entries = self._layout.entries
        return np.where(entries < 0, np.int32(EMPTY), entries)

    def row_of(self, text: TreeCache) -> int:
        """Where a text lies."""
        return self._layout.texts.index(weakref.ref(text))

    @contextmanager
    def pass_over(self, texts: Sequence[TreeCache], rows: Sequence[int]) -> Iterator[Pass]:
        """Prepare for a forward pass: what its texts' last passes wrote and did not keep is forgotten.

        Texts that are not here join. The others stay as they are, what they wrote and did not keep included.

        Args:
            texts: Each once.
            rows: Rows of each text's part, which is padded to the most of them.

        Raises:
            IndexError: A text grows beyond what its cache was made for.
        """
        for text, count in zip(texts, rows, strict=True):
            if text.length + count > text.capacity:
                raise IndexError(f"{text.length + count} positions do not fit a cache of {text.capacity}")
        with self._lock:
            self.now = self._begin(texts, rows)
            try:
                yield self.now
            finally:
                self.now = None
                self._sweep()

    @torch.inference_mode()
    def _begin(self, texts: Sequence[TreeCache], counts: Sequence[int]) -> Pass:
        self._sweep()
        refs, width = [weakref.ref(text) for text in texts], max(counts)
        for layout in self._layouts:
            for ref in refs:
                layout.forget(ref)
        self.step = max(self.step, width)
        joining = [text for text, ref in zip(texts, refs, strict=True) if ref not in self._layout.texts]
        layout = self._layout
        if joining:
            layout = layout.joined([weakref.ref(text) for text in joining], [text.length for text in joining])
        for text in joining:
            text.home = self
        self.policy = self._asked or default_policy(len(layout.texts))
        rows = np.array([layout.texts.index(ref) for ref in refs])
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
        joins = len(layout.texts) > self.texts
        room = self.columns if len(layout.texts) <= self.rows else most
        packs = self._torn
        if self.policy == "offset":
            packs |= bool((used[rows] != counts[rows]).any())
        else:
            packs |= max(int(used[rows].max()) + width, int(used.max())) > room
            self.rearrangements += int(packs)
        used = counts if packs else used
        need = max(int(used[rows].max()) + width, int(used.max()))
        if packs and self.policy == "column":
            need += int(_WORTH * longest)
        if len(layout.texts) > self.rows:
            self.rows, self.columns = len(layout.texts), max(need, int(_TIGHT * longest) + self.step)
        elif need > self.columns or self._too_large(len(layout.texts), most):
            self.rows, self.columns = len(layout.texts), most
        elif not (packs or joins):
            return
        self._arrange(layout.packed() if packs else layout)

    def _too_large(self, texts: int, most: int) -> bool:
        return self.columns > most or self.rows * self.columns > texts * most

    @property
    def _torn(self) -> bool:
        """Whether an arrangement failed on the way, so that layers lie differently."""
        return any(layer.layout is not self._layout for layer in self.batch_layers)

    @property
    def _layouts(self) -> list[Layout]:
        """All layouts that a layer lies in: one, but after an arrangement that failed."""
        layouts = {id(layer.layout): layer.layout for layer in self.batch_layers}
        return list((layouts | {id(self._layout): self._layout}).values())

    def _arrange(self, layout: Layout) -> None:
        """Move all layers, one after the other, to a layout; what is allocated, to `rows` and `columns`."""
        assert layout.used.max() <= self.columns
        layout = layout.within(self.columns)
        texts = [text() for text in layout.texts]
        self._layout = layout  # from here on, so that one that fails is completed by the next
        moves: dict[int, Moves] = {}
        for n, layer in enumerate(self.batch_layers):
            old = layer.layout
            if id(old) not in moves:
                moves[id(old)] = Moves(old, layout)
            own = [text.tree_layers[n] if text is not None else TreeLayer(0) for text in texts]
            self.bytes_moved += layer.arrange(moves[id(old)], own)

    @torch.inference_mode()
    def keep(self, text: TreeCache, rows: Sequence[int]) -> None:
        """Commit those rows of a text's last pass, in the given order. Nothing is moved yet."""
        with self._lock:
            for layout in self._layouts:
                layout.keep(weakref.ref(text), rows, text.length)

    def leave(self, text: TreeCache) -> None:
        """Give back a text's row; at once, or when the pass has ended that another thread runs."""
        self._left.append(weakref.ref(text))
        if self._lock.acquire(blocking=False):
            try:
                if self.now is None:
                    self._sweep()
            finally:
                self._lock.release()

    @torch.inference_mode()
    def _sweep(self) -> None:
        """Give back the rows of texts that have left, and of those that nobody holds any more."""
        left = [self._left.pop() for _ in range(len(self._left))]
        gone = [text for text in self._layout.texts if text in left or text() is None]
        if not gone:
            return
        layout = self._layout.without(gone)
        if not layout.texts:
            self.rows = self.columns = self.step = 0
            self._layout = Layout.empty()
            for layer in self.batch_layers:
                layer.keys = layer.values = None
                layer.is_initialized = False
                layer.layout = self._layout
            return
        try:
            self._tighten(layout, int(layout.lengths.max()))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # All still lies somewhere; the next pass tries again.

    def _tighten(self, layout: Layout, longest: int) -> None:
        """Take a layout, and give back columns and rows where more is allocated than its longest text may have."""
        packs = self._torn
        if self._too_large(len(layout.texts), int(ROOM * longest) + self.step):
            self.rows, self.columns = len(layout.texts), min(self.columns, int(_TIGHT * longest) + self.step)
            packs |= int(layout.used.max()) > self.columns
        self.rearrangements += int(packs and self.policy == "column")
        self._arrange(layout.packed() if packs else layout)

    @torch.inference_mode()
    def pretend(self, text: TreeCache, length: int) -> None:
        """Take the first `length` columns of a text's row for its committed positions, whatever they hold."""
        with self._lock:
            row = self.row_of(text)
            for layout in self._layouts:
                if weakref.ref(text) in layout.texts:
                    layout.entries[layout.texts.index(weakref.ref(text))] = EMPTY
            longest = max(self.longest, length)
            if length > self.columns:
                self.rows, self.columns = self.texts, int(ROOM * longest) + self.step
            self._tighten(self._layout, longest)
            self._layout.entries[row, :length] = np.arange(length)

    @torch.inference_mode()
    def states(self, text: TreeCache, start: int, stop: int) -> States:
        """See `TreeCache.states`."""
        with self._lock:
            return [layer.states_of(weakref.ref(text), start, stop) for layer in self.batch_layers]

    def bytes_of(self, text: TreeCache) -> int:
        """Bytes held for a text: its share."""
        return self.nbytes // max(self.texts, 1)
