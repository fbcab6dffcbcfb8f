"""Exact nearest-neighbour search in memory, with filters that are applied before the search, not after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from llama_index.core.vector_stores.types import FilterCondition, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn
from numpy.typing import NDArray

from reader_rag.errors import ConfigError
from reader_rag.rag.stores.contract import Selection


@dataclass(frozen=True)
class Entry:
    """What filters need of a node, kept in memory so that the node is not read from the file.

    Attributes:
        node_id: Id of the node.
        ref_doc_id: Id of the node's document; None if it has none.
        metadata: The node's metadata.
    """

    node_id: str
    ref_doc_id: str | None
    metadata: dict[str, Any]


class FlatIndex:
    """Vectors of length 1 with int64 ids; similarity is their inner product, the cosine.

    Args:
        dimension: Length of the vectors.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.faiss_index = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._entries: dict[int, Entry] = {}
        self._id_of: dict[str, int] = {}
        self._ids_of_document: defaultdict[str | None, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, ids: Sequence[int], entries: Sequence[Entry], vectors: NDArray[np.float32]) -> None:
        """Add vectors; ids and node ids must be new.

        Args:
            ids: Id of each vector, n of them.
            entries: Node id, document and metadata of each vector, n of them.
            vectors: float32 [n, dimension], each of length 1.
        """
        if not ids:
            return
        self.faiss_index.add_with_ids(np.ascontiguousarray(vectors), np.asarray(ids, dtype=np.int64))
        for id_, entry in zip(ids, entries, strict=True):
            self._entries[id_] = entry
            self._id_of[entry.node_id] = id_
            self._ids_of_document[entry.ref_doc_id].add(id_)

    def remove(self, ids: Iterable[int]) -> None:
        """Remove vectors; unknown ids are ignored."""
        known = [id_ for id_ in ids if id_ in self._entries]
        if not known:
            return
        self.faiss_index.remove_ids(faiss.IDSelectorBatch(np.asarray(known, dtype=np.int64)))
        for id_ in known:
            entry = self._entries.pop(id_)
            del self._id_of[entry.node_id]
            siblings = self._ids_of_document[entry.ref_doc_id]
            siblings.discard(id_)
            if not siblings:
                del self._ids_of_document[entry.ref_doc_id]

    def select(self, selection: Selection) -> list[int]:
        """Ids of the vectors of selected nodes, in ascending order.

        Args:
            selection: The conditions on the nodes.

        Raises:
            ConfigError: A filter cannot be applied to a value in the metadata.
        """
        node_ids, doc_ids, filters = selection
        chosen: set[int] = set(self._entries)
        if node_ids is not None:
            chosen &= {self._id_of[n] for n in node_ids if n in self._id_of}
        if doc_ids is not None:
            chosen &= {id_ for d in doc_ids for id_ in self._ids_of_document.get(d, ())}
        if filters is not None and filters.filters:
            matches = self._filter_function(filters)
            try:
                chosen = {id_ for id_ in chosen if matches(self._entries[id_].node_id)}
            except (TypeError, ValueError) as error:
                raise ConfigError(f"the metadata filter cannot be applied: {error}") from error
        return sorted(chosen)

    def search(self, vector: NDArray[np.float32], k: int, allowed: Sequence[int] | None) -> list[tuple[int, float]]:
        """The k nearest vectors, nearest first.

        Args:
            vector: float32 [dimension], of length 1.
            k: Most results; fewer are returned where there are fewer vectors.
            allowed: Search only these ids; None searches all.

        Returns:
            (id, cosine similarity) pairs; rounding may carry a similarity slightly past 1.
        """
        k = min(k, len(self._entries) if allowed is None else len(allowed))
        if k < 1:
            return []
        parameters = None
        if allowed is not None:
            selector = faiss.IDSelectorBatch(np.asarray(allowed, dtype=np.int64))
            parameters = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
        scores, ids = self.faiss_index.search(vector[None, :], k, params=parameters)
        return [(int(i), float(s)) for i, s in zip(ids[0], scores[0], strict=True) if i >= 0]

    def _filter_function(self, filters: MetadataFilters) -> Callable[[str], bool]:
        """LlamaIndex's evaluation of single filters, with nested filters, which it lacks."""
        parts = [
            self._filter_function(part)
            if isinstance(part, MetadataFilters)
            else build_metadata_filter_fn(self._filterable, MetadataFilters(filters=[part]))
            for part in filters.filters
        ]
        if filters.condition == FilterCondition.OR:
            return lambda node_id: any(part(node_id) for part in parts)
        if filters.condition == FilterCondition.NOT:
            return lambda node_id: not any(part(node_id) for part in parts)
        return lambda node_id: all(part(node_id) for part in parts)

    def _filterable(self, node_id: str) -> dict[str, Any]:
        return self._entries[self._id_of[node_id]].metadata
