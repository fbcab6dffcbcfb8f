"""NamespaceWriter: changes a namespace, commits, flushes, compacts, evicts, and recovers from crashes.

The committed state is what the manifest names, and the whole frames of its write-ahead log. A change is made in memory
first and written as part of one frame; segments are written to new files, and belong to the namespace when the manifest
is replaced. So after a crash at any point the files hold the last commit.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reader_rag.datastore import write_ahead_log as wal
from reader_rag.datastore.compactor import CompactionConfig, choose_segments
from reader_rag.datastore.manifest import (
    NAMESPACE_MANIFEST,
    NamespaceManifest,
    read_namespace_manifest,
    write_namespace_manifest,
)
from reader_rag.datastore.memtable import Memtable, SegmentState
from reader_rag.datastore.namespace import Namespace, check_bounds, checked_name
from reader_rag.datastore.segment import Document, Segment, build_segment, merge_segments
from reader_rag.datastore.segment_file import open_segment, verify_segment, write_segment
from reader_rag.datastore.token_codec import Identity
from reader_rag.errors import DatastoreCorruptError, DatastoreError, DatastoreWriteError, ReaderWarning
from reader_rag.util.files import Files, datastore_errors, read_regular

_DAMAGED = "damaged"
"""Folder of the segments that were set aside."""
_LOG_BYTES = 16
"""A log with so many bytes for each of `memtable_tokens` is flushed, whatever the memtable holds."""


class NamespaceWriter(Namespace):
    """The one writer of a namespace.

    Args:
        folder: Folder of the namespace; made if it does not exist.
        name: Name of the namespace.
        identity: Identity of the datastore.
        compaction: When segments are written and merged.
        files: File layer.
        clock: Seconds since 1970.

    Attributes:
        removed: Whether the namespace was removed.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        identity: Identity,
        compaction: CompactionConfig,
        files: Files,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(folder, identity)
        self._config, self._files, self._clock = compaction, files, clock
        self._uncommitted: list[wal.Change] = []
        self._uncommitted_documents = 0
        self._uncommitted_removals = False  # whether documents are removed or replaced
        self._removed_from_log_since: float | None = None
        self._last_number = 0
        self._log_start = 0  # bytes of the log when it was made
        self._committed = wal.Committed(0, 0)
        self._compacting = threading.Lock()
        self.removed = False
        with datastore_errors(folder):
            if not (folder / NAMESPACE_MANIFEST).exists():
                files.make_folder(folder)
                files.create(folder / "0.log", [wal.new_log(identity)[0]])
                write_namespace_manifest(files, folder, NamespaceManifest(name, log="0.log"))
            self._recover()

    # Changes

    def add(self, document: Document) -> None:
        """Add a document, or replace the one of its name."""
        with self.lock:
            self._uncommitted_removals |= self._remove(document.name)
            self.memtable.add([document])
            self._uncommitted.append(wal.Added(document))
            self._uncommitted_documents += 1
            self.version += 1

    def remove(self, name: str) -> bool:
        """Remove a document.

        Returns:
            False if there is none of that name.
        """
        name = checked_name(name)
        with self.lock:
            if not self._remove(name):
                return False
            self._uncommitted.append(wal.Removed(name))
            self._uncommitted_removals = True
            self.version += 1
            return True

    def mark_used(self, names: Iterable[str]) -> None:
        """Record that drafts from documents were accepted, if the namespace evicts documents."""
        with self.lock:
            now = int(self._clock())
            if self.manifest.evicts:
                self._uncommitted += [wal.Used(name, now) for name in names if self._mark_used(name, now)]

    def limit(self, max_tokens: int | None, max_age_s: float | None) -> None:
        """Bound the namespace; committed at once, enforced at each commit.

        Args:
            max_tokens: Most tokens; None: no bound.
            max_age_s: Seconds after which a document is evicted; None: no bound.
        """
        check_bounds(max_tokens, max_age_s)
        with self.lock, datastore_errors(self.folder):
            self._replace_manifest(max_tokens=max_tokens, max_age_s=max_age_s)

    def commit(self) -> None:
        """Write all changes to disk, all or none.

        Raises:
            DatastoreWriteError: They could not be written; they stay in memory for the next commit.
        """
        with self.lock:
            for name in self.expired(self._clock()):
                self.remove(name)
            for name in self.excess():
                self.remove(name)
            if self._uncommitted:
                data = wal.commit_frames(self._uncommitted)
                with datastore_errors(self.folder):
                    try:
                        self._files.append(self.log_path, self._log_end, data)
                    except OSError:
                        with contextlib.suppress(OSError):
                            self._files.shorten(self.log_path, self._log_end)
                        raise
                self._log_end += len(data)
                self._record(self._committed.extended(data))
                self._logged += self._uncommitted_documents
                removes = self._uncommitted_removals
                self._uncommitted, self._uncommitted_documents, self._uncommitted_removals = [], 0, False
                if self._commit_tombstones() or removes:
                    # Removed text stays removed where the log is damaged or lost; the commit itself is in the log.
                    with contextlib.suppress(OSError):
                        self._replace_manifest(log_bytes=self._log_end)
            max_log_bytes = _LOG_BYTES * self._config.memtable_tokens
            full = self.memtable.tokens >= self._config.memtable_tokens
            if full or self._log_end - self._log_start > max_log_bytes:
                try:
                    self.flush()
                except DatastoreWriteError as error:  # the changes are in the log
                    warnings.warn(str(error), ReaderWarning, stacklevel=2)

    def _record(self, committed: wal.Committed) -> None:
        """Record in the log what is committed of it.

        Where that fails the commit holds all the same, and the next one records it: until then, a log that is cut off
        there looks like one with an interrupted commit.
        """
        self._committed = committed
        with contextlib.suppress(OSError):
            self._files.overwrite(self.log_path, wal.RECORD_AT, committed.record())

    def flush(self) -> None:
        """Write the memtable to a segment and begin a new log; all changes must be committed."""
        assert not self._uncommitted
        documents = list(self.memtable.documents.values())
        with self.lock, self._creating() as created:
            name = self._new_file_name("log", created)
            segments = list(self.segments)
            if documents:
                segments.append(self._write_segment(self._build(documents), created))
            content, committed = wal.new_log(self.identity, b"".join(self._uses()))
            self._files.create(self.folder / name, [content])
            old = self.log_path
            self._replace_manifest(segments, log=name, log_bytes=0)
            self.segments, self.memtable = segments, Memtable(self.identity)
            self._committed = committed
            self._log_start = self._log_end = committed.end
            self._logged, self._removed_from_log_since = 0, None
            self.version += 1
            self._discard([old.name])

    def add_segment(self, documents: Sequence[Document]) -> None:
        """Add many documents as one segment, in place of those of their names; committed when it returns.

        Raises:
            DatastoreWriteError: The segment could not be written.
        """
        if not documents:
            return
        with self._creating() as created:
            new = self._write_segment(self._build(documents), created)
            with self.lock:
                self.commit()
                # Documents in a log take precedence over those in segments.
                if self._log_end > wal.new_log(self.identity)[1].end:
                    self.flush()
                replaced = [found for document in documents if (found := self.locate(document.name))]
                for state, k in replaced:
                    state.tombstones.add(k)
                    state.committed_tombstones.add(k)
                try:
                    self._replace_manifest([*self.segments, new])
                except OSError:
                    for state, k in replaced:
                        state.tombstones.discard(k)
                        state.committed_tombstones.discard(k)
                    raise
                self.segments = [*self.segments, new]
                for state, _ in replaced:
                    state.tombstones_since = self._clock() if state.tombstones_since is None else state.tombstones_since
                self.version += 1

    def remove_folder(self) -> None:
        """Remove the namespace from memory and from disk."""

        def forget() -> None:
            self.removed = True
            self._uncommitted = []
            self.clear()

        with self.lock, datastore_errors(self.folder):
            self._files.remove_atomically(self.folder, forget)

    # Compaction

    def compact(self, *, force: bool = False, full: bool = False) -> None:
        """Merge and rewrite the segments that are due.

        Args:
            force: Commit, and remove the tokens of all removed documents from disk.
            full: Merge into as few segments as `max_segment_tokens` allows.
        """
        with self._compacting:
            with self.lock:
                if self.removed:
                    return
                if force:
                    self.commit()
                since = None if self._uncommitted else self._removed_from_log_since
                if since is not None and (force or self._clock() >= since + self._config.max_removed_age_s):
                    self.flush()
            while inputs := self._choose(force=force, full=full):
                if not self._merge(inputs):
                    return

    def seconds_until_due(self) -> float | None:
        """Seconds until there may be something to compact; None: nothing is foreseen."""
        with self.lock:
            if self._choose():
                return 0.0
            since = [state.tombstones_since for state in self.segments if state.committed_tombstones]
            since.append(None if self._uncommitted else self._removed_from_log_since)
            times = [time for time in since if time is not None]
            return max(min(times) + self._config.max_removed_age_s - self._clock(), 0.0) if times else None

    def _choose(self, **options: bool) -> list[SegmentState]:
        with self.lock:
            return [] if self.removed else choose_segments(self.segments, self._config, self._clock(), **options)

    def _merge(self, inputs: Sequence[SegmentState]) -> bool:
        """Replace segments by one without the documents whose removal is committed; searches and changes go on.

        Returns:
            False if the segments changed meanwhile and nothing was replaced.
        """
        with self.lock:
            kept = [state.without(state.committed_tombstones) for state in inputs]
            used_at = [np.array(state.used_at) for state in inputs]
        try:
            with self._creating() as created:
                for state in inputs:
                    path = self.folder / state.segment.file
                    if damaged := verify_segment(path, state.segment):
                        self._set_aside(state, f"{path} is damaged in {len(damaged)} blocks")
                        return True
                new = None
                if any(keep.any() for keep in kept):
                    segments = [state.segment for state in inputs]
                    merged = merge_segments(segments, kept, used_at, self.identity.vocabulary)
                    new = self._write_segment(merged, created)
                with self.lock:
                    if self.removed or any(state not in self.segments for state in inputs):
                        self._discard(created)
                        return False
                    remaining = [state for state in self.segments if state not in inputs]
                    if new is not None:
                        first = 0
                        for state, keep, times in zip(inputs, kept, used_at, strict=True):
                            new.inherit(state, keep, times, first)
                            first += int(keep.sum())
                        remaining.append(new)
                    self._replace_manifest(remaining)
                    self.segments = remaining
                    self.version += 1
                    self._discard([state.segment.file for state in inputs])
        except (DatastoreWriteError, DatastoreCorruptError):
            if self.removed:  # with its files
                return False
            raise
        return True

    def _set_aside(self, damaged: SegmentState, why: str) -> None:
        """Move a damaged segment out of the namespace."""
        file = damaged.segment.file
        with self.lock, datastore_errors(self.folder):
            self._move_aside(file)
            segments = [state for state in self.segments if state is not damaged]
            self._replace_manifest(segments, damaged=(*self.manifest.damaged, file))
            self.segments = segments
            self.damaged.append(why)
            self.version += 1
        message = f"datastore: {why}; it is set aside in {_DAMAGED}, the rest is served"
        warnings.warn(message, ReaderWarning, stacklevel=2)

    def _commit_tombstones(self) -> bool:
        """Note that all changes are committed; returns whether they removed documents of segments."""
        now, removed = self._clock(), False
        for state in self.segments:
            if len(state.tombstones) != len(state.committed_tombstones):
                removed = True
                state.committed_tombstones = set(state.tombstones)
                state.tombstones_since = now if state.tombstones_since is None else state.tombstones_since
        if self._logged > len(self.memtable.documents) and self._removed_from_log_since is None:
            self._removed_from_log_since = now
        return removed

    # Files

    def _recover(self) -> None:
        """Read the committed state, and repair what a crash or damage left."""
        log = self.load()
        numbers = [int(path.stem) for path in self.folder.iterdir() if path.stem.isdigit()]
        self._last_number = max(numbers, default=0)
        readable = {state.segment.file for state in self.segments}
        lost = [entry.file for entry in self.manifest.segments if entry.file not in readable]
        for file in lost:
            if (self.folder / file).exists():
                self._move_aside(file)
        if lost:
            self._replace_manifest(damaged=(*self.manifest.damaged, *lost))
        if self._log_end == 0 or log.damaged or log.version != wal.FORMAT_VERSION:
            if self.log_path.is_file() and log.version == wal.FORMAT_VERSION:
                self._move_aside(self.manifest.log, copy=True)
            self.flush()
        else:
            if log.size > log.end:
                message = f"{self.log_path}: {log.size - log.end} bytes of an interrupted commit are dropped"
                warnings.warn(message, ReaderWarning, stacklevel=3)
                self._files.shorten(self.log_path, log.end)
            self._committed = log.committed
            if log.recorded < log.end:
                self._record(log.committed)
        removed_from_log = self._logged > len(self.memtable.documents)
        if removed_from_log:
            self._removed_from_log_since = 0.0
        tombstones = sum(len(entry.tombstones) for entry in self.manifest.segments)
        removed = removed_from_log or tombstones < sum(len(state.tombstones) for state in self.segments)
        if removed and self.manifest.log_bytes < self._log_end:  # the process ended before it wrote the manifest
            self._replace_manifest(log_bytes=self._log_end)
        named = {NAMESPACE_MANIFEST, _DAMAGED, self.manifest.log, *(entry.file for entry in self.manifest.segments)}
        self._discard([path.name for path in self.folder.iterdir() if path.name not in named])

    def _move_aside(self, file: str, *, copy: bool = False) -> None:
        self._files.make_folder(self.folder / _DAMAGED)
        if copy:
            self._files.create(self.folder / _DAMAGED / file, [read_regular(self.folder / file)])
        else:
            self._files.rename(self.folder / file, self.folder / _DAMAGED / file)

    def _build(self, documents: Iterable[Document]) -> Segment:
        return build_segment(documents, self.identity.codec, self.identity.vocabulary)

    def _write_segment(self, segment: Segment, created: list[str]) -> SegmentState:
        """Write a segment to a new file, whose name is added to `created`, and map it."""
        name = self._new_file_name("seg", created)
        crc = write_segment(self._files, self.folder / name, segment, self.identity)
        return SegmentState(open_segment(self.folder / name, self.identity, crc), crc)

    def _replace_manifest(self, segments: Sequence[SegmentState] | None = None, **changes: Any) -> None:
        """Replace the manifest atomically.

        Args:
            segments: The segments that it names; None: those before.
            changes: Other attributes of the manifest.
        """
        entries = tuple(state.entry() for state in (self.segments if segments is None else segments))
        new = replace(self.manifest, generation=self.manifest.generation + 1, segments=entries, **changes)
        try:
            self._files.sync_folder(self.folder)  # the files that the manifest names must be durable before it
            write_namespace_manifest(self._files, self.folder, new)
        except OSError:
            # The manifest may have been replaced before the failure; then its state is the committed one.
            if self._manifest_on_disk() != new:
                raise
        self.manifest = new

    def _manifest_on_disk(self) -> NamespaceManifest | None:
        try:
            return read_namespace_manifest(self.folder)
        except (OSError, DatastoreError):
            return None

    def _uses(self) -> list[bytes]:
        """Log entries of when documents of segments were used since those were written."""
        if not self.manifest.evicts:
            return []
        return [
            wal.encode_change(wal.Used(self._name(state, k), int(state.used_at[k])))
            for state in self.segments
            if state.used_at is not state.segment.used_at
            for k in np.flatnonzero(state.kept & (state.used_at != state.segment.used_at))
        ]

    @contextlib.contextmanager
    def _creating(self) -> Iterator[list[str]]:
        """Yield a list for the names of new files; if the block fails, they are removed."""
        created: list[str] = []
        with datastore_errors(self.folder):
            try:
                yield created
            except (OSError, DatastoreError):
                self._discard(created)
                raise

    def _new_file_name(self, suffix: str, created: list[str]) -> str:
        """A file name that was not used before; it is added to `created`."""
        with self.lock:
            self._last_number += 1
            created.append(f"{self._last_number}.{suffix}")
            return created[-1]

    def _discard(self, names: Iterable[str]) -> None:
        """Remove files that are not needed; where that fails, the next writer removes them."""
        for name in names:
            with contextlib.suppress(OSError):
                self._files.unlink(self.folder / name)
