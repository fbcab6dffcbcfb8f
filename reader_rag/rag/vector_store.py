"""`FaissStore`: the vector store, LlamaIndex's interface over a FAISS index in memory and one SQLite file."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
from numpy.typing import NDArray

from reader_rag.errors import ConfigError, StoreMismatchError
from reader_rag.rag.flat_index import Entry, FlatIndex
from reader_rag.rag.store_file import DocumentRecord, NodeRow, StoreFile

if TYPE_CHECKING:
    from collections.abc import Iterator

# Two models that place this sentence at the same spot are the same model, whatever name or folder it was loaded from.
_PROBE = "The quick brown fox jumps over the lazy dog."
_SAME_MODEL_COSINE = 0.995  # leaves room for 16-bit weights and other devices

_Change = tuple[Sequence[int], Sequence[NodeRow]]


class FaissStore(BasePydanticVectorStore):
    """Nodes and their vectors, searched exactly; similarity is the cosine, higher is nearer.

    On disk the store is one SQLite file in a folder. Every change is one transaction that is on the disk when the call
    returns, so there is nothing to save at the end, and a killed process or full disk leaves the last commit. Several
    processes may have one store open; each sees the others' commits at its next call. All methods are thread safe.

    Args:
        path: Folder of the store, made if it does not exist; None keeps the store in memory.
        embed_model: The model whose vectors the store holds; it is compared with the one that made the store.
        similarity_cutoff: Leave out results whose cosine similarity is lower; a query may give its own.

    Raises:
        StoreError: The store cannot be opened: corrupt, foreign, of another version or embedding model, busy.

    Example:
        >>> store = FaissStore("my-store")
        >>> index = VectorStoreIndex.from_vector_store(store, embed_model=LocalEmbedding())
    """

    stores_text: bool = True
    is_embedding_query: bool = True
    similarity_cutoff: float | None = None

    _file: StoreFile = PrivateAttr()
    _lock: threading.RLock = PrivateAttr(default_factory=threading.RLock)
    _index: FlatIndex | None = PrivateAttr(default=None)
    _meta: dict[str, str] = PrivateAttr(default_factory=dict)
    _identity: dict[str, str] = PrivateAttr(default_factory=dict)
    _seen: int | None = PrivateAttr(default=None)  # the commit that the memory shows; None: load again

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        embed_model: BaseEmbedding | None = None,
        similarity_cutoff: float | None = None,
        must_exist: bool = False,
    ) -> None:
        super().__init__(stores_text=True)
        self.similarity_cutoff = similarity_cutoff
        if path is None:
            self._file = StoreFile.in_memory()
        else:
            self._file = StoreFile.open(Path(path)) if must_exist else StoreFile.create(Path(path))
        try:
            with self._reading():
                pass
            if embed_model is not None:
                self._identity = identity_of(embed_model)
                self._require_same_model()
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def open(
        cls, path: str | Path, *, embed_model: BaseEmbedding | None = None, similarity_cutoff: float | None = None
    ) -> FaissStore:
        """Open a store that exists.

        Raises:
            StoreNotFoundError: There is none at `path`.
            StoreError: As the constructor.
        """
        return cls(path, embed_model=embed_model, similarity_cutoff=similarity_cutoff, must_exist=True)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises this component."""
        return "FaissStore"

    @property
    def client(self) -> Any:
        """The FAISS index, or None while the store is empty. For looking at; changes to it are lost."""
        return self._index.faiss_index if self._index is not None else None

    @property
    def path(self) -> Path | None:
        """Folder of the store; None in memory."""
        return self._file.path.parent if self._file.path is not None else None

    @property
    def num_nodes(self) -> int:
        """Number of nodes. (No `__len__`: LlamaIndex takes a falsy store for a missing one.)"""
        with self._reading():
            return len(self._index) if self._index is not None else 0

    @property
    def dimension(self) -> int | None:
        """Length of the vectors; None while none was ever stored."""
        return self._index.dimension if self._index is not None else None

    def documents(self) -> list[DocumentRecord]:
        """Files that were ingested into the store, in path order."""
        with self._reading():
            return self._file.documents()

    def close(self) -> None:
        """Release the file; the store cannot be used afterwards."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> FaissStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, nodes: Sequence[BaseNode], **add_kwargs: Any) -> list[str]:
        """Store nodes with their embeddings; a node whose id is there already is replaced.

        Args:
            nodes: Each with its `embedding`; vectors of any length are scaled to length 1.
            add_kwargs: Ignored; LlamaIndex passes some.

        Returns:
            The node ids.

        Raises:
            StoreMismatchError: Vectors of another length than the store's.
            ConfigError: A vector that holds NaN or infinity.
            StoreError: Nothing was stored, for the reason it gives.
        """
        self._replace(nodes)
        return [node.node_id for node in nodes]

    def replace_documents(
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord], gone: Sequence[str] = ()
    ) -> None:
        """Swap the nodes of some documents for new ones and drop other documents, all in one commit.

        Args:
            nodes: With embeddings; their `ref_doc_id`s are paths of `records`.
            records: Documents that are new or changed: their old nodes go.
            gone: Paths of documents to drop with their nodes.

        Raises:
            ConfigError, StoreError: As `add`; then nothing has changed.
        """
        self._replace(nodes, records, gone)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove a document's nodes; an unknown document is ignored."""
        self._replace((), (), [ref_doc_id])

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Remove the nodes that meet every given condition.

        Raises:
            ConfigError: No condition was given (`clear` removes everything), or a filter cannot be applied.
        """
        if node_ids is None and filters is None:
            raise ConfigError("delete_nodes needs node_ids or filters; use clear() to remove everything")

        def change() -> _Change:
            ids = self._index.select(node_ids=node_ids, filters=filters) if self._index is not None else []
            self._file.delete_nodes(ids)
            return ids, ()

        self._write(change)

    def clear(self) -> None:
        """Remove everything, also what ties the store to an embedding model."""

        def change() -> _Change:
            ids = self._index.select() if self._index is not None else []
            self._file.delete_nodes(ids)
            self._file.drop_documents([record.path for record in self._file.documents()])
            self._file.set_meta({})
            return ids, ()

        with self._lock:
            self._write(change)
            self._meta, self._index = {}, None

    def get_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        doc_ids: list[str] | None = None,
    ) -> list[BaseNode]:
        """The nodes that meet every given condition (all nodes without one), in the order they were stored."""
        with self._reading():
            if self._index is None:
                return []
            return self._nodes(self._index.select(node_ids=node_ids, doc_ids=doc_ids, filters=filters))

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to a vector.

        Filters, `node_ids` and `doc_ids` are applied before the search: `similarity_top_k` nodes come back as long as
        that many meet them. An empty list of ids restricts nothing.

        Args:
            query: Mode "default" with a `query_embedding`.
            kwargs: `similarity_cutoff` takes the place of the store's own; others are ignored.

        Returns:
            Nodes, ids and cosine similarities in [-1, 1], nearest first.

        Raises:
            ConfigError: Another mode, no vector, `similarity_top_k` below 1, or a filter that cannot be applied.
            StoreMismatchError: A vector of another length than the store's.
        """
        _check(query)
        cutoff: float | None = kwargs.get("similarity_cutoff", self.similarity_cutoff)
        with self._reading():
            if self._index is None:
                return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
            vector = _unit_vectors([query.query_embedding or []], self._index.dimension)[0]
            found = self._index.search(vector, query.similarity_top_k, self._allowed(query))
            if cutoff is not None:
                found = [(id_, score) for id_, score in found if score >= cutoff]
            nodes = self._nodes([id_ for id_, _ in found])
        scores = [score for _, score in found]
        return VectorStoreQueryResult(nodes=nodes, similarities=scores, ids=[node.node_id for node in nodes])

    def persist(self, persist_path: str | None = None, fs: Any = None) -> None:
        """Write a copy of the store into another folder. A store on disk needs no saving: each change is on the disk.

        Args:
            persist_path: Folder for the copy; None, or the store's own folder, does nothing for a store on disk.
            fs: Must be None; only local folders can hold a store.

        Raises:
            ConfigError: A store in memory without `persist_path`, or another file system.
            StoreWriteError: The copy cannot be written.
        """
        if fs is not None:
            raise ConfigError("a store can be persisted to local folders only; leave out fs")
        if persist_path is None and self.path is None:
            raise ConfigError("this store is in memory: name the folder to write it to")
        target = Path(persist_path) if persist_path is not None else self.path
        if target is None or (self.path is not None and target.resolve() == self.path.resolve()):
            return
        with self._lock:
            self._file.copy_to(target)

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

    def _replace(
        self, nodes: Sequence[BaseNode], records: Sequence[DocumentRecord] = (), gone: Sequence[str] = ()
    ) -> None:
        latest = list({node.node_id: node for node in nodes}.values())
        embeddings = [node.get_embedding() for node in latest]
        documents = [*(record.path for record in records), *gone]

        def change() -> _Change:
            vectors = _unit_vectors(embeddings, self._index.dimension if self._index is not None else None)
            rows = [_row(node, vector) for node, vector in zip(latest, vectors, strict=True)]
            old: set[int] = set()
            if self._index is not None:
                old.update(self._index.select(doc_ids=documents))
                old.update(self._index.select(node_ids=[row.node_id for row in rows]))
            self._file.delete_nodes(old)
            self._file.drop_documents(gone)
            self._file.put_documents(records)
            if rows and "dimension" not in self._meta:
                self._file.set_meta(self._identity | {"dimension": str(vectors.shape[1])})
            added = [_with_id(row, self._file.insert_node(row)) for row in rows]
            return sorted(old), added

        self._write(change)

    def _write(self, change: Callable[[], _Change]) -> None:
        """Run `change` in a transaction; memory follows only once the disk has it."""
        with self._lock:
            with self._file.writing():
                self._refresh()
                removed, added = change()
                commit, self._seen = self._seen, None  # should anything fail from here on, load from the disk again
            self._meta = self._meta or self._file_meta()
            self._ensure_index()
            if self._index is not None:
                self._index.remove(removed)
                self._index.add([r.id for r in added], [_entry(r) for r in added], _matrix(added))
            self._seen = commit

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, self._file.reading():
            self._refresh()
            yield

    def _refresh(self) -> None:
        """Load the store again if another process has committed since. Call it inside a transaction."""
        commit = self._file.commits_by_others()
        if commit == self._seen:
            return
        self._seen = None
        self._meta = self._file.meta()
        if self._identity:
            self._require_same_model()
        self._index = None
        self._ensure_index()
        rows = list(self._file.nodes())
        if self._index is not None:
            self._index.add([r.id for r in rows], [_entry(r) for r in rows], _matrix(rows))
        self._seen = commit

    def _file_meta(self) -> dict[str, str]:
        with self._file.reading():
            return self._file.meta()

    def _ensure_index(self) -> None:
        if self._index is None and "dimension" in self._meta:
            self._index = FlatIndex(int(self._meta["dimension"]))

    def _require_same_model(self) -> None:
        if "dimension" not in self._meta:
            return
        ours, theirs = self._identity, self._meta
        made_by = f"the store was made with the embedding model {theirs.get('embed_model', 'unknown')!r}"
        remedy = "use that model (--embed-model) or ingest into a new folder"
        if ours["dimension"] != theirs["dimension"]:
            raise StoreMismatchError(
                f"{made_by} ({theirs['dimension']} numbers per vector), not {ours['embed_model']!r} "
                f"({ours['dimension']}): {remedy}"
            )
        if "probe" in theirs and _probe_cosine(ours, theirs) < _SAME_MODEL_COSINE:
            raise StoreMismatchError(f"{made_by}, and {ours['embed_model']!r} gives other vectors: {remedy}")

    def _allowed(self, query: VectorStoreQuery) -> list[int] | None:
        # LlamaIndex's `index.as_retriever()` sends an empty list where it means "any node".
        node_ids, doc_ids = query.node_ids or None, query.doc_ids or None
        if self._index is None or (node_ids is None and doc_ids is None and query.filters is None):
            return None
        return self._index.select(node_ids=node_ids, doc_ids=doc_ids, filters=query.filters)

    def _nodes(self, ids: Sequence[int]) -> list[BaseNode]:
        return [
            metadata_dict_to_node({"_node_type": node_type, "_node_content": node})
            for node_type, node in self._file.node_texts(ids)
        ]


