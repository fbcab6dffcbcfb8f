"""`Database`: the few things that a connector does with a collection of its vector database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import MetadataFilters

# What is added to a node's metadata while it is in the database. Hashes, because filters must not depend on how a
# database quotes the characters of a name.
KIND, TENANT, DOCUMENT, NODE_KEY = "rr_kind", "rr_tenant", "rr_document", "rr_node"
BATCH, ORDER, NODE_ID = "rr_batch", "rr_order", "rr_node_id"
KEYWORDS = (KIND, TENANT, DOCUMENT, NODE_KEY, BATCH)
"""The added keys that are filtered by: short strings, worth an index."""


class Database(ABC):
    """What a connector can do with its collection. Its methods may raise whatever the client raises: see `errors`.

    Attributes:
        place: URL of the collection, without what is secret.
        lock: Held during each call; a database that takes calls from many threads has one that holds nobody.
    """

    place: str
    lock: AbstractContextManager[Any]

    @property
    @abstractmethod
    def client(self) -> Any:
        """The database's own client."""

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Inside, the client's errors become `StoreError`s of one line."""

    @abstractmethod
    def dimension(self) -> int | None:
        """Length of the collection's vectors; None if there is no collection."""

    @abstractmethod
    def create(self, dimension: int) -> None:
        """Make the collection, with an index of `KEYWORDS`; one that is there by now is left."""

    @abstractmethod
    def drop(self) -> None:
        """Remove the collection."""

    @abstractmethod
    def put(self, nodes: Sequence[BaseNode]) -> None:
        """Store nodes with their embeddings, so that the next call sees them; one of the same id is replaced."""

    @abstractmethod
    def nearest(self, vector: list[float], top_k: int, where: MetadataFilters) -> list[tuple[BaseNode, float]]:
        """The nodes nearest to a vector among those that meet a condition, with their cosines, nearest first."""

    @abstractmethod
    def fetch(self, where: MetadataFilters) -> Iterable[BaseNode]:
        """All nodes that meet a condition, in any order."""

    @abstractmethod
    def count(self, where: MetadataFilters) -> int:
        """How many nodes meet a condition."""

    @abstractmethod
    def remove(self, where: MetadataFilters) -> None:
        """Remove the nodes that meet a condition, so that the next call does not see them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""
