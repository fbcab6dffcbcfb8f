"""`DocumentStore`: what ingestion, retrieval and answers need of a store, whatever database lies underneath."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from reader_rag.config import checked_tenant
from reader_rag.errors import ConfigError
from reader_rag.rag.stores.sqlite_file import DocumentRecord


class DocumentStore(BasePydanticVectorStore):
    """A LlamaIndex vector store that also knows which files its nodes came from, and whose they are.

    `FaissStore` is the one that comes with the package; the connectors bring those of other databases. All methods are
    thread safe. What is asked of a store and done to it concerns the documents of its tenant and no others.

    Attributes:
        similarity_cutoff: Leave out results whose cosine similarity is lower; a query may give its own.
    """

    stores_text: bool = True
    is_embedding_query: bool = True
    similarity_cutoff: float | None = None

    _tenant: str = PrivateAttr()

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the store is, always by the same name: a folder, a URL, or "memory"."""

    @property
    def tenant(self) -> str:
        """Whose documents are seen and changed."""
        return self._tenant

    def for_tenant(self, tenant: str) -> Self:
        """A light copy that sees and changes the documents of a tenant, and no others.

        Args:
            tenant: Whose documents.

        Returns:
            A copy that shares what is open: closing one closes all.

        Raises:
            ConfigError: No tenant can have that name.
        """
        copy = self.model_copy()
        copy._tenant = checked_tenant(tenant)
        return copy

    @property
    @abstractmethod
    def num_nodes(self) -> int:
        """Number of the tenant's nodes. (No `__len__`: LlamaIndex takes a falsy store for a missing one.)"""

    @abstractmethod
    def documents(self) -> list[DocumentRecord]:
        """Files that were ingested for the tenant, in path order."""

    @abstractmethod
    def replace_documents(
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord], gone: Sequence[str] = ()
    ) -> None:
        """Swap the nodes of some documents for new ones and drop other documents.

        Args:
            nodes: With embeddings; their `ref_doc_id`s are paths of `records`.
            records: Documents that are new or changed: their old nodes go.
            gone: Paths of documents to drop with their nodes.

        Raises:
            ConfigError: A vector that holds NaN or infinity.
            StoreError: It cannot be done; doing it again when it can be leaves what should be there.
        """

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove a document's nodes; an unknown document is ignored."""
        self.replace_documents((), (), [ref_doc_id])

    @abstractmethod
    def get_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        doc_ids: list[str] | None = None,
    ) -> list[BaseNode]:
        """The nodes that meet every given condition (all nodes without one), in the order they were stored."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store; neither it nor its copies for tenants can be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """`add` on a worker thread."""
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """`delete` on a worker thread."""
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """`delete_nodes` on a worker thread."""
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    async def aclear(self) -> None:
        """`clear` on a worker thread."""
        await asyncio.to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """`get_nodes` on a worker thread."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """`query` on a worker thread."""
        return await asyncio.to_thread(self.query, query, **kwargs)

    def _require_condition(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> None:
        if node_ids is None and filters is None:
            raise ConfigError("delete_nodes needs node_ids or filters; use clear() to remove everything")

    def _checked_vector(self, query: VectorStoreQuery) -> list[float]:
        """The vector of a query that can be answered."""
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise ConfigError(f"{self.class_name()} answers queries of mode 'default' only, not {query.mode.value!r}")
        if query.query_embedding is None:
            raise ConfigError("the query has no query_embedding: give the retriever an embedding model")
        if query.similarity_top_k < 1:
            raise ConfigError(f"top_k must be at least 1, not {query.similarity_top_k}")
        return query.query_embedding
