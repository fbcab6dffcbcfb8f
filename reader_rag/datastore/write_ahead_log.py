"""Write-ahead log of a namespace: the changes since its segments were written, one frame for each commit.

A file is a magic, a version and frames: length and CRC-32 of a payload, then the payload. The first frame identifies
the datastore; each other one holds the changes of one commit, so that a commit is present as a whole or not at all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reader_rag.datastore.segment import Document
from reader_rag.datastore.token_codec import Identity, check_version, checksum
from reader_rag.errors import DatastoreCorruptError

MAGIC = b"RRAGLOG\n"
FORMAT_VERSION = 1

_HEAD = struct.Struct("<8sI")
_FRAME = struct.Struct("<QI")
_OPERATION = struct.Struct("<cI")
_ADDED = struct.Struct("<IQII")
_USED = struct.Struct("<I")


@dataclass(frozen=True)
class Added:
    """A document was added, and replaced the one of its name if there was one.

    Attributes:
        document: The document.
    """

    document: Document

    @property
    def name(self) -> str:
        """Name of the document."""
        return self.document.name


@dataclass(frozen=True)
class Removed:
    """A document was removed.

    Attributes:
        name: Name of the document.
    """

    name: str


@dataclass(frozen=True)
class Used:
    """A draft from a document was accepted.

    Attributes:
        name: Name of the document.
        time: Seconds since 1970.
    """

    name: str
    time: int


Change = Added | Removed | Used


def encode_change(change: Change) -> bytes:
    """The bytes of a change in a frame's payload."""
    name = change.name.encode()
    if isinstance(change, Removed):
        return _OPERATION.pack(b"R", len(name)) + name
    if isinstance(change, Used):
        return _OPERATION.pack(b"U", len(name)) + name + _USED.pack(change.time)
    document = change.document
    stored = document.stored.tobytes()
    fixed = _ADDED.pack(len(stored), document.digest, document.added_at, document.used_at)
    return _OPERATION.pack(b"A", len(name)) + name + fixed + stored


def frame(payload: bytes) -> bytes:
    """A payload behind its length and checksum."""
    return _FRAME.pack(len(payload), checksum(payload)) + payload


def empty_log(identity: Identity) -> bytes:
    """The content of a log without commits."""
    owner = {"tokenizer": identity.tokenizer, "vocabulary": identity.vocabulary}
    return _HEAD.pack(MAGIC, FORMAT_VERSION) + frame(json.dumps(owner).encode())


@dataclass(frozen=True)
class LogContent:
    """What was read from a log.

    Attributes:
        changes: The changes, in order.
        end: Offset behind the last whole frame, in bytes.
        size: Size of the file in bytes; the bytes from `end` on were never committed.
        damaged: Ranges of bytes that were skipped.
    """

    changes: list[Change]
    end: int
    size: int
    damaged: tuple[tuple[int, int], ...]


def read_log(path: Path, identity: Identity, start: int = 0) -> LogContent:
    """Read a log from an offset on.

    A frame with a wrong checksum is damage if a whole frame follows: it is skipped and reported. Otherwise it is a
    commit that a crash interrupted.

    Args:
        path: The file.
        identity: Identity of the datastore.
        start: Offset of a frame in bytes; 0: the beginning of the file.

    Raises:
        FileNotFoundError: There is no such file.
        DatastoreCorruptError: The file is no log, or its first frame is damaged.
        DatastoreMismatchError: The file is of another version, tokenizer or vocabulary.
    """
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    at = 0
    if start == 0:
        if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
            raise DatastoreCorruptError(
                f"{path} is no write-ahead log of a datastore: restore it, or remove its folder"
            )
        check_version(path, _HEAD.unpack(data[: _HEAD.size])[1], FORMAT_VERSION)
        at = _HEAD.size
        stop, whole = _frame_at(data, at)
        if not whole:
            raise DatastoreCorruptError(f"{path} has a damaged header: restore it, or remove its folder")
        identity.check(json.loads(data[at + _FRAME.size : stop]), path)
        at = stop
    changes: list[Change] = []
    damaged: list[tuple[int, int]] = []
    suspect: list[tuple[int, int]] = []
    end = at
    while at < len(data):
        stop, whole = _frame_at(data, at)
        if stop > len(data):
            break
        if whole:
            changes.extend(_decode(data[at + _FRAME.size : stop], identity))
            damaged += suspect
            suspect = []
            end = stop
        else:
            suspect.append((start + at, start + stop))
        at = stop
    return LogContent(changes, start + end, start + len(data), tuple(damaged))


def _frame_at(data: bytes, at: int) -> tuple[int, bool]:
    """Where a frame ends, and whether it is whole."""
    if at + _FRAME.size > len(data):
        return len(data) + 1, False
    length, crc = _FRAME.unpack_from(data, at)
    stop = at + _FRAME.size + length
    return stop, stop <= len(data) and length > 0 and checksum(data[at + _FRAME.size : stop]) == crc


def _decode(payload: bytes, identity: Identity) -> Iterator[Change]:
    at = 0

    def take(layout: struct.Struct) -> tuple[Any, ...]:
        nonlocal at
        at += layout.size
        return layout.unpack_from(payload, at - layout.size)

    while at < len(payload):
        kind, length = take(_OPERATION)
        name = payload[at : at + length].decode()
        at += length
        if kind == b"R":
            yield Removed(name)
        elif kind == b"U":
            yield Used(name, *take(_USED))
        else:
            size, digest, added_at, used_at = take(_ADDED)
            dtype = identity.codec.dtype
            stored = np.frombuffer(payload, dtype, size // dtype.itemsize, at)
            at += size
            yield Added(Document(name, stored, digest, added_at, used_at))
