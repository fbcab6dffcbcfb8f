"""`Library`: the documents of all tenants, for the API: list, text, originals, deletion with undo."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import BaseNode, MetadataMode

from reader_rag.config import ServerConfig
from reader_rag.errors import StoreWriteError
from reader_rag.rag.stores.contract import DocumentRecord, DocumentStore
from reader_rag.server.documents.text import DocumentText, document_id, document_text
from reader_rag.server.errors import ApiError, unknown_document

_ORIGINALS = "originals"
_TRASH = "trash"
_INCOMING = "incoming"
_TENANT = ".tenant"
"""Name of a file in the folder of a tenant's originals, which itself has a hash as name."""
PREVIOUS = ".previous-"
"""Prefix of the name of an earlier original while one of the same name is ingested."""
_NAME_BYTES = 180
_UNDOS_PER_TENANT = 32
_SUMMARIES = 1 << 14


@dataclass(frozen=True)
class DocumentSummary:
    """A document in the list.

    Attributes:
        id: Its id in the API.
        name: File name.
        title: Title; the file name without suffix where the document has none.
        type: Suffix of the file name, in lower case, without the dot.
        size: Bytes of the original; None where it is not kept.
        chunks: Number of nodes.
        pages: Number of pages; 1 where the format has none.
        version: Hash of its text.
        added: Unix time at which the original was uploaded; None where it is not kept.
        original: Whether the original is kept.
    """

    id: str
    name: str
    title: str
    type: str
    size: int | None
    chunks: int
    pages: int
    version: str
    added: float | None
    original: bool


@dataclass(frozen=True)
class _Deleted:
    tenant: str
    record: DocumentRecord
    nodes: list[BaseNode]
    original: Path | None  # in the trash
    until: float  # Unix time


