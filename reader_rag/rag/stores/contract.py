"""`DocumentStore`: what ingestion, retrieval and query engines require of a store, whatever database is behind it."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

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
from reader_rag.rag.stores.records import DocumentRecord, TenantSize
from reader_rag.util.encodable import is_encodable

__all__ = ["DocumentRecord", "DocumentStore", "Selection", "TenantSize"]


class Selection(NamedTuple):
    """Which nodes of a tenant are meant: those that meet every given condition.

    Attributes:
        node_ids: Only nodes with these ids; None: any.
        doc_ids: Only nodes of these documents; None: any.
        filters: Only nodes whose metadata meets these conditions; None: any.
    """

    node_ids: Sequence[str] | None = None
    doc_ids: Sequence[str] | None = None
    filters: MetadataFilters | None = None


def check_names(what: str, names: Any) -> None:
    """Check ids that a caller names.

    Args:
        what: What they are, for the error.
        names: A list of texts; None: none are named.

    Raises:
        ConfigError: It is something else, or one of them cannot be encoded.
    """
    if names is None:
        return
    if not isinstance(names, list | tuple | set | frozenset):
        raise ConfigError(f"{what} must be a list of texts, not {names!r:.60}")
    for name in names:
        if not isinstance(name, str) or not is_encodable(name):
            raise ConfigError(f"{what} must be texts that UTF-8 can encode, not {name!r:.60}")


def _check_number(what: str, value: Any, *, whole: bool = False) -> None:
    """Check an option of a query, which may be None.

    Raises:
        ConfigError: It is no finite number, or none without a fraction.
    """
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value)):
        raise ConfigError(f"{what} must be {'a whole' if whole else 'a'} number, not {value!r:.60}")


_FRACTIONS = ("similarity_cutoff", "mmr_threshold", "mmr_prefetch_factor", "hybrid_prefetch_factor")


def _check_query(query: VectorStoreQuery, options: Mapping[str, Any]) -> None:
    """Check the types of all that a query holds: LlamaIndex checks none.

    Raises:
        ConfigError: One is wrong.
    """
    vector = query.query_embedding
    try:
        numbers = None if vector is None else [float(number) for number in vector]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"query_embedding must be a list of numbers, not {vector!r:.60}") from None
    if query.query_str is not None and not (isinstance(query.query_str, str) and is_encodable(query.query_str)):
        raise ConfigError(f"query_str must be a text that UTF-8 can encode, not {query.query_str!r:.60}")
    if numbers is not None and not all(map(math.isfinite, numbers)):
        raise ConfigError("query_embedding holds NaN or infinity")
    for name in ("similarity_top_k", "hybrid_top_k", "sparse_top_k"):
        _check_number(name, getattr(query, name), whole=True)
    for name in ("alpha", "mmr_threshold"):
        _check_number(name, getattr(query, name))
    for name in _FRACTIONS:
        _check_number(name, options.get(name))
    check_names("node_ids", query.node_ids)
    check_names("doc_ids", query.doc_ids)


class DocumentStore(BasePydanticVectorStore):
    """A LlamaIndex vector store that also records which files its nodes come from and which tenant owns them.

    `FaissStore` is the one of this package; the connectors add those of other databases. Similarity is the cosine,
    higher is nearer. All methods are thread safe, and all of them read and change the documents of the store's tenant
    only.

    Attributes:
        similarity_cutoff: Least cosine similarity of a result; a query may set its own. None: no limit.
    """

    stores_text: bool = True
    is_embedding_query: bool = True
    similarity_cutoff: float | None = None

    _tenant: str = PrivateAttr()
    _modes: ClassVar[tuple[VectorStoreQueryMode, ...]] = (VectorStoreQueryMode.DEFAULT,)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises this component."""
        return cls.__name__

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the store is, in one canonical form: an absolute folder, a URL, or "memory"."""

    @property
    def tenant(self) -> str:
        """The tenant whose documents this store reads and changes."""
        return self._tenant

    @property
    def modes(self) -> tuple[VectorStoreQueryMode, ...]:
        """The modes of queries that the store answers."""
        return self._modes

    def for_tenant(self, tenant: str) -> Self:
        """A light copy that reads and changes the documents of another tenant.

        Args:
            tenant: Name of the tenant.

        Returns:
            A copy that shares the open connection: closing one closes all.

        Raises:
            ConfigError: The tenant's name is invalid.
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
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord], removed: Sequence[str] = ()
    ) -> None:
        """Swap the nodes of some documents for new ones and remove other documents.

        Args:
            nodes: Nodes with embeddings. Those that belong to a record have its path as `ref_doc_id`. A node of the
                tenant with the same id is replaced.
            records: Documents that are new or changed; their old nodes are removed.
            removed: Paths of documents to remove with their nodes; unknown paths are ignored.

        Raises:
            StoreMismatchError: The vectors are of another length than the store's.
            ConfigError: A vector holds NaN or infinity.
            StoreError: The change failed; repeating it once the cause is removed completes it.
        """

    @abstractmethod
    def get_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        doc_ids: list[str] | None = None,
    ) -> list[BaseNode]:
        """The tenant's nodes, in the order they were stored.

        Args:
            node_ids: Only nodes with these ids; None: any.
            filters: Only nodes whose metadata meets these conditions; None: any.
            doc_ids: Only nodes of these documents; None: any.

        Returns:
            The nodes that meet every given condition, without their vectors.

        Raises:
            ConfigError: A filter cannot be applied.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the store; neither it nor its copies for tenants can be used afterwards."""

    @abstractmethod
    def _search(self, embedding: list[float], top_k: int, selection: Selection) -> list[tuple[BaseNode, float]]:
        """The `top_k` nearest of the selected nodes, with their cosines, nearest first."""

    def _search_mmr(
        self, query: VectorStoreQuery, selection: Selection, options: Mapping[str, Any]
    ) -> list[tuple[BaseNode, float]]:
        """Selected nodes by maximal marginal relevance, with their cosines; see `query`."""
        raise NotImplementedError

    def _search_hybrid(
        self, query: VectorStoreQuery, selection: Selection, options: Mapping[str, Any]
    ) -> list[tuple[BaseNode, float]]:
        """Selected nodes by vectors and words, with their fused scores; see `query`."""
        raise NotImplementedError

    @abstractmethod
    def _delete_nodes(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> None:
        """Remove the nodes that meet every given condition."""

    def add(self, nodes: Sequence[BaseNode], **add_kwargs: Any) -> list[str]:
        """Store nodes; a node of the tenant with the same id is replaced.

        Args:
            nodes: Nodes with their `embedding`; vectors of any length are scaled to length 1.
            add_kwargs: Ignored; LlamaIndex passes some.

        Returns:
            The node ids.

        Raises:
            StoreMismatchError: The vectors are of another length than the store's.
            ConfigError: A vector holds NaN or infinity.
            StoreError: The store cannot be written.
        """
        for node in nodes:
            check_names("ids of nodes", [node.node_id, *([] if node.ref_doc_id is None else [node.ref_doc_id])])
            if not is_encodable(node.get_content()):
                raise ConfigError(f"the text of node {node.node_id!r:.60} cannot be encoded: it has a lone surrogate")
        self.replace_documents(nodes, ())
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove a document with its nodes; an unknown document is ignored."""
        check_names("ref_doc_id", [ref_doc_id])
        self.replace_documents((), (), [ref_doc_id])

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Remove the nodes that meet every given condition.

        Args:
            node_ids: Only nodes with these ids; None: any.
            filters: Only nodes whose metadata meets these conditions; None: any.
            delete_kwargs: Ignored; LlamaIndex passes some.

        Raises:
            ConfigError: No condition was given (`clear` removes everything), or a filter cannot be applied.
        """
        if node_ids is None and filters is None:
            raise ConfigError("delete_nodes needs node_ids or filters; use clear() to remove everything")
        check_names("node_ids", node_ids)
        self._delete_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The tenant's nodes nearest to a vector.

        Filters, `node_ids` and `doc_ids` are applied before the search: it returns `similarity_top_k` nodes as long as
        that many meet them. An empty list of ids restricts nothing.

        Args:
            query: A query with a `query_embedding`, of mode "default" or, where the store has them, "mmr" (maximal
                marginal relevance: near to the vector and far from those chosen before) and "hybrid" (near to the
                vector, or with rare words of `query_str`: BM25 over the tenant's nodes; both rankings are joined by
                reciprocal rank fusion, in which the vectors weigh `alpha`, 0..1, default 0.5). `hybrid_top_k` is the
                number of hybrid results (default `similarity_top_k`), `sparse_top_k` that of nodes ranked by words.
            kwargs: `similarity_cutoff` overrides the store's own; of "mmr", `mmr_threshold` (0..1: how much nearness to
                the vector weighs, default 0.5) and `mmr_prefetch_factor` (nearest nodes to choose from for each
                result, default 4); of "hybrid", `hybrid_prefetch_factor` (nodes in each ranking for each of
                `similarity_top_k`, default 4). Others are ignored.

        Returns:
            Nodes, ids and cosine similarities in [-1, 1], nearest first; of "mmr" in the order of their choice; of
            "hybrid" with fused scores in 0..1, 1 for a node that is first in both rankings. The cutoff is one of
            cosines in every mode.

        Raises:
            ConfigError: Another mode, no vector, for "hybrid" no `query_str`, `similarity_top_k` below 1, or an option
                or filter that cannot be applied.
            StoreMismatchError: The vector is of another length than the store's.
            StoreError: The store cannot be read.
        """
        if query.mode not in self._modes:
            known = " or ".join(repr(mode.value) for mode in self._modes)
            raise ConfigError(f"{self.class_name()} answers queries of mode {known} only, not {query.mode.value!r}")
        if query.query_embedding is None:
            raise ConfigError("the query has no query_embedding: give the retriever an embedding model")
        _check_query(query, kwargs)
        if query.similarity_top_k is None or query.similarity_top_k < 1:
            raise ConfigError(f"top_k must be at least 1, not {query.similarity_top_k}")
        cutoff: float | None = kwargs.get("similarity_cutoff", self.similarity_cutoff)
        # LlamaIndex's `index.as_retriever()` sends an empty list where it means "any node".
        selection = Selection(query.node_ids or None, query.doc_ids or None, query.filters)
        if query.mode == VectorStoreQueryMode.HYBRID:
            found = self._search_hybrid(query, selection, {**kwargs, "similarity_cutoff": cutoff})
            cutoff = None  # the scores are no cosines
        elif query.mode == VectorStoreQueryMode.MMR:
            found = self._search_mmr(query, selection, kwargs)
        else:
            found = self._search(query.query_embedding, query.similarity_top_k, selection)
        # Rounding can carry the inner product of unit vectors past 1.
        found = [(node, min(1.0, max(-1.0, score))) for node, score in found]
        found = [(node, score) for node, score in found if cutoff is None or score >= cutoff]
        return VectorStoreQueryResult(
            nodes=[node for node, _ in found],
            similarities=[score for _, score in found],
            ids=[node.node_id for node, _ in found],
        )

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
