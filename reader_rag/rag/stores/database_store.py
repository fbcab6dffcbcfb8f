"""`DatabaseStore`: a document store in a vector database, over the few things that every such database can do.

One collection holds the nodes of all tenants, a record of each ingested file, and a note about the embedding model.
Each is a LlamaIndex node whose metadata says what it is and whose, and every search and every change names both. Such
databases have no transactions: new nodes are written before the old ones go and the file's record after both, so that
what was broken off is found unfinished, and done again, by the next ingestion.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.vector_stores.types import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from numpy.typing import NDArray

from reader_rag.config import checked_tenant
from reader_rag.errors import ConfigError, StoreBusyError, StoreError, StoreMismatchError, StoreNotFoundError
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.rag.stores.database import BATCH, DOCUMENT, KEYWORDS, KIND, NODE_ID, NODE_KEY, ORDER, TENANT, Database
from reader_rag.rag.stores.identity import identity_of, require_same_model, unit_vectors
from reader_rag.rag.stores.location import DatabaseUrl
from reader_rag.rag.stores.sqlite_file import DocumentRecord

FORMAT_VERSION = "1"

_OURS = {*KEYWORDS, ORDER, NODE_ID}
_NAMES_AT_ONCE = 200  # in one filter
_ELSEWHERE = "another collection"


class Kind(StrEnum):
    """What a point of the collection is."""

    NODE = "node"
    RECORD = "record"
    ABOUT = "about"


@dataclass
class _Shared:
    """What the copies of a store for its tenants have in common."""

    database: Database
    identity: dict[str, str] = field(default_factory=dict)  # of our embedding model, if there is one
    dimension: int | None = None


class DatabaseStore(DocumentStore):
    """A document store in a collection of a vector database; similarity is the cosine, higher is nearer.

    Several processes may use one collection. Searches see what was written as soon as it is; while an ingestion
    writes, they may for a moment see old and new nodes of a file that has changed.

    Args:
        url: Of the collection; which ones there are, the connectors say.
        embed_model: The model whose vectors the store holds; it is compared with the one that made the store.
        similarity_cutoff: Leave out results whose cosine similarity is lower; a query may give its own.
        must_exist: Refuse a collection that is not there; else the first nodes make it.
        tenant: On whose behalf the store is used.

    Raises:
        ConfigError: The URL is no such one, or no tenant can have that name.
        StoreNotFoundError: There is no such collection, and it must exist.
        StoreMismatchError: The collection was made by another program or for another embedding model.
        StoreError: The database cannot be used.
    """

    _shared: _Shared = PrivateAttr()

    def __init__(
        self,
        url: str | DatabaseUrl,
        *,
        embed_model: BaseEmbedding | None = None,
        similarity_cutoff: float | None = None,
        must_exist: bool = False,
        tenant: str = "",
    ) -> None:
        database = self.database_at(url if isinstance(url, DatabaseUrl) else DatabaseUrl.parse(url))
        super().__init__(stores_text=True)
        self.similarity_cutoff = similarity_cutoff
        self._shared = _Shared(database)
        try:
            self._tenant = checked_tenant(tenant)
            if embed_model is not None:
                self._shared.identity = identity_of(embed_model)
            with self._calling() as database:
                self._shared.dimension = database.dimension()
                if self._shared.dimension is not None:
                    self._require_ours(self._shared.dimension)
                elif must_exist:
                    raise StoreNotFoundError(
                        f"there is no store at {self.place}; make one with "
                        f"`reader-rag ingest PATH --vector-store {self.place}`"
                    )
        except BaseException:
            database.close()
            raise

    @classmethod
    @abstractmethod
    def database_at(cls, url: DatabaseUrl) -> Database:
        """Open what a URL names."""

    @property
    def client(self) -> Any:
        """The database's own client."""
        return self._shared.database.client

    @property
    def place(self) -> str:
        """URL of the collection."""
        return self._shared.database.place

    @property
    def dimension(self) -> int | None:
        """Length of the vectors; None while there is no collection."""
        with self._calling():
            return self._known_dimension()

    @property
    def num_nodes(self) -> int:
        """Number of the tenant's nodes."""
        with self._calling() as database:
            return 0 if self._known_dimension() is None else database.count(self._mine())

    def documents(self) -> list[DocumentRecord]:
        """Files that were ingested for the tenant, in path order."""
        with self._calling() as database:
            found = [] if self._known_dimension() is None else list(database.fetch(self._mine(kind=Kind.RECORD)))
        records = [DocumentRecord(**{key: node.metadata[key] for key in ("path", "root", "hash")}) for node in found]
        return sorted(records, key=lambda record: record.path)

    def close(self) -> None:
        """See `DocumentStore.close`."""
        self._shared.database.close()

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
            StoreError: The database cannot be used.
        """
        with self._calling() as database:
            self._put(database, nodes, uuid.uuid4().hex)
        return [node.node_id for node in nodes]

    def replace_documents(
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord], gone: Sequence[str] = ()
    ) -> None:
        """See `DocumentStore.replace_documents`.

        Raises:
            StoreBusyError: Somebody else replaced nodes of the same documents meanwhile.
        """
        batch = uuid.uuid4().hex
        with self._calling() as database:
            stored = self._put(database, nodes, batch)
            if self._known_dimension() is None:
                if records:
                    raise ConfigError("documents without nodes need a store that holds nodes already")
                return
            of_others = MetadataFilter(key=BATCH, value=batch, operator=FilterOperator.NE)
            for paths in _parts([record.path for record in records]):
                database.remove(self._mine(_among(DOCUMENT, paths), of_others))
            self._put_records(database, records, batch)
            self._forget(database, gone)
            # Whoever of several writes last finds what the others removed, and says so.
            if database.count(self._mine(_is(BATCH, batch))) != stored:
                self._forget(database, [record.path for record in records])
                raise StoreBusyError(
                    f"somebody else ingested the same documents into {self.place} meanwhile: "
                    "run the command again when they have finished"
                )

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Remove the nodes that meet every given condition.

        Raises:
            ConfigError: No condition was given (`clear` removes everything), or a filter cannot be applied.
        """
        self._require_condition(node_ids, filters)
        with self._calling() as database:
            if self._known_dimension() is not None:
                for condition in self._conditions(node_ids, filters, None):
                    database.remove(condition)

    def clear(self) -> None:
        """Remove all documents and nodes of the tenant, and with the last tenant's the collection."""
        with self._calling() as database:
            if self._known_dimension() is None:
                return
            for kind in (Kind.RECORD, Kind.NODE):
                database.remove(self._mine(kind=kind))
            others = MetadataFilters(filters=[MetadataFilter(key=KIND, value=Kind.ABOUT, operator=FilterOperator.NE)])
            if database.count(others) == 0:
                database.drop()
                self._shared.dimension = None

    def get_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        doc_ids: list[str] | None = None,
    ) -> list[BaseNode]:
        """See `DocumentStore.get_nodes`.

        Raises:
            ConfigError: A filter cannot be applied.
        """
        with self._calling() as database:
            if self._known_dimension() is None:
                return []
            conditions = self._conditions(node_ids, filters, doc_ids)
            found = [node for condition in conditions for node in database.fetch(condition)]
        found.sort(key=lambda node: int(node.metadata[ORDER]))
        return [_as_given(node) for node in found]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The tenant's nodes nearest to a vector.

        Filters, `node_ids` and `doc_ids` are conditions of the search itself: `similarity_top_k` nodes come back as
        long as that many meet them. An empty list of ids restricts nothing.

        Args:
            query: Mode "default" with a `query_embedding`.
            kwargs: `similarity_cutoff` takes the place of the store's own; others are ignored.

        Returns:
            Nodes, ids and cosine similarities in [-1, 1], nearest first.

        Raises:
            ConfigError: Another mode, no vector, `similarity_top_k` below 1, or a filter that cannot be applied.
            StoreMismatchError: A vector of another length than the store's.
            StoreError: The database cannot be used.
        """
        embedding = self._checked_vector(query)
        cutoff: float | None = kwargs.get("similarity_cutoff", self.similarity_cutoff)
        with self._calling() as database:
            dimension = self._known_dimension()
            if dimension is None:
                return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
            vector = unit_vectors([embedding], dimension, _ELSEWHERE)[0].tolist()
            conditions: list[MetadataFilter | MetadataFilters] = []
            # LlamaIndex's `index.as_retriever()` sends an empty list where it means "any node".
            if query.node_ids:
                conditions.append(_among(NODE_KEY, query.node_ids))
            if query.doc_ids:
                conditions.append(_among(DOCUMENT, query.doc_ids))
            if query.filters is not None:
                conditions.append(query.filters)
            found = database.nearest(vector, query.similarity_top_k, self._mine(*conditions))
        found = [(_as_given(node), score) for node, score in found if cutoff is None or score >= cutoff]
        return VectorStoreQueryResult(
            nodes=[node for node, _ in found],
            # Rounding can carry the inner product of unit vectors past 1.
            similarities=[min(1.0, max(-1.0, score)) for _, score in found],
            ids=[node.node_id for node, _ in found],
        )

    @contextmanager
    def _calling(self) -> Iterator[Database]:
        database = self._shared.database
        with database.lock, database.errors():
            yield database

    def _known_dimension(self) -> int | None:
        """Length of the vectors; asked for again while there is no collection, which another process may make."""
        if self._shared.dimension is None:
            self._shared.dimension = self._shared.database.dimension()
        return self._shared.dimension

    def _require_ours(self, dimension: int) -> None:
        """Check that the collection is a store of ours, for our embedding model; an empty one becomes that."""
        database = self._shared.database
        about = next(iter(database.fetch(_all_of(_is(KIND, Kind.ABOUT)))), None)
        if about is None:
            if database.count(MetadataFilters(filters=[])) > 0:
                raise StoreMismatchError(
                    f"the collection at {self.place} was made by another program: name {_ELSEWHERE}, it will be made"
                )
            self._put_about(database, dimension)
            return
        facts = about.metadata
        if facts.get("format") != FORMAT_VERSION:
            raise StoreMismatchError(
                f"the store at {self.place} has format version {facts.get('format')}, this program reads "
                f"{FORMAT_VERSION}: use the version that made it, or ingest into {_ELSEWHERE}"
            )
        if self._shared.identity:
            require_same_model(self._shared.identity, facts, _ELSEWHERE)

    def _put(self, database: Database, nodes: Sequence[BaseNode], batch: str) -> int:
        """Store nodes, making the collection if it is missing; how many they are."""
        latest = list({node.node_id: node for node in nodes}.values())
        # The collection may be another one by now, made by another process.
        dimension = self._shared.dimension = database.dimension()
        vectors = unit_vectors([node.get_embedding() for node in latest], dimension, _ELSEWHERE)
        if not latest:
            return 0
        if dimension is None:
            dimension = vectors.shape[1]
            database.create(dimension)
            self._shared.dimension = database.dimension()
        self._require_ours(dimension)
        first = time.time_ns()
        database.put(
            [
                self._as_stored(node, vector, Kind.NODE, node.ref_doc_id, batch, first + place)
                for place, (node, vector) in enumerate(zip(latest, vectors, strict=True))
            ]
        )
        return len(latest)

    def _put_records(self, database: Database, records: Sequence[DocumentRecord], batch: str) -> None:
        vector = self._marker()
        nodes = [
            TextNode(id_=record.path, text="", metadata={"path": record.path, "root": record.root, "hash": record.hash})
            for record in records
        ]
        if nodes:
            database.put([self._as_stored(node, vector, Kind.RECORD, node.id_, batch, 0) for node in nodes])

    def _put_about(self, database: Database, dimension: int) -> None:
        facts = self._shared.identity | {"dimension": str(dimension), "format": FORMAT_VERSION}
        everybodys = self.for_tenant("")
        node = TextNode(id_="about", text="", metadata=facts)
        database.put([everybodys._as_stored(node, _marker(dimension), Kind.ABOUT, None, "", 0)])

    def _marker(self) -> NDArray[np.float32]:
        dimension = self._known_dimension()
        if dimension is None:
            raise StoreError(f"the collection at {self.place} was removed meanwhile: run the command again")
        return _marker(dimension)

    def _forget(self, database: Database, paths: Sequence[str]) -> None:
        """Remove documents. The records go last: where this breaks off, they say that there is something to remove."""
        for part in _parts(paths):
            for kind in (Kind.NODE, Kind.RECORD):
                database.remove(self._mine(_among(DOCUMENT, part), kind=kind))

    def _conditions(
        self, node_ids: list[str] | None, filters: MetadataFilters | None, doc_ids: list[str] | None
    ) -> list[MetadataFilters]:
        """Conditions that together meet each chosen node once, none of them too long for a database."""
        always: list[MetadataFilter | MetadataFilters] = [] if filters is None else [filters]
        node_parts = [[]] if node_ids is None else [[_among(NODE_KEY, part)] for part in _parts(node_ids)]
        doc_parts = [[]] if doc_ids is None else [[_among(DOCUMENT, part)] for part in _parts(doc_ids)]
        return [self._mine(*always, *some, *others) for some in node_parts for others in doc_parts]

    def _mine(self, *conditions: MetadataFilter | MetadataFilters, kind: Kind = Kind.NODE) -> MetadataFilters:
        return _all_of(_is(TENANT, _key(self._tenant)), _is(KIND, kind), *conditions)

    def _as_stored(
        self, node: BaseNode, vector: NDArray[np.float32], kind: Kind, document: str | None, batch: str, order: int
    ) -> BaseNode:
        """A copy as it lies in the database, under an id that no other tenant's node has."""
        stored = node.model_copy()
        stored.id_ = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{kind}\0{self._tenant}\0{node.node_id}"))
        stored.embedding = vector.tolist()
        ours = {
            KIND: str(kind),
            TENANT: _key(self._tenant),
            DOCUMENT: _key(document),
            NODE_KEY: _key(node.node_id),
            BATCH: batch,
            ORDER: order,
            NODE_ID: node.node_id,
        }
        stored.metadata = {**node.metadata, **ours}
        return stored


