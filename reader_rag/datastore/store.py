"""Datastore: documents as tokens in a folder, in which drafts are searched."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.catalog import Catalog, lock_folder, read_manifest
from reader_rag.datastore.compactor import CompactionConfig, Compactor
from reader_rag.datastore.namespace import Namespace, checked_name, folder_name
from reader_rag.datastore.searcher import Searcher
from reader_rag.datastore.segment import Document
from reader_rag.datastore.stats import Damage, NamespaceStats, find_damage, measure
from reader_rag.datastore.token_codec import Identity, token_array, token_digest
from reader_rag.datastore.writer import NamespaceWriter
from reader_rag.errors import DatastoreError, DatastoreWriteError
from reader_rag.util.files import Files

if TYPE_CHECKING:
    from filelock import BaseFileLock

_SEGMENT_TOKENS = 1 << 25


class Datastore:
    """Documents as tokens on disk, in namespaces, searchable as soon as they are added.

    Open one with `Datastore.open`. One process writes at a time, any number read; all methods may be called from any
    thread. This process sees what `add` and `remove` change at once; other processes see it, and it outlasts a crash,
    when `commit` has returned.

    Example:
        >>> with Datastore.open("drafts", vocabulary=50_000, tokenizer="sha256:...") as store:
        ...     store.add("a", [5, 6, 7, 8, 9])
        ...     store.commit()
        ...     cursor = store.searcher([""]).cursor()
        ...     cursor.extend([1, 6, 7])
        ...     cursor.search(), cursor.continuations[:3].tolist(), cursor.longest_match
        True
        (1, [8, 9, -1], 2)

    Args:
        folder: Folder of the datastore; it has a manifest.
        identity: Tokenizer and vocabulary of the datastore.
        compaction: When segments are written and merged.
        files: File layer.
        clock: Seconds since 1970.
        lock: The writer's lock, held; None: read-only.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        compaction: CompactionConfig,
        files: Files,
        clock: Callable[[], float],
        lock: BaseFileLock | None,
    ) -> None:
        self.folder = folder
        self.compaction = compaction
        self._identity, self._files, self._clock, self._lock = identity, files, clock, lock
        self._compactor = Compactor(clock) if lock is not None and compaction.background else None
        self._catalog = Catalog(folder, identity, files, None if lock is None else self._open_writer)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        vocabulary: int,
        tokenizer: str,
        read_only: bool = False,
        compaction: CompactionConfig | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Datastore:
        """Open a datastore, or make one.

        Args:
            folder: Its folder.
            vocabulary: Number of token ids; decides how many bytes a stored token has.
            tokenizer: Fingerprint of the tokenizer: the tokens of another one mean other text.
            read_only: Change nothing; another process may write meanwhile.
            compaction: When segments are written and merged; None: the defaults.
            files: File layer; for tests.
            clock: Seconds since 1970; for tests.

        Raises:
            DatastoreNotFoundError: There is none, and it is opened read-only, or the folder has other files.
            DatastoreMismatchError: It is of another version, tokenizer or vocabulary.
            DatastoreCorruptError: Its manifest is damaged.
            DatastoreBusyError: Another process writes to it.
            DatastoreWriteError: The folder cannot be written to.
            ConfigError: The vocabulary is out of range, or the tokenizer is no string.
        """
        if sys.byteorder != "little":
            raise DatastoreError("datastores need a little-endian machine: run without one")
        folder, files = Path(folder), files or Files()
        identity = Identity(tokenizer, vocabulary)
        assert identity.codec  # raises if the vocabulary is out of range
        lock = None if read_only else lock_folder(folder, files)
        try:
            store = cls(folder, identity, compaction or CompactionConfig(), files, clock, lock)
            if lock is not None:
                store._catalog.clean()
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return store

    @classmethod
    def inspect(cls, folder: Path | str, *, read_only: bool = True) -> Datastore:
        """Open a datastore that exists, whatever its tokenizer.

        Args:
            folder: Its folder.
            read_only: Change nothing; another process may write meanwhile.

        Raises:
            DatastoreNotFoundError: There is none.
            DatastoreMismatchError: It is of another version.
            DatastoreCorruptError: Its manifest is damaged.
            DatastoreBusyError: Another process writes to it.
            DatastoreWriteError: The folder cannot be written to.
        """
        manifest = read_manifest(Path(folder))
        return cls.open(folder, vocabulary=manifest.vocabulary, tokenizer=manifest.tokenizer, read_only=read_only)

    # Documents

    def add(self, document: str, tokens: Sequence[int] | NDArray[np.integer], *, namespace: str = "") -> bool:
        """Add a document, or replace the one of its name; searchable when this returns, durable after `commit`.

        Args:
            document: Name of the document.
            tokens: Token ids.
            namespace: Namespace of the document; made if it does not exist.

        Returns:
            False if the document exists with the same tokens; nothing changes then.

        Raises:
            ConfigError: A token id is outside the vocabulary, or a name cannot be stored.
            DatastoreError: The datastore was opened read-only, or is closed.
        """
        array = token_array(tokens, self._identity.vocabulary)
        digest = token_digest(array)
        writer = self._catalog.writer(namespace)
        with writer.lock:
            if writer.digest_of(document) == digest:
                return False
            writer.add(self._document(document, array, digest))
            return True

    def add_many(
        self,
        documents: Iterable[tuple[str, Sequence[int] | NDArray[np.integer]]],
        *,
        namespace: str = "",
        segment_tokens: int = _SEGMENT_TOKENS,
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Add many documents as segments; each is committed when it is full.

        To resume an interrupted run, run it again: documents that exist with the same tokens are skipped.

        Args:
            documents: Names and token ids.
            namespace: Namespace of the documents; made if it does not exist.
            segment_tokens: Most tokens of a segment.
            progress: Called with the number of tokens so far.

        Returns:
            The number of documents that were new or changed.

        Raises:
            ConfigError: A token id is outside the vocabulary, or a name cannot be stored.
            DatastoreWriteError: A segment could not be written; those before it are committed.
            DatastoreError: The datastore was opened read-only, or is closed.
        """
        writer = self._catalog.writer(namespace)
        limit = min(segment_tokens, self.compaction.max_segment_tokens)
        pending: dict[str, Document] = {}
        size = total = changed = 0

        def write() -> None:
            nonlocal changed, size
            changed += len(pending)
            writer.add_segment(list(pending.values()))
            pending.clear()
            size = 0
            self._schedule(writer)

        for name, tokens in documents:
            array = token_array(tokens, self._identity.vocabulary)
            checked_name(name)
            total += len(array)
            digest = token_digest(array)
            if (pending[name].digest if name in pending else writer.digest_of(name)) == digest:
                continue
            if size and size + len(array) > limit:
                write()
                progress(total - len(array))
            pending[name] = self._document(name, array, digest)
            size += len(array) + 1
        write()
        progress(total)
        return changed

    def remove(self, document: str, *, namespace: str = "") -> bool:
        """Remove a document: no search finds it when this returns; durable after `commit`.

        Its tokens leave the disk when its segment is rewritten: in the background (`CompactionConfig`), or when
        `compact` returns.

        Args:
            document: Name of the document.
            namespace: Namespace of the document.

        Returns:
            False if there is none of that name.
        """
        self._catalog.check_writable()
        return self._catalog.exists(namespace) and self._catalog.writer(namespace).remove(document)

    def mark_used(self, documents: Iterable[str], *, namespace: str = "") -> None:
        """Record that drafts from documents were accepted: a bounded namespace evicts the least recently used.

        Args:
            documents: Names of documents; those that do not exist are ignored.
            namespace: Namespace of the documents.
        """
        if self._catalog.exists(namespace):
            self._catalog.writer(namespace).mark_used(documents)

    def has(self, document: str, *, namespace: str = "") -> bool:
        """Whether a document exists.

        Args:
            document: Name of the document.
            namespace: Namespace of the document.
        """
        space = self._catalog.get(namespace)
        return space is not None and space.digest_of(document) is not None

    def read(self, document: str, *, namespace: str = "") -> NDArray[np.int64] | None:
        """Read the tokens of a document.

        Args:
            document: Name of the document.
            namespace: Namespace of the document.

        Returns:
            int64 [n]; None: there is none of that name.
        """
        space = self._catalog.get(namespace)
        return None if space is None else space.read(document)

    def documents(self, *, namespace: str = "") -> list[str]:
        """The names of all documents of a namespace."""
        space = self._catalog.get(namespace)
        return [] if space is None else space.names()

    # Namespaces

    def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        return self._catalog.names()

    def remove_namespace(self, namespace: str) -> bool:
        """Remove a namespace with all its documents, from searches and from disk.

        Returns:
            False if there is none of that name.
        """
        return self._catalog.remove(namespace)

    def share(self, namespace: str, shared: bool = True) -> None:
        """Mark a namespace as one that every request searches; committed at once.

        Args:
            namespace: Name of the namespace.
            shared: False: remove the mark.
        """
        self._catalog.share(namespace, shared)

    def limit(self, namespace: str, *, max_tokens: int | None = None, max_age_s: float | None = None) -> None:
        """Bound a namespace: each commit evicts old and least recently used documents.

        Args:
            namespace: Name of the namespace; made if it does not exist.
            max_tokens: Most tokens; None: no bound.
            max_age_s: Seconds after which a document is evicted; None: no bound.
        """
        self._catalog.writer(namespace).limit(max_tokens, max_age_s)

    def searcher(self, namespaces: Sequence[str], *, shared: bool = True) -> Searcher:
        """Search the namespaces of one request, and those that `share` marked; nothing else.

        Args:
            namespaces: Namespaces of the request; those that do not exist (yet) are empty.
            shared: Also search the shared namespaces.

        Returns:
            A searcher. Its searches see the changes of this process at once, and those of other processes when it is
            made and after `refresh`.
        """
        names = tuple(dict.fromkeys(map(checked_name, namespaces)))
        self.refresh(names)
        resolved: tuple[int, tuple[Namespace, ...]] = (-1, ())

        def resolve() -> tuple[int, tuple[Namespace, ...]]:
            nonlocal resolved
            catalog = self._catalog
            if resolved[0] != catalog.version:
                with catalog.lock:
                    wanted = dict.fromkeys((*names, *(catalog.shared if shared else ())))
                    found = [catalog.get(name, skip_damaged=True) for name in wanted]
                    resolved = catalog.version, tuple(space for space in found if space is not None)
            return resolved

        return Searcher(resolve, self._identity)

    def refresh(self, namespaces: Sequence[str] | None = None) -> None:
        """Read what another process committed; does nothing in the process that writes.

        Args:
            namespaces: Only these and the shared ones; None: all that were opened before.
        """
        self._catalog.refresh(namespaces)

    # Disk

    def commit(self) -> None:
        """Write all changes to disk, of each namespace all or none.

        Raises:
            DatastoreWriteError: Some could not be written; they are kept for the next commit.
            DatastoreError: The datastore was opened read-only, or is closed.
        """
        self._catalog.check_writable()
        self._commit_all()

    def compact(self, *, namespace: str | None = None, full: bool = False, wait: bool = True) -> None:
        """Commit, remove the tokens of removed documents from disk, and merge the segments that are due.

        Args:
            namespace: Only this one; None: all.
            full: Merge into as few segments as `max_segment_tokens` allows; searches are fastest then.
            wait: False: compact in the background, and return at once.

        Raises:
            DatastoreWriteError: Something could not be written.
            DatastoreError: The datastore was opened read-only, or is closed.
        """
        self._catalog.check_writable()
        names = self.namespaces() if namespace is None else [namespace]
        for writer in [self._catalog.writer(name) for name in names if self._catalog.exists(name)]:
            writer.commit()
            if wait or self._compactor is None:
                writer.compact(force=True, full=full)
            else:
                self._compactor.schedule(writer, force=True, full=full)

    def verify(self) -> list[Damage]:
        """Read all files and compare their checksums; changes nothing.

        Returns:
            What is damaged.
        """
        names = self.namespaces()
        spaces = {name: self._catalog.get(name) for name in names}
        damage = [found for name, space in spaces.items() if space is not None for found in find_damage(name, space)]
        readable = set(map(folder_name, names))
        unreadable = [path.name for path in self._catalog.folders() if path.name not in readable]
        return damage + [Damage("", folder, "its manifest cannot be read") for folder in unreadable]

    def stats(self) -> dict[str, NamespaceStats]:
        """What each namespace holds."""
        spaces = {name: self._catalog.get(name) for name in self.namespaces()}
        shared = self._catalog.shared
        return {name: measure(space, name in shared) for name, space in spaces.items() if space is not None}

    def close(self, *, commit: bool = True) -> None:
        """Commit, end the compactor's thread, and release the writer's lock.

        Args:
            commit: False: drop the changes since the last commit.
        """
        with self._catalog.lock:
            if self._catalog.closed:
                return
            self._catalog.closed = True
        try:
            if self._compactor is not None:
                self._compactor.close()
            if commit:
                self._commit_all()
        finally:
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)

    def _document(self, name: str, tokens: NDArray[np.int64], digest: int) -> Document:
        now = int(self._clock())
        return Document(name, self._identity.codec.encode(tokens), digest, now, now)

    def _open_writer(self, folder: Path, name: str) -> NamespaceWriter:
        writer = NamespaceWriter(folder, name, self._identity, self.compaction, self._files, self._clock)
        self._schedule(writer)
        return writer

    def _schedule(self, writer: NamespaceWriter) -> None:
        if self._compactor is not None:
            self._compactor.schedule(writer)

    def _commit_all(self) -> None:
        errors = []
        for writer in self._catalog.writers:
            try:
                writer.commit()
            except DatastoreWriteError as error:
                errors.append(error)
            self._schedule(writer)
        if errors:
            raise errors[0]
