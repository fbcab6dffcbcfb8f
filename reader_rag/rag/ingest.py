"""`ingest`: updates a store from files and documents, in one commit."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.node_parser import NodeParser
from llama_index.core.schema import BaseNode, Document, MetadataMode

from reader_rag.config import checked_tenant
from reader_rag.config.reading import ReadLimits
from reader_rag.errors import (
    ConfigError,
    IngestError,
    ReaderWarning,
    StoreBusyError,
    StoreNotFoundError,
    StoreWriteError,
)
from reader_rag.rag.chunking import Chunker, ParserSplitter, Splitter
from reader_rag.rag.embedding import TextSizes, sizes_of
from reader_rag.rag.files import FoundFiles, find_files, printable
from reader_rag.rag.plan import FileMetadata, Plan, Planner
from reader_rag.rag.plan import SkippedFile as SkippedFile
from reader_rag.rag.reading.process import ReadingProcess
from reader_rag.rag.sources import Source, sort_sources
from reader_rag.rag.stores.location import local_folder, lock_folder, open_store
from reader_rag.rag.stores.records import DocumentRecord

DEFAULT_CHUNK_TOKENS = 256
DEFAULT_CHUNK_OVERLAP = 32

_SMALLEST_CHUNK = 16
_LOCK_NAME = "ingest.lock"
_COMMIT_LOCK_NAME = "commit.lock"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class IngestReport:
    """Result of an ingestion.

    Files are absolute paths, documents that were passed as such are their ids.

    Attributes:
        added: Files and documents that are new in the store.
        updated: Those whose content, metadata or chunk settings changed.
        unchanged: Those that were not embedded again.
        removed: Files that no longer exist under their root.
        skipped: Files, folders and documents that could not be ingested, with reasons.
        chunks: Number of nodes of what was added and updated.
        total_chunks: Number of the tenant's nodes in the store after the ingestion.
    """

    added: tuple[Path | str, ...]
    updated: tuple[Path | str, ...]
    unchanged: tuple[Path | str, ...]
    removed: tuple[Path, ...]
    skipped: tuple[SkippedFile, ...]
    chunks: int
    total_chunks: int

    @property
    def ok(self) -> bool:
        """Whether everything could be ingested."""
        return not self.skipped


def ingest(
    sources: Source | Iterable[Source],
    store: str | Path,
    *,
    embed_model: BaseEmbedding,
    chunk_tokens: int | None = None,
    chunk_overlap: int | None = None,
    node_parser: NodeParser | None = None,
    metadata: FileMetadata | None = None,
    encoding: str = "utf-8",
    progress: Progress | None = None,
    tenant: str = "",
    follow_links: bool = False,
    limits: ReadLimits | None = None,
) -> IngestReport:
    """Update a tenant's documents in a store from files, LlamaIndex documents and LlamaIndex readers.

    What is new or changed is split and embedded first; then documents and vectors are swapped in one commit. Until that
    commit queries see the old content, and an error leaves the store unchanged. A vector database has no such commits:
    there the next ingestion completes an interrupted one. Files under other roots and documents of other tenants stay.
    A file that can no longer be read keeps its last content in the store and is reported.

    Documents replace those of the same id; documents that are not passed again stay (`store.delete(id)` removes one).
    A document without an id of its own, which LlamaIndex gives a random one, is unchanged if the store has one with
    the same text and metadata.

    Args:
        sources: Files and folders, LlamaIndex `Document`s, and readers (or `ReaderConfig`s) that load some; or a single
            one. Hidden files and folders inside a folder are skipped, and links to folders are not followed. Pipes,
            sockets and devices are skipped and reported.
        store: Folder of the store, or the URL of a collection in a vector database (`qdrant://...`, `milvus://...`);
            made with the first documents.
        embed_model: The embedding model of the store: any LlamaIndex embedding. Of one that does not report how many
            tokens it reads (no `SizedEmbedding`), chunks have `chunk_tokens`, or 256 with a warning.
        chunk_tokens: Most tokens of a chunk, by the embedding's tokenizer; None takes 256, or the model's limit if that
            is lower.
        chunk_overlap: Most tokens that neighbouring chunks share; None takes 32.
        node_parser: Any LlamaIndex node parser to split with, in place of sentences up to `chunk_tokens`.
        metadata: Called with the path of each file; returns metadata that retrieval can filter by, JSON-ready. It is
            neither embedded nor shown to the LLM. `file_name` replaces the name that is shown.
        encoding: Encoding of text in files that declare none (plain text, Markdown, CSV, HTML without a charset ...).
            Text with a byte order mark needs none.
        progress: Called as (stage, done, total) with the stages "read" (files and documents) and "embed" (distinct
            chunks).
        tenant: The tenant who owns the documents; only the tenant's queries find them.
        follow_links: Whether links inside a folder to files outside of it, or to hidden files, are read. By default
            they are skipped and reported, so that nobody who may write to the folder can have other files read.
        limits: Limits of reading one file: bytes, seconds, memory, and what an archive unpacks to. A file beyond one
            is skipped and reported; None takes the defaults.

    Returns:
        What was added, updated, removed and skipped.

    Raises:
        IngestError: A path does not exist, or nothing can be ingested; the store is unchanged.
        ConfigError: A source is of another type, the chunk settings contradict each other or the model's limit, the
            metadata cannot be stored, or encoding or tenant are invalid.
        StoreBusyError: Another ingestion for this tenant into this store is running.
        StoreError: The store cannot be used or written, or was made with another embedding model.
    """
    checked_tenant(tenant)
    splitter = _splitter(embed_model, chunk_tokens, chunk_overlap, node_parser)
    _check_encoding(encoding)
    report = progress or (lambda stage, done, total: None)
    limits = limits or ReadLimits()
    given = sort_sources(sources)
    roots = [find_files(path, local_folder(store), follow_links=follow_links) for path in given.paths]
    _require_any(roots, given.documents)
    with _ingestion_lock(store, tenant):
        known = _known_documents(store, embed_model, tenant)
        with ReadingProcess(limits) as reading:
            planner = Planner(known, splitter, reading, tenant, metadata, encoding)
            _read(planner, roots, given.documents, report)
        plan = planner.plan
        planner.add_missing(roots)
        if not (plan.records or plan.unchanged):
            first = plan.skipped[0]
            kind = "files" if roots else "documents"
            raise IngestError(
                f"none of the {len(plan.skipped)} {kind} can be ingested, e.g. {printable(first.path)}: {first.reason}",
                plan.skipped,
            )
        if isinstance(splitter, ParserSplitter) and splitter.truncated:
            warnings.warn(
                f"{splitter.truncated} of {len(plan.nodes)} passages are longer than the embedding reads; their ends "
                f"are not searched: let {type(node_parser).__name__} make smaller ones",
                ReaderWarning,
                stacklevel=2,
            )
        _embed(plan.nodes, embed_model, report)
        with (
            # Serialises the commits of all tenants: SQLite's timeout is shorter than a large commit.
            FileLock(lock_folder(store) / _COMMIT_LOCK_NAME),
            open_store(store, embed_model=embed_model, tenant=tenant, must_exist=False) as opened,
        ):
            if plan.records or plan.removed:
                opened.replace_documents(plan.nodes, plan.records, [str(path) for path in plan.removed])
            return _report(plan, opened.num_nodes)


def _read(
    planner: Planner, roots: Sequence[FoundFiles], documents: Mapping[str, Sequence[Document]], report: Progress
) -> None:
    """Read and split everything that was given, files first.

    Args:
        planner: Decides what changes.
        roots: The files of each path; of a file under two of them, the first root counts.
        documents: The documents, by id.
        report: Called with the stage "read", what is done, and the total.
    """
    files = {file: found.root for found in reversed(roots) for file in found.files}
    total = len(files) + len(documents)
    for done, (file, root) in enumerate(sorted(files.items())):
        report("read", done, total)
        planner.add_file(file, root)
    for done, parts in enumerate(documents.values(), start=len(files)):
        report("read", done, total)
        planner.add_document(parts)
    report("read", total, total)


def _splitter(
    embed_model: BaseEmbedding, chunk_tokens: int | None, chunk_overlap: int | None, node_parser: NodeParser | None
) -> Splitter:
    if node_parser is not None:
        if chunk_tokens is not None or chunk_overlap is not None:
            raise ConfigError("node_parser has its own sizes: leave out chunk_tokens and chunk_overlap")
        if not isinstance(node_parser, NodeParser):
            raise ConfigError(f"node_parser must be a LlamaIndex NodeParser, not {type(node_parser).__name__}")
        return ParserSplitter(node_parser, sizes_of(embed_model, DEFAULT_CHUNK_TOKENS))
    sizes: TextSizes = sizes_of(embed_model, chunk_tokens, stacklevel=4)
    overlap = DEFAULT_CHUNK_OVERLAP if chunk_overlap is None else chunk_overlap
    tokens = _checked_chunk_tokens(chunk_tokens, overlap, sizes.max_text_tokens)
    return Chunker(sizes, tokens, overlap)


def _check_encoding(encoding: str) -> None:
    try:
        b"text".decode(encoding)
    except LookupError as error:
        raise ConfigError(
            f"{encoding!r} is no encoding of text that Python knows; try 'latin-1' or 'cp1252'"
        ) from error
    except UnicodeDecodeError:
        return  # one of whole words, such as utf-32


def _checked_chunk_tokens(chunk_tokens: int | None, overlap: int, limit: int) -> int:
    tokens = min(DEFAULT_CHUNK_TOKENS, limit) if chunk_tokens is None else chunk_tokens
    if tokens > limit:
        raise ConfigError(f"the embedding model reads {limit} tokens at most: chunk_tokens cannot be {tokens}")
    if tokens < _SMALLEST_CHUNK:
        raise ConfigError(f"chunk_tokens must be at least {_SMALLEST_CHUNK}, not {tokens}")
    if not 0 <= overlap < tokens:
        raise ConfigError(f"chunk_overlap must be 0..{tokens - 1} (less than chunk_tokens), not {overlap}")
    return tokens


def _require_any(roots: Sequence[FoundFiles], documents: Mapping[str, Sequence[Document]]) -> None:
    """Require a file under every path: an empty folder is more likely a mistake than a request to remove its files."""
    if not roots and not documents:
        raise IngestError("no path was given: name a file or folder to ingest")
    for found in roots:
        if not found.files:
            nothing = (found.root, "no file in it (hidden files are skipped)")
            path, reason = [*found.unlisted, *found.links, nothing][0]
            raise IngestError(f"{printable(path)}: {reason}; nothing was changed")


@contextmanager
def _ingestion_lock(store: str | Path, tenant: str) -> Iterator[None]:
    """Hold the tenant's ingestion lock, because two ingestions at once would embed the same files twice."""
    folder = lock_folder(store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _lock_name(tenant), timeout=0)
        lock.acquire()
    except Timeout as error:
        raise StoreBusyError(f"another process is ingesting into {store}; wait until it has finished") from error
    except OSError as error:
        raise StoreWriteError(
            f"the store folder {folder} cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _lock_name(tenant: str) -> str:
    # A hash, because names may hold characters that file names cannot, and some file systems ignore case.
    return f"ingest-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.lock" if tenant else _LOCK_NAME


def _known_documents(store: str | Path, embed_model: BaseEmbedding, tenant: str) -> dict[str, DocumentRecord]:
    """The tenant's records by path, after checking the store and its embedding model."""
    try:
        with open_store(store, embed_model=embed_model, tenant=tenant) as opened:
            return {record.path: record for record in opened.documents()}
    except StoreNotFoundError:
        return {}


def _embed(nodes: Sequence[BaseNode], embed_model: BaseEmbedding, report: Progress) -> None:
    """Set the nodes' embeddings; equal texts are embedded once."""
    sharing: dict[str, list[BaseNode]] = {}
    for node in nodes:
        sharing.setdefault(node.get_content(metadata_mode=MetadataMode.EMBED), []).append(node)
    texts, batch = list(sharing), embed_model.embed_batch_size
    for start in range(0, len(texts), batch):
        report("embed", start, len(texts))
        part = texts[start : start + batch]
        for text, vector in zip(part, embed_model.get_text_embedding_batch(part), strict=True):
            for node in sharing[text]:
                node.embedding = vector
    report("embed", len(texts), len(texts))


def _report(plan: Plan, total_chunks: int) -> IngestReport:
    return IngestReport(
        added=tuple(plan.added),
        updated=tuple(plan.updated),
        unchanged=tuple(plan.unchanged),
        removed=tuple(plan.removed),
        skipped=tuple(sorted(plan.skipped, key=lambda skipped: str(skipped.path))),
        chunks=len(plan.nodes),
        total_chunks=total_chunks,
    )
