"""Bring a store up to date with files on disk: file by file, and then in one commit."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from llama_index.core.schema import MetadataMode, TextNode

from reader_rag.config import checked_tenant
from reader_rag.errors import ConfigError, IngestError, StoreBusyError, StoreNotFoundError, StoreWriteError
from reader_rag.rag.chunking import Chunker
from reader_rag.rag.embedding import SizedEmbedding
from reader_rag.rag.files import FoundFiles, UnusableFileError, content_hash, find_files, parse, read_bytes
from reader_rag.rag.stores.location import local_folder, lock_folder, open_store
from reader_rag.rag.stores.records import DocumentRecord

DEFAULT_CHUNK_TOKENS = 256
DEFAULT_CHUNK_OVERLAP = 32

_SMALLEST_CHUNK = 16
# Part of each file's hash: raise it when the same settings begin to split differently, and stores are made anew.
_CHUNKER_VERSION = 1
_LOCK_NAME = "ingest.lock"
_COMMIT_LOCK_NAME = "commit.lock"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SkippedFile:
    """A file or folder that could not be used.

    Attributes:
        path: Absolute path.
        reason: Why, in a few words.
        kept_old: The store holds what the path had at an earlier ingestion, and keeps it.
    """

    path: Path
    reason: str
    kept_old: bool = False


@dataclass(frozen=True)
class IngestReport:
    """What an ingestion did.

    Attributes:
        added: Files that are new in the store.
        updated: Files whose content had changed.
        unchanged: Files that were not embedded again.
        removed: Files that are gone from their root.
        skipped: Files and folders that could not be used, with reasons.
        chunks: Number of nodes that are new in the store.
        total_chunks: Number of nodes of the tenant in the store now.
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
        """True if every file found could be used."""
        return not self.skipped


@dataclass
class _Plan:
    """The changes that one ingestion will commit."""

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
    embed_model: SizedEmbedding,
    chunk_tokens: int | None = None,
    chunk_overlap: int = DEFAULT_CHUNK_OVERLAP,
    progress: Progress | None = None,
    tenant: str = "",
) -> IngestReport:
    """Bring a tenant's documents in the store up to date with what lies under some paths.

    New and changed files are split and embedded first; then documents and vectors are swapped in one commit. Until
    that commit the store answers as before, and it stays as it was if anything fails. A vector database has no such
    commits: there, what was broken off is made good by the next ingestion. Files under other roots stay, and so does
    all that is another tenant's, also where it is the same file. A file that can no longer be read keeps its last good
    content and is reported.

    Args:
        paths: Folders and files, or one of them. Hidden files and folders inside are passed over, and links to
            folders not followed.
        store: Folder of the store, or the URL of a collection in a vector database (`qdrant://...`, `milvus://...`);
            made when there is something to put in.
        embed_model: The model that the store is for.
        chunk_tokens: Longest chunk, in the embedding's tokens; None takes 256 or the model's limit if that is less.
        chunk_overlap: Tokens that neighbouring chunks share.
        progress: Called as (stage, done, total) with the stages "read" (files) and "embed" (distinct chunks).
        tenant: Whose documents they are: nobody else's queries find them.

    Returns:
        What was done, and which files were skipped and why.

    Raises:
        IngestError: A path does not exist, or there is no usable file at all; the store is unchanged.
        ConfigError: Chunk settings that contradict each other or the model's limit, or a name that no tenant can have.
        StoreBusyError: Another ingestion for this tenant into this store is running.
        StoreError: The store cannot be used or written, or is for another embedding model.
    """
    checked_tenant(tenant)
    tokens = _checked_chunk_tokens(chunk_tokens, chunk_overlap, embed_model.max_text_tokens)
    settings = f"chunker {_CHUNKER_VERSION}, {tokens} tokens, overlap {chunk_overlap}"
    report = progress or (lambda stage, done, total: None)
    own_folder = local_folder(store)
    named = [paths] if isinstance(paths, (str, Path)) else paths
    roots = [find_files(Path(path), own_folder) for path in named]
    _require_files(roots)
    with _only_ingestion(store, tenant):
        known = _known_documents(store, embed_model, tenant)
        plan = _Plan()
        files = {file: found.root for found in reversed(roots) for file in found.files}
        chunker = Chunker(embed_model, tokens, chunk_overlap)
        for done, (file, root) in enumerate(sorted(files.items())):
            report("read", done, len(files))
            _plan_file(plan, file, root, known, settings, chunker, tenant)
        report("read", len(files), len(files))
        _plan_unlisted_and_gone(plan, roots, known)
        if not (plan.records or plan.unchanged):
            first = plan.skipped[0]
            raise IngestError(f"none of the {len(plan.skipped)} files can be used, e.g. {first.path}: {first.reason}")
        _embed(plan.nodes, embed_model, report)
        with (
            # In turn with other tenants' ingestions: SQLite would give up while a large commit goes on.
            FileLock(lock_folder(store) / _COMMIT_LOCK_NAME),
            open_store(store, embed_model=embed_model, tenant=tenant, must_exist=False) as opened,
        ):
            if plan.records or plan.removed:
                opened.replace_documents(plan.nodes, plan.records, [str(path) for path in plan.removed])
            return _report(plan, opened.num_nodes)


