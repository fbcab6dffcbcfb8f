"""What the datastore's tests share: small stores, brute force, and a file layer that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reader_rag.datastore import CompactionConfig, Cursor, Datastore, Files, Searcher

MANY = 2048
"""More matches than any text here has."""

SMALL = CompactionConfig(memtable_tokens=60, merge_factor=3, max_segment_tokens=100_000, background=False)
"""Segments are written and merged after a few documents."""


def open_store(folder: Path, vocabulary: int = 60, **options: Any) -> Datastore:
    """Open a datastore of small segments, with a clock that stands still."""
    options = {"compaction": SMALL, "clock": lambda: 1000.0, "tokenizer": "t", **options}
    return Datastore.open(folder, vocabulary=vocabulary, **options)


def search(searcher: Searcher, context: Sequence[int], **options: int) -> Cursor:
    """A cursor that has searched."""
    cursor = searcher.cursor(**{"max_matches": MANY, **options})
    cursor.extend(context)
    cursor.search()
    return cursor


def found(cursor: Cursor) -> list[tuple[str, int, int]]:
    """(document, position, match length) of every match, sorted."""
    sources = [cursor.source_of(k) for k in range(cursor.found)]
    lengths = cursor.matches[1].tolist()
    return sorted((source.document, source.position, length) for source, length in zip(sources, lengths, strict=True))


def continuations(cursor: Cursor) -> list[list[int]]:
    """The tokens behind each match."""
    result = []
    for start in cursor.matches[0].tolist():
        tokens = cursor.continuations[start:].tolist()
        result.append(tokens[: tokens.index(-1)])
    return result


def brute_force(documents: Mapping[str, Sequence[int]], context: Sequence[int]) -> list[tuple[str, int, int]]:
    """(document, position, match length) of every token whose predecessors match the context's end, sorted."""
    matches = []
    for name, tokens in documents.items():
        for position in range(1, len(tokens)):
            length = 0
            while (
                length < min(position, len(context), 64)
                and tokens[position - 1 - length] == context[len(context) - 1 - length]
            ):
                length += 1
            if length:
                matches.append((name, position, length))
    return sorted(matches)


def contents(store: Datastore, namespace: str = "") -> dict[str, list[int]]:
    """All documents of a namespace."""
    result = {}
    for name in store.documents(namespace=namespace):
        tokens = store.read(name, namespace=namespace)
        assert tokens is not None
        result[name] = tokens.tolist()
    return result


def bytes_on_disk(folder: Path) -> bytes:
    """All files, one after the other."""
    return b"|".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


class Crash(BaseException):
    """The process ends."""


class FailingFiles(Files):
    """Fails at one step of all changes on disk; a write that fails writes the first half.

    Args:
        fail_at: The step that fails, from 0 on; None: none.
        fail: Makes the exception that is raised.
        lasting: Every later step fails as well.
        power_cut: `lose_power` takes back what was not flushed to disk.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        fail: Callable[[], BaseException] = Crash,
        *,
        lasting: bool = True,
        power_cut: bool = False,
    ) -> None:
        self.steps = 0
        self.written = 0
        self.log: list[str] = []
        self._fail_at, self._fail, self._lasting, self._power_cut = fail_at, fail, lasting, power_cut
        self._unsynced: dict[Path, int] = {}
        self._path = Path()

    def _step(self, what: str) -> bool:
        """Whether this step fails."""
        self.log.append(what)
        self.steps += 1
        at = self._fail_at
        return at is not None and (self.steps - 1 == at or (self._lasting and self.steps - 1 > at))

    def lose_power(self) -> None:
        """Take back what was not flushed to disk."""
        for path, size in self._unsynced.items():
            if self._power_cut and path.exists():
                os.truncate(path, size)

    def create(self, path: Path, chunks: Iterable[Any]) -> None:
        if self._step("create"):
            raise self._fail()
        self._path = path
        self._unsynced[path] = 0
        super().create(path, chunks)

    def append(self, path: Path, at: int, data: bytes) -> None:
        self._path = path
        self._unsynced[path] = path.stat().st_size
        super().append(path, at, data)

    def overwrite(self, path: Path, at: int, data: bytes) -> None:
        if self._step("overwrite"):
            raise self._fail()
        with path.open("r+b") as file:  # not a step of `write`: a few bytes of one sector are written whole or not
            file.seek(at)
            file.write(data)

    def shorten(self, path: Path, size: int) -> None:
        self._path = path
        super().shorten(path, size)

    def write(self, file: int, data: Any) -> None:
        data = memoryview(data).cast("B")
        if self._step("write"):
            super().write(file, data[: len(data) // 2])
            raise self._fail()
        self.written += len(data)
        super().write(file, data)

    def sync(self, file: int) -> None:
        if self._step("sync"):
            raise self._fail()
        self._unsynced.pop(self._path, None)

    def truncate(self, file: int, size: int) -> None:
        if self._step("truncate"):
            raise self._fail()
        super().truncate(file, size)

    def rename(self, source: Path, target: Path) -> None:
        if self._step("rename"):
            raise self._fail()
        super().rename(source, target)
        if source in self._unsynced:
            self._unsynced[target] = self._unsynced.pop(source)

    def unlink(self, path: Path) -> None:
        if self._step("unlink"):
            raise self._fail()
        super().unlink(path)

    def sync_folder(self, path: Path) -> None:
        if self._step("sync_folder"):
            raise self._fail()


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")
