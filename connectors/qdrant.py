"""`QdrantStore`: the document store in a collection of Qdrant, on a server or in a folder of this machine."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

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
    StoreMismatchError,
    StoreNotFoundError,
    StoreWriteError,
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
_AT_ONCE = 1000  # points of one answer when all are read


class QdrantStore(DatabaseStore):
    """A document store in a Qdrant collection.

    Args:
        url: `qdrant://HOST:PORT/COLLECTION` for a server (`qdrant+tls://` where it is encrypted; its key is read from
            the environment variable `QDRANT_API_KEY`), or `qdrant:///FOLDER/COLLECTION` for a folder of this machine,
            which one process at a time can use.
        embed_model: The model whose vectors the store holds; it is compared with the one that made the store.
        similarity_cutoff: Leave out results whose cosine similarity is lower; a query may give its own.
        must_exist: Refuse a collection that is not there; else the first nodes make it.
        tenant: On whose behalf the store is used.

    Raises:
        ConfigError: The URL is none of these, or no tenant can have that name.
        StoreConnectionError: No Qdrant answers there, or it refuses the key.
        StoreBusyError: Another process uses the folder.
        StoreError: As `DatabaseStore`.
    """

    @classmethod
    def database_at(cls, url: DatabaseUrl) -> QdrantDatabase:
        """See `DatabaseStore.database_at`."""
        return QdrantDatabase(url)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises this component."""
        return "QdrantStore"


class QdrantDatabase(Database):
    """A Qdrant collection, through LlamaIndex's `QdrantVectorStore` and Qdrant's own client.

    Args:
        url: Where it is.

    Raises:
        StoreError: The folder cannot be used.
    """

    def __init__(self, url: DatabaseUrl) -> None:
        self.location = str(url)
        self._url = url
        # The embedded database is not made for several threads; the server's client is.
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
        """See `Database.errors`."""
        try:
            yield
        except UnexpectedResponse as error:
            raise self._refused(error) from error
        except (ResponseHandlingException, ApiException, ConnectionError) as error:
            raise StoreConnectionError(
                f"no Qdrant answers at {self.location} ({first_line(error)}): start it, or check host and port"
            ) from error
        except (OSError, sqlite3.Error) as error:
            raise StoreWriteError(
                f"{self.location} cannot be read or written ({error}); check permissions and room on the disk"
            ) from error
        except RuntimeError as error:
            if "already accessed" in str(error):
                raise StoreBusyError(
                    f"another process uses {self._url.path}: wait until it has finished, or run a Qdrant server"
                ) from error
            if "closed" in str(error):
                raise StoreError(f"the store {self.location} is closed; open it again") from error
            raise

    def dimension(self) -> int | None:
        """See `Database.dimension`."""
        if not self._client.collection_exists(self._url.collection):
            return None
        vectors = self._client.get_collection(self._url.collection).config.params.vectors
        if not isinstance(vectors, dict) or _VECTOR not in vectors:
            raise StoreMismatchError(
                f"the collection at {self.location} was made by another program: name another, it will be made"
            )
        return int(vectors[_VECTOR].size)

    def create(self, dimension: int) -> None:
        """See `Database.create`."""
        on_server = self._url.path is None
        try:
            self._client.create_collection(
                self._url.collection,
                vectors_config={
                    _VECTOR: models.VectorParams(
                        size=dimension,
                        distance=models.Distance.COSINE,
                        # Qdrant's way to give each tenant a search graph of its own, and none over all.
                        hnsw_config=models.HnswConfigDiff(m=0, payload_m=16) if on_server else None,
                    )
                },
            )
        except (UnexpectedResponse, ValueError):
            if not self._client.collection_exists(self._url.collection):
                raise
        if on_server:  # embedded, all points are looked at anyway
            for key in KEYWORDS:
                schema = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=key == TENANT)
                self._client.create_payload_index(self._url.collection, key, field_schema=schema, wait=True)

    def drop(self) -> None:
        """See `Database.drop`."""
        self._client.delete_collection(self._url.collection)
        self._store = None

    def put(self, nodes: Sequence[BaseNode]) -> None:
        """See `Database.put`."""
        self._vector_store().add(list(nodes))

    def nearest(self, vector: list[float], top_k: int, where: MetadataFilters) -> list[tuple[BaseNode, float]]:
        """See `Database.nearest`."""
        query = VectorStoreQuery(query_embedding=vector, similarity_top_k=top_k)
        result = self._vector_store().query(query, qdrant_filters=to_qdrant(where))
        return list(zip(result.nodes or (), result.similarities or (), strict=True))

    def fetch(self, where: MetadataFilters) -> Iterable[BaseNode]:
        """See `Database.fetch`."""
        place: Any = None
        while True:
            points, place = self._client.scroll(
                self._url.collection, scroll_filter=to_qdrant(where), limit=_AT_ONCE, offset=place, with_vectors=False
            )
            for point in points:
                yield metadata_dict_to_node(point.payload or {})
            if place is None:
                return

    def count(self, where: MetadataFilters) -> int:
        """See `Database.count`."""
        return int(self._client.count(self._url.collection, count_filter=to_qdrant(where), exact=True).count)

    def remove(self, where: MetadataFilters) -> None:
        """See `Database.remove`."""
        selector = models.FilterSelector(filter=to_qdrant(where))
        self._client.delete(self._url.collection, points_selector=selector, wait=True)

    def close(self) -> None:
        """See `Database.close`."""
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
            check_compatibility=False,  # it would only warn; what a server cannot do, it refuses
        )

    def _vector_store(self) -> QdrantVectorStore:
        """LlamaIndex's store over the collection; it asks the collection what it is like, once."""
        if self._store is None:
            self._store = QdrantVectorStore(
                self._url.collection, client=self._client, dense_vector_name=_VECTOR, index_doc_id=False
            )
        return self._store

    def _refused(self, error: UnexpectedResponse) -> StoreError:
        if error.status_code in (401, 403):
            return StoreConnectionError(
                f"Qdrant at {self.location} refuses us ({error.status_code}): put its key into {API_KEY_VARIABLE}"
            )
        if error.status_code == 404:
            return StoreNotFoundError(f"the collection at {self.location} is gone: ingest the documents again")
        content = error.content.decode(errors="replace")[:200]
        return StoreError(f"Qdrant at {self.location} refused a request ({error.status_code}): {one_line(content)}")


def to_qdrant(filters: MetadataFilters) -> models.Filter:
    """LlamaIndex's filters as Qdrant's.

    Raises:
        ConfigError: Qdrant has no such condition.
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
                raise ConfigError(f"the metadata filter cannot be applied: Qdrant orders numbers only, not {value!r}")
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
    raise ConfigError(f"the metadata filter cannot be applied: Qdrant has nothing like {operator.value!r}")


def _equals(key: str, value: Any) -> models.FieldCondition:
    if isinstance(value, float):
        return models.FieldCondition(key=key, range=models.Range(gte=value, lte=value))
    if not isinstance(value, (bool, int, str)):
        raise ConfigError(f"the metadata filter cannot be applied: Qdrant compares no {type(value).__name__}")
    return models.FieldCondition(key=key, match=models.MatchValue(value=value))


def _any_of(key: str, values: Sequence[Any]) -> models.Filter | models.FieldCondition:
    if values and all(isinstance(value, str) for value in values):
        return models.FieldCondition(key=key, match=models.MatchAny(any=list(values)))
    return models.Filter(should=[_equals(key, value) for value in values]) if values else _nothing()


def _nothing() -> models.Filter:
    return models.Filter(must=[models.HasIdCondition(has_id=[])])
