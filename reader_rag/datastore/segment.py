"""Segment: immutable documents with their suffix array, in memory or mapped from a file; the unit of search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.kernels import suffix_array
from reader_rag.datastore.token_codec import TokenCodec

_BUCKETS_PAY = 8
"""A segment of so many tokens for each token id has a table of where each token's bucket begins."""


@dataclass(frozen=True, eq=False)
class Document:
    """A document as it is added.

    Attributes:
        name: Unique in its namespace.
        stored: Its tokens in stored form, without separators.
        digest: `token_digest` of its tokens.
        added_at: When it was added, in seconds since 1970.
        used_at: When a draft from it was last accepted, in seconds since 1970.
    """

    name: str
    stored: NDArray[Any]
    digest: int
    added_at: int
    used_at: int


class DocumentNames(Sequence[str]):
    """The names of a segment's documents, searchable without decoding them all.

    Args:
        text: uint8 [bytes], the names in UTF-8, one after the other.
        ends: uint32 [documents], where each name ends.
        order: int32 [documents], documents sorted by their names' bytes.
    """

    def __init__(self, text: NDArray[np.uint8], ends: NDArray[np.uint32], order: NDArray[np.int32]) -> None:
        self.text, self.ends, self.order = text, ends, order

    @classmethod
    def of(cls, names: Iterable[str]) -> DocumentNames:
        """Encode and sort names.

        Raises:
            ValueError: They take 4 GiB or more.
        """
        encoded = [name.encode() for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        if len(ends) and ends[-1] >= 1 << 32:
            raise ValueError("the names of a segment's documents take more than 4 GiB: give shorter names")
        order = np.array(sorted(range(len(encoded)), key=encoded.__getitem__), np.int32)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends.astype(np.uint32), order)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, k: Any) -> Any:
        return self._bytes(range(len(self))[k]).decode()

    def _bytes(self, k: int) -> bytes:
        return self.text[int(self.ends[k - 1]) if k else 0 : int(self.ends[k])].tobytes()

    def find(self, name: str) -> int:
        """Index of the document of that name, or -1."""
        wanted = name.encode()
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._bytes(int(self.order[middle])) < wanted:
                low = middle + 1
            else:
                high = middle
        k = int(self.order[low]) if low < len(self) else -1
        return k if k >= 0 and self._bytes(k) == wanted else -1


@dataclass(frozen=True, eq=False)
class Segment:
    """Documents and their suffix array. Immutable: tombstones are kept in `SegmentState`.

    Attributes:
        codec: How tokens are stored.
        tokens: The stored text: a separator, then each document and a separator.
        positions: int32 [entries], the suffix array; see `kernels.layout`.
        bucket_starts: int32 [vocabulary + 1], where in `positions` the entries behind each token begin; empty in small
            segments.
        starts: uint32 [documents + 1], where each document begins in the text; the last one: where the text ends.
        names: Names of the documents.
        digests: uint64 [documents].
        added_at: uint32 [documents], seconds since 1970.
        used_at: uint32 [documents], seconds since 1970; later uses are in `SegmentState`.
        file: File name; empty: in memory.
    """

    codec: TokenCodec
    tokens: NDArray[Any]
    positions: NDArray[np.int32]
    bucket_starts: NDArray[np.int32]
    starts: NDArray[np.uint32]
    names: DocumentNames
    digests: NDArray[np.uint64]
    added_at: NDArray[np.uint32]
    used_at: NDArray[np.uint32]
    file: str = ""

    @property
    def size(self) -> int:
        """Tokens, separators included."""
        return int(self.starts[-1])

    @property
    def document_count(self) -> int:
        """Documents, removed ones included."""
        return len(self.digests)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [documents], tokens of each."""
        return np.diff(self.starts).astype(np.int64) - 1

    def stored(self, k: int) -> NDArray[Any]:
        """The stored tokens of document `k`, not copied."""
        elements = self.codec.elements
        return self.tokens[int(self.starts[k]) * elements : (int(self.starts[k + 1]) - 1) * elements]

    def document_at(self, position: int) -> int:
        """Index of the document in which a position of the text lies."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1


