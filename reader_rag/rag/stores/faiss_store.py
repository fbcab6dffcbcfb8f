"""`FaissStore`: the vector store, LlamaIndex's interface over a FAISS index in memory and one SQLite file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
from numpy.typing import NDArray

from reader_rag.config import checked_tenant
from reader_rag.errors import ConfigError
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.rag.stores.flat_index import FlatIndex
from reader_rag.rag.stores.identity import identity_of, unit_vectors
from reader_rag.rag.stores.sqlite_file import DocumentRecord, NodeRow, StoreFile, TenantSize
from reader_rag.rag.stores.tenant_index import Change, StoreMemory


class FaissStore(DocumentStore):
    """Nodes and their vectors, searched exactly; similarity is the cosine, higher is nearer.

    On disk the store is one SQLite file in a folder. Every change is one transaction that is on the disk when the call
    returns, so there is nothing to save at the end, and a killed process or full disk leaves the last commit. Several
    processes may have one store open; each sees the others' commits at its next call. All methods are thread safe.

    What is asked of a store and done to it concerns the documents of one tenant and no others, also where node ids,
    document ids or texts are the same. `for_tenant` gives the same store on another's behalf. Whoever has no tenants
    leaves the name out, which makes it "".

    Args:
        path: Folder of the store, made if it does not exist; None keeps the store in memory.
        embed_model: The model whose vectors the store holds; it is compared with the one that made the store.
        similarity_cutoff: Leave out results whose cosine similarity is lower; a query may give its own.
        tenant: On whose behalf the store is used.

    Raises:
        ConfigError: No tenant can have that name.
        StoreError: The store cannot be opened: corrupt, foreign, of another version or embedding model, busy.

    Example:
        >>> store = FaissStore("my-store")
        >>> index = VectorStoreIndex.from_vector_store(store, embed_model=LocalEmbedding())
    """

    _memory: StoreMemory = PrivateAttr()  # shared by the store on behalf of all tenants

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        embed_model: BaseEmbedding | None = None,
        similarity_cutoff: float | None = None,
        must_exist: bool = False,
        tenant: str = "",
    ) -> None:
        super().__init__(stores_text=True)
        self.similarity_cutoff = similarity_cutoff
        self._tenant = checked_tenant(tenant)
        if path is None:
            file = StoreFile.in_memory()
        else:
            file = StoreFile.open(Path(path)) if must_exist else StoreFile.create(Path(path))
        self._memory = StoreMemory(file)
        try:
            with self._memory.reading(self._tenant):
                pass
            if embed_model is not None:
                self._memory.require(identity_of(embed_model))
        except BaseException:
            self._memory.close()
            raise

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        embed_model: BaseEmbedding | None = None,
        similarity_cutoff: float | None = None,
        tenant: str = "",
    ) -> FaissStore:
        """Open a store that exists.

        Raises:
            StoreNotFoundError: There is none at `path`.
            ConfigError, StoreError: As the constructor.
        """
        return cls(path, embed_model=embed_model, similarity_cutoff=similarity_cutoff, must_exist=True, tenant=tenant)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises this component."""
        return "FaissStore"

    @property
    def client(self) -> Any:
        """The tenant's FAISS index, or None while there is none. For looking at; changes to it are lost."""
        with self._memory.reading(self._tenant) as index:
            return None if index is None else index.faiss_index

    @property
    def path(self) -> Path | None:
        """Folder of the store; None in memory."""
        return self._file.path.parent if self._file.path is not None else None

    @property
    def place(self) -> str:
        """The store's folder, or "memory"."""
        return "memory" if self.path is None else str(self.path.resolve())

    @property
    def num_nodes(self) -> int:
        """Number of the tenant's nodes."""
        with self._memory.reading(self._tenant) as index:
            return 0 if index is None else len(index)

    @property
    def dimension(self) -> int | None:
        """Length of the vectors; None while none was ever stored."""
        return self._memory.dimension()

    def documents(self) -> list[DocumentRecord]:
        """Files that were ingested for the tenant, in path order."""
        with self._memory.reading(self._tenant):
            return self._file.documents(self._tenant)

    def tenants(self) -> list[TenantSize]:
        """All tenants that have documents or nodes in the store, by name, and how much. For whoever runs it."""
        with self._memory.reading(self._tenant):
            return self._file.tenants()

    def close(self) -> None:
        """Release the file; neither the store nor its copies for tenants can be used afterwards."""
        self._memory.close()

    def add(self, nodes: Sequence[BaseNode], **add_kwargs: Any) -> list[str]:
        """Store nodes with their embeddings; a node of the tenant whose id is there already is replaced.

        Args:
            nodes: Each with its `embedding`; vectors of any length are scaled to length 1.
            add_kwargs: Ignored; LlamaIndex passes some.

        Returns:
            The node ids.

        Raises:
            StoreMismatchError: Vectors of another length than the store's.
            ConfigError: A vector that holds NaN or infinity.
            StoreError: Nothing was stored, for the reason it gives.
        """
        self._replace(nodes)
        return [node.node_id for node in nodes]

    def replace_documents(
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord], gone: Sequence[str] = ()
    ) -> None:
        """Swap the nodes of some documents for new ones and drop other documents, all in one commit.

        Args:
            nodes: With embeddings; their `ref_doc_id`s are paths of `records`.
            records: Documents that are new or changed: their old nodes go.
            gone: Paths of documents to drop with their nodes.

        Raises:
            ConfigError, StoreError: As `add`; then nothing has changed.
        """
        self._replace(nodes, records, gone)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Remove the nodes that meet every given condition.

        Raises:
            ConfigError: No condition was given (`clear` removes everything), or a filter cannot be applied.
        """
        self._require_condition(node_ids, filters)

        def change(index: FlatIndex | None, dimension: int | None) -> Change:
            ids = index.select(node_ids=node_ids, filters=filters) if index is not None else []
            self._file.delete_nodes(self._tenant, ids)
            return ids, ()

        self._memory.write(self._tenant, change)

    def clear(self) -> None:
        """Remove all documents and nodes of the tenant.

        Where no other tenant has any, what ties the store to an embedding model goes as well.
        """
        self._memory.clear(self._tenant)

    def get_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        doc_ids: list[str] | None = None,
    ) -> list[BaseNode]:
        """The nodes that meet every given condition (all nodes without one), in the order they were stored."""
        with self._memory.reading(self._tenant) as index:
            if index is None:
                return []
            return self._nodes(index.select(node_ids=node_ids, doc_ids=doc_ids, filters=filters))

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The tenant's nodes nearest to a vector.

        Filters, `node_ids` and `doc_ids` are applied before the search: `similarity_top_k` nodes come back as long as
        that many meet them. An empty list of ids restricts nothing.

        Args:
            query: Mode "default" with a `query_embedding`.
            kwargs: `similarity_cutoff` takes the place of the store's own; others are ignored.

        Returns:
            Nodes, ids and cosine similarities in [-1, 1], nearest first.

        Raises:
            ConfigError: Another mode, no vector, `similarity_top_k` below 1, or a filter that cannot be applied.
            StoreMismatchError: A vector of another length than the store's.
        """
        embedding = self._checked_vector(query)
        cutoff: float | None = kwargs.get("similarity_cutoff", self.similarity_cutoff)
        with self._memory.reading(self._tenant) as index:
            if index is None:
                return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
            vector = unit_vectors([embedding], index.dimension)[0]
            found = index.search(vector, query.similarity_top_k, _allowed(index, query))
            if cutoff is not None:
                found = [(id_, score) for id_, score in found if score >= cutoff]
            nodes = self._nodes([id_ for id_, _ in found])
        scores = [score for _, score in found]
        return VectorStoreQueryResult(nodes=nodes, similarities=scores, ids=[node.node_id for node in nodes])

    def persist(self, persist_path: str | None = None, fs: Any = None) -> None:
        """Write a copy of the store into another folder. A store on disk needs no saving: each change is on the disk.

        The copy is of the whole file: it holds the documents of all tenants.

        Args:
            persist_path: Folder for the copy; None, or the store's own folder, does nothing for a store on disk.
            fs: Must be None; only local folders can hold a store.

        Raises:
            ConfigError: A store in memory without `persist_path`, or another file system.
            StoreWriteError: The copy cannot be written.
        """
        if fs is not None:
            raise ConfigError("a store can be persisted to local folders only; leave out fs")
        if persist_path is None and self.path is None:
            raise ConfigError("this store is in memory: name the folder to write it to")
        target = Path(persist_path) if persist_path is not None else self.path
        if target is None or (self.path is not None and target.resolve() == self.path.resolve()):
            return
        with self._memory.locked():
            self._file.copy_to(target)

    def _replace(
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord] = (), gone: Sequence[str] = ()
    ) -> None:
        latest = list({node.node_id: node for node in nodes}.values())
        embeddings = [node.get_embedding() for node in latest]
        documents = [*(record.path for record in records), *gone]

        def change(index: FlatIndex | None, dimension: int | None) -> Change:
            vectors = unit_vectors(embeddings, dimension)
            rows = [_row(node, vector) for node, vector in zip(latest, vectors, strict=True)]
            old: set[int] = set()
            if index is not None:
                old.update(index.select(doc_ids=documents))
                old.update(index.select(node_ids=[row.node_id for row in rows]))
            self._file.delete_nodes(self._tenant, old)
            self._file.drop_documents(self._tenant, gone)
            self._file.put_documents(self._tenant, records)
            if rows:
                self._memory.identify(vectors.shape[1])
            added = [replace(row, id=self._file.insert_node(self._tenant, row)) for row in rows]
            return sorted(old), added

        self._memory.write(self._tenant, change)

    def _nodes(self, ids: Sequence[int]) -> list[BaseNode]:
        return [
            metadata_dict_to_node({"_node_type": node_type, "_node_content": node})
            for node_type, node in self._file.node_texts(self._tenant, ids)
        ]

    @property
    def _file(self) -> StoreFile:
        return self._memory.file


def _allowed(index: FlatIndex, query: VectorStoreQuery) -> list[int] | None:
    """The ids that a query may find; None: any."""
    # LlamaIndex's `index.as_retriever()` sends an empty list where it means "any node".
    node_ids, doc_ids = query.node_ids or None, query.doc_ids or None
    if node_ids is None and doc_ids is None and query.filters is None:
        return None
    return index.select(node_ids=node_ids, doc_ids=doc_ids, filters=query.filters)


def _row(node: BaseNode, vector: NDArray[np.float32]) -> NodeRow:
    stored = node_to_metadata_dict(node, remove_text=False, flat_metadata=False)
    return NodeRow(node.node_id, node.ref_doc_id, stored["_node_type"], stored["_node_content"], vector)
