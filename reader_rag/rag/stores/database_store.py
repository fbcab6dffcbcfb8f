"""`DatabaseStore`: a document store in a vector database, over the operations of `Database`.

One collection holds the nodes of all tenants, a record of each ingested file, and a record of the embedding model. Each
is a LlamaIndex node whose metadata holds its kind and its tenant, and every search and every change filters by both.
Such databases have no transactions: new nodes are written before the old ones are removed, and the file's record last,
so that the next ingestion detects an interrupted one and repeats it.
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
)
from numpy.typing import NDArray

from reader_rag.config import checked_tenant
from reader_rag.errors import ConfigError, StoreBusyError, StoreError, StoreMismatchError, StoreNotFoundError
from reader_rag.rag.stores.contract import DocumentStore, Selection, check_names
from reader_rag.rag.stores.database import BATCH, DOCUMENT, KEYWORDS, KIND, NODE_ID, NODE_KEY, ORDER, TENANT, Database
from reader_rag.rag.stores.identity import identity_of, require_same_model, unit_vectors
from reader_rag.rag.stores.location import DatabaseUrl
from reader_rag.rag.stores.records import DocumentRecord

FORMAT_VERSION = "1"

_ADDED_KEYS = {*KEYWORDS, ORDER, NODE_ID}
_NAMES_PER_FILTER = 200
_ANOTHER = "another collection"


class Kind(StrEnum):
    """Kinds of points in the collection."""

    NODE = "node"
    RECORD = "record"
    ABOUT = "about"


@dataclass
class _Shared:
    """State that the copies of a store for its tenants share."""

    database: Database
    identity: dict[str, str] = field(default_factory=dict)  # of the embedding model in use, if one was given
    dimension: int | None = None  # length of the collection's vectors; None while there is no collection


class DatabaseStore(DocumentStore):
    """A document store in a collection of a vector database.

    Several processes may use one collection. A search sees every finished write; during an ingestion it may briefly see
    old and new nodes of a changed file.

    Args:
        url: URL of the collection; the connectors describe theirs.
        embed_model: The embedding model of the vectors; it is compared with the one that made the store.
        similarity_cutoff: Least cosine similarity of a result; a query may set its own.
        must_exist: Raise if there is no collection instead of making one with the first nodes.
        tenant: The tenant whose documents the store reads and changes.

    Raises:
        ConfigError: The URL or the tenant's name is invalid.
        StoreNotFoundError: There is no such collection, and `must_exist` is set.
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
                    self._require_same_store(self._shared.dimension)
                elif must_exist:
                    raise StoreNotFoundError.at(self.location)
        except BaseException:
            database.close()
            raise

    @classmethod
    @abstractmethod
    def database_at(cls, url: DatabaseUrl) -> Database:
        """Connect to the collection of a URL.

        Args:
            url: The parsed URL.
        """

    @property
    def client(self) -> Any:
        """The database's own client."""
        return self._shared.database.client

    @property
    def location(self) -> str:
        """URL of the collection."""
        return self._shared.database.location

    @property
    def dimension(self) -> int | None:
        """Length of the vectors; None while there is no collection."""
        with self._calling():
            return self._known_dimension()

    @property
    def num_nodes(self) -> int:
        """Number of the tenant's nodes."""
        with self._calling() as database:
            return 0 if self._known_dimension() is None else database.count(self._of_tenant())

    def documents(self) -> list[DocumentRecord]:
        """Files that were ingested for the tenant, in path order."""
        with self._calling() as database:
            found = [] if self._known_dimension() is None else list(database.fetch(self._of_tenant(kind=Kind.RECORD)))
        records = [DocumentRecord(**{key: node.metadata[key] for key in ("path", "root", "hash")}) for node in found]
        return sorted(records, key=lambda record: record.path)

    def close(self) -> None:
        """Close the connection; neither the store nor its copies for tenants can be used afterwards."""
        self._shared.database.close()

    def replace_documents(
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord], removed: Sequence[str] = ()
    ) -> None:
        """Swap the nodes of some documents for new ones and remove other documents.

        Args:
            nodes: Nodes with embeddings. Those that belong to a record have its path as `ref_doc_id`.
            records: Documents that are new or changed; their old nodes are removed.
            removed: Paths of documents to remove with their nodes.

        Raises:
            StoreBusyError: Another process replaced nodes of the same documents at the same time.
            StoreMismatchError: The vectors are of another length than the store's.
            ConfigError: A vector holds NaN or infinity.
            StoreError: The database cannot be used.
        """
        batch = uuid.uuid4().hex
        with self._calling() as database:
            stored = self._put(database, nodes, batch)
            if self._known_dimension() is None:
                if records:
                    raise ConfigError("documents without nodes need a store that holds nodes already")
                return
            other_batches = MetadataFilter(key=BATCH, value=batch, operator=FilterOperator.NE)
            for paths in _parts([record.path for record in records]):
                database.remove(self._of_tenant(_among(DOCUMENT, paths), other_batches))
            self._put_records(database, records, batch)
            self._remove_documents(database, removed)
            # Of several concurrent writers the last one finds that its nodes were removed, and raises.
            if records and database.count(self._of_tenant(_is(BATCH, batch))) != stored:
                self._remove_documents(database, [record.path for record in records])
                raise StoreBusyError(
                    f"another process ingested the same documents into {self.location} at the same time: "
                    "run the command again when it has finished"
                )

    def _delete_nodes(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> None:
        with self._calling() as database:
            if self._known_dimension() is not None:
                for condition in self._conditions(Selection(node_ids, filters=filters)):
                    database.remove(condition)

    def clear(self) -> None:
        """Remove all documents and nodes of the tenant; the collection is deleted with the last tenant."""
        with self._calling() as database:
            if self._known_dimension() is None:
                return
            for kind in (Kind.RECORD, Kind.NODE):
                database.remove(self._of_tenant(kind=kind))
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
        """The tenant's nodes that meet every given condition; see `DocumentStore.get_nodes` for the arguments."""
        check_names("node_ids", node_ids)
        check_names("doc_ids", doc_ids)
        with self._calling() as database:
            if self._known_dimension() is None:
                return []
            conditions = self._conditions(Selection(node_ids, doc_ids, filters))
            found = [node for condition in conditions for node in database.fetch(condition)]
        found.sort(key=lambda node: int(node.metadata[ORDER]))
        return [_without_added_keys(node) for node in found]

    def _search(self, embedding: list[float], top_k: int, selection: Selection) -> list[tuple[BaseNode, float]]:
        with self._calling() as database:
            dimension = self._known_dimension()
            if dimension is None:
                return []
            vector = unit_vectors([embedding], dimension, _ANOTHER)[0].tolist()
            conditions: list[MetadataFilter | MetadataFilters] = (
                [] if selection.filters is None else [selection.filters]
            )
            if selection.node_ids is not None:
                conditions.append(_among(NODE_KEY, selection.node_ids))
            if selection.doc_ids is not None:
                conditions.append(_among(DOCUMENT, selection.doc_ids))
            found = database.nearest(vector, top_k, self._of_tenant(*conditions))
        return [(_without_added_keys(node), score) for node, score in found]

    @contextmanager
    def _calling(self) -> Iterator[Database]:
        database = self._shared.database
        with database.lock, database.errors():
            yield database

    def _known_dimension(self) -> int | None:
        """Length of the vectors; read again while there is no collection, since another process may make it."""
        if self._shared.dimension is None:
            self._shared.dimension = self._shared.database.dimension()
        return self._shared.dimension

    def _require_same_store(self, dimension: int) -> None:
        """Check that the collection is a store for the same embedding model; an empty one gets the model's record."""
        database = self._shared.database
        about = next(iter(database.fetch(_all_of(_is(KIND, Kind.ABOUT)))), None)
        if about is None:
            if database.count(MetadataFilters(filters=[])) > 0:
                raise StoreMismatchError(
                    f"the collection at {self.location} was made by another program: use {_ANOTHER}"
                )
            self._put_about(database, dimension)
            return
        facts = about.metadata
        if facts.get("format") != FORMAT_VERSION:
            raise StoreMismatchError(
                f"the store at {self.location} has format version {facts.get('format')}, this program reads "
                f"{FORMAT_VERSION}: use the version that made it, or ingest into {_ANOTHER}"
            )
        if self._shared.identity:
            require_same_model(self._shared.identity, facts, _ANOTHER)

    def _put(self, database: Database, nodes: Sequence[BaseNode], batch: str) -> int:
        """Store nodes, making the collection if it is missing, and return their number."""
        latest = list({node.node_id: node for node in nodes}.values())
        # Another process may have deleted the collection and made a new one.
        dimension = self._shared.dimension = database.dimension()
        vectors = unit_vectors([node.get_embedding() for node in latest], dimension, _ANOTHER)
        if not latest:
            return 0
        if dimension is None:
            dimension = vectors.shape[1]
            database.create(dimension)
            self._shared.dimension = database.dimension()
        self._require_same_store(dimension)
        first = time.time_ns()
        database.put(
            [
                self._as_stored(node, vector, Kind.NODE, node.ref_doc_id, batch, first + offset)
                for offset, (node, vector) in enumerate(zip(latest, vectors, strict=True))
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
        shared = self.for_tenant("")
        node = TextNode(id_="about", text="", metadata=facts)
        database.put([shared._as_stored(node, _marker(dimension), Kind.ABOUT, None, "", 0)])

    def _marker(self) -> NDArray[np.float32]:
        dimension = self._known_dimension()
        if dimension is None:
            raise StoreError(f"another process deleted the collection at {self.location}: run the command again")
        return _marker(dimension)

    def _remove_documents(self, database: Database, paths: Sequence[str]) -> None:
        """Remove documents, their records last: after an interruption the records show what is left to remove."""
        for part in _parts(paths):
            for kind in (Kind.NODE, Kind.RECORD):
                database.remove(self._of_tenant(_among(DOCUMENT, part), kind=kind))

    def _conditions(self, selection: Selection) -> list[MetadataFilters]:
        """Conditions that together match each chosen node once, each short enough for a database."""
        node_ids, doc_ids, filters = selection
        always: list[MetadataFilter | MetadataFilters] = [] if filters is None else [filters]
        node_parts = [[]] if node_ids is None else [[_among(NODE_KEY, part)] for part in _parts(node_ids)]
        doc_parts = [[]] if doc_ids is None else [[_among(DOCUMENT, part)] for part in _parts(doc_ids)]
        return [self._of_tenant(*always, *some, *others) for some in node_parts for others in doc_parts]

    def _of_tenant(self, *conditions: MetadataFilter | MetadataFilters, kind: Kind = Kind.NODE) -> MetadataFilters:
        return _all_of(_is(TENANT, _key(self._tenant)), _is(KIND, kind), *conditions)

    def _as_stored(
        self, node: BaseNode, vector: NDArray[np.float32], kind: Kind, document: str | None, batch: str, order: int
    ) -> BaseNode:
        """The node as it is stored: with the added metadata, under an id that no other tenant's node has."""
        stored = node.model_copy()
        stored.id_ = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{kind}\0{self._tenant}\0{node.node_id}"))
        stored.embedding = vector.tolist()
        added = {
            KIND: str(kind),
            TENANT: _key(self._tenant),
            DOCUMENT: _key(document),
            NODE_KEY: _key(node.node_id),
            BATCH: batch,
            ORDER: order,
            NODE_ID: node.node_id,
        }
        stored.metadata = {**node.metadata, **added}
        return stored


def _without_added_keys(stored: BaseNode) -> BaseNode:
    """The node as it was before `_as_stored`, without its vector."""
    node = stored.model_copy()
    node.id_ = stored.metadata[NODE_ID]
    node.embedding = None
    node.metadata = {key: value for key, value in stored.metadata.items() if key not in _ADDED_KEYS}
    return node


def _marker(dimension: int) -> NDArray[np.float32]:
    """The vector of points that no search returns: databases require one."""
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
    return [distinct[start : start + _NAMES_PER_FILTER] for start in range(0, len(distinct), _NAMES_PER_FILTER)]
