"""`Database`: the operations that a connector implements on a collection of its vector database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import MetadataFilters

from reader_rag.errors import (
    StoreConnectionError,
    StoreError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreWriteError,
)

# Keys that `DatabaseStore` adds to a node's metadata in the database. Names are stored as hashes, so that filters do
# not depend on how a database quotes their characters.
KIND, TENANT, DOCUMENT, NODE_KEY = "rr_kind", "rr_tenant", "rr_document", "rr_node"
BATCH, ORDER, NODE_ID = "rr_batch", "rr_order", "rr_node_id"
KEYWORDS = (KIND, TENANT, DOCUMENT, NODE_KEY, BATCH)
"""The added keys that filters use: short strings, each with an index."""


class Database(ABC):
    """A collection of a vector database. The methods may raise the client's own errors: `errors` translates them.

    Attributes:
        product: Name of the database, for messages.
        location: URL of the collection, without secrets.
        lock: Held during each call; `nullcontext()` for a database whose client is thread safe.
    """

    product: ClassVar[str]
    location: str
    lock: AbstractContextManager[Any]

    def unreachable(self, reason: str) -> StoreConnectionError:
        """The error where the database does not answer; `reason` in a few words."""
        return StoreConnectionError(
            f"{self.product} does not answer at {self.location} ({reason}): start it, or check host and port"
        )

    def not_accessible(self, error: Exception) -> StoreWriteError:
        """The error where files of an embedded database cannot be read or written."""
        return StoreWriteError(f"{self.location} cannot be read or written ({error}); check permissions and free space")

    def foreign(self) -> StoreMismatchError:
        """The error of a collection that is no store."""
        return StoreMismatchError(
            f"the collection at {self.location} was made by another program: use another collection name"
        )

    def missing(self) -> StoreNotFoundError:
        """The error of a collection that was deleted meanwhile."""
        return StoreNotFoundError(
            f"the collection at {self.location} does not exist any more: ingest the documents again"
        )

    def closed(self) -> StoreError:
        """The error of a call after `close`."""
        return StoreError(f"the store {self.location} is closed; open it again")

    @property
    @abstractmethod
    def client(self) -> Any:
        """The database's own client."""

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Translate the client's errors that are raised inside into `StoreError`s of one line."""

    @abstractmethod
    def dimension(self) -> int | None:
        """Length of the collection's vectors; None if there is no collection."""

    @abstractmethod
    def create(self, dimension: int) -> None:
        """Make the collection with an index on each of `KEYWORDS`; an existing collection is left unchanged.

        Args:
            dimension: Length of the vectors.
        """

    @abstractmethod
    def drop(self) -> None:
        """Delete the collection."""

    @abstractmethod
    def put(self, nodes: Sequence[BaseNode]) -> None:
        """Store nodes, visible to the next call; a node with the same id is replaced.

        Args:
            nodes: Nodes with their embeddings.
        """

    @abstractmethod
    def nearest(self, vector: list[float], top_k: int, where: MetadataFilters) -> list[tuple[BaseNode, float]]:
        """The nodes nearest to a vector.

        Args:
            vector: The query's vector, of length 1.
            top_k: Most results.
            where: Conditions that the nodes must meet.

        Returns:
            Nodes with their cosine similarities, nearest first.
        """

    @abstractmethod
    def fetch(self, where: MetadataFilters) -> Iterable[BaseNode]:
        """All nodes that meet the conditions, in any order."""

    @abstractmethod
    def count(self, where: MetadataFilters) -> int:
        """Number of nodes that meet the conditions."""

    @abstractmethod
    def remove(self, where: MetadataFilters) -> None:
        """Delete the nodes that meet the conditions, before the next call."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""
