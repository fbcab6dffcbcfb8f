"""What is in memory of a store's file: for each tenant that was asked for, an index of its own.

One index with a filter would let others' nodes be felt: the time of a search would grow with them. Here a search meets
its tenant's vectors alone, and what one tenant changes makes no other's index be loaded again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from reader_rag.rag.stores.flat_index import Entry, FlatIndex
from reader_rag.rag.stores.identity import require_same_model
from reader_rag.rag.stores.sqlite_file import NodeRow, StoreFile

Change = tuple[Sequence[int], Sequence[NodeRow]]
"""Ids that were removed from a tenant's nodes, and rows that were added to them."""


@dataclass(frozen=True)
class _Held:
    """A tenant's index, and the version of its rows that it shows."""

    version: str
    index: FlatIndex


class StoreMemory:
    """An open store file and the indexes over it. All methods are thread safe.

    Args:
        file: The file; closed by `close`.

    Attributes:
        file: The file. Use it inside `reading` or `writing` only.
    """

    def __init__(self, file: StoreFile) -> None:
        self.file = file
        self._lock = threading.RLock()
        self._held: dict[str, _Held] = {}
        self._meta: dict[str, str] = {}
        self._identity: dict[str, str] = {}
        self._seen: int | None = None  # the commit whose facts `_meta` shows; None: read them again

    def require(self, identity: dict[str, str]) -> None:
        """Keep the store to one embedding model from now on.

        Args:
            identity: What `identity.identity_of` says of it.

        Raises:
            StoreMismatchError: The store was made with another one.
        """
        with self._lock, self.file.reading():
            self._identity = identity
            self._seen = None
            self._read_facts()

    @contextmanager
    def reading(self, tenant: str) -> Iterator[FlatIndex | None]:
        """A tenant's index, None where it has nothing; all reads inside see one commit.

        Raises:
            StoreError: The file cannot be read, or is for another embedding model by now.
        """
        with self._lock, self.file.reading():
            yield self._index_of(tenant)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else uses the store meanwhile."""
        with self._lock:
            yield

    def write(self, tenant: str, change: Callable[[FlatIndex | None, int | None], Change]) -> None:
        """Change a tenant's rows in one commit; memory follows only once the disk has it.

        Args:
            tenant: Whose rows.
            change: Given the tenant's index and the length of the store's vectors (None while it holds none), changes
                the file and says what of it concerns the index.

        Raises:
            StoreError: Nothing was changed.
        """
        with self._lock:
            with self.file.writing():
                index = self._index_of(tenant)
                removed, added = change(index, self._dimension)
                if not (removed or added):
                    return  # what else was changed, the index does not show
                version = self.file.changed(tenant)
                self.forget(tenant)  # should anything fail from here on, it is loaded from the disk again
            if index is None:
                index = FlatIndex(len(added[0].vector))
            index.remove(removed)
            _add(index, added)
            self._held[tenant] = _Held(version, index)

    def clear(self, tenant: str) -> None:
        """Remove all of a tenant, and once the store is empty, also what ties it to an embedding model.

        Raises:
            StoreError: Nothing was removed.
        """
        with self._lock, self.file.writing():
            self._read_facts()
            self.forget(tenant)
            self.file.drop_tenant(tenant)
            if self.file.is_empty():
                self.file.set_meta({})

    def identify(self, dimension: int) -> None:
        """Write down which embedding model the store is for, if that is open; inside a `change`."""
        if self._dimension is None:
            self.file.set_meta(self._identity | {"dimension": str(dimension)})

    def dimension(self) -> int | None:
        """Length of the store's vectors; None while none was ever stored."""
        with self._lock, self.file.reading():
            self._read_facts()
            return self._dimension

    def forget(self, tenant: str) -> None:
        """Drop what is in memory of a tenant; it is loaded again when it is asked for."""
        with self._lock:
            self._held.pop(tenant, None)
            self._seen = None

    def close(self) -> None:
        """Release the file and the memory."""
        with self._lock:
            self._held.clear()
            self.file.close()

    @property
    def _dimension(self) -> int | None:
        return int(self._meta["dimension"]) if "dimension" in self._meta else None

    def _index_of(self, tenant: str) -> FlatIndex | None:
        """The tenant's index as of this transaction, loaded if memory has none or another process has changed it."""
        self._read_facts()
        version, dimension = self.file.version(tenant), self._dimension
        held = self._held.get(tenant)
        if held is not None and (held.version, held.index.dimension) == (version, dimension):
            return held.index
        self._held.pop(tenant, None)
        if version is None or dimension is None:
            return None
        index = FlatIndex(dimension)
        _add(index, list(self.file.nodes(tenant)))
        self._held[tenant] = _Held(version, index)
        return index

    def _read_facts(self) -> None:
        commit = self.file.commits_by_others()
        if commit == self._seen:
            return
        self._seen = None
        self._meta = self.file.meta()
        if self._identity and "dimension" in self._meta:
            require_same_model(self._identity, self._meta)
        self._seen = commit


def _add(index: FlatIndex, rows: Sequence[NodeRow]) -> None:
    if rows:
        index.add([r.id for r in rows], [_entry(r) for r in rows], np.stack([r.vector for r in rows]))


def _entry(row: NodeRow) -> Entry:
    metadata = dict(json.loads(row.node).get("metadata") or {})
    # The names under which LlamaIndex's other stores let filters ask for the document.
    metadata |= dict.fromkeys(("document_id", "doc_id", "ref_doc_id"), row.ref_doc_id or "None")
    return Entry(row.node_id, row.ref_doc_id, metadata)
