"""Searcher and Cursor: what one request may search of a datastore, and the end of its text that is searched for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.kernels import layout
from reader_rag.datastore.kernels.layout import MAX_MATCH
from reader_rag.datastore.kernels.search import STATE_ROWS, find_matches, find_range
from reader_rag.datastore.namespace import Namespace, Searchable
from reader_rag.datastore.token_codec import Identity


@dataclass(frozen=True)
class Source:
    """Where a match lies.

    Attributes:
        namespace: Namespace of the document.
        document: Name of the document.
        position: Index, in the document, of the token behind the match.
    """

    namespace: str
    document: str
    position: int


class Snapshot:
    """The segments of some namespaces at one moment, as the kernels take them. Immutable.

    Args:
        namespaces: The namespaces.
        identity: Identity of the datastore.

    Attributes:
        searchable: The segments, each with the ranges of its removed documents.
        table: The segments for the kernels, a tuple like `SegmentTable`; its addresses point into `searchable`.
    """

    def __init__(self, namespaces: Sequence[Namespace], identity: Identity) -> None:
        self.searchable: list[Searchable] = []
        self._owners: list[str] = []
        for namespace in namespaces:
            found = namespace.searchable()
            self.searchable += found
            self._owners += [namespace.manifest.namespace] * len(found)
        rows = np.zeros((len(self.searchable), layout.COLUMNS), np.int64)
        for row, (segment, removed) in zip(rows, self.searchable, strict=True):
            row[layout.TOKENS] = segment.tokens.ctypes.data
            row[layout.SIZE] = segment.size
            row[layout.POSITIONS] = segment.positions.ctypes.data
            row[layout.POSITION_COUNT] = len(segment.positions)
            row[layout.BUCKET_STARTS] = segment.bucket_starts.ctypes.data if len(segment.bucket_starts) else 0
            row[layout.VOCABULARY] = len(segment.bucket_starts) - 1
            row[layout.TOMBSTONES] = removed.ctypes.data
            row[layout.TOMBSTONE_COUNT] = len(removed)
        self.table = (rows, np.zeros(0, identity.codec.dtype), identity.codec.separator, identity.vocabulary)

    def __len__(self) -> int:
        return len(self.searchable)

    def source(self, k: int, position: int) -> Source:
        """The document at a position of the text of segment `k`."""
        segment = self.searchable[k][0]
        document = segment.document_at(position)
        return Source(self._owners[k], segment.names[document], position - int(segment.starts[document]))


class Searcher:
    """Searches the namespaces that one request may search. Each search reads their state at its time.

    Made by `Datastore.searcher`.

    Args:
        resolve: Returns the namespaces, and a number that changes when there are others.
        identity: Identity of the datastore.
    """

    def __init__(self, resolve: Callable[[], tuple[int, tuple[Namespace, ...]]], identity: Identity) -> None:
        self._resolve = resolve
        self._identity = identity
        self._snapshot: tuple[tuple[int, ...], Snapshot] | None = None

    def cursor(self, *, max_matches: int = 64, max_tokens: int = 24, min_match: int = 1) -> Cursor:
        """Begin to search for the end of a growing text.

        Args:
            max_matches: Most matches of one search.
            max_tokens: Most tokens that are read behind a match.
            min_match: Tokens that must match.

        Raises:
            ValueError: A number is below 1.
        """
        return Cursor(self, max_matches=max_matches, max_tokens=max_tokens, min_match=min_match)

    def occurrences(self, tokens: Sequence[int] | NDArray[np.integer]) -> list[Source]:
        """Find all occurrences of a run of tokens that another token follows. Slower than a cursor, and complete.

        Args:
            tokens: 1 to 64 token ids.

        Returns:
            The token behind each occurrence.

        Raises:
            ValueError: There are none, or more than 64.
        """
        query = np.array(tokens[::-1], np.int64)
        if not 1 <= len(query) <= MAX_MATCH:
            raise ValueError(f"occurrences are found of 1 to {MAX_MATCH} tokens, not of {len(query)}")
        snapshot = self.snapshot()
        state = np.zeros((STATE_ROWS, len(snapshot)), np.int64)
        found = []
        for k, (segment, removed) in enumerate(snapshot.searchable):
            start, stop = find_range(snapshot.table, k, query, state)
            positions = np.sort(segment.positions[start:stop].astype(np.int64))
            if len(removed):
                at = np.searchsorted(removed[:, 0], positions, side="right") - 1
                positions = positions[(at < 0) | (positions >= removed[np.maximum(at, 0), 1])]
            found += [snapshot.source(k, position) for position in positions.tolist()]
        return found

    def count(self, tokens: Sequence[int] | NDArray[np.integer]) -> int:
        """The number of `occurrences`.

        Args:
            tokens: 1 to 64 token ids.

        Raises:
            ValueError: There are none, or more than 64.
        """
        return len(self.occurrences(tokens))

    def snapshot(self) -> Snapshot:
        """The state that a search reads now."""
        number, namespaces = self._resolve()
        key = (number, *[namespace.version for namespace in namespaces])
        cached = self._snapshot
        if cached is None or cached[0] != key:
            # A change between the key and the snapshot shows in this snapshot, and makes the next key another.
            self._snapshot = cached = (key, Snapshot(namespaces, self._identity))
        return cached[1]


class Cursor:
    """Finds the positions whose preceding tokens match the end of one request's text.

    Only the last tokens are kept between searches: a search takes the same time whether the match goes on or breaks.

    Example:
        >>> cursor = store.searcher([""]).cursor()
        >>> cursor.extend(prompt)
        >>> cursor.search()
        3
        >>> cursor.matches  # where each match's tokens begin in `continuations`, and its length
        array([[ 0, 25, 50],
               [12,  4,  4]], dtype=int32)

    Args:
        searcher: What is searched.
        max_matches: Most matches of one search.
        max_tokens: Most tokens that are read behind a match.
        min_match: Tokens that must match.

    Attributes:
        continuations: int32 [max_matches * (max_tokens + 1)], for each match the tokens behind it and -1.
        all_matches: int32 [2, max_matches], `matches` and unused columns.
        found: Number of matches of the last search.
        longest_match: Length of its longest match, at most 64.
        longest_match_count: Occurrences of the longest match, of which `matches` may be a sample.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(self, searcher: Searcher, *, max_matches: int, max_tokens: int, min_match: int) -> None:
        if min(max_matches, max_tokens, min_match) < 1:
            raise ValueError(
                f"max_matches, max_tokens and min_match must be at least 1: {max_matches}, {max_tokens}, {min_match}"
            )
        self._searcher, self._max_tokens, self._min_match = searcher, max_tokens, min_match
        self._context = np.full(MAX_MATCH, -1, np.int32)
        self._state = np.zeros((STATE_ROWS, 8), np.int64)
        self._snapshot: Snapshot | None = None
        self.continuations = np.full(max_matches * (max_tokens + 1), -1, np.int32)
        self.all_matches = np.zeros((2, max_matches), np.int32)
        self._origins = np.zeros((2, max_matches), np.int64)
        self._buffers = (self.continuations, self.all_matches, self._origins)
        self.found = self.longest_match = self.longest_match_count = 0

    def extend(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append tokens to the request's text.

        Args:
            tokens: Token ids; the last 64 of the text count.
        """
        new = np.asarray(tokens[-MAX_MATCH:])
        count = len(new)
        if count:
            self._context[: MAX_MATCH - count] = self._context[count:]
            self._context[MAX_MATCH - count :] = new

    def search(self) -> int:
        """Find matches: all of the longest length, then of shorter ones, up to `max_matches`.

        Of a length whose matches do not all fit there is an evenly spread sample.

        Returns:
            The number of matches.
        """
        self._snapshot = snapshot = self._searcher.snapshot()
        if self._state.shape[1] < len(snapshot):
            self._state = np.zeros((STATE_ROWS, 2 * len(snapshot)), np.int64)
        self.found, self.longest_match, self.longest_match_count = find_matches(
            snapshot.table, self._context, self._min_match, self._max_tokens, self._state, self._buffers
        )
        return self.found

    @property
    def matches(self) -> NDArray[np.int32]:
        """int32 [2, found], where each match's tokens begin in `continuations`, and its length; the longest first."""
        return self.all_matches[:, : self.found]

    def source_of(self, k: int) -> Source:
        """The document in which match `k` lies.

        Raises:
            IndexError: There is no such match.
        """
        if self._snapshot is None or not 0 <= k < self.found:
            raise IndexError(f"no match {k} among {self.found}")
        return self._snapshot.source(int(self._origins[0, k]), int(self._origins[1, k]))
