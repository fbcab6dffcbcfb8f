"""Namespace: documents that are searched together, as committed in a folder. Read-only; `writer` changes it."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.manifest import NAMESPACE_MANIFEST, NamespaceManifest, read_namespace_manifest
from reader_rag.datastore.memtable import Memtable, SegmentState
from reader_rag.datastore.segment import Document, Segment
from reader_rag.datastore.segment_file import open_segment
from reader_rag.datastore.token_codec import Identity
from reader_rag.datastore.write_ahead_log import FORMAT_VERSION, Added, Change, LogContent, Removed, read_log
from reader_rag.errors import ConfigError, DatastoreCorruptError, DatastoreError, ReaderWarning
from reader_rag.util.encodable import is_encodable

FOLDER_PREFIX = "ns-"

_ATTEMPTS = 50
"""Attempts to read a manifest and the files that it names while another process replaces them."""

Searchable = tuple[Segment, NDArray[np.int64]]
"""A segment, and the ranges of positions of its removed documents, int64 [n, 2]."""


def checked_name(name: str) -> str:
    """The name of a document or namespace.

    Raises:
        ConfigError: It is no string, or has a lone surrogate, which cannot be stored.
    """
    if not isinstance(name, str) or not is_encodable(name):
        raise ConfigError(f"documents and namespaces have strings without lone surrogates as names, not {name!r:.80}")
    return name


def check_bounds(max_tokens: int | None, max_age_s: float | None) -> None:
    """Check the bounds of a namespace.

    Raises:
        ConfigError: One is no number, or negative.
    """
    for name, bound, kinds in (("max_tokens", max_tokens, int), ("max_age_s", max_age_s, (int, float))):
        if bound is not None and not (isinstance(bound, kinds) and 0 <= bound < 1 << 63):
            raise ConfigError(f"{name} must be a number that is not negative, or None, not {bound!r:.80}")


def folder_name(namespace: str) -> str:
    """The name of a namespace's folder: a hash, because a namespace may have any name.

    Raises:
        ConfigError: The name is no string, or cannot be stored.
    """
    namespace = checked_name(namespace)
    return FOLDER_PREFIX + hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()


class Namespace:
    """Documents that are searched together.

    Args:
        folder: Folder of the namespace; it has a manifest.
        identity: Identity of the datastore.

    Attributes:
        lock: Held for each change, and to read several attributes consistently.
        version: Grows with each change of what a search may find.
        manifest: The committed state.
        segments: The segments that the manifest names, as far as they are readable.
        memtable: The documents that were added since.
        damaged: What is not readable, as messages.

    Raises:
        DatastoreCorruptError: The manifest is damaged.
        DatastoreMismatchError: A file is of another version, tokenizer or vocabulary.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.folder, self.identity = folder, identity
        self.lock = threading.RLock()
        self.version = 0
        self.manifest = NamespaceManifest("")
        self.segments: list[SegmentState] = []
        self.memtable = Memtable(identity)
        self.damaged: list[str] = []
        self._manifest_stamp: tuple[int, ...] = ()
        self._log_end = 0  # bytes
        self._log_grows = False  # whether it can be read from `_log_end` on: it is whole, and of this version
        self._logged = 0  # documents in the log, also those that were removed since
        self._searchable: tuple[int, tuple[Searchable, ...]] = (-1, ())

    @property
    def log_path(self) -> Path:
        """Path of the write-ahead log."""
        return self.folder / self.manifest.log

    def load(self) -> LogContent:
        """Read the committed state; segments that are mapped stay mapped.

        Returns:
            The content of the log.
        """
        with self.lock:
            for attempt in range(_ATTEMPTS):
                stamp = _stamp(self.folder / NAMESPACE_MANIFEST)
                manifest = read_namespace_manifest(self.folder)
                damaged: list[str] = []
                segments = list(self._open_segments(manifest, damaged))
                try:
                    log = read_log(self.folder / manifest.log, self.identity)
                except (FileNotFoundError, DatastoreCorruptError) as error:
                    damaged.append(f"the write-ahead log cannot be read: {error}")
                    log = LogContent([], 0, 0, ())
                unreadable = len(log.damaged)
                if log.end < (committed := max(manifest.log_bytes, log.recorded)):
                    damaged.append(f"{self.folder / manifest.log} lacks its last {committed - log.end} committed bytes")
                    log = replace(log, damaged=(*log.damaged, (log.end, committed)))
                if log.end < manifest.log_bytes:
                    # What it holds may have been removed by the commits that are missing.
                    log = replace(log, changes=[])
                if not damaged or attempt + 1 == _ATTEMPTS or read_namespace_manifest(self.folder) == manifest:
                    break
            self.manifest, self.segments, self.memtable = manifest, segments, Memtable(self.identity)
            self._log_end, self._logged, self._manifest_stamp = log.end, 0, stamp
            self._log_grows = log.version == FORMAT_VERSION and not log.damaged
            if unreadable:
                damaged.append(f"{self.log_path}: {unreadable} commits cannot be read")
            for what in damaged:
                if what not in self.damaged:
                    warnings.warn(f"datastore: {what}; the rest is served", ReaderWarning, stacklevel=3)
            self.damaged = damaged
            self._apply(log.changes)
            self.version += 1
            return log

    def refresh(self) -> None:
        """Read what another process has committed since."""
        with self.lock:
            try:
                if _stamp(self.folder / NAMESPACE_MANIFEST) != self._manifest_stamp:
                    self.load()
                    return
                size = self.log_path.stat().st_size if self._log_end else 0
                if size < self._log_end:
                    self.load()  # a failed commit was rolled back
                if size <= self._log_end:
                    return
                log = read_log(self.log_path, self.identity, self._log_end) if self._log_grows else None
            except FileNotFoundError:
                if (self.folder / NAMESPACE_MANIFEST).exists():
                    self.load()
                else:
                    self.clear()
                return
            if log is None or log.damaged:
                self.load()
            elif log.end > self._log_end:
                self._log_end = log.end
                self._apply(log.changes)
                self.version += 1

    def clear(self) -> None:
        """Drop all documents from memory, because the namespace was removed."""
        with self.lock:
            self.segments, self.memtable = [], Memtable(self.identity)
            self.version += 1

    def searchable(self) -> tuple[Searchable, ...]:
        """The segments and runs to search now; the result does not change with the namespace."""
        with self.lock:
            if self._searchable[0] != self.version:
                states = [state for state in (*self.segments, *self.memtable.runs) if len(state.segment.positions)]
                self._searchable = self.version, tuple((state.segment, state.tombstone_ranges()) for state in states)
            return self._searchable[1]

    def locate(self, name: str) -> tuple[SegmentState, int] | None:
        """The segment of a document and its index there; None: it is in no segment, or was removed."""
        for state in reversed(self.segments):
            k = state.find(name)
            if k >= 0:
                return state, k
        return None

    def digest_of(self, name: str) -> int | None:
        """The `token_digest` of a document; None: there is none of that name."""
        name = checked_name(name)
        with self.lock:
            if name in self.memtable.documents:
                return self.memtable.documents[name].digest
            located = self.locate(name)
            return None if located is None else int(located[0].segment.digests[located[1]])

    def read(self, name: str) -> NDArray[np.int64] | None:
        """int64 [n], the tokens of a document; None: there is none of that name."""
        name = checked_name(name)
        with self.lock:
            if name in self.memtable.documents:
                return self.identity.codec.decode(self.memtable.documents[name].stored)
            located = self.locate(name)
            return None if located is None else self.identity.codec.decode(located[0].segment.stored(located[1]))

    def names(self) -> list[str]:
        """The names of all documents."""
        with self.lock:
            return [
                *(self._name(state, k) for state in self.segments for k in np.flatnonzero(state.kept)),
                *self.memtable.documents,
            ]

    @property
    def documents(self) -> int:
        """Number of documents."""
        kept = (state.segment.document_count - len(state.tombstones) for state in self.segments)
        return sum(kept) + len(self.memtable.documents)

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return sum(state.tokens for state in self.segments) + self.memtable.tokens

    def expired(self, now: float) -> list[str]:
        """Names of the documents that are older than the namespace's `max_age_s`.

        Args:
            now: Seconds since 1970.
        """
        if self.manifest.max_age_s is None:
            return []
        oldest = now - self.manifest.max_age_s
        old = [(state, np.flatnonzero(state.kept & (state.segment.added_at < oldest))) for state in self.segments]
        return [
            *(document.name for document in self.memtable.documents.values() if document.added_at < oldest),
            *(self._name(state, k) for state, documents in old for k in documents),
        ]

    def excess(self) -> list[str]:
        """Names of the least recently used documents beyond the namespace's `max_tokens`."""
        limit = self.manifest.max_tokens
        if limit is None or self.tokens <= limit:
            return []
        recent = list(self.memtable.documents.values())
        kept = [np.flatnonzero(state.kept) for state in self.segments]
        pairs = list(zip(self.segments, kept, strict=True))
        elements = self.identity.codec.elements
        used_at = [state.used_at[ks] for state, ks in pairs]
        used_at.append(np.array([document.used_at for document in recent], np.uint32))
        lengths = [state.segment.lengths[ks] for state, ks in pairs]
        lengths.append(np.array([len(document.stored) // elements for document in recent], np.int64))
        order = np.argsort(np.concatenate(used_at), kind="stable")
        count = int(np.searchsorted(np.cumsum(np.concatenate(lengths)[order]), self.tokens - limit)) + 1
        first = np.cumsum([0, *map(len, kept)])
        names = []
        for n in order[:count].tolist():
            segment = int(np.searchsorted(first, n, side="right")) - 1
            if segment < len(kept):
                names.append(self._name(self.segments[segment], kept[segment][n - first[segment]]))
            else:
                names.append(recent[n - int(first[-1])].name)
        return names

    def _open_segments(self, manifest: NamespaceManifest, damaged: list[str]) -> Iterator[SegmentState]:
        """Map the segments of a manifest; those that cannot be read are described in `damaged`."""
        mapped = {(state.segment.file, state.header_crc): state.segment for state in self.segments}
        for entry in manifest.segments:
            segment = mapped.get((entry.file, entry.crc))
            try:
                if segment is None:
                    segment = open_segment(self.folder / entry.file, self.identity, entry.crc)
                last = entry.tombstones[-1] if entry.tombstones else -1
                if segment.document_count != entry.documents or last >= segment.document_count:
                    raise DatastoreCorruptError(
                        f"{self.folder / entry.file} does not match its manifest: restore it, or build it again"
                    )
            except DatastoreCorruptError as error:
                damaged.append(str(error))
                continue
            yield SegmentState(segment, entry.crc, entry.tombstones)

    def _apply(self, changes: Iterable[Change]) -> None:
        """Apply changes from the log."""
        new: dict[str, Document] = {}
        for change in changes:
            name = change.name
            if isinstance(change, Added | Removed):
                new.pop(name, None)
                self._remove(name)
            if isinstance(change, Added):
                self._logged += 1
                new[name] = change.document
            elif not isinstance(change, Removed):
                if name in new:
                    new[name] = replace(new[name], used_at=max(new[name].used_at, change.time))
                else:
                    self._mark_used(name, change.time)
        self.memtable.add(new.values())
        for state in self.segments:
            state.committed_tombstones = set(state.tombstones)
            if state.tombstones and state.tombstones_since is None:
                state.tombstones_since = 0.0

    def _remove(self, name: str) -> bool:
        """Remove a document in memory; False: there is none of that name."""
        if self.memtable.remove(name):
            return True
        located = self.locate(name)
        if located is None:
            return False
        located[0].tombstones.add(located[1])
        return True

    def _mark_used(self, name: str, time: int) -> bool:
        """Record a use of a document in memory; False: there is none of that name."""
        name = checked_name(name)
        document = self.memtable.documents.get(name)
        if document is not None:
            self.memtable.documents[name] = replace(document, used_at=max(document.used_at, time))
            return True
        located = self.locate(name)
        if located is None:
            return False
        located[0].mark_used(located[1], time)
        return True

    @staticmethod
    def _name(state: SegmentState, k: int | np.integer) -> str:
        return str(state.segment.names[int(k)])


def namespace_in(folder: Path) -> str | None:
    """The namespace that a folder holds; None: its manifest cannot be read."""
    try:
        return read_namespace_manifest(folder).namespace
    except (OSError, DatastoreError):
        return None


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes when a file is replaced; empty: it cannot be read.

    Raises:
        FileNotFoundError: There is no such file.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_size
