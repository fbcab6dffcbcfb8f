"""Part: documents as one sorted text, in memory or mapped from a file; what the search runs over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore import kernels
from reader_rag.datastore.token_codec import Width

_TABLE_PAYS = 8
"""A part of so many tokens for each of the vocabulary has a table of where the places of each token begin."""

NEVER = 0
"""A time that is not known."""


@dataclass(frozen=True, eq=False)
class Document:
    """A text as it is put in.

    Attributes:
        name: Unlike that of any other document of the namespace.
        stored: Its tokens in stored form, without separators.
        digest: Of the tokens, see `widths.digest`.
        added: When it was put in, in seconds since 1970.
        used: When it was last of use.
    """

    name: str
    stored: NDArray[Any]
    digest: int
    added: int
    used: int


class Names(Sequence[str]):
    """The names of a part's documents: bytes one after the other, and the order in which they can be searched.

    Args:
        text: uint8 [bytes], UTF-8.
        ends: uint32 [documents], where each name ends.
        order: int32 [documents], documents by their names' bytes.
    """

    def __init__(self, text: NDArray[np.uint8], ends: NDArray[np.uint32], order: NDArray[np.int32]) -> None:
        self.text, self.ends, self.order = text, ends, order

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Those of new documents."""
        encoded = [name.encode() for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        if len(ends) and ends[-1] >= 1 << 32:
            raise ValueError("the names of a part's documents take more than 4 GiB: give shorter names")
        order = np.array(sorted(range(len(encoded)), key=encoded.__getitem__), np.int32)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends.astype(np.uint32), order)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, k: Any) -> Any:
        return self._bytes(range(len(self))[k]).decode()

    def _bytes(self, k: int) -> bytes:
        return self.text[int(self.ends[k - 1]) if k else 0 : int(self.ends[k])].tobytes()

    def find(self, name: str) -> int:
        """The document of that name, or -1."""
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
class Part:
    """Documents, sorted. Never changed; which of them were removed is known elsewhere.

    Attributes:
        width: How tokens are stored.
        tokens: The stored text: a separator, then each document and a separator.
        places: int32, see `kernels`.
        firsts: int32 [vocabulary + 1], see `kernels.find_firsts`; empty in small parts.
        starts: uint32 [documents + 1], where each document begins; the last one: where the text ends.
        names: Of the documents.
        digests: uint64 [documents].
        added: uint32 [documents].
        used: uint32 [documents].
        file: The segment's file name; empty: in memory.
    """

    width: Width
    tokens: NDArray[Any]
    places: NDArray[np.int32]
    firsts: NDArray[np.int32]
    starts: NDArray[np.uint32]
    names: Names
    digests: NDArray[np.uint64]
    added: NDArray[np.uint32]
    used: NDArray[np.uint32]
    file: str = ""

    @property
    def size(self) -> int:
        """Tokens, separators included."""
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        """How many there are, the removed ones too."""
        return len(self.digests)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [documents], tokens of each."""
        return np.diff(self.starts).astype(np.int64) - 1

    def stored(self, k: int) -> NDArray[Any]:
        """The tokens of document `k`, stored; a view."""
        each = self.width.each
        return self.tokens[int(self.starts[k]) * each : (int(self.starts[k + 1]) - 1) * each]

    def document_at(self, position: int) -> int:
        """The document that a position lies in."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def document(self, k: int) -> Document:
        """Document `k` as it was put in."""
        stored = np.array(self.stored(k))
        return Document(self.names[k], stored, int(self.digests[k]), int(self.added[k]), int(self.used[k]))


def build_part(documents: Sequence[Document], width: Width, vocabulary: int) -> Part:
    """Sort documents.

    Raises:
        ValueError: They have 2**31 tokens or more.
    """
    separator = width.pack(np.array([width.separator], np.int64))
    runs = [separator]
    for document in documents:
        runs += [document.stored, separator]
    lengths = [len(document.stored) // width.each + 1 for document in documents]
    tokens = np.concatenate(runs)
    starts = np.cumsum([1, *lengths], dtype=np.int64)
    return _sorted(
        width,
        vocabulary,
        tokens,
        starts,
        Names.of(document.name for document in documents),
        np.array([document.digest for document in documents], np.uint64),
        np.array([document.added for document in documents], np.uint32),
        np.array([document.used for document in documents], np.uint32),
    )


def merge_parts(
    parts: Sequence[Part], kept: Sequence[NDArray[np.bool_]], vocabulary: int, used: Sequence[NDArray[np.uint32]]
) -> Part:
    """Those documents of several parts that are kept, as one part; in the order of the parts.

    One part alone is not sorted again: dropping documents leaves the order of the other places as it is.

    Args:
        parts: At least one.
        kept: For each part, bool [documents].
        vocabulary: Number of token ids.
        used: For each part, uint32 [documents], when each document was last of use.
    """
    width = parts[0].width
    runs = [width.pack(np.array([width.separator], np.int64))]
    for part, keep in zip(parts, kept, strict=True):
        # Neighbours that are kept are copied as one.
        edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]])))
        for first, last in edges.reshape(-1, 2):
            runs.append(part.tokens[int(part.starts[first]) * width.each : int(part.starts[last]) * width.each])
    tokens = np.concatenate(runs)
    lengths = [part.lengths[keep] + 1 for part, keep in zip(parts, kept, strict=True)]
    starts = np.cumsum(np.concatenate([np.ones(1, np.int64), *lengths]))
    tables = (
        Names.of(part.names[int(k)] for part, keep in zip(parts, kept, strict=True) for k in np.flatnonzero(keep)),
        np.concatenate([part.digests[keep] for part, keep in zip(parts, kept, strict=True)]),
        np.concatenate([part.added[keep] for part, keep in zip(parts, kept, strict=True)]),
        np.concatenate([times[keep] for times, keep in zip(used, kept, strict=True)]),
    )
    if len(parts) > 1:
        return _sorted(width, vocabulary, tokens, starts, *tables)
    (part,), (keep,) = parts, kept
    shifts = np.full(part.documents, -1, np.int64)
    shifts[keep] = part.starts[:-1][keep] - starts[:-1]
    places = np.empty(len(part.places), np.int32)
    number = kernels.keep_places(part.places, part.starts[:-1].astype(np.int64), shifts, places)
    return _sorted(width, vocabulary, tokens, starts, *tables, places=np.array(places[:number]))


def _sorted(
    width: Width,
    vocabulary: int,
    tokens: NDArray[Any],
    starts: NDArray[np.int64],
    names: Names,
    digests: NDArray[np.uint64],
    added: NDArray[np.uint32],
    used: NDArray[np.uint32],
    places: NDArray[np.int32] | None = None,
) -> Part:
    size = int(starts[-1])
    if size >= 1 << 31:
        raise ValueError(f"{size} tokens do not fit one part: keep it below 2**31")
    if places is None:
        places = width.sort(tokens)
    firsts = np.zeros(vocabulary + 1 if size >= _TABLE_PAYS * vocabulary else 0, np.int32)
    if len(firsts):
        kernels.find_firsts(tokens, size, width.separator, firsts)
    return Part(width, tokens, places, firsts, starts.astype(np.uint32), names, digests, added, used)
