"""View and Cursor: what one request sees of a datastore, and its place in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore import kernels
from reader_rag.datastore.namespace import Namespace
from reader_rag.datastore.part import Part
from reader_rag.datastore.segment import Identity


@dataclass(frozen=True)
class Source:
    """Where a place lies.

    Attributes:
        namespace: Of the document.
        document: Its name.
        position: Index of the place's next token in the document.
    """

    namespace: str
    document: str
    position: int


class _Table:
    """All parts of a view, as the kernels take them; keeps what their addresses point to."""

    def __init__(self, namespaces: Sequence[Namespace], identity: Identity) -> None:
        self.parts: list[Part] = []
        self.owners: list[str] = []
        self._ranges: list[NDArray[np.int64]] = []
        for namespace in namespaces:
            for part, ranges in namespace.snapshot():
                self.parts.append(part)
                self.owners.append(namespace.manifest.namespace)
                self._ranges.append(ranges)
        self.count = len(self.parts)
        self.rows = np.zeros((max(self.count, 1), kernels.COLUMNS), np.int64)
        for row, part, ranges in zip(self.rows, self.parts, self._ranges, strict=False):
            row[kernels.TOKENS] = part.tokens.ctypes.data
            row[kernels.SIZE] = part.size
            row[kernels.PLACES] = part.places.ctypes.data
            row[kernels.COUNT] = len(part.places)
            row[kernels.FIRSTS] = part.firsts.ctypes.data if len(part.firsts) else 0
            row[kernels.VOCABULARY] = len(part.firsts) - 1
            row[kernels.DEAD] = ranges.ctypes.data
            row[kernels.DEAD_COUNT] = len(ranges)
        self.like = np.zeros(0, identity.width.dtype)

    def source(self, part: int, position: int) -> Source:
        held = self.parts[part]
        k = held.document_at(position)
        return Source(self.owners[part], held.names[k], position - int(held.starts[k]))


class View:
    """The namespaces that one request may see, as they are now: changes show in the next search.

    Made by `Datastore.view`; searched through cursors.

    Args:
        resolve: Gives the namespaces, and a number that changes when there are others.
        identity: Of the datastore.
    """

    def __init__(self, resolve: Callable[[], tuple[int, tuple[Namespace, ...]]], identity: Identity) -> None:
        self._resolve = resolve
        self._identity = identity
        self._held: tuple[tuple[int, ...], _Table] | None = None

    @property
    def separator(self) -> int:
        """What stands between documents."""
        return self._identity.width.separator

    def cursor(self, *, most: int = 64, reach: int = 24, least: int = 1) -> Cursor:
        """A place in the view for one request; see `Cursor`."""
        return Cursor(self, most=most, reach=reach, least=least)

    def occurrences(self, tokens: Sequence[int] | NDArray[np.integer]) -> list[Source]:
        """All places behind a run of tokens that another token follows; slower than a cursor, and complete.

        Args:
            tokens: 1 to 64 token ids.

        Raises:
            ValueError: There are none, or more.
        """
        wanted = np.array(tokens, np.int64)
        if not 1 <= len(wanted) <= kernels.LONGEST:
            raise ValueError(f"occurrences are found of 1 to {kernels.LONGEST} tokens, not of {len(wanted)}")
        table = self.table()
        state = np.zeros((kernels.STATE_ROWS, 1), np.int64)
        found = []
        for k, (part, ranges) in enumerate(zip(table.parts, table._ranges, strict=True)):
            start, stop = kernels.find_range(
                table.rows[k], table.like, wanted[::-1].copy(), self._identity.width.separator, state
            )
            positions = np.sort(part.places[start:stop].astype(np.int64))
            at = np.searchsorted(ranges[:, 0], positions, side="right") - 1
            dead = (at >= 0) & (positions < ranges[np.maximum(at, 0), 1]) if len(ranges) else np.zeros(len(at), bool)
            found += [table.source(k, position) for position in positions[~dead].tolist()]
        return found

    def count(self, tokens: Sequence[int] | NDArray[np.integer]) -> int:
        """How many `occurrences` there are."""
        return len(self.occurrences(tokens))

    def table(self) -> _Table:
        """What is searched now."""
        number, namespaces = self._resolve()
        key = (number, *[namespace.version for namespace in namespaces])
        held = self._held
        if held is None or held[0] != key:
            # Changes after the key was made show in the next search.
            self._held = held = (key, _Table(namespaces, self._identity))
        return held[1]


class Cursor:
    """The end of one request's text, and the places of a view whose preceding tokens equal it.

    Nothing is kept from step to step but the last tokens: a search takes the same time whether the match goes on or
    breaks.

    Example:
        >>> cursor = store.view([""]).cursor()
        >>> cursor.extend(prompt)
        >>> cursor.collect()
        3
        >>> cursor.places       # where each continuation begins in `tokens`, and its match length
        array([[ 0, 25, 50],
               [12,  4,  4]], dtype=int32)

    Args:
        view: What is searched.
        most: Most places.
        reach: Most tokens behind a place.
        least: Shortest match.

    Attributes:
        tokens: int32 [most * (reach + 1)], behind each other: for each place up to `reach` tokens and -1.
        all_places: int32 [2, most]; see `places`.
        found: Places found last.
        longest: Length of the longest match, at most 64.
        matches: Occurrences of the longest match, of which `places` may have a sample.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(self, view: View, *, most: int = 64, reach: int = 24, least: int = 1) -> None:
        if min(most, reach, least) < 1:
            raise ValueError(f"most, reach and least must be at least 1: {most}, {reach}, {least}")
        self._view, self._reach, self._least = view, reach, least
        self._separator = view.separator
        self._last = np.full(kernels.LONGEST, -1, np.int32)
        self._state = np.zeros((kernels.STATE_ROWS, 8), np.int64)
        self._origins = np.zeros((2, most), np.int64)
        self._table: _Table | None = None
        self.tokens = np.full(most * (reach + 1), -1, np.int32)
        self.all_places = np.zeros((2, most), np.int32)
        self.found = self.longest = self.matches = 0

    def extend(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Follow tokens of the request's text; of a prompt, only the last 64 count."""
        new = np.asarray(tokens[-kernels.LONGEST :])
        count = len(new)
        if count:
            self._last[: kernels.LONGEST - count] = self._last[count:]
            self._last[kernels.LONGEST - count :] = new

    def collect(self) -> int:
        """Find the places: those of the longest match, then of shorter ones while there is room.

        Of a length whose places do not all find room there is a sample, evenly spread.

        Returns:
            The number of places.
        """
        table = self._view.table()
        self._table = table
        if self._state.shape[1] < table.count:
            self._state = np.zeros((kernels.STATE_ROWS, 2 * table.count), np.int64)
        self.found, self.longest, self.matches = kernels.collect(
            table.rows,
            table.count,
            table.like,
            self._last,
            kernels.LONGEST,
            self._least,
            self._reach,
            self._separator,
            self._state,
            self.tokens,
            self.all_places,
            self._origins,
        )
        return self.found

    @property
    def places(self) -> NDArray[np.int32]:
        """int32 [2, found], where each continuation begins in `tokens` and its match length, the longest first."""
        return self.all_places[:, : self.found]

    def document_of(self, k: int) -> Source:
        """Which document place `k` lies in.

        Raises:
            IndexError: There is no such place.
        """
        if self._table is None or not 0 <= k < self.found:
            raise IndexError(f"no place {k} among {self.found}")
        return self._table.source(int(self._origins[0, k]), int(self._origins[1, k]))