class Library:
    """The documents of all tenants.

    Args:
        store: The store.
        embedding: Its embedding model, which restores deleted documents.
        folder: Where originals are kept.
        config: Limits.

    Attributes:
        store: As given.
        embedding: As given.
        folder: As given.

    Raises:
        StoreWriteError: The folder cannot be written.
    """

    def __init__(self, store: DocumentStore, embedding: BaseEmbedding, folder: Path, config: ServerConfig) -> None:
        self.store = store
        self.embedding = embedding
        self.folder = folder
        self._config = config
        self._lock = threading.Lock()
        self._deleted: OrderedDict[str, _Deleted] = OrderedDict()
        self._summaries: OrderedDict[tuple[str, str, str], tuple[str, int, int, str]] = OrderedDict()
        with writing_errors(folder):
            for name in (_ORIGINALS, _TRASH, _INCOMING):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._empty(_TRASH)  # of an earlier process: nobody has the tokens any more
            self._empty(_INCOMING)

    def close(self) -> None:
        """Remove what was deleted and not restored."""
        with self._lock:
            self._deleted.clear()
        self._empty(_TRASH)

    # -- reading --

    def records(self, tenant: str) -> list[DocumentRecord]:
        """A tenant's documents, in path order.

        Args:
            tenant: The tenant.
        """
        return self.store.for_tenant(tenant).documents()

    def find(self, tenant: str, id_: str) -> DocumentRecord:
        """A tenant's document.

        Args:
            tenant: The tenant.
            id_: Its id in the API.

        Raises:
            ApiError: The tenant has no such document.
        """
        for record in self.records(tenant):
            if document_id(record.path) == id_:
                return record
        raise unknown_document()

    def text(self, tenant: str, record: DocumentRecord) -> DocumentText:
        """The text of a document.

        Args:
            tenant: The tenant.
            record: The document.
        """
        return document_text(self.store.for_tenant(tenant).get_nodes(doc_ids=[record.path]))

    def summary(self, tenant: str, record: DocumentRecord) -> DocumentSummary:
        """What the list says of a document.

        Args:
            tenant: The tenant.
            record: The document.
        """
        key = (tenant, record.path, record.hash)
        with self._lock:
            known = self._summaries.get(key)
        if known is None:
            text = self.text(tenant, record)
            known = (text.name or Path(record.path).name, len(text.offsets), len(text.pages), text.version)
            with self._lock:
                self._summaries[key] = known
                while len(self._summaries) > _SUMMARIES:
                    self._summaries.popitem(last=False)
        name, chunks, pages, version = known
        original = self.original(tenant, record)
        status = original.stat() if original is not None else None
        return DocumentSummary(
            id=document_id(record.path),
            name=name,
            title=Path(name).stem or name,
            type=Path(name).suffix.lower().removeprefix("."),
            size=None if status is None else status.st_size,
            chunks=chunks,
            pages=pages,
            version=version,
            added=None if status is None else status.st_mtime,
            original=original is not None,
        )

    def original(self, tenant: str, record: DocumentRecord) -> Path | None:
        """The uploaded file of a document; None where it is not kept, as of files that were not uploaded.

        Args:
            tenant: The tenant.
            record: The document.
        """
        # The folder of the store may have been moved since: only the end of the recorded path counts.
        path = self.place(tenant, Path(record.path).name)
        if Path(record.path).parts[-4:] != path.parts[-4:] or not path.is_file():
            return None
        # No link leads out of the folder of originals, which itself may be one.
        inside = (self.folder / _ORIGINALS).resolve() / path.relative_to(self.folder / _ORIGINALS)
        return path if path.resolve() == inside else None

    # -- files of uploads --

    def place(self, tenant: str, name: str) -> Path:
        """Where the original of an upload is kept: a file of the same name takes the place of the earlier one.

        Args:
            tenant: The tenant.
            name: A name that `safe_name` returned.
        """
        return self.folder / _ORIGINALS / _hashed(tenant) / _hashed(name) / name

    def bound_originals(self, tenant: str) -> None:
        """Keep a tenant's originals within their bound: the oldest go, their texts stay.

        Args:
            tenant: The tenant.
        """
        found = []
        for path in (self.folder / _ORIGINALS / _hashed(tenant)).glob("*/*"):
            with contextlib.suppress(OSError):  # deleted meanwhile
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self._config.originals_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            with contextlib.suppress(OSError):  # the next ingestion tries again
                path.unlink(missing_ok=True)
            excess -= size

    def make_place(self, tenant: str, name: str) -> Path:
        """The `place` of an upload, with its folder.

        Args:
            tenant: The tenant.
            name: A name that `safe_name` returned.
        """
        place = self.place(tenant, name).resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        if _owner(place) != tenant:
            (place.parents[1] / _TENANT).write_text(tenant, encoding="utf-8")
        return place

    def interrupted(self) -> dict[str, Path]:
        """Undo what an earlier process was doing with originals when it was killed.

        Returns:
            By tenant, a folder with the uploads that it had taken and not ingested yet.
        """
        found: dict[str, Path] = {}
        for previous in (self.folder / _ORIGINALS).glob(f"*/*/{PREVIOUS}*"):
            place = previous.with_name(previous.name.removeprefix(PREVIOUS))
            tenant = _owner(place)
            if place.exists() and tenant is not None:
                if tenant not in found:
                    found[tenant] = self.incoming()
                place.replace(found[tenant] / place.name)
            previous.replace(place)
        return found

    def incoming(self) -> Path:
        """A new folder for the files of an upload."""
        folder = self.folder / _INCOMING / secrets.token_hex(8)
        with writing_errors(self.folder):
            folder.mkdir()
        return folder

    # -- deletion --

    def delete(self, tenant: str, id_: str) -> tuple[str, float]:
        """Delete a document. Nothing of it is found from then on.

        Args:
            tenant: The tenant.
            id_: Its id in the API.

        Returns:
            The token that restores it, and the Unix time until which it does.

        Raises:
            ApiError: The tenant has no such document.
            StoreError: The store cannot be changed.
        """
        record = self.find(tenant, id_)
        store = self.store.for_tenant(tenant)
        nodes = store.get_nodes(doc_ids=[record.path])
        original = self.original(tenant, record)
        token = secrets.token_urlsafe(16)
        in_trash = None if original is None else self._thrown_away(original, token)
        try:
            store.replace_documents((), (), [record.path])
        except BaseException:
            if original is not None and in_trash is not None:
                self._taken_back(in_trash, original)
            raise
        until = time.time() + self._config.undo_seconds
        with self._lock:
            self._deleted[token] = _Deleted(tenant, record, nodes, in_trash, until)
        self.purge()
        return token, until

    def undo(self, tenant: str, token: str) -> str:
        """Restore a deleted document.

        Args:
            tenant: The tenant.
            token: What `delete` returned.

        Returns:
            The document's id.

        Raises:
            ApiError: There is nothing to restore, or there is a new document of that name.
            StoreError: The store cannot be changed.
        """
        with self._lock:
            deleted = self._deleted.get(token)
            if deleted is None or deleted.tenant != tenant or deleted.until < time.time():
                raise ApiError(404, "there is nothing to restore: the time for it is over", code="undo_gone")
            del self._deleted[token]
        record = deleted.record
        try:
            if any(other.path == record.path for other in self.records(tenant)):
                raise ApiError(409, "there is a new document of that name", code="replaced")
            texts = [node.get_content(metadata_mode=MetadataMode.EMBED) for node in deleted.nodes]
            vectors = self.embedding.get_text_embedding_batch(texts)
            for node, vector in zip(deleted.nodes, vectors, strict=True):
                node.embedding = vector
            self._restore(deleted)
        except BaseException:
            with self._lock:
                self._deleted[token] = deleted  # it may be tried again
            raise
        return document_id(record.path)

    def _restore(self, deleted: _Deleted) -> None:
        """Put a deleted document back, whole or not at all."""
        place = self.place(deleted.tenant, Path(deleted.record.path).name)
        if deleted.original is not None:
            self._taken_back(deleted.original, place)
        try:
            self.store.for_tenant(deleted.tenant).replace_documents(deleted.nodes, [deleted.record])
        except BaseException:
            if deleted.original is not None:
                with contextlib.suppress(OSError):
                    deleted.original.mkdir(exist_ok=True)
                    place.replace(deleted.original / place.name)
            raise

    def _thrown_away(self, original: Path, token: str) -> Path:
        """Move an original into the trash; returns its folder there."""
        folder = self.folder / _TRASH / token
        with writing_errors(self.folder):
            folder.mkdir()
            original.replace(folder / original.name)
        with contextlib.suppress(OSError):  # a new one is being uploaded
            original.parent.rmdir()
        return folder

    def _taken_back(self, folder: Path, original: Path) -> None:
        """Move an original back out of the trash."""
        with writing_errors(self.folder):
            original.parent.mkdir(parents=True, exist_ok=True)
            (folder / original.name).replace(original)
        with contextlib.suppress(OSError):  # it is removed with the trash
            folder.rmdir()

    def purge(self) -> None:
        """Remove for good what was deleted longer ago than it can be restored, and more than may wait for that."""
        now, gone = time.time(), []
        with self._lock:
            count: dict[str, int] = {}
            for token in reversed(list(self._deleted)):
                tenant = self._deleted[token].tenant
                count[tenant] = count.get(tenant, 0) + 1
                if self._deleted[token].until < now or count[tenant] > _UNDOS_PER_TENANT:
                    gone.append(self._deleted.pop(token))
        for deleted in gone:
            if deleted.original is not None:
                shutil.rmtree(deleted.original, ignore_errors=True)

    def _empty(self, name: str) -> None:
        for entry in (self.folder / name).iterdir():
            shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """Raise a `StoreWriteError` in place of an `OSError`.

    Args:
        folder: Folder of the originals, for the message.
    """
    try:
        yield
    except OSError as error:
        raise StoreWriteError(
            f"the folder {folder} cannot be written ({error.strerror or error}); make room, check its permissions, or "
            "choose another store"
        ) from error


