"""Writer: a namespace that takes documents; commits, segments, merges, and what goes by itself.

What is committed is what the manifest names, with the whole frames of its log. A change is first made in memory, then
written as one frame; segments are written beside those that are there, and become part of the namespace when the
manifest is replaced. So after a crash at any point the files say what was committed last.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore import write_ahead_log as log
from reader_rag.datastore.manifest import MANIFEST, Manifest, SegmentEntry, read_manifest, write_manifest
from reader_rag.datastore.memtable import Held, Live
from reader_rag.datastore.namespace import Namespace
from reader_rag.datastore.part import Document, Part, build_part, merge_parts
from reader_rag.datastore.segment import Identity, open_segment, verify_segment, write_segment
from reader_rag.datastore.settings import DatastoreSettings
from reader_rag.errors import DatastoreCorruptError, DatastoreError, DatastoreWriteError, ReaderWarning
from reader_rag.util.files import Files, writing

DAMAGED = "damaged"
"""The folder of segments that were set aside."""

GONE = "removed-"
"""What the folder of a namespace that is no more is called while it is removed."""

_LOG_BYTES = 16
"""A log that grew by so many bytes for each of `live_tokens` is done, whatever it holds."""


class Writer(Namespace):
    """The one writer of a namespace.

    Args:
        folder: Of the namespace; made if it is not there.
        name: Of the namespace.
        identity: Of the datastore.
        settings: When segments are written and merged.
        files: What writes.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        identity: Identity,
        settings: DatastoreSettings,
        files: Files,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(folder, identity)
        self._settings, self._files, self._clock = settings, files, clock
        self._pending: list[bytes] = []
        self._pending_documents = 0
        self._ghosts_since: float | None = None
        self._number = 0
        self._log_start = 0  # where the log ended when it was made
        self._upkeep = threading.Lock()
        self.gone = False
        with writing(folder):
            if not (folder / MANIFEST).exists():
                files.make_folder(folder)
                files.create(folder / "0.log", [log.beginning(identity)])
                write_manifest(files, folder, Manifest(name, log="0.log"))
            self._recover()

    # Changes

    def put(self, document: Document) -> None:
        """Add a document in place of any of its name."""
        with self.lock:
            self._forget(document.name)
            self.live.put([document])
            self._pending.append(log.encode(log.Added(document)))
            self._pending_documents += 1
            self.version += 1

    def remove(self, name: str) -> bool:
        """Remove a document; False: there is none of that name."""
        with self.lock:
            if not self._forget(name):
                return False
            self._pending.append(log.encode(log.Removed(name)))
            self.version += 1
            return True

    def use(self, names: Iterable[str]) -> None:
        """Note that documents were of use, where that decides which go."""
        with self.lock:
            now = int(self._clock())
            if self.manifest.limited:
                self._pending += [log.encode(log.Used(name, now)) for name in names if self._use(name, now)]

    def limit(self, max_tokens: int | None, max_age_s: float | None) -> None:
        """Bound what the namespace holds; committed at once, and held to at every commit."""
        with self.lock, writing(self.folder):
            self._replace(max_tokens=max_tokens, max_age_s=max_age_s)

    def commit(self) -> None:
        """Bring all changes to the disk, all or none.

        Raises:
            DatastoreWriteError: They could not be written; they stay in memory for the next commit.
        """
        with self.lock:
            self._evict()
            if self._pending:
                data = log.frame(b"".join(self._pending))
                with writing(self.folder):
                    try:
                        self._files.append(self.log_path, self._log_end, data)
                    except OSError:
                        with contextlib.suppress(OSError):
                            self._files.shorten(self.log_path, self._log_end)
                        raise
                self._log_end += len(data)
                self._logged += self._pending_documents
                self._pending, self._pending_documents = [], 0
                self._settle()
            most = _LOG_BYTES * self._settings.live_tokens
            if self.live.tokens >= self._settings.live_tokens or self._log_end - self._log_start > most:
                try:
                    self.flush()
                except DatastoreWriteError as error:  # the changes are in the log
                    warnings.warn(str(error), ReaderWarning, stacklevel=2)

    def flush(self) -> None:
        """Make a segment of the log; all changes must be committed."""
        assert not self._pending
        documents = list(self.live.documents.values())
        name = self._new_name("log")
        made: list[str] = []
        with self.lock, writing(self.folder):
            try:
                segments = list(self.segments)
                if documents:
                    part = build_part(documents, self.identity.width, self.identity.vocabulary)
                    segments.append(self._write(part, made))
                made.append(name)
                uses = b"".join(self._uses())
                self._files.create(self.folder / name, [log.beginning(self.identity), log.frame(uses) if uses else b""])
                old = self.log_path
                self._replace(segments, log=name)
            except OSError:
                self._discard(made)
                raise
            self.segments, self.live = segments, Live(self.identity)
            self._log_start = self._log_end = self.log_path.stat().st_size
            self._logged, self._ghosts_since = 0, None
            self.version += 1
            self._discard([old.name])

    def add_segment(self, documents: Sequence[Document]) -> None:
        """Put many documents in at once, in place of those of their names; committed when it returns."""
        if not documents:
            return
        made: list[str] = []
        with writing(self.folder):
            try:
                new = self._write(build_part(documents, self.identity.width, self.identity.vocabulary), made)
                with self.lock:
                    self.commit()
                    # What a log says is taken to be newer than any segment.
                    if self._log_end > len(log.beginning(self.identity)):
                        self.flush()
                    places = [place for document in documents if (place := self.locate(document.name))]
                    for held, k in places:
                        held.dead.add(k)
                        held.settled.add(k)
                    try:
                        self._replace([*self.segments, new])
                    except OSError:
                        for held, k in places:
                            held.dead.discard(k)
                            held.settled.discard(k)
                        raise
                    self.segments = [*self.segments, new]
                    for held, _ in places:
                        held.dead_since = self._clock() if held.dead_since is None else held.dead_since
                    self.version += 1
            except OSError:
                self._discard(made)
                raise

    # Upkeep

    def tidy(self, *, force: bool = False, full: bool = False) -> None:
        """Merge and rewrite what is due.

        Args:
            force: Take removed text off the disk now.
            full: Merge into as few segments as may be.
        """
        with self._upkeep:
            with self.lock:
                if self.gone:
                    return
                if force:
                    self.commit()
                if self._ghosts_since is not None and (force or self._due(self._ghosts_since)) and not self._pending:
                    self.flush()
            while inputs := self._plan(force, full):
                if not self._rewrite(inputs):
                    return

    def due_in(self) -> float | None:
        """Seconds until there may be something to tidy; None: nothing is foreseen."""
        with self.lock:
            if self._plan(force=False, full=False):
                return 0.0
            since = [held.dead_since for held in self.segments if held.settled]
            ghosts = None if self._pending else self._ghosts_since
            times = [time for time in (*since, ghosts) if time is not None]
            return max(min(times) + self._settings.rewrite_after_s - self._clock(), 0.0) if times else None

    def end(self) -> None:
        """The namespace is no more: forget it and take it off the disk."""
        with self.lock, writing(self.folder):
            remove_folder(self._files, self.folder, self._end)

    def _end(self) -> None:
        self.gone = True
        self._pending = []
        self.clear()

    def _plan(self, force: bool, full: bool) -> list[Held]:
        """Segments to make one of."""
        settings = self._settings
        with self.lock:
            if self.gone:
                return []
            for held in self.segments:
                share = held.tokens_of(held.settled) / max(held.part.size, 1)
                if held.settled and (force or share >= settings.rewrite_share or self._due(held.dead_since)):
                    return [held]
            tiers: dict[int, list[Held]] = {}
            for held in self.segments:
                size = max(held.part.size / settings.live_tokens, 1)
                tiers.setdefault(0 if full else int(math.log(size, settings.fan) + 1e-9), []).append(held)
            for tier in sorted(tiers):
                chosen: list[Held] = []
                total = 0
                for held in sorted(tiers[tier], key=lambda held: held.part.size):
                    if total + held.part.size <= settings.max_segment_tokens:
                        chosen.append(held)
                        total += held.part.size
                if len(chosen) > 1 and (full or len(tiers[tier]) >= settings.fan):
                    return chosen
            return []

    def _rewrite(self, inputs: Sequence[Held]) -> bool:
        """Put one segment in place of several, without the documents whose removal is committed."""
        with self.lock:
            kept = [np.ones(held.part.documents, np.bool_) for held in inputs]
            for keep, held in zip(kept, inputs, strict=True):
                keep[list(held.settled)] = False
            used = [np.array(held.used) for held in inputs]
        made: list[str] = []
        with writing(self.folder):
            try:
                for held in inputs:
                    path = self.folder / held.part.file
                    if bad := verify_segment(path, held.part):
                        self._set_aside(held, f"{path} is damaged in {len(bad)} blocks")
                        return True
                new = None
                if any(keep.any() for keep in kept):
                    merged = merge_parts([held.part for held in inputs], kept, self.identity.vocabulary, used)
                    new = self._write(merged, made)
                with self.lock:
                    if self.gone or any(held not in self.segments for held in inputs):
                        self._discard(made)
                        return False
                    if new is not None:
                        _carry_over(inputs, kept, used, new)
                    segments = [held for held in self.segments if held not in inputs]
                    segments += [new] if new is not None else []
                    self._replace(segments)
                    self.segments = segments
                    self.version += 1
                    self._discard([held.part.file for held in inputs])
            except (OSError, DatastoreCorruptError):
                self._discard(made)
                if self.gone:
                    return False
                raise
        return True

    def _set_aside(self, held: Held, why: str) -> None:
        with self.lock, writing(self.folder):
            self._move_aside(held.part.file)
            segments = [other for other in self.segments if other is not held]
            self._replace(segments, damaged=(*self.manifest.damaged, held.part.file))
            self.segments = segments
            self.damaged.append(why)
            self.version += 1
        warnings.warn(
            f"datastore: {why}; it is set aside in {DAMAGED}, the rest is served", ReaderWarning, stacklevel=2
        )

    def _due(self, since: float | None) -> bool:
        return since is not None and self._clock() >= since + self._settings.rewrite_after_s

    def _settle(self) -> None:
        now = self._clock()
        for held in self.segments:
            if len(held.dead) != len(held.settled):
                held.settled = set(held.dead)
                held.dead_since = now if held.dead_since is None else held.dead_since
        if self._logged > len(self.live.documents) and self._ghosts_since is None:
            self._ghosts_since = now

    def _evict(self) -> None:
        """Remove what is too old, then what was longest of no use, until the rest is within its bound."""
        limits = self.manifest
        if not limits.limited:
            return
        if limits.max_age_s is not None:
            oldest = self._clock() - limits.max_age_s
            names = [d.name for d in self.live.documents.values() if d.added < oldest]
            for held in self.segments:
                names += [held.part.names[int(k)] for k in np.flatnonzero(held.kept & (held.part.added < oldest))]
            for name in names:
                self.remove(name)
        if limits.max_tokens is None:
            return
        excess = self.tokens - limits.max_tokens
        if excess <= 0:
            return
        live = list(self.live.documents.values())
        each = self.identity.width.each
        kept = [np.flatnonzero(held.kept) for held in self.segments]
        used = [held.used[ks] for held, ks in zip(self.segments, kept, strict=True)]
        lengths = [held.part.lengths[ks] for held, ks in zip(self.segments, kept, strict=True)]
        used.append(np.array([document.used for document in live], np.uint32))
        lengths.append(np.array([len(document.stored) // each for document in live], np.int64))
        order = np.argsort(np.concatenate(used), kind="stable")
        count = int(np.searchsorted(np.cumsum(np.concatenate(lengths)[order]), excess)) + 1
        first = np.cumsum([0, *(len(ks) for ks in kept)])
        going = []
        for n in order[:count].tolist():
            k = int(np.searchsorted(first, n, side="right")) - 1
            if k < len(kept):
                going.append(self.segments[k].part.names[int(kept[k][n - first[k]])])
            else:
                going.append(live[n - int(first[-1])].name)
        for name in going:
            self.remove(name)

    # Files

    def _recover(self) -> None:
        """Read the committed state, and put in order what a crash or damage left."""
        read = self.load()
        numbers = [int(path.stem) for path in self.folder.iterdir() if path.stem.isdigit()]
        self._number = max(numbers, default=0)
        readable = {held.part.file for held in self.segments}
        lost = [entry.file for entry in self.manifest.segments if entry.file not in readable]
        for file in lost:
            if (self.folder / file).exists():
                self._move_aside(file)
        if lost:
            self._replace(damaged=(*self.manifest.damaged, *lost))
        if self._log_end == 0 or read.damaged:
            if self.log_path.exists():
                self._move_aside(self.manifest.log, copy=True)
            self.flush()
        elif read.size > read.end:
            message = f"{self.log_path}: {read.size - read.end} bytes of a commit that was cut off are dropped"
            warnings.warn(message, ReaderWarning, stacklevel=3)
            self._files.shorten(self.log_path, read.end)
        if self._logged > len(self.live.documents):
            self._ghosts_since = 0.0
        named = {MANIFEST, DAMAGED, self.manifest.log, *(entry.file for entry in self.manifest.segments)}
        self._discard([path.name for path in self.folder.iterdir() if path.name not in named])

    def _move_aside(self, file: str, *, copy: bool = False) -> None:
        self._files.make_folder(self.folder / DAMAGED)
        if copy:
            shutil.copyfile(self.folder / file, self.folder / DAMAGED / file)
        else:
            self._files.rename(self.folder / file, self.folder / DAMAGED / file)

    def _write(self, part: Part, made: list[str]) -> Held:
        """Write a part as a new segment, and map it."""
        name = self._new_name("seg")
        made.append(name)
        crc = write_segment(self._files, self.folder / name, part, self.identity)
        return Held(open_segment(self.folder / name, self.identity, crc), crc)

    def _replace(self, segments: Sequence[Held] | None = None, **changes: object) -> None:
        """Replace the manifest."""
        entries = tuple(
            SegmentEntry(
                held.part.file,
                held.crc,
                held.part.size,
                held.part.documents,
                tuple(int(k) for k in sorted(held.settled)),
            )
            for held in (self.segments if segments is None else segments)
        )
        new = replace(self.manifest, generation=self.manifest.generation + 1, segments=entries, **changes)  # type: ignore[arg-type]
        try:
            self._files.sync_folder(self.folder)  # what the manifest names must outlast it
            write_manifest(self._files, self.folder, new)
        except OSError:
            # It may have been replaced before something failed: then that is the state from now on.
            if self._on_disk() != new:
                raise
        self.manifest = new

    def _on_disk(self) -> Manifest | None:
        try:
            return read_manifest(self.folder)
        except (OSError, DatastoreError):
            return None

    def _uses(self) -> list[bytes]:
        """When documents of segments were of use since those were written."""
        if not self.manifest.limited:
            return []
        return [
            log.encode(log.Used(held.part.names[int(k)], int(held.used[k])))
            for held in self.segments
            if held.used is not held.part.used
            for k in np.flatnonzero(held.kept & (held.used != held.part.used))
        ]

    def _new_name(self, kind: str) -> str:
        with self.lock:
            self._number += 1
            return f"{self._number}.{kind}"

    def _discard(self, names: Iterable[str]) -> None:
        """Remove files that are of no use; where that fails, the next writer will."""
        for name in names:
            with contextlib.suppress(OSError):
                self._files.unlink(self.folder / name)


def remove_folder(files: Files, folder: Path, gone: Callable[[], None] = lambda: None) -> None:
    """Take a namespace off the disk.

    One step decides; what a crash leaves of the rest, the next writer removes.

    Args:
        files: What writes.
        folder: Of the namespace.
        gone: Called when it is decided.
    """
    target = folder.with_name(GONE + folder.name)
    if folder.exists():
        if target.exists():
            files.remove_folder(target)
        files.rename(folder, target)
    gone()
    files.sync_folder(target.parent)
    if target.exists():
        files.remove_folder(target)


def _carry_over(
    inputs: Sequence[Held], kept: Sequence[NDArray[np.bool_]], used: Sequence[NDArray[np.uint32]], new: Held
) -> None:
    """Bring what happened to the inputs while they were merged to the new segment."""
    first = 0
    for held, keep, times in zip(inputs, kept, used, strict=True):
        numbers = np.cumsum(keep) - 1 + first
        for target, documents in ((new.dead, held.dead), (new.settled, held.settled)):
            target.update(int(numbers[k]) for k in documents if keep[k])
        for k in np.flatnonzero(keep & (held.used != times)):
            new.use(int(numbers[k]), int(held.used[k]))
        first += int(keep.sum())
    if new.settled:
        new.dead_since = min(held.dead_since for held in inputs if held.dead_since is not None)
