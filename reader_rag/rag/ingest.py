"""`ingest`: updates a store from files, in one commit."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import MetadataMode, TextNode

from reader_rag.config import checked_tenant
from reader_rag.config.reading import ReadLimits
from reader_rag.errors import ConfigError, IngestError, StoreBusyError, StoreNotFoundError, StoreWriteError
from reader_rag.rag.chunking import Chunker
from reader_rag.rag.embedding import sizes_of
from reader_rag.rag.files import FoundFiles, UnusableFileError, content_hash, find_files, parse, printable, read_bytes
from reader_rag.rag.reading.process import ReadingProcess
from reader_rag.rag.stores.location import local_folder, lock_folder, open_store
from reader_rag.rag.stores.records import DocumentRecord

DEFAULT_CHUNK_TOKENS = 256
DEFAULT_CHUNK_OVERLAP = 32

_SMALLEST_CHUNK = 16
# Part of each file's hash: a new version makes every store split and embed its files again.
_CHUNKER_VERSION = 1
_LOCK_NAME = "ingest.lock"
_COMMIT_LOCK_NAME = "commit.lock"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SkippedFile:
    """A file or folder that could not be ingested; as text, one line that can be printed whatever the path holds.

    Attributes:
        path: Absolute path; a name that is not valid UTF-8 has lone surrogates, as everywhere in Python.
        reason: The reason in a few words.
        kept_old: Whether the store keeps the path's content of an earlier ingestion.
    """

    path: Path
    reason: str
    kept_old: bool = False

    def __str__(self) -> str:
        kept = "; its earlier version stays in the store" if self.kept_old else ""
        return f"{printable(self.path)}: {self.reason}{kept}"


@dataclass(frozen=True)
class IngestReport:
    """Result of an ingestion.

    Attributes:
        added: Files that are new in the store.
        updated: Files whose content or chunk settings changed.
        unchanged: Files that were not embedded again.
        removed: Files that no longer exist under their root.
        skipped: Files and folders that could not be ingested, with reasons.
        chunks: Number of nodes of the added and updated files.
        total_chunks: Number of the tenant's nodes in the store after the ingestion.
    """

    added: tuple[Path, ...]
    updated: tuple[Path, ...]
    unchanged: tuple[Path, ...]
    removed: tuple[Path, ...]
    skipped: tuple[SkippedFile, ...]
    chunks: int
    total_chunks: int

    @property
    def ok(self) -> bool:
        """Whether every file could be ingested."""
        return not self.skipped


@dataclass
class _Plan:
    """The changes that one ingestion commits."""

    records: list[DocumentRecord] = field(default_factory=list)
    nodes: list[TextNode] = field(default_factory=list)
    added: list[Path] = field(default_factory=list)
    updated: list[Path] = field(default_factory=list)
    unchanged: list[Path] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)


def ingest(
    paths: str | Path | Sequence[str | Path],
    store: str | Path,
    *,
    embed_model: BaseEmbedding,
    chunk_tokens: int | None = None,
    chunk_overlap: int = DEFAULT_CHUNK_OVERLAP,
    progress: Progress | None = None,
    tenant: str = "",
    follow_links: bool = False,
    limits: ReadLimits | None = None,
) -> IngestReport:
    """Update a tenant's documents in a store from the files under some paths.

    New and changed files are split and embedded first; then documents and vectors are swapped in one commit. Until that
    commit queries see the old content, and an error leaves the store unchanged. A vector database has no such commits:
    there the next ingestion completes an interrupted one. Files under other roots and documents of other tenants stay.
    A file that can no longer be read keeps its last content in the store and is reported.

    Args:
        paths: Files and folders, or a single one. Hidden files and folders inside are skipped, and links to folders are
            not followed. Pipes, sockets and devices are skipped and reported.
        store: Folder of the store, or the URL of a collection in a vector database (`qdrant://...`, `milvus://...`);
            made with the first documents.
        embed_model: The embedding model of the store: any LlamaIndex embedding. Of one that does not report how many
            tokens it reads (no `SizedEmbedding`), chunks have `chunk_tokens`, or 256 with a warning.
        chunk_tokens: Most tokens of a chunk, by the embedding's tokenizer; None takes 256, or the model's limit if that
            is lower.
        chunk_overlap: Most tokens that neighbouring chunks share.
        progress: Called as (stage, done, total) with the stages "read" (files) and "embed" (distinct chunks).
        tenant: The tenant who owns the documents; only the tenant's queries find them.
        follow_links: Whether links inside a folder to files outside of it, or to hidden files, are read. By default
            they are skipped and reported, so that nobody who may write to the folder can have other files read.
        limits: Limits of reading one file: bytes, seconds, memory, and what an archive unpacks to. A file beyond one
            is skipped and reported; None takes the defaults.

    Returns:
        The files that were added, updated, removed and skipped.

    Raises:
        IngestError: A path does not exist, or no file can be ingested; the store is unchanged.
        ConfigError: The chunk settings contradict each other or the model's limit, or the tenant's name is invalid.
        StoreBusyError: Another ingestion for this tenant into this store is running.
        StoreError: The store cannot be used or written, or was made with another embedding model.
    """
    checked_tenant(tenant)
    sizes = sizes_of(embed_model, chunk_tokens)
    tokens = _checked_chunk_tokens(chunk_tokens, chunk_overlap, sizes.max_text_tokens)
    settings = f"chunker {_CHUNKER_VERSION}, {tokens} tokens, overlap {chunk_overlap}"
    report = progress or (lambda stage, done, total: None)
    listed = [paths] if isinstance(paths, (str, Path)) else paths
    limits = limits or ReadLimits()
    roots = [find_files(Path(path), local_folder(store), follow_links=follow_links) for path in listed]
    _require_files(roots)
    with _ingestion_lock(store, tenant):
        known = _known_documents(store, embed_model, tenant)
        plan = _Plan()
        files = {file: found.root for found in reversed(roots) for file in found.files}
        chunker = Chunker(sizes, tokens, chunk_overlap)
        with ReadingProcess(limits) as reading:
            for done, (file, root) in enumerate(sorted(files.items())):
                report("read", done, len(files))
                _plan_file(plan, file, root, known, settings, chunker, reading, tenant)
        report("read", len(files), len(files))
        _plan_unlisted_and_removed(plan, roots, known)
        if not (plan.records or plan.unchanged):
            first = plan.skipped[0]
            raise IngestError(
                f"none of the {len(plan.skipped)} files can be ingested, e.g. {printable(first.path)}: {first.reason}"
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


def _checked_chunk_tokens(chunk_tokens: int | None, overlap: int, limit: int) -> int:
    tokens = min(DEFAULT_CHUNK_TOKENS, limit) if chunk_tokens is None else chunk_tokens
    if tokens > limit:
        raise ConfigError(f"the embedding model reads {limit} tokens at most: chunk_tokens cannot be {tokens}")
    if tokens < _SMALLEST_CHUNK:
        raise ConfigError(f"chunk_tokens must be at least {_SMALLEST_CHUNK}, not {tokens}")
    if not 0 <= overlap < tokens:
        raise ConfigError(f"chunk_overlap must be 0..{tokens - 1} (less than chunk_tokens), not {overlap}")
    return tokens


def _require_files(roots: Sequence[FoundFiles]) -> None:
    """Require a file under every path: an empty folder is more likely a mistake than a request to remove its files."""
    if not roots:
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


def _plan_file(
    plan: _Plan,
    file: Path,
    root: Path,
    known: dict[str, DocumentRecord],
    settings: str,
    chunker: Chunker,
    reading: ReadingProcess,
    tenant: str,
) -> None:
    old = known.get(str(file))
    try:
        data = read_bytes(file, reading.limits.file_bytes)
        digest = content_hash(file, data, settings)
        if old is not None and old.hash == digest:
            plan.unchanged.append(file)
            return
        nodes = chunker.split(parse(file, data, reading))
    except UnusableFileError as error:
        plan.skipped.append(SkippedFile(file, str(error), kept_old=old is not None))
        return
    for number, node in enumerate(nodes):
        # Tenants with the same file have nodes of different ids.
        owner = f"\0{tenant}" if tenant else ""
        node.id_ = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{file}\0{digest}\0{number}{owner}"))
    plan.nodes.extend(nodes)
    plan.records.append(DocumentRecord(str(file), old.root if old is not None else str(root), digest))
    (plan.added if old is None else plan.updated).append(file)


def _plan_unlisted_and_removed(plan: _Plan, roots: Sequence[FoundFiles], known: dict[str, DocumentRecord]) -> None:
    """Plan the removal of known files that their root no longer has, except below folders that cannot be listed."""
    unlisted = [(folder, reason) for found in roots for folder, reason in found.unlisted]
    for found in roots:
        plan.skipped.extend(SkippedFile(link, reason) for link, reason in found.links)
    for folder, reason in unlisted:
        kept = any(Path(path).is_relative_to(folder) for path in known)
        plan.skipped.append(SkippedFile(folder, reason, kept_old=kept))
    found_now = {str(file) for found in roots for file in found.files}
    root_names = {str(found.root) for found in roots}
    for path, record in known.items():
        covered = any(Path(path).is_relative_to(found.root) for found in roots)
        unknown = any(Path(path).is_relative_to(folder) for folder, _ in unlisted)
        if not covered or unknown or path in found_now:
            continue
        # A root inside a hidden folder is not listed by the roots around it, which must not remove its files.
        if record.root in root_names or not os.path.lexists(path):
            plan.removed.append(Path(path))


def _embed(nodes: Sequence[TextNode], embed_model: BaseEmbedding, report: Progress) -> None:
    """Set the nodes' embeddings; equal texts are embedded once."""
    sharing: dict[str, list[TextNode]] = {}
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


def _report(plan: _Plan, total_chunks: int) -> IngestReport:
    return IngestReport(
        added=tuple(plan.added),
        updated=tuple(plan.updated),
        unchanged=tuple(plan.unchanged),
        removed=tuple(plan.removed),
        skipped=tuple(sorted(plan.skipped, key=lambda skipped: skipped.path)),
        chunks=len(plan.nodes),
        total_chunks=total_chunks,
    )