def identity_of(embed_model: BaseEmbedding) -> dict[str, str]:
    """What a store remembers of the model that made it: name, vector length and a probe vector (hex, float32)."""
    probe = _unit_vectors([embed_model.get_text_embedding(_PROBE)], None)[0]
    return {
        "embed_model": embed_model.model_name,
        "dimension": str(len(probe)),
        "probe": probe.astype("<f4").tobytes().hex(),
    }


def _probe_cosine(ours: dict[str, str], theirs: dict[str, str]) -> float:
    a, b = (np.frombuffer(bytes.fromhex(identity["probe"]), dtype="<f4") for identity in (ours, theirs))
    return float(a @ b)


def _check(query: VectorStoreQuery) -> None:
    if query.mode != VectorStoreQueryMode.DEFAULT:
        raise ConfigError(f"FaissStore answers queries of mode 'default' only, not {query.mode.value!r}")
    if query.query_embedding is None:
        raise ConfigError("the query has no query_embedding: give the retriever an embedding model")
    if query.similarity_top_k < 1:
        raise ConfigError(f"top_k must be at least 1, not {query.similarity_top_k}")


def _unit_vectors(embeddings: Sequence[Sequence[float]], dimension: int | None) -> NDArray[np.float32]:
    """float32 [n, dimension], each row scaled to length 1; a row of zeros stays as it is and is near to nothing."""
    lengths = {len(embedding) for embedding in embeddings}
    wanted = dimension or next(iter(lengths), 0)
    if lengths - {wanted}:
        other = next(iter(lengths - {wanted}))
        raise StoreMismatchError(
            f"the store holds vectors of {wanted} numbers, not {other}: "
            "use the embedding model that made it, or a new folder"
        )
    vectors = np.asarray(embeddings, dtype=np.float64).reshape(len(embeddings), wanted)
    if not np.isfinite(vectors).all():
        raise ConfigError("an embedding holds NaN or infinity: the embedding model failed on a text")
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: NDArray[np.float64] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return units.astype(np.float32)


def _row(node: BaseNode, vector: NDArray[np.float32]) -> NodeRow:
    stored = node_to_metadata_dict(node, remove_text=False, flat_metadata=False)
    return NodeRow(node.node_id, node.ref_doc_id, stored["_node_type"], stored["_node_content"], vector)


def _with_id(row: NodeRow, id_: int) -> NodeRow:
    return NodeRow(row.node_id, row.ref_doc_id, row.node_type, row.node, row.vector, id_)


def _entry(row: NodeRow) -> Entry:
    metadata = dict(json.loads(row.node).get("metadata") or {})
    # The names under which LlamaIndex's other stores let filters ask for the document.
    metadata |= dict.fromkeys(("document_id", "doc_id", "ref_doc_id"), row.ref_doc_id or "None")
    return Entry(row.node_id, row.ref_doc_id, metadata)


def _matrix(rows: Sequence[NodeRow]) -> NDArray[np.float32]:
    return np.stack([row.vector for row in rows]) if rows else np.zeros((0, 0), dtype=np.float32)