def safe_name(name: str, *, on_windows: bool = os.name == "nt") -> str:
    """The name of an uploaded file as a file name: one part of a path, printable, not hidden, not too long.

    Args:
        name: The name that the client sent, which may be anything.
        on_windows: Whether it must be a name on Windows, which reserves some names and characters.
    """
    last = unicodedata.normalize("NFC", name).replace("\\", "/").rsplit("/", 1)[-1]
    text = "".join(character if character.isprintable() else "_" for character in last).strip()
    text = text.lstrip(".").strip()
    if on_windows:
        text = "".join("_" if character in '<>:"|?*' else character for character in text).rstrip(". ")
        if text.partition(".")[0].rstrip().upper() in _DEVICES:
            text = f"_{text}"
    text = text or "unnamed"
    stem, dot, suffix = text.rpartition(".")
    if not dot or len(suffix.encode()) > 16:
        stem, dot, suffix = text, "", ""
    room = _NAME_BYTES - len(f"{dot}{suffix}".encode())
    return stem.encode()[:room].decode("utf-8", "ignore") + dot + suffix


_DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{number}" for port in ("COM", "LPT") for number in range(1, 10))}
"""Names that are devices on Windows, with any suffix."""


def _owner(place: Path) -> str | None:
    """Whose original lies at a place; None: that was not written down, or not to its end."""
    try:
        tenant = (place.parents[1] / _TENANT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return tenant if _hashed(tenant) == place.parents[1].name else None


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
