"""The log of a namespace: what was committed since its segments were written, one frame for each commit.

A file is a magic, a version and frames: length and CRC-32 of a payload, then the payload. The first frame says what the
log belongs to; each other one holds the changes of one commit, so a commit is there wholly or not at all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reader_rag.datastore.part import Document
from reader_rag.datastore.segment import Identity
from reader_rag.datastore.token_codec import checksum
from reader_rag.errors import DatastoreCorruptError, DatastoreMismatchError

MAGIC = b"RRAGLOG\n"
FORMAT_VERSION = 1

_HEAD = struct.Struct("<8sI")
_FRAME = struct.Struct("<QI")
_OP = struct.Struct("<cI")
_ADDED = struct.Struct("<IQII")
_USED = struct.Struct("<I")


@dataclass(frozen=True)
class Added:
    """A document came, in place of any of that name."""

    document: Document

    @property
    def name(self) -> str:
        """The document's."""
        return self.document.name


@dataclass(frozen=True)
class Removed:
    """A document went."""

    name: str


@dataclass(frozen=True)
class Used:
    """A document was of use at a time, in seconds since 1970."""

    name: str
    time: int


Change = Added | Removed | Used


def encode(change: Change) -> bytes:
    """The bytes of a change."""
    name = change.name.encode()
    if isinstance(change, Removed):
        return _OP.pack(b"R", len(name)) + name
    if isinstance(change, Used):
        return _OP.pack(b"U", len(name)) + name + _USED.pack(change.time)
    document = change.document
    stored = document.stored.tobytes()
    fixed = _ADDED.pack(len(stored), document.digest, document.added, document.used)
    return _OP.pack(b"A", len(name)) + name + fixed + stored


def frame(payload: bytes) -> bytes:
    """A payload with its length and checksum."""
    return _FRAME.pack(len(payload), checksum(payload)) + payload


def beginning(identity: Identity) -> bytes:
    """What an empty log holds."""
    owner = {"tokenizer": identity.tokenizer, "vocabulary": identity.vocabulary}
    return _HEAD.pack(MAGIC, FORMAT_VERSION) + frame(json.dumps(owner).encode())


@dataclass(frozen=True)
class LogPart:
    """What was read of a log.

    Attributes:
        changes: In their order.
        end: Where the last whole frame ends.
        size: Where the file ends; what lies between was never committed.
        damaged: Stretches of bytes that were skipped.
    """

    changes: list[Change]
    end: int
    size: int
    damaged: tuple[tuple[int, int], ...]


def read_log(path: Path, identity: Identity, start: int = 0) -> LogPart:
    """Read a log from a position on.

    A frame with a wrong checksum with whole frames behind it is damage: it is skipped and told. Without any it is the
    trace of a crash within a commit.

    Args:
        path: The log.
        identity: What it must be of.
        start: Where a frame begins; 0: at the beginning.

    Raises:
        FileNotFoundError: There is none.
        DatastoreCorruptError: It is not a log.
        DatastoreMismatchError: It is of another version, tokenizer or vocabulary.
    """
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    at = 0
    if start == 0:
        if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
            raise DatastoreCorruptError(f"{path} is no log of a datastore: restore it, or remove its folder")
        version = _HEAD.unpack(data[: _HEAD.size])[1]
        if version != FORMAT_VERSION:
            raise DatastoreMismatchError(
                f"{path} has format {version} and this version reads {FORMAT_VERSION}: use the version that wrote it"
            )
        at = _HEAD.size
        stop, good = _frame_at(data, at)
        if not good:
            raise DatastoreCorruptError(f"{path} has a damaged beginning: restore it, or remove its folder")
        identity.check(json.loads(data[at + _FRAME.size : stop]), path)
        at = stop
    changes: list[Change] = []
    damaged: list[tuple[int, int]] = []
    doubtful: list[tuple[int, int]] = []
    end = at
    while at < len(data):
        stop, good = _frame_at(data, at)
        if stop > len(data):
            break
        if good:
            changes.extend(_decode(data[at + _FRAME.size : stop], identity))
            damaged += doubtful
            doubtful = []
            end = stop
        else:
            doubtful.append((start + at, start + stop))
        at = stop
    return LogPart(changes, start + end, start + len(data), tuple(damaged))


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
        kind, length = take(_OP)
        name = payload[at : at + length].decode()
        at += length
        if kind == b"R":
            yield Removed(name)
        elif kind == b"U":
            yield Used(name, *take(_USED))
        else:
            size, digest, added, used = take(_ADDED)
            dtype = identity.width.dtype
            stored = np.frombuffer(payload, dtype, size // dtype.itemsize, at)
            at += size
            yield Added(Document(name, stored, digest, added, used))
