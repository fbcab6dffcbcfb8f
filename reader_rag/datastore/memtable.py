"""Memtable: the documents since the last segment, searchable at once; and the state of a segment.

The memtable's documents are sorted in runs, small segments in memory. As in a binary counter, a new document is merged
with the runs before it that are not at least twice as large. So there are few runs, and a token is sorted a few times.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.manifest import SegmentEntry
from reader_rag.datastore.segment import Document, Segment, build_segment
from reader_rag.datastore.token_codec import Identity


class SegmentState:
    """A segment, the tombstones of its documents, and when they were last used.

    Args:
        segment: The segment.
        header_crc: CRC-32 of the segment's header; 0 in memory.
        tombstones: Removed documents whose removal is committed.

    Attributes:
        tombstones: Indices of removed documents.
        committed_tombstones: Those whose removal is committed.
        used_at: uint32 [documents], when each document was last used, in seconds since 1970.
        tombstones_since: When the first removal was committed, in seconds since 1970; None: there was none.
    """

    def __init__(self, segment: Segment, header_crc: int = 0, tombstones: Iterable[int] = ()) -> None:
        self.segment, self.header_crc = segment, header_crc
        self.tombstones = set(tombstones)
        self.committed_tombstones = set(self.tombstones)
        self.used_at: NDArray[np.uint32] = segment.used_at
        self.tombstones_since: float | None = 0.0 if self.tombstones else None

    def entry(self) -> SegmentEntry:
        """The committed state, as the manifest has it."""
        segment, tombstones = self.segment, tuple(sorted(map(int, self.committed_tombstones)))
        return SegmentEntry(segment.file, self.header_crc, segment.size, segment.document_count, tombstones)

    def find(self, name: str) -> int:
        """Index of the document of that name, or -1 if there is none or it was removed."""
        k = self.segment.names.find(name)
        return -1 if k in self.tombstones else k

    @property
    def kept(self) -> NDArray[np.bool_]:
        """bool [documents], which documents have no tombstone."""
        return self.without(self.tombstones)

    def without(self, documents: Iterable[int]) -> NDArray[np.bool_]:
        """bool [documents], all documents but the given ones."""
        kept = np.ones(self.segment.document_count, np.bool_)
        kept[list(documents)] = False
        return kept

    def tokens_of(self, documents: Iterable[int]) -> int:
        """Tokens of some documents, given by index."""
        chosen = np.fromiter(documents, np.int64)
        return int((self.segment.starts[chosen + 1] - self.segment.starts[chosen] - 1).sum())

    @property
    def tokens(self) -> int:
        """Tokens of the documents that have no tombstone."""
        return self.segment.size - 1 - self.segment.document_count - self.tokens_of(self.tombstones)

    def tombstone_ranges(self) -> NDArray[np.int64]:
        """int64 [tombstones, 2], where each removed document begins, and behind its separator; ascending."""
        removed = np.array(sorted(self.tombstones), np.int64)
        return np.stack([self.segment.starts[removed], self.segment.starts[removed + 1]], axis=1).astype(np.int64)

    def mark_used(self, k: int, time: int) -> None:
        """Record that document `k` was used at a time, in seconds since 1970."""
        if self.used_at is self.segment.used_at:
            self.used_at = np.array(self.segment.used_at)
        self.used_at[k] = max(int(self.used_at[k]), time)

    def inherit(self, state: SegmentState, kept: NDArray[np.bool_], used_at: NDArray[np.uint32], first: int) -> None:
        """Apply what happened to an input of a merge while it was merged into this segment.

        Args:
            state: The input, as it is now.
            kept: bool [documents of the input], the documents that were merged.
            used_at: uint32 [documents of the input], the last uses that were merged.
            first: Index of the input's first document in this segment.
        """
        indices = np.cumsum(kept) - 1 + first
        self.tombstones.update(int(indices[k]) for k in state.tombstones if kept[k])
        committed = {int(indices[k]) for k in state.committed_tombstones if kept[k]}
        self.committed_tombstones |= committed
        for k in np.flatnonzero(kept & (state.used_at != used_at)):
            self.mark_used(int(indices[k]), int(state.used_at[k]))
        if committed and state.tombstones_since is not None:
            since = self.tombstones_since
            self.tombstones_since = state.tombstones_since if since is None else min(since, state.tombstones_since)


class Memtable:
    """The documents since the last segment.

    Args:
        identity: Identity of the datastore.

    Attributes:
        documents: The documents by name.
        runs: The documents, sorted.
        tokens: Tokens of all documents, without separators.
    """

    def __init__(self, identity: Identity) -> None:
        self.documents: dict[str, Document] = {}
        self.runs: list[SegmentState] = []
        self.tokens = 0
        self._identity = identity

    def add(self, documents: Iterable[Document]) -> None:
        """Add documents; none of their names may be in the memtable."""
        new = list(documents)
        if not new:
            return
        codec = self._identity.codec
        self.documents.update((document.name, document) for document in new)
        size = sum(len(document.stored) for document in new) // codec.elements + len(new)
        self.tokens += size - len(new)
        while self.runs and self.runs[-1].segment.size < 2 * size:
            run = self.runs.pop()
            kept = (name for k, name in enumerate(run.segment.names) if k not in run.tombstones)
            new = [*(self.documents[name] for name in kept), *new]
            size += run.segment.size
        self.runs.append(SegmentState(build_segment(new, codec, self._identity.vocabulary)))

    def remove(self, name: str) -> bool:
        """Remove a document.

        Returns:
            False if there is none of that name.
        """
        document = self.documents.pop(name, None)
        if document is None:
            return False
        self.tokens -= len(document.stored) // self._identity.codec.elements
        for n, run in enumerate(self.runs):
            k = run.find(name)
            if k >= 0:
                run.tombstones.add(k)
                if len(run.tombstones) == run.segment.document_count:
                    del self.runs[n]
                break
        return True