def _as_given(stored: BaseNode) -> BaseNode:
    """The node as it was before `_as_stored`, without its vector."""
    node = stored.model_copy()
    node.id_ = stored.metadata[NODE_ID]
    node.embedding = None
    node.metadata = {key: value for key, value in stored.metadata.items() if key not in _OURS}
    return node


def _marker(dimension: int) -> NDArray[np.float32]:
    """A vector for what is never searched by its vector."""
    vector = np.zeros(dimension, dtype=np.float32)
    vector[0] = 1.0
    return vector


def _key(name: str | None) -> str:
    return "" if name is None else hashlib.sha256(name.encode()).hexdigest()[:40]


def _is(key: str, value: str) -> MetadataFilter:
    return MetadataFilter(key=key, value=str(value), operator=FilterOperator.EQ)


def _among(key: str, names: Iterable[str]) -> MetadataFilter:
    return MetadataFilter(key=key, value=sorted({_key(name) for name in names}), operator=FilterOperator.IN)


def _all_of(*conditions: MetadataFilter | MetadataFilters) -> MetadataFilters:
    return MetadataFilters(filters=list(conditions))


def _parts(names: Sequence[str]) -> list[list[str]]:
    distinct = list(dict.fromkeys(names))
    return [distinct[start : start + _NAMES_AT_ONCE] for start in range(0, len(distinct), _NAMES_AT_ONCE)]
