"""Live: the documents since the last segment, searchable at once.

They are sorted in parts whose sizes halve, as in a binary counter: a document becomes a part, together with those
before it that are not at least twice as large. So there are few parts, and a token is sorted a few times.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.part import Document, Part, build_part
from reader_rag.datastore.segment import Identity


class Held:
    """A part, and which of its documents were removed.

    Attributes:
        part: The documents.
        crc: Of the segment's header.
        dead: Removed documents.
        settled: Those whose removal is committed.
        used: When each document was last of use.
        dead_since: When the first removal was committed; None: none was.
    """

    def __init__(self, part: Part, crc: int = 0, dead: Iterable[int] = ()) -> None:
        self.part, self.crc = part, crc
        self.dead = set(dead)
        self.settled = set(self.dead)
        self.used: NDArray[np.uint32] = part.used
        self.dead_since: float | None = 0.0 if self.dead else None

    def find(self, name: str) -> int:
        """The document of that name that was not removed, or -1."""
        k = self.part.names.find(name)
        return -1 if k in self.dead else k

    @property
    def kept(self) -> NDArray[np.bool_]:
        """bool [documents], which were not removed."""
        kept = np.ones(self.part.documents, np.bool_)
        kept[list(self.dead)] = False
        return kept

    def tokens_of(self, documents: Iterable[int]) -> int:
        """Tokens of some documents."""
        chosen = np.fromiter(documents, np.int64)
        return int((self.part.starts[chosen + 1] - self.part.starts[chosen] - 1).sum())

    @property
    def alive(self) -> int:
        """Tokens that were not removed."""
        return self.part.size - 1 - self.part.documents - self.tokens_of(self.dead)

    def dead_ranges(self) -> NDArray[np.int64]:
        """int64 [removed documents, 2], positions from and to, rising."""
        dead = np.array(sorted(self.dead), np.int64)
        return np.stack([self.part.starts[dead], self.part.starts[dead + 1]], axis=1).astype(np.int64)

    def use(self, k: int, time: int) -> None:
        """Note that document `k` was of use."""
        if self.used is self.part.used:
            self.used = np.array(self.part.used)
        self.used[k] = max(int(self.used[k]), time)


class Live:
    """The documents since the last segment.

    Args:
        identity: Of the datastore.
    """

    def __init__(self, identity: Identity) -> None:
        self.documents: dict[str, Document] = {}
        self.parts: list[Held] = []
        self.tokens = 0
        self._identity = identity

    def put(self, documents: Iterable[Document]) -> None:
        """Add documents of names that are not there."""
        new = list(documents)
        if not new:
            return
        for document in new:
            self.documents[document.name] = document
        size = sum(len(document.stored) for document in new) // self._identity.width.each + len(new)
        self.tokens += size - len(new)
        while self.parts and self.parts[-1].part.size < 2 * size:
            held = self.parts.pop()
            new = [*self._alive(held), *new]
            size += held.part.size
        self.parts.append(Held(build_part(new, self._identity.width, self._identity.vocabulary)))

    def take(self, name: str) -> bool:
        """Remove a document; False: there is none of that name."""
        document = self.documents.pop(name, None)
        if document is None:
            return False
        self.tokens -= len(document.stored) // self._identity.width.each
        for n, held in enumerate(self.parts):
            k = held.find(name)
            if k >= 0:
                held.dead.add(k)
                if len(held.dead) == held.part.documents:
                    del self.parts[n]
                break
        return True

    def _alive(self, held: Held) -> list[Document]:
        return [self.documents[name] for k, name in enumerate(held.part.names) if k not in held.dead]
