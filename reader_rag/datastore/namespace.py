"""Namespace: documents that are searched together, as its folder has them; read, never written (see `writer`)."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.manifest import MANIFEST, Manifest, read_manifest
from reader_rag.datastore.memtable import Held, Live
from reader_rag.datastore.part import Document, Part
from reader_rag.datastore.segment import Identity, open_segment
from reader_rag.datastore.write_ahead_log import Added, Change, LogPart, Removed, read_log
from reader_rag.errors import DatastoreCorruptError, DatastoreError, ReaderWarning

_ATTEMPTS = 50
"""Of reading a manifest and all it names while somebody replaces them."""

Searchable = tuple[Part, NDArray[np.int64]]
"""A part and the positions of its removed documents."""


def folder_of(namespace: str) -> str:
    """The name of a namespace's folder: names may hold what folders' names cannot."""
    return "ns-" + hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()


class Namespace:
    """The documents of one party, or of one kind.

    Args:
        folder: Of the namespace; it has a manifest.
        identity: Of the datastore.

    Attributes:
        lock: Taken for every change and every look at several attributes.
        version: Grows with every change of what can be found.
        manifest: The committed state.
        segments: What the manifest names, as far as it can be read.
        live: What came since.
        damaged: What could not be read, in words.

    Raises:
        DatastoreCorruptError: The manifest is damaged.
        DatastoreMismatchError: A file is of another version, tokenizer or vocabulary.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.folder, self.identity = folder, identity
        self.lock = threading.RLock()
        self.version = 0
        self.manifest = Manifest("")
        self.segments: list[Held] = []
        self.live = Live(identity)
        self.damaged: list[str] = []
        self._seen: tuple[int, ...] = ()
        self._log_end = 0
        self._logged = 0  # documents in the log, also those that were removed since
        self._snapshot: tuple[Searchable, ...] = ()
        self._snapshot_version = -1

    @property
    def log_path(self) -> Path:
        """The log's file."""
        return self.folder / self.manifest.log

    def load(self) -> LogPart:
        """Read the committed state; segments that are mapped already stay as they are.

        Returns:
            What the log holds.
        """
        with self.lock:
            for attempt in range(_ATTEMPTS):
                seen = _signature(self.folder / MANIFEST)
                manifest = read_manifest(self.folder)
                damaged: list[str] = []
                segments = list(self._open_all(manifest, damaged))
                try:
                    log = read_log(self.folder / manifest.log, self.identity)
                except (FileNotFoundError, DatastoreCorruptError) as error:
                    damaged.append(f"the log of what came last cannot be read: {error}")
                    log = LogPart([], 0, 0, ())
                if not damaged or attempt + 1 == _ATTEMPTS or read_manifest(self.folder) == manifest:
                    break
            self.manifest, self.segments, self.live = manifest, segments, Live(self.identity)
            self._log_end, self._logged, self._seen = log.end, 0, seen
            if log.damaged:
                damaged.append(f"{self.log_path}: {len(log.damaged)} commits cannot be read")
            for what in damaged:
                if what not in self.damaged:
                    warnings.warn(f"datastore: {what}; the rest is served", ReaderWarning, stacklevel=3)
            self.damaged = damaged
            self._apply(log.changes)
            self.version += 1
            return log

    def refresh(self) -> None:
        """Take in what another process has committed since."""
        with self.lock:
            try:
                if _signature(self.folder / MANIFEST) != self._seen:
                    self.load()
                    return
                size = self.log_path.stat().st_size if self._log_end else 0
                if size < self._log_end:
                    self.load()  # a commit that failed was taken back
                if size <= self._log_end:
                    return
                log = read_log(self.log_path, self.identity, self._log_end)
            except FileNotFoundError:
                if (self.folder / MANIFEST).exists():
                    self.load()
                else:
                    self.clear()
                return
            if log.end > self._log_end:
                self._log_end = log.end
                self._apply(log.changes)
                self.version += 1

    def clear(self) -> None:
        """Forget all documents, because the namespace is no more."""
        with self.lock:
            self.segments, self.live = [], Live(self.identity)
            self.version += 1

    def snapshot(self) -> tuple[Searchable, ...]:
        """What can be searched now; stays as it is whatever happens to the namespace."""
        with self.lock:
            if self._snapshot_version != self.version:
                self._snapshot = tuple(
                    (held.part, held.dead_ranges())
                    for held in (*self.segments, *self.live.parts)
                    if len(held.part.places)
                )
                self._snapshot_version = self.version
            return self._snapshot

    def locate(self, name: str) -> tuple[Held, int] | None:
        """The segment and number of a document that was not removed."""
        for held in reversed(self.segments):
            k = held.find(name)
            if k >= 0:
                return held, k
        return None

    def digest_of(self, name: str) -> int | None:
        """What `widths.digest` says of a document; None: there is none of that name."""
        with self.lock:
            if name in self.live.documents:
                return self.live.documents[name].digest
            place = self.locate(name)
            return None if place is None else int(place[0].part.digests[place[1]])

    def read(self, name: str) -> NDArray[np.int64] | None:
        """The tokens of a document; None: there is none of that name."""
        with self.lock:
            if name in self.live.documents:
                return self.identity.width.unpack(self.live.documents[name].stored)
            place = self.locate(name)
            return None if place is None else self.identity.width.unpack(place[0].part.stored(place[1]))

    def names(self) -> list[str]:
        """The names of all documents."""
        with self.lock:
            kept = [name for held in self.segments for k, name in enumerate(held.part.names) if k not in held.dead]
            return [*kept, *self.live.documents]

    @property
    def documents(self) -> int:
        """How many there are."""
        return sum(held.part.documents - len(held.dead) for held in self.segments) + len(self.live.documents)

    @property
    def tokens(self) -> int:
        """How many they have."""
        return sum(held.alive for held in self.segments) + self.live.tokens

    def _open_all(self, manifest: Manifest, damaged: list[str]) -> Iterator[Held]:
        mapped = {(held.part.file, held.crc): held.part for held in self.segments}
        for entry in manifest.segments:
            part = mapped.get((entry.file, entry.crc))
            try:
                if part is None:
                    part = open_segment(self.folder / entry.file, self.identity, entry.crc)
                if part.documents != entry.documents or (entry.dead and entry.dead[-1] >= part.documents):
                    raise DatastoreCorruptError(f"{self.folder / entry.file} does not fit its manifest")
            except DatastoreCorruptError as error:
                damaged.append(str(error))
                continue
            yield Held(part, entry.crc, entry.dead)

    def _apply(self, changes: Iterable[Change]) -> None:
        """Bring the documents up to date with what a log says."""
        new: dict[str, Document] = {}
        for change in changes:
            name = change.name
            if isinstance(change, Added | Removed):
                new.pop(name, None)
                self._forget(name)
            if isinstance(change, Added):
                self._logged += 1
                new[name] = change.document
            elif not isinstance(change, Removed):
                if name in new:
                    new[name] = replace(new[name], used=max(new[name].used, change.time))
                else:
                    self._use(name, change.time)
        self.live.put(new.values())
        for held in self.segments:
            held.settled = set(held.dead)
            if held.dead and held.dead_since is None:
                held.dead_since = 0.0

    def _forget(self, name: str) -> bool:
        """Remove a document; False: there is none of that name."""
        if self.live.take(name):
            return True
        place = self.locate(name)
        if place is None:
            return False
        place[0].dead.add(place[1])
        return True

    def _use(self, name: str, time: int) -> bool:
        document = self.live.documents.get(name)
        if document is not None:
            self.live.documents[name] = replace(document, used=max(document.used, time))
            return True
        place = self.locate(name)
        if place is None:
            return False
        place[0].use(place[1], time)
        return True


def name_in(folder: Path) -> str | None:
    """The namespace that a folder holds; None: its manifest cannot be read."""
    try:
        return read_manifest(folder).namespace
    except (OSError, DatastoreError):
        return None


def _signature(path: Path) -> tuple[int, ...]:
    """Changes when a file is replaced."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size