def _checked_chunk_tokens(asked: int | None, overlap: int, limit: int) -> int:
    tokens = min(DEFAULT_CHUNK_TOKENS, limit) if asked is None else asked
    if tokens > limit:
        raise ConfigError(f"the embedding model reads {limit} tokens at most: chunk_tokens cannot be {tokens}")
    if tokens < _SMALLEST_CHUNK:
        raise ConfigError(f"chunk_tokens must be at least {_SMALLEST_CHUNK}, not {tokens}")
    if not 0 <= overlap < tokens:
        raise ConfigError(f"chunk_overlap must be 0..{tokens - 1} (less than chunk_tokens), not {overlap}")
    return tokens


def _require_files(roots: Sequence[FoundFiles]) -> None:
    """Every path must yield a file: an empty folder is likelier a mistake than a wish to forget what was in it."""
    if not roots:
        raise IngestError("no path was given: name a file or folder to ingest")
    for found in roots:
        if not found.files:
            reason = found.unlisted[0][1] if found.unlisted else "no file in it (hidden files are passed over)"
            raise IngestError(f"{found.root}: {reason}; nothing was changed")


@contextmanager
def _only_ingestion(store: str | Path, tenant: str) -> Iterator[None]:
    """Hold the tenant's ingestion lock: embedding takes long, and two at once would do the same work twice."""
    folder = lock_folder(store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _lock_name(tenant), timeout=0)
        lock.acquire()
    except Timeout as error:
        raise StoreBusyError(f"another process is ingesting into {store}; wait until it has finished") from error
    except OSError as error:
        raise StoreWriteError(
            f"the store folder {folder} cannot be written ({error.strerror or error}); choose another with --store"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _lock_name(tenant: str) -> str:
    # A name may hold characters that no file can have, and file systems take "A" for "a".
    return f"ingest-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.lock" if tenant else _LOCK_NAME


def _known_documents(store: str | Path, embed_model: SizedEmbedding, tenant: str) -> dict[str, DocumentRecord]:
    """What the store holds of a tenant, after checking that it is whole and for this embedding model."""
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
    tenant: str,
) -> None:
    old = known.get(str(file))
    try:
        data = read_bytes(file)
        digest = content_hash(data, settings)
        if old is not None and old.hash == digest:
            plan.unchanged.append(file)
            return
        nodes = chunker.split(parse(file, data))
    except UnusableFileError as error:
        plan.skipped.append(SkippedFile(file, str(error), kept_old=old is not None))
        return
    for number, node in enumerate(nodes):
        # Of tenants that have the same file, each has nodes of its own.
        owner = f"\0{tenant}" if tenant else ""
        node.id_ = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{file}\0{digest}\0{number}{owner}"))
    plan.nodes.extend(nodes)
    plan.records.append(DocumentRecord(str(file), old.root if old is not None else str(root), digest))
    (plan.added if old is None else plan.updated).append(file)


def _plan_unlisted_and_gone(plan: _Plan, roots: Sequence[FoundFiles], known: dict[str, DocumentRecord]) -> None:
    """A known file is gone if its root no longer yields it; below a folder that cannot be listed no one can tell."""
    unlisted = [(folder, reason) for found in roots for folder, reason in found.unlisted]
    for folder, reason in unlisted:
        kept = any(Path(path).is_relative_to(folder) for path in known)
        plan.skipped.append(SkippedFile(folder, reason, kept_old=kept))
    found_now = {str(file) for found in roots for file in found.files}
    root_names = {str(found.root) for found in roots}
    for path, record in known.items():
        covered = any(Path(path).is_relative_to(found.root) for found in roots)
        hidden_from_us = any(Path(path).is_relative_to(folder) for folder, _ in unlisted)
        if not covered or hidden_from_us or path in found_now:
            continue
        # A root inside a hidden folder is passed over by the roots around it, and must outlive that.
        if record.root in root_names or not os.path.lexists(path):
            plan.removed.append(Path(path))


def _embed(nodes: Sequence[TextNode], embed_model: SizedEmbedding, report: Progress) -> None:
    """Set the nodes' embeddings; a text that several files share is embedded once."""
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
        skipped=tuple(plan.skipped),
        chunks=len(plan.nodes),
        total_chunks=total_chunks,
    )
