"""`MilvusStore`: a document store in a collection of Milvus, on a server or in a file on this machine."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
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
from reader_rag.rag.stores.database import KEYWORDS, ORDER, TENANT, Database
from reader_rag.rag.stores.database_store import DatabaseStore
from reader_rag.rag.stores.location import DatabaseUrl
from reader_rag.util.one_line import first_line

_LOGGER = logging.getLogger("pymilvus")
_level = _LOGGER.level

try:
    import grpc
    from llama_index.vector_stores.milvus import MilvusVectorStore
    from pymilvus import DataType, MilvusClient
    from pymilvus.exceptions import ConnectionConfigException, ErrorCode, MilvusException
except ImportError as cause:
    raise MissingDependencyError("a store in Milvus needs its client: pip install 'reader-rag[milvus]'") from cause

if _level != logging.NOTSET:
    _LOGGER.setLevel(_level)  # importing the client changes it

TOKEN_VARIABLE = "MILVUS_TOKEN"

_DEFAULT_PORT = 19530
_CONNECT_TIMEOUT_S = 5.0
_TIMEOUT_S = 30.0
_PAGE_SIZE = 1000  # rows of one answer of an iterator
_UNAVAILABLE = 2  # Milvus's error code of a server that does not answer
_MOST_RESULTS = 16_384  # Milvus's limit of a search
_ID, _TEXT, _VECTOR = "id", "text", "embedding"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_COMPARISONS = {
    FilterOperator.GT: ">",
    FilterOperator.GTE: ">=",
    FilterOperator.LT: "<",
    FilterOperator.LTE: "<=",
}


class MilvusStore(DatabaseStore):
    """A document store in a Milvus collection.

    Args:
        url: `milvus://HOST:PORT/COLLECTION` for a server (`milvus+tls://` for an encrypted connection; the token is
            read from the environment variable `MILVUS_TOKEN`), or `milvus:///PATH/NAME.db/COLLECTION` for Milvus Lite
            on this machine, which one process at a time can use.
        embed_model: The embedding model of the vectors; it is compared with the one that made the store.
        similarity_cutoff: Least cosine similarity of a result; a query may set its own.
        must_exist: Raise if there is no collection instead of making one with the first nodes.
        tenant: The tenant whose documents the store reads and changes.

    Raises:
        ConfigError: The URL or the tenant's name is invalid.
        StoreConnectionError: Milvus does not answer, or refuses the token.
        StoreBusyError: Another process uses the file.
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
    def database_at(cls, url: DatabaseUrl) -> MilvusDatabase:
        """Connect to the collection of a URL.

        Args:
            url: The parsed URL.
        """
        return MilvusDatabase(url)


class _TimedVectorStore(MilvusVectorStore):
    """LlamaIndex's store with this module's timeout on its reads and writes."""

    # Declared because type checkers see pydantic's generated constructor instead of LlamaIndex's.
    def __init__(self, uri: str, **options: Any) -> None:
        super().__init__(uri, **options)

    @property
    def client(self) -> Any:
        return _TimedClient(super().client)