def build_segment(documents: Iterable[Document], codec: TokenCodec, vocabulary: int) -> Segment:
    """Sort documents into a segment in memory.

    Args:
        documents: At least one.
        codec: Codec of their tokens.
        vocabulary: Number of token ids.

    Raises:
        ValueError: They have 2**31 tokens or more.
    """
    documents = list(documents)
    separator = codec.encode(np.array([codec.separator], np.int64))
    runs = [separator]
    for document in documents:
        runs += [document.stored, separator]
    lengths = [len(document.stored) // codec.elements + 1 for document in documents]
    return _sorted_segment(
        codec,
        vocabulary,
        np.concatenate(runs),
        starts=np.cumsum([1, *lengths], dtype=np.int64),
        names=DocumentNames.of(document.name for document in documents),
        digests=np.array([document.digest for document in documents], np.uint64),
        added_at=np.array([document.added_at for document in documents], np.uint32),
        used_at=np.array([document.used_at for document in documents], np.uint32),
    )


def merge_segments(
    segments: Sequence[Segment],
    kept: Sequence[NDArray[np.bool_]],
    used_at: Sequence[NDArray[np.uint32]],
    vocabulary: int,
) -> Segment:
    """Merge segments into one in memory, without the documents that are not kept.

    A single segment is not sorted again: without some documents the order of the other entries stays.

    Args:
        segments: At least one.
        kept: For each segment, bool [documents].
        used_at: For each segment, uint32 [documents], when each document was last used, in seconds since 1970.
        vocabulary: Number of token ids.

    Raises:
        ValueError: They have 2**31 tokens or more.
    """
    codec = segments[0].codec
    runs = [codec.encode(np.array([codec.separator], np.int64))]
    for segment, keep in zip(segments, kept, strict=True):
        # Adjacent documents are copied in one piece.
        edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]])))
        for first, last in edges.reshape(-1, 2):
            start, stop = int(segment.starts[first]), int(segment.starts[last])
            runs.append(segment.tokens[start * codec.elements : stop * codec.elements])
    pairs = list(zip(segments, kept, strict=True))
    lengths = [segment.lengths[keep] + 1 for segment, keep in pairs]
    starts = np.cumsum(np.concatenate([np.ones(1, np.int64), *lengths]))
    positions = None
    if len(segments) == 1:
        (segment,), (keep,) = segments, kept
        shifts = np.full(segment.document_count, -1, np.int64)
        shifts[keep] = segment.starts[:-1][keep] - starts[:-1]
        positions = np.empty(len(segment.positions), np.int32)
        number = suffix_array.keep_positions(segment.positions, segment.starts[:-1].astype(np.int64), shifts, positions)
        positions = np.array(positions[:number])
    return _sorted_segment(
        codec,
        vocabulary,
        np.concatenate(runs),
        positions,
        starts=starts,
        names=DocumentNames.of(segment.names[int(k)] for segment, keep in pairs for k in np.flatnonzero(keep)),
        digests=np.concatenate([segment.digests[keep] for segment, keep in pairs]),
        added_at=np.concatenate([segment.added_at[keep] for segment, keep in pairs]),
        used_at=np.concatenate([times[keep] for times, keep in zip(used_at, kept, strict=True)]),
    )


def _sorted_segment(
    codec: TokenCodec,
    vocabulary: int,
    tokens: NDArray[Any],
    positions: NDArray[np.int32] | None = None,
    *,
    starts: NDArray[np.int64],
    **tables: Any,
) -> Segment:
    """A segment of a text; its suffix array is computed unless `positions` is given."""
    size = int(starts[-1])
    if size >= 1 << 31:
        raise ValueError(f"{size} tokens do not fit one segment: keep it below 2**31")
    if positions is None:
        positions = codec.suffix_array(tokens)
    bucket_starts = np.zeros(vocabulary + 1 if size >= _BUCKETS_PAY * vocabulary else 0, np.int32)
    if len(bucket_starts):
        suffix_array.count_buckets(tokens, size, codec.separator, bucket_starts)
    return Segment(codec, tokens, positions, bucket_starts, starts.astype(np.uint32), **tables)
