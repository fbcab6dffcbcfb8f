"""`QdrantStore`: a document store in a collection of Qdrant, on a server or in a folder on this machine."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from reader_rag.errors import (
    ConfigError,
    MissingDependencyError,
    StoreBusyError,
    StoreConnectionError,
    StoreError,
)
from reader_rag.rag.stores.database import KEYWORDS, TENANT, Database
from reader_rag.rag.stores.database_store import DatabaseStore
from reader_rag.rag.stores.location import DatabaseUrl
from reader_rag.util.one_line import first_line, one_line

try:
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient, models
    from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse
except ImportError as cause:
    raise MissingDependencyError("a store in Qdrant needs its client: pip install 'reader-rag[qdrant]'") from cause

API_KEY_VARIABLE = "QDRANT_API_KEY"

_DEFAULT_PORT = 6333
_TIMEOUT_S = 30
_VECTOR = "passage"
_PAGE_SIZE = 1000  # points of one answer of a scroll


class QdrantStore(DatabaseStore):
    """A document store in a Qdrant collection.

    Args:
        url: `qdrant://HOST:PORT/COLLECTION` for a server (`qdrant+tls://` for an encrypted connection; the API key is
            read from the environment variable `QDRANT_API_KEY`), or `qdrant:///FOLDER/COLLECTION` for a folder on this
            machine, which one process at a time can use.
        embed_model: The embedding model of the vectors; it must be the one that made the store.
        similarity_cutoff: Least cosine similarity of a result, -1 to 1; a query may set its own.
        must_exist: Whether to raise if there is no collection; otherwise the first nodes make one.
        tenant: The tenant whose documents the store reads and changes.

    Raises:
        ConfigError: The URL or the tenant's name is invalid.
        StoreConnectionError: Qdrant does not answer, or refuses the key.
        StoreBusyError: Another process uses the folder.
        StoreNotFoundError: There is no such collection, and `must_exist` is set.
        StoreMismatchError: The collection was made by another program or for another embedding model.
    """

    # A type checker takes the fields of a pydantic class for its arguments unless it has an `__init__` of its own.
    def __init__(
        self,
        url: str | DatabaseUrl,
        *,
        embed_model: BaseEmbedding | None = None,
        similarity_cutoff: float | None = None,
        must_exist: bool = False,
        tenant: str = "",
    ) -> None:
        super().__init__(
            url, embed_model=embed_model, similarity_cutoff=similarity_cutoff, must_exist=must_exist, tenant=tenant
        )

    @classmethod
    def database_at(cls, url: DatabaseUrl) -> QdrantDatabase:
        """Connect to the collection of a URL.

        Args:
            url: The parsed URL.
        """
        return QdrantDatabase(url)


class QdrantDatabase(Database):
    """A Qdrant collection, through LlamaIndex's `QdrantVectorStore` and Qdrant's own client.

    Args:
        url: URL of the collection.

    Raises:
        StoreError: The folder cannot be used, or the client cannot be made.
    """

    product = "Qdrant"

    def __init__(self, url: DatabaseUrl) -> None:
        self.location = str(url)
        self._url = url
        # The embedded database is not thread safe; the server's client is.
        self.lock = nullcontext() if url.path is None else threading.RLock()
        self._store: QdrantVectorStore | None = None
        with self.errors():
            self._client = self._connected()

    @property
    def client(self) -> QdrantClient:
        """Qdrant's client."""
        return self._client

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate Qdrant's errors that are raised inside into `StoreError`s."""
        try:
            yield
        except UnexpectedResponse as error:
            raise self._response_error(error) from error
        except (ResponseHandlingException, ApiException, ConnectionError) as error:
            raise self.unreachable(first_line(error)) from error
        except (OSError, sqlite3.Error) as error:
            raise self.not_accessible(error) from error
        except RuntimeError as error:
            if "already accessed" in str(error):
                raise StoreBusyError(
                    f"another process uses {self._url.path}: wait until it has finished, or run a Qdrant server"
                ) from error
            if "closed" in str(error):
                raise self.closed() from error
            raise

    def dimension(self) -> int | None:
        """Length of the collection's vectors; None if there is no collection.

        Raises:
            StoreMismatchError: The collection has no vector of the store's name.
        """
        if not self._client.collection_exists(self._url.collection):
            return None
        vectors = self._client.get_collection(self._url.collection).config.params.vectors
        if not isinstance(vectors, dict) or _VECTOR not in vectors:
            raise self.foreign()
        return int(vectors[_VECTOR].size)

    def create(self, dimension: int) -> None:
        """Make the collection with an index on each of `KEYWORDS`; an existing collection is left unchanged."""
        on_server = self._url.path is None
        try:
            self._client.create_collection(
                self._url.collection,
                vectors_config={
                    _VECTOR: models.VectorParams(
                        size=dimension,
                        distance=models.Distance.COSINE,
                        # A search graph for each tenant, and none over all points.
                        hnsw_config=models.HnswConfigDiff(m=0, payload_m=16) if on_server else None,
                    )
                },
            )
        except (UnexpectedResponse, ValueError):
            if not self._client.collection_exists(self._url.collection):
                raise
        if on_server:  # an embedded database scans all points
            for key in KEYWORDS:
                schema = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=key == TENANT)
                self._client.create_payload_index(self._url.collection, key, field_schema=schema, wait=True)

    def drop(self) -> None:
        """Delete the collection."""
        self._client.delete_collection(self._url.collection)
        self._store = None

    def put(self, nodes: Sequence[BaseNode]) -> None:
        """Store nodes through LlamaIndex's store; a node with the same id is replaced.

        Args:
            nodes: Nodes with embeddings.
        """
        self._vector_store().add(list(nodes))

    def nearest(self, vector: list[float], top_k: int, where: MetadataFilters) -> list[tuple[BaseNode, float]]:
        """The nodes nearest to a vector that meet the conditions.

        Args:
            vector: The query's embedding.
            top_k: Most nodes to return.
            where: The conditions.

        Returns:
            Pairs of node and cosine similarity, most similar first.
        """
        query = VectorStoreQuery(query_embedding=vector, similarity_top_k=top_k)
        result = self._vector_store().query(query, qdrant_filters=to_qdrant(where))
        return list(zip(result.nodes or (), result.similarities or (), strict=True))

    def fetch(self, where: MetadataFilters) -> Iterable[BaseNode]:
        """All nodes that meet the conditions, read page by page."""
        offset: Any = None
        while True:
            points, offset = self._client.scroll(
                self._url.collection,
                scroll_filter=to_qdrant(where),
                limit=_PAGE_SIZE,
                offset=offset,
                with_vectors=False,
            )
            for point in points:
                yield metadata_dict_to_node(point.payload or {})
            if offset is None:
                return

    def count(self, where: MetadataFilters) -> int:
        """Number of nodes that meet the conditions, exact."""
        return int(self._client.count(self._url.collection, count_filter=to_qdrant(where), exact=True).count)

    def remove(self, where: MetadataFilters) -> None:
        """Delete the nodes that meet the conditions, and wait until they are deleted."""
        selector = models.FilterSelector(filter=to_qdrant(where))
        self._client.delete(self._url.collection, points_selector=selector, wait=True)

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    def _connected(self) -> QdrantClient:
        url = self._url
        if url.path is not None:
            url.path.mkdir(parents=True, exist_ok=True)
            return QdrantClient(path=str(url.path), force_disable_check_same_thread=True)
        return QdrantClient(
            host=url.host or "",
            port=url.port or _DEFAULT_PORT,
            https=url.tls,
            api_key=os.environ.get(API_KEY_VARIABLE),
            timeout=_TIMEOUT_S,
            check_compatibility=False,  # it would only warn; the server itself refuses what it does not support
        )

    def _vector_store(self) -> QdrantVectorStore:
        """LlamaIndex's store over the collection, made at first use, because it reads the collection's settings."""
        if self._store is None:
            self._store = QdrantVectorStore(
                self._url.collection, client=self._client, dense_vector_name=_VECTOR, index_doc_id=False
            )
        return self._store

    def _response_error(self, error: UnexpectedResponse) -> StoreError:
        if error.status_code in (401, 403):
            return StoreConnectionError(
                f"Qdrant at {self.location} refuses access ({error.status_code}): put its key into {API_KEY_VARIABLE}"
            )
        if error.status_code == 404:
            return self.missing()
        content = error.content.decode(errors="replace")[:200]
        return StoreError(
            f"Qdrant at {self.location} refused a request ({error.status_code}: {one_line(content)}): see its log"
        )


