"""The indexes of an open store file, of vectors and of words: one for each tenant, loaded when it is first used.

One index with a filter would expose other tenants: the time of a search would grow with their nodes. Here a search
scans its own tenant's vectors only, and a change by one tenant reloads no other tenant's index. Statistics of words
in one index would expose them too: how rare a word is in other tenants' texts would change scores.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from llama_index.core.schema import MetadataMode
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from reader_rag.rag.stores.flat_index import Entry, FlatIndex
from reader_rag.rag.stores.hybrid import WordIndex
from reader_rag.rag.stores.identity import require_same_model
from reader_rag.rag.stores.sqlite_file import StoreFile
from reader_rag.rag.stores.sqlite_rows import NodeRow

IndexChange = tuple[Sequence[int], Sequence[NodeRow]]
"""Ids that were removed from a tenant's nodes, and rows that were added to them."""


@dataclass(frozen=True)
class _LoadedIndex:
    """A tenant's index, and the version of the tenant's rows that it was loaded from.

    Attributes:
        version: The version.
        index: The index of the vectors.
        words: The index of the texts; None until it is asked for.
    """

    version: str
    index: FlatIndex
    words: WordIndex | None = None


class TenantIndexes:
    """An open store file and the indexes over it. All methods are thread safe.

    Args:
        file: The open file; `close` closes it.

    Attributes:
        file: The open file. Use it inside `reading` or a `change` of `write` only.
    """

    def __init__(self, file: StoreFile) -> None:
        self.file = file
        self._lock = threading.RLock()
        self._loaded: dict[str, _LoadedIndex] = {}
        self._meta: dict[str, str] = {}
        self._identity: dict[str, str] = {}
        self._meta_commit: int | None = None  # the commit that `_meta` was read at; None: read it again

    def require(self, identity: dict[str, str]) -> None:
        """Bind the open store to one embedding model.

        Args:
            identity: The model's identity, from `identity.identity_of`.

        Raises:
            StoreMismatchError: The store was made with another model.
        """
        with self._lock, self.file.reading():
            self._identity = identity
            self._meta_commit = None
            self._read_meta()

    @contextmanager
    def reading(self, tenant: str) -> Iterator[FlatIndex | None]:
        """A tenant's index, None where the tenant has no nodes; all reads inside see one commit.

        Args:
            tenant: Name of the tenant.

        Raises:
            StoreError: The file cannot be read, or another process has bound it to another embedding model.
        """
        with self._lock, self.file.reading():
            yield self._index_of(tenant)

    def words(self, tenant: str) -> WordIndex:
        """The index of the words of a tenant's nodes. Call it inside `reading`, where that has an index.

        Args:
            tenant: Name of the tenant.

        Raises:
            StoreError: The file cannot be read.
        """
        loaded = self._loaded[tenant]
        if loaded.words is not None:
            return loaded.words
        words = WordIndex()
        with self.file.decoding("a tenant's nodes"):
            _add_words(words, list(self.file.rows.nodes(tenant)))
        self._loaded[tenant] = replace(loaded, words=words)
        return words

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other calls."""
        with self._lock:
            yield

    def write(self, tenant: str, change: Callable[[FlatIndex | None, int | None], IndexChange]) -> None:
        """Change a tenant's rows in one commit; the index changes only after the commit.

        Args:
            tenant: Name of the tenant.
            change: Called with the tenant's index and the length of the store's vectors (None while it holds none);
                changes the file and returns the changes that the index has to follow.

        Raises:
            StoreError: Nothing was changed.
        """
        with self._lock:
            with self.file.writing():
                index = self._index_of(tenant)
                removed, added = change(index, self._dimension)
                if not (removed or added):
                    return  # other changes, e.g. of document records, do not concern the index
                version = self.file.rows.new_version(tenant)
                words = self._loaded[tenant].words if tenant in self._loaded else None
                self.unload(tenant)  # if anything fails from here on, it is loaded from the disk again
            if index is None:
                index = FlatIndex(len(added[0].vector))
            index.remove(removed)
            _add(index, added)
            if words is not None:
                words.remove(removed)
                _add_words(words, added)
            self._loaded[tenant] = _LoadedIndex(version, index, words)

    def clear(self, tenant: str) -> None:
        """Remove everything of a tenant, and from an empty store also the identity of its embedding model.

        Args:
            tenant: Name of the tenant.

        Raises:
            StoreError: Nothing was removed.
        """
        with self._lock, self.file.writing():
            self._read_meta()
            self.unload(tenant)
            self.file.rows.drop_tenant(tenant)
            if self.file.rows.is_empty():
                self.file.rows.set_meta({})

    def write_identity(self, dimension: int) -> None:
        """Record the embedding model, unless the file has a record of one. Call it inside a `change`.

        Args:
            dimension: Length of the vectors.
        """
        if self._dimension is None:
            self.file.rows.set_meta(self._identity | {"dimension": str(dimension)})

    def dimension(self) -> int | None:
        """Length of the store's vectors; None before the first was stored."""
        with self._lock, self.file.reading():
            self._read_meta()
            return self._dimension

    def unload(self, tenant: str) -> None:
        """Drop a tenant's index from memory; the next use loads it again.

        Args:
            tenant: Name of the tenant.
        """
        with self._lock:
            self._loaded.pop(tenant, None)
            self._meta_commit = None

    def close(self) -> None:
        """Release the file and the memory."""
        with self._lock:
            self._loaded.clear()
            self.file.close()

    @property
    def _dimension(self) -> int | None:
        with self.file.decoding("its identity"):
            return int(self._meta["dimension"]) if "dimension" in self._meta else None

    def _index_of(self, tenant: str) -> FlatIndex | None:
        """The tenant's index as of this transaction, loaded if it is not in memory or another process changed it."""
        self._read_meta()
        version, dimension = self.file.rows.version(tenant), self._dimension
        loaded = self._loaded.get(tenant)
        if loaded is not None and (loaded.version, loaded.index.dimension) == (version, dimension):
            return loaded.index
        self._loaded.pop(tenant, None)
        if version is None or dimension is None:
            return None
        with self.file.decoding("a tenant's nodes"):
            index = FlatIndex(dimension)
            _add(index, list(self.file.rows.nodes(tenant)))
        self._loaded[tenant] = _LoadedIndex(version, index)
        return index

    def _read_meta(self) -> None:
        commit = self.file.commits_by_others()
        if commit == self._meta_commit:
            return
        self._meta_commit = None
        self._meta = self.file.rows.meta()
        if self._identity and "dimension" in self._meta:
            with self.file.decoding("its identity"):
                require_same_model(self._identity, self._meta)
        self._meta_commit = commit


def _add(index: FlatIndex, rows: Sequence[NodeRow]) -> None:
    if rows:
        index.add([r.id for r in rows], [_entry(r) for r in rows], np.stack([r.vector for r in rows]))


def _add_words(words: WordIndex, rows: Sequence[NodeRow]) -> None:
    nodes = [metadata_dict_to_node({"_node_type": row.node_type, "_node_content": row.node}) for row in rows]
    words.add([row.id for row in rows], [node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes])


def _entry(row: NodeRow) -> Entry:
    metadata = dict(json.loads(row.node).get("metadata") or {})
    # The keys under which LlamaIndex's other stores let filters match the document.
    metadata |= dict.fromkeys(("document_id", "doc_id", "ref_doc_id"), row.ref_doc_id or "None")
    return Entry(row.node_id, row.ref_doc_id, metadata)
