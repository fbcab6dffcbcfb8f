"""`FaissStore`: LlamaIndex's vector store interface over FAISS indexes in memory and one SQLite file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
from llama_index.core.schema import BaseNode
from llama_index.core.storage.storage_context import DEFAULT_PERSIST_DIR
from llama_index.core.vector_stores.simple import DEFAULT_VECTOR_STORE, NAMESPACE_SEP
from llama_index.core.vector_stores.types import (
    DEFAULT_PERSIST_FNAME,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
from numpy.typing import NDArray

from reader_rag.config import checked_tenant
from reader_rag.errors import ConfigError
from reader_rag.rag.stores.contract import DocumentStore, Selection, check_names
from reader_rag.rag.stores.flat_index import FlatIndex
from reader_rag.rag.stores.hybrid import fuse
from reader_rag.rag.stores.identity import identity_of, unit_vectors
from reader_rag.rag.stores.records import DocumentRecord, TenantSize
from reader_rag.rag.stores.sqlite_file import StoreFile
from reader_rag.rag.stores.sqlite_rows import NodeRow
from reader_rag.rag.stores.tenant_index import IndexChange, TenantIndexes


class FaissStore(DocumentStore):
    """Nodes and their vectors, searched exactly.

    On disk the store is one SQLite file in a folder. Every change is one transaction that is on the disk when the call
    returns: nothing has to be saved at the end, and a killed process or a full disk leaves the last commit. Several
    processes may have one store open; each sees the others' commits at its next call.

    Tenants are separate even where their node ids, document ids or texts are equal. `for_tenant` returns the same store
    for another tenant; without tenants the name is "".

    Args:
        path: Folder of the store, made if it does not exist; None keeps the store in memory.
        embed_model: The embedding model of the vectors; it is compared with the one that made the store.
        similarity_cutoff: Least cosine similarity of a result; a query may set its own.
        must_exist: Raise if there is no store in `path` instead of making one.
        tenant: The tenant whose documents the store reads and changes.

    Raises:
        ConfigError: The tenant's name is invalid.
        StoreError: The store cannot be opened: corrupt, foreign, of another version or embedding model, busy.

    Example:
        >>> store = FaissStore("my-store")
        >>> index = VectorStoreIndex.from_vector_store(store, embed_model=LocalEmbedding())
    """

    _modes = (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR, VectorStoreQueryMode.HYBRID)
    _indexes: TenantIndexes = PrivateAttr()  # shared by the copies for all tenants

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
        self._indexes = TenantIndexes(file)
        try:
            with self._indexes.reading(self._tenant):
                pass
            if embed_model is not None:
                self._indexes.require(identity_of(embed_model))
        except BaseException:
            self._indexes.close()
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

        Args:
            path: Folder of the store.
            embed_model: The embedding model of the vectors; it is compared with the one that made the store.
            similarity_cutoff: Least cosine similarity of a result; a query may set its own.
            tenant: The tenant whose documents the store reads and changes.

        Raises:
            StoreNotFoundError: There is none at `path`.
            ConfigError: The tenant's name is invalid.
            StoreError: The store cannot be opened: corrupt, foreign, of another version or embedding model, busy.
        """
        return cls(path, embed_model=embed_model, similarity_cutoff=similarity_cutoff, must_exist=True, tenant=tenant)

    @classmethod
    def from_persist_dir(
        cls,
        persist_dir: str | Path = DEFAULT_PERSIST_DIR,
        namespace: str = DEFAULT_VECTOR_STORE,
        *,
        embed_model: BaseEmbedding | None = None,
        similarity_cutoff: float | None = None,
    ) -> FaissStore:
        """Open the copy that LlamaIndex's `StorageContext.persist` wrote.

        Args:
            persist_dir: Folder of the storage context.
            namespace: Name of the vector store in the storage context.
            embed_model: The embedding model of the vectors; it is compared with the one that made the store.
            similarity_cutoff: Least cosine similarity of a result; a query may set its own.

        Raises:
            StoreNotFoundError: There is none.
            StoreError: It cannot be opened.

        Example:
            >>> context = StorageContext.from_defaults(
            ...     vector_store=FaissStore.from_persist_dir("storage"), persist_dir="storage"
            ... )
            >>> index = load_index_from_storage(context, embed_model=embed_model)
        """
        path = Path(persist_dir) / f"{namespace}{NAMESPACE_SEP}{DEFAULT_PERSIST_FNAME}"
        return cls.open(path, embed_model=embed_model, similarity_cutoff=similarity_cutoff)

    @property
    def client(self) -> Any:
        """The tenant's FAISS index, or None while it has no nodes. Read it only: changes to it are lost."""
        with self._indexes.reading(self._tenant) as index:
            return None if index is None else index.faiss_index

    @property
    def path(self) -> Path | None:
        """Folder of the store; None in memory."""
        return self._file.path.parent if self._file.path is not None else None

    @property
    def location(self) -> str:
        """The store's absolute folder, or "memory"."""
        return "memory" if self.path is None else str(self.path.resolve())

    @property
    def num_nodes(self) -> int:
        """Number of the tenant's nodes."""
        with self._indexes.reading(self._tenant) as index:
            return 0 if index is None else len(index)

    @property
    def dimension(self) -> int | None:
        """Length of the vectors; None before the first was stored."""
        return self._indexes.dimension()

    def documents(self) -> list[DocumentRecord]:
        """Files that were ingested for the tenant, in path order."""
        with self._indexes.reading(self._tenant):
            return self._file.rows.documents(self._tenant)

    def tenants(self) -> list[TenantSize]:
        """The size of every tenant that has documents or nodes, by name. For the operator of the store."""
        with self._indexes.reading(self._tenant):
            return self._file.rows.tenants()

    def close(self) -> None:
        """Release the file; neither the store nor its copies for tenants can be used afterwards."""
        self._indexes.close()

    def replace_documents(
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord], removed: Sequence[str] = ()
    ) -> None:
        """Swap the nodes of some documents for new ones and remove other documents, all in one commit.

        Args:
            nodes: Nodes with embeddings. Those that belong to a record have its path as `ref_doc_id`.
            records: Documents that are new or changed; their old nodes are removed.
            removed: Paths of documents to remove with their nodes.

        Raises:
            StoreMismatchError: The vectors are of another length than the store's; nothing has changed.
            ConfigError: A vector holds NaN or infinity; nothing has changed.
            StoreError: The store cannot be written; nothing has changed.
        """
        latest = list({node.node_id: node for node in nodes}.values())
        embeddings = [node.get_embedding() for node in latest]
        documents = [*(record.path for record in records), *removed]

        def change(index: FlatIndex | None, dimension: int | None) -> IndexChange:
            vectors = unit_vectors(embeddings, dimension)
            rows = [_row(node, vector) for node, vector in zip(latest, vectors, strict=True)]
            old: set[int] = set()
            if index is not None:
                old.update(index.select(Selection(doc_ids=documents)))
                old.update(index.select(Selection([row.node_id for row in rows])))
            self._file.rows.delete_nodes(self._tenant, old)
            self._file.rows.drop_documents(self._tenant, removed)
            self._file.rows.put_documents(self._tenant, records)
            if rows:
                self._indexes.write_identity(vectors.shape[1])
            added = [replace(row, id=self._file.rows.insert_node(self._tenant, row)) for row in rows]
            return sorted(old), added

        self._indexes.write(self._tenant, change)

    def clear(self) -> None:
        """Remove all documents and nodes of the tenant.

        Where no other tenant has any, the store is no longer bound to an embedding model.
        """
        self._indexes.clear(self._tenant)

    def get_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        doc_ids: list[str] | None = None,
    ) -> list[BaseNode]:
        """The tenant's nodes that meet every given condition; see `DocumentStore.get_nodes` for the arguments."""
        check_names("node_ids", node_ids)
        check_names("doc_ids", doc_ids)
        with self._indexes.reading(self._tenant) as index:
            if index is None:
                return []
            return self._nodes(index.select(Selection(node_ids, doc_ids, filters)))

    def persist(self, persist_path: str | None = None, fs: Any = None) -> None:
        """Write a copy of the store into another folder. A store on disk needs no saving: each change is on the disk.

        The copy is of the whole file, with the documents of all tenants.

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
        with self._indexes.locked():
            self._file.copy_to(target)

    def _search(self, embedding: list[float], top_k: int, selection: Selection) -> list[tuple[BaseNode, float]]:
        with self._indexes.reading(self._tenant) as index:
            if index is None:
                return []
            allowed = None if selection == Selection() else index.select(selection)
            found = index.search(unit_vectors([embedding], index.dimension)[0], top_k, allowed)
            nodes = self._nodes([id_ for id_, _ in found])
        return list(zip(nodes, (score for _, score in found), strict=True))

    def _search_mmr(
        self, query: VectorStoreQuery, selection: Selection, options: Mapping[str, Any]
    ) -> list[tuple[BaseNode, float]]:
        assert query.query_embedding is not None  # `query` checks it
        threshold = options.get("mmr_threshold", query.mmr_threshold)
        weight = 0.5 if threshold is None else float(threshold)
        factor = options.get("mmr_prefetch_factor", 4)
        if not 0.0 <= weight <= 1.0 or factor < 1:
            raise ConfigError(
                f"mmr_threshold must be 0..1 and mmr_prefetch_factor at least 1, not {weight:g} and {factor:g}"
            )
        with self._indexes.reading(self._tenant) as index:
            if index is None:
                return []
            allowed = index.select(selection)
            vector = unit_vectors([query.query_embedding], index.dimension)[0]
            near = dict(index.search(vector, int(query.similarity_top_k * factor), allowed))
            vectors = [index.faiss_index.reconstruct(id_).tolist() for id_ in near]
            _, chosen = get_top_k_mmr_embeddings(
                vector.tolist(),
                vectors,
                similarity_top_k=query.similarity_top_k,
                embedding_ids=list(near),
                mmr_threshold=weight,
            )
            nodes = self._nodes(chosen)
        return list(zip(nodes, (near[id_] for id_ in chosen), strict=True))

    def _search_hybrid(
        self, query: VectorStoreQuery, selection: Selection, options: Mapping[str, Any]
    ) -> list[tuple[BaseNode, float]]:
        assert query.query_embedding is not None  # `query` checks it
        if query.query_str is None:
            raise ConfigError("the query has no query_str: retrieval in hybrid mode searches its words")
        alpha = 0.5 if query.alpha is None else float(query.alpha)
        factor = options.get("hybrid_prefetch_factor", 4)
        results = query.similarity_top_k if query.hybrid_top_k is None else query.hybrid_top_k
        ranked = max(1, int(query.similarity_top_k * factor))
        words_ranked = ranked if query.sparse_top_k is None else query.sparse_top_k
        if not 0.0 <= alpha <= 1.0 or factor < 1 or results < 1 or words_ranked < 1:
            raise ConfigError(
                "alpha must be 0..1, and hybrid_prefetch_factor, hybrid_top_k and sparse_top_k at least 1, not "
                f"{alpha:g}, {factor:g}, {results} and {words_ranked}"
            )
        with self._indexes.reading(self._tenant) as index:
            if index is None:
                return []
            allowed = None if selection == Selection() else index.select(selection)
            vector = unit_vectors([query.query_embedding], index.dimension)[0]
            cutoff = options["similarity_cutoff"]
            near = index.search(vector, ranked if cutoff is None else len(index), allowed)
            if cutoff is not None:
                near = [(id_, cosine) for id_, cosine in near if cosine >= cutoff]
                allowed = [id_ for id_, _ in near]
            words = self._indexes.words(self._tenant).search(query.query_str, words_ranked, allowed)
            fused = fuse([id_ for id_, _ in near[:ranked]], [id_ for id_, _ in words], alpha)[:results]
            nodes = self._nodes([id_ for id_, _ in fused])
        return list(zip(nodes, (score for _, score in fused), strict=True))

    def _delete_nodes(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> None:
        def change(index: FlatIndex | None, dimension: int | None) -> IndexChange:
            ids = index.select(Selection(node_ids, filters=filters)) if index is not None else []
            self._file.rows.delete_nodes(self._tenant, ids)
            return ids, ()

        self._indexes.write(self._tenant, change)

    def _nodes(self, ids: Sequence[int]) -> list[BaseNode]:
        with self._file.decoding("a node"):
            return [
                metadata_dict_to_node({"_node_type": node_type, "_node_content": node})
                for node_type, node in self._file.rows.node_texts(self._tenant, ids)
            ]

    @property
    def _file(self) -> StoreFile:
        return self._indexes.file


def _row(node: BaseNode, vector: NDArray[np.float32]) -> NodeRow:
    stored = node_to_metadata_dict(node, remove_text=False, flat_metadata=False)
    return NodeRow(node.node_id, node.ref_doc_id, stored["_node_type"], stored["_node_content"], vector)