def to_qdrant(filters: MetadataFilters) -> models.Filter:
    """Translate LlamaIndex's filters to Qdrant's.

    Args:
        filters: Conditions, possibly nested.

    Raises:
        ConfigError: Qdrant has no equivalent of a condition.
    """
    conditions: list[Any] = [
        to_qdrant(one) if isinstance(one, MetadataFilters) else _condition(one) for one in filters.filters
    ]
    if filters.condition == FilterCondition.OR:
        return models.Filter(should=conditions)
    if filters.condition == FilterCondition.NOT:
        return models.Filter(must_not=conditions)
    return models.Filter(must=conditions)


def _condition(one: MetadataFilter) -> models.Filter | models.FieldCondition | models.IsEmptyCondition:
    key, value, operator = one.key, one.value, one.operator
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    match operator:
        case FilterOperator.EQ | FilterOperator.CONTAINS:
            return _equals(key, value)
        case FilterOperator.NE:
            return models.Filter(must_not=[_equals(key, value)])
        case FilterOperator.GT | FilterOperator.GTE | FilterOperator.LT | FilterOperator.LTE:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise _unsupported(f"compares only numbers by greater and less, not {value!r}")
            bound = {FilterOperator.GT: "gt", FilterOperator.GTE: "gte", FilterOperator.LT: "lt"}.get(operator, "lte")
            return models.FieldCondition(key=key, range=models.Range(**{bound: value}))
        case FilterOperator.IN | FilterOperator.ANY:
            return _any_of(key, values)
        case FilterOperator.NIN:
            return models.Filter(must_not=[_any_of(key, values)])
        case FilterOperator.ALL:
            return models.Filter(must=[_equals(key, each) for each in values])
        case FilterOperator.TEXT_MATCH:
            return models.FieldCondition(key=key, match=models.MatchText(text=str(value)))
        case FilterOperator.IS_EMPTY:
            nothing = models.IsEmptyCondition(is_empty=models.PayloadField(key=key))
            return models.Filter(should=[nothing, _equals(key, "")])
    raise _unsupported(f"has no operator like {operator.value!r}")


def _equals(key: str, value: Any) -> models.FieldCondition:
    if isinstance(value, float):
        return models.FieldCondition(key=key, range=models.Range(gte=value, lte=value))
    if not isinstance(value, (bool, int, str)):
        raise _unsupported(f"cannot compare a {type(value).__name__}")
    return models.FieldCondition(key=key, match=models.MatchValue(value=value))


def _any_of(key: str, values: Sequence[Any]) -> models.Filter | models.FieldCondition:
    if values and all(isinstance(value, str) for value in values):
        return models.FieldCondition(key=key, match=models.MatchAny(any=list(values)))
    return models.Filter(should=[_equals(key, value) for value in values]) if values else _nothing()


def _unsupported(reason: str) -> ConfigError:
    return ConfigError(f"the metadata filter cannot be applied: Qdrant {reason}; change the filter")


def _nothing() -> models.Filter:
    return models.Filter(must=[models.HasIdCondition(has_id=[])])