class _TimedClient:
    """Milvus's client with a timeout on `search` and `upsert`."""

    def __init__(self, client: MilvusClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return partial(method, timeout=_TIMEOUT_S) if name in ("search", "upsert") else method


class MilvusDatabase(Database):
    """A Milvus collection, through LlamaIndex's `MilvusVectorStore` and Milvus's own client.

    Args:
        url: URL of the collection.

    Raises:
        ConfigError: Milvus does not allow the name of the file or of the collection.
        StoreError: Milvus does not answer, or the file cannot be used.
    """

    product = "Milvus"

    def __init__(self, url: DatabaseUrl) -> None:
        if not _NAME.fullmatch(url.collection):
            raise ConfigError(
                "the name of a Milvus collection has letters, digits and _, and does not begin with a digit: "
                f"{url.collection!r} is not allowed"
            )
        if url.path is not None and url.path.suffix != ".db":
            raise ConfigError(
                f"the file of an embedded Milvus ends in .db: write milvus:///PATH/NAME.db/{url.collection}"
            )
        self.location = str(url)
        self._url = url
        # The embedded database does not allow concurrent writers; a server does.
        self.lock = nullcontext() if url.path is None else threading.RLock()
        self._store: MilvusVectorStore | None = None
        self._closed = False
        with self.errors():
            self._client = self._connected()

    @property
    def client(self) -> MilvusClient:
        """Milvus's client."""
        return self._client

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate Milvus's errors that are raised inside into `StoreError`s."""
        try:
            yield
        except MilvusException as error:
            raise self._store_error(error) from error
        except grpc.RpcError as error:
            raise self.unreachable(first_line(error)) from error
        except OSError as error:
            raise self.not_accessible(error) from error

    def dimension(self) -> int | None:
        """Length of the collection's vectors; None if there is no collection.

        Raises:
            StoreMismatchError: The collection lacks the store's fields.
        """
        self._require_open()
        if not self._client.has_collection(self._url.collection, timeout=_TIMEOUT_S):
            return None
        fields = {
            field["name"]: field
            for field in self._client.describe_collection(self._url.collection, timeout=_TIMEOUT_S)["fields"]
        }
        if not {_ID, _TEXT, _VECTOR, ORDER, *KEYWORDS} <= fields.keys():
            raise self.foreign()
        return int(fields[_VECTOR]["params"]["dim"])

    def create(self, dimension: int) -> None:
        """Make the collection with an index on each of `KEYWORDS`; an existing collection is left unchanged."""
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=True)
        schema.add_field(_ID, DataType.VARCHAR, is_primary=True, max_length=36)
        schema.add_field(_TEXT, DataType.VARCHAR, max_length=65_535)
        schema.add_field(_VECTOR, DataType.FLOAT_VECTOR, dim=dimension)
        schema.add_field(ORDER, DataType.INT64)
        index = MilvusClient.prepare_index_params()
        embedded = self._url.path is not None
        index.add_index(_VECTOR, index_type="FLAT" if embedded else "AUTOINDEX", metric_type="COSINE")
        for key in KEYWORDS:
            # With the tenant as partition key a search reads its own tenant's partitions only.
            schema.add_field(key, DataType.VARCHAR, max_length=64, is_partition_key=key == TENANT)
            if not embedded:
                index.add_index(key, index_type="INVERTED")
        try:
            self._client.create_collection(
                self._url.collection,
                schema=schema,
                consistency_level="Strong",  # reads see all finished writes
                timeout=_TIMEOUT_S,
            )
            # The collection is empty, so the index need not be waited for.
            self._client.create_index(self._url.collection, index, timeout=_TIMEOUT_S, sync=False)
        except MilvusException:
            if not self._client.has_collection(self._url.collection, timeout=_TIMEOUT_S):
                raise

    def drop(self) -> None:
        """Delete the collection."""
        self._client.drop_collection(self._url.collection, timeout=_TIMEOUT_S)
        self._store = None

    def put(self, nodes: Sequence[BaseNode]) -> None:
        """Store nodes through LlamaIndex's store; a node with the same id is replaced."""
        self._vector_store().add(list(nodes))

    def nearest(self, vector: list[float], top_k: int, where: MetadataFilters) -> list[tuple[BaseNode, float]]:
        """The nodes nearest to a vector that meet the conditions, with their cosines, nearest first."""
        query = VectorStoreQuery(query_embedding=vector, similarity_top_k=min(top_k, _MOST_RESULTS))
        result = self._vector_store().query(query, string_expr=to_milvus(where))
        return list(zip(result.nodes or (), result.similarities or (), strict=True))

    def fetch(self, where: MetadataFilters) -> Iterable[BaseNode]:
        """All nodes that meet the conditions, read page by page."""
        self._vector_store()
        rows = self._client.query_iterator(
            self._url.collection,
            batch_size=_PAGE_SIZE,
            filter=to_milvus(where),
            output_fields=[_TEXT, "_node_content", "_node_type"],
            timeout=_TIMEOUT_S,
        )
        try:
            while part := rows.next():
                for row in part:
                    yield metadata_dict_to_node(row, text=row[_TEXT])
        finally:
            rows.close()

    def count(self, where: MetadataFilters) -> int:
        """Number of nodes that meet the conditions, exact."""
        self._vector_store()
        rows = self._client.query(
            self._url.collection, filter=to_milvus(where), output_fields=["count(*)"], timeout=_TIMEOUT_S
        )
        return int(rows[0]["count(*)"])

    def remove(self, where: MetadataFilters) -> None:
        """Delete the nodes that meet the conditions."""
        self._client.delete(self._url.collection, filter=to_milvus(where), timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close the client, and end an embedded server."""
        if self._closed:
            return
        self._closed = True
        self._client.close()
        if self._store is not None:
            self._store.client.close()
        if self._url.path is not None:
            from milvus_lite.server_manager import server_manager_instance

            # The client does not end the embedded server it started, which keeps the file locked.
            server_manager_instance.release_server(str(self._url.path))

    def _connected(self) -> MilvusClient:
        url = self._url
        if url.path is None:
            # `dedicated`: a connection shared with other clients keeps waiting after the server is back.
            return MilvusClient(self._uri, token=self._token, timeout=_CONNECT_TIMEOUT_S, dedicated=True)
        try:
            import milvus_lite  # noqa: F401  the client's own message does not name the extra
        except ImportError as error:
            raise MissingDependencyError(
                "a store in an embedded Milvus needs Milvus Lite: pip install 'reader-rag[milvus]'"
            ) from error
        url.path.parent.mkdir(parents=True, exist_ok=True)
        return MilvusClient(self._uri)

    @property
    def _uri(self) -> str:
        url = self._url
        if url.path is not None:
            return str(url.path)
        host = f"[{url.host}]" if ":" in (url.host or "") else url.host
        return f"{'https' if url.tls else 'http'}://{host}:{url.port or _DEFAULT_PORT}"

    @property
    def _token(self) -> str:
        return "" if self._url.path is not None else os.environ.get(TOKEN_VARIABLE, "")

    def _vector_store(self) -> MilvusVectorStore:
        """LlamaIndex's store over the collection, made at first use, with the collection loaded for searching."""
        self._require_open()
        if self._store is None:
            self._store = _TimedVectorStore(
                self._uri,
                token=self._token,
                collection_name=self._url.collection,
                upsert_mode=True,
                text_key=_TEXT,
                embedding_field=_VECTOR,
                similarity_metric="COSINE",
                use_async_client=False,
                timeout=_CONNECT_TIMEOUT_S,
                dedicated=True,
            )
            self._client.load_collection(self._url.collection, timeout=_TIMEOUT_S)
        return self._store

    def _require_open(self) -> None:
        if self._closed:
            raise self.closed()

    def _store_error(self, error: MilvusException) -> StoreError:
        reason = first_line(error.message)
        if isinstance(error, ConnectionConfigException) and self._url.path is not None:
            return StoreBusyError(
                f"{self._url.path} cannot be opened: another process uses it (wait until it has finished, or run a "
                "Milvus server), or it is not a database of Milvus Lite"
            )
        if error.code == ErrorCode.COLLECTION_NOT_FOUND:
            return self.missing()
        if error.code == grpc.StatusCode.UNAUTHENTICATED or "auth" in reason:
            return StoreConnectionError(
                f"Milvus at {self.location} refuses access: put its token into {TOKEN_VARIABLE}"
            )
        # Where the network fails, the client sets gRPC's status in place of Milvus's error code.
        if error.code == _UNAVAILABLE or not isinstance(error.code, int):
            return self.unreachable(reason)
        return StoreError(f"Milvus at {self.location} refused a request ({reason}): see its log")


def to_milvus(filters: MetadataFilters) -> str:
    """Translate LlamaIndex's filters to a filter expression of Milvus.

    Args:
        filters: Conditions, possibly nested.

    Returns:
        The expression; "" without conditions.

    Raises:
        ConfigError: Milvus has no equivalent of a condition.
    """
    parts = [to_milvus(one) if isinstance(one, MetadataFilters) else _condition(one) for one in filters.filters]
    parts = [f"({part})" for part in parts if part]
    if filters.condition == FilterCondition.NOT:
        return f"not ({' or '.join(parts)})" if parts else ""
    return (" or " if filters.condition == FilterCondition.OR else " and ").join(parts)


def _condition(one: MetadataFilter) -> str:
    key, value, operator = _field(one.key), one.value, one.operator
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    match operator:
        case FilterOperator.EQ:
            return _if_exists(one.key, f"{key} == {_literal(value)}")
        case FilterOperator.NE:
            return f"not ({_if_exists(one.key, f'{key} == {_literal(value)}')})"
        case FilterOperator.GT | FilterOperator.GTE | FilterOperator.LT | FilterOperator.LTE:
            return _if_exists(one.key, f"{key} {_COMPARISONS[operator]} {_literal(value)}")
        case FilterOperator.IN:
            return _if_exists(one.key, _any_of(key, values))
        case FilterOperator.NIN:
            return f"not ({_if_exists(one.key, _any_of(key, values))})"
        case FilterOperator.CONTAINS | FilterOperator.ANY | FilterOperator.ALL:
            joined = " and " if operator == FilterOperator.ALL else " or "
            return _if_exists(one.key, joined.join(f"json_contains({_name(one.key)}, {_literal(v)})" for v in values))
        case FilterOperator.TEXT_MATCH:
            pattern = re.sub(r"([\\%_])", r"\\\1", str(value))
            return _if_exists(one.key, f"{key} like {_literal(f'%{pattern}%')}")
        case FilterOperator.IS_EMPTY:
            empty = f'{key} == "" or array_length({_name(one.key)}) == 0'
            return f"not (exists {key}) or {empty}"
    raise _unsupported(f"has no operator like {operator.value!r}")


def _if_exists(key: str, condition: str) -> str:
    # In Milvus a comparison with a missing field is neither true nor false, and so is its negation.
    return condition if key in KEYWORDS else f"exists {_field(key)} and ({condition})"


def _field(key: str) -> str:
    return key if key in KEYWORDS else f"$meta[{_literal(key)}]"


def _name(key: str) -> str:
    """A key as Milvus's functions over lists need it."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
        raise _unsupported(f"does not allow {key!r} as the name of a list")
    return key


def _any_of(key: str, values: Sequence[Any]) -> str:
    if key in KEYWORDS:
        return f"{key} in [{', '.join(_literal(value) for value in values)}]"
    return " or ".join(f"{key} == {_literal(value)}" for value in values) or "false"


def _unsupported(reason: str) -> ConfigError:
    return ConfigError(f"the metadata filter cannot be applied: Milvus {reason}; change the filter")


def _literal(value: Any) -> str:
    if not isinstance(value, (bool, int, float, str)):
        raise _unsupported(f"cannot compare a {type(value).__name__}")
    return json.dumps(value, ensure_ascii=False)
