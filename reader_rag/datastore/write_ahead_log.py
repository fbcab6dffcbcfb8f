"""Write-ahead log of a namespace: the changes since its segments were written, one commit after the other.

A file is a magic, a version, a record of what is committed, and frames. A frame is a head (magic, length and CRC-32 of
the payload, CRC-32 of the head) and a payload. The first frame identifies the datastore; each other one holds the
changes of one commit, so that a commit is present as a whole or not at all. The names that a commit removes or replaces
stand in a frame of their own before it: where the commit is damaged they are removed all the same, so that damage
brings no removed text back.

The record has the committed length of the file and the CRC-32 of all committed frames. It is written in place when a
commit is durable, and flushed to disk with the next one, so it costs no flush of its own: bytes that it counts were
once on the disk. A file that ends before them is damaged; what follows them may be of an interrupted commit.

Version 2 had no record, version 1 no names and no checksum of the head either. Both are read, and replaced when the
namespace is opened to write.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reader_rag.datastore.segment import Document
from reader_rag.datastore.token_codec import Identity, check_version, checksum
from reader_rag.errors import DatastoreCorruptError
from reader_rag.util.files import open_regular

MAGIC = b"RRAGLOG\n"
FORMAT_VERSION = 3

_HEAD = struct.Struct("<8sI")
RECORD_AT = _HEAD.size
"""Offset of the record of what is committed, which lies in the first 512 bytes: a disk writes it whole or not."""
_RECORD = struct.Struct("<QI")
_FRAMES_AT = RECORD_AT + _RECORD.size + 4
_FRAME_1 = struct.Struct("<QI")
_FRAME_MAGIC = b"RFRM"
_FRAME = struct.Struct("<4sQI")
_HEAD_CRC = struct.Struct("<I")
_HEAD_BYTES = _FRAME.size + _HEAD_CRC.size
_NAMES = b"N"
"""First byte of a frame with the names that the next one removes or replaces."""
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
    """A payload behind its length and checksums."""
    head = _FRAME.pack(_FRAME_MAGIC, len(payload), checksum(payload))
    return head + _HEAD_CRC.pack(checksum(head)) + payload


def commit_frames(changes: Iterable[Change]) -> bytes:
    """The bytes of a commit in the log: the names that it removes or replaces, and its changes."""
    changes = list(changes)
    names = dict.fromkeys(change.name for change in changes if isinstance(change, Added | Removed))
    head = frame(_NAMES + b"".join(encode_change(Removed(name)) for name in names)) if names else b""
    return head + frame(b"".join(map(encode_change, changes)))


class Committed(NamedTuple):
    """What is committed of a log.

    Attributes:
        end: Length of the file, in bytes.
        crc: CRC-32 of all frames up to there.
    """

    end: int
    crc: int

    def extended(self, data: bytes) -> Committed:
        """What is committed after the frames of another commit."""
        return Committed(self.end + len(data), zlib.crc32(data, self.crc))

    def record(self) -> bytes:
        """The bytes at `RECORD_AT`."""
        record = _RECORD.pack(self.end, self.crc)
        return record + _HEAD_CRC.pack(checksum(record))


def new_log(identity: Identity, changes: bytes = b"") -> tuple[bytes, Committed]:
    """The content of a new log.

    Args:
        identity: Identity of the datastore.
        changes: The changes that it begins with, encoded.

    Returns:
        The content, and what of it is committed: all.
    """
    owner = {"tokenizer": identity.tokenizer, "vocabulary": identity.vocabulary}
    frames = frame(json.dumps(owner).encode()) + (frame(changes) if changes else b"")
    committed = Committed(_FRAMES_AT, 0).extended(frames)
    return _HEAD.pack(MAGIC, FORMAT_VERSION) + committed.record() + frames, committed


@dataclass(frozen=True)
class LogContent:
    """What was read from a log.

    Attributes:
        changes: The changes, in order.
        end: Offset behind the last frame, in bytes.
        size: Size of the file in bytes; the bytes from `end` on are of a commit that was interrupted.
        damaged: Ranges of bytes that were skipped.
        version: Version of the file's format.
        recorded: The committed length by the file's record; 0: unknown.
        crc: CRC-32 of the frames up to `end`, if the file was read from its first byte.
    """

    changes: list[Change]
    end: int
    size: int
    damaged: tuple[tuple[int, int], ...]
    version: int = FORMAT_VERSION
    recorded: int = 0
    crc: int = 0

    @property
    def committed(self) -> Committed:
        """What a writer goes on from."""
        return Committed(self.end, self.crc)


def read_log(path: Path, identity: Identity, start: int = 0) -> LogContent:
    """Read a log from an offset on.

    A frame of full length with a wrong checksum is damage: it is skipped and reported, and the documents that it
    removes or replaces are removed. A frame that the file ends in is of a commit that a crash interrupted, unless the
    record counts it (`LogContent.recorded`): then it was committed, and its end is lost.

    Args:
        path: The file.
        identity: Identity of the datastore.
        start: Offset of a frame in bytes, in a file of this version; 0: the start of the file.

    Raises:
        FileNotFoundError: There is no such file.
        DatastoreCorruptError: The file is no log, cannot be read, or its first frame is damaged.
        DatastoreMismatchError: The file is of another version, tokenizer or vocabulary.
    """
    try:
        with open_regular(path) as file:
            file.seek(start)
            data = file.readall() or b""
    except FileNotFoundError:
        raise
    except OSError as cause:
        raise DatastoreCorruptError(f"{path} cannot be read ({cause.strerror or cause}); restore it") from cause
    at, version = 0, FORMAT_VERSION
    damaged: list[tuple[int, int]] = []
    if start == 0:
        at, version = _first_commit(data, path, identity)
        if at < 0:
            at = -at
            damaged.append((0, at))
    recorded = _recorded(data) if start == 0 and version == FORMAT_VERSION else Committed(0, 0)
    if recorded is None:
        damaged.append((RECORD_AT, _FRAMES_AT))
        recorded = Committed(0, 0)
    changes: list[Change] = []
    removed: list[Change] = []  # by the commit whose frame comes next
    end = at
    while at < len(data):
        found = _frame_at(data, at, version)
        if found is not None and found.stop > len(data):
            break
        stop = _next_frame(data, at + 1, version) if found is None else found.stop
        if found is None and not data[at:stop].strip(b"\0"):
            break  # bytes that a crash left without content
        payload = found.payload(data) if found is not None and found.whole else b""
        decoded = _decoded(payload, identity)
        if decoded is None:
            damaged.append((start + at, start + stop))
            decoded = removed
        at = stop
        if payload[:1] == _NAMES and decoded is not removed:
            removed = decoded
        else:
            changes += decoded
            removed, end = [], stop
    if end < recorded.end:
        changes += removed
    elif recorded.end and not damaged and zlib.crc32(data[_FRAMES_AT : recorded.end]) != recorded.crc:
        # Each frame is whole, and they are not those that were committed: any of them may lack a removal.
        changes, damaged = [], [(_FRAMES_AT, recorded.end)]
    crc = zlib.crc32(data[_FRAMES_AT:end]) if start == 0 else 0
    return LogContent(changes, start + end, start + len(data), tuple(damaged), version, recorded.end, crc)


def _recorded(data: bytes) -> Committed | None:
    """The record of what is committed; None: it is damaged."""
    record = data[RECORD_AT:_FRAMES_AT]
    if len(record) < _FRAMES_AT - RECORD_AT or checksum(record[:-4]) != _HEAD_CRC.unpack(record[-4:])[0]:
        return None
    return Committed(*_RECORD.unpack(record[:-4]))


def _first_commit(data: bytes, path: Path, identity: Identity) -> tuple[int, int]:
    """Read the head of a file.

    Returns:
        Offset of the first commit, negative if the head is damaged and commits follow; and the version of the format.

    Raises:
        DatastoreCorruptError: The file is no log, or has a damaged head and no commit.
        DatastoreMismatchError: The file is of another version, tokenizer or vocabulary.
    """
    known = len(data) >= _HEAD.size and data[: len(MAGIC)] == MAGIC
    version = _HEAD.unpack(data[: _HEAD.size])[1] if known else FORMAT_VERSION
    if version not in (1, 2):
        check_version(path, version, FORMAT_VERSION)
    found = _frame_at(data, _FRAMES_AT if version == FORMAT_VERSION else _HEAD.size, version)
    if known and found is not None and found.whole:
        identity.check(_header(found.payload(data), path), path)
        return found.stop, version
    first = _next_frame(data, 0, FORMAT_VERSION)
    if first < len(data):
        second = _frame_at(data, first, FORMAT_VERSION)
        has_identity = second is not None and second.payload(data)[:1] == b"{"
        return -(second.stop if second is not None and has_identity else first), FORMAT_VERSION
    if not known:
        raise DatastoreCorruptError(f"{path} is no write-ahead log of a datastore: restore it, or remove its folder")
    raise DatastoreCorruptError(f"{path} has a damaged header: restore it, or remove its folder")


class _Frame(NamedTuple):
    """A frame whose head is whole.

    Attributes:
        begin: Offset of its payload.
        stop: Offset of its end.
        whole: Whether its payload has the right checksum.
    """

    begin: int
    stop: int
    whole: bool

    def payload(self, data: bytes) -> bytes:
        """Its payload."""
        return data[self.begin : self.stop]


def _frame_at(data: bytes, at: int, version: int) -> _Frame | None:
    """The frame at an offset; None: its head is damaged. A head that the data end in is one of a longer frame."""
    layout = _FRAME_1 if version == 1 else _FRAME
    begin = at + (_FRAME_1.size if version == 1 else _HEAD_BYTES)
    if begin > len(data):
        partial = data[at : at + len(_FRAME_MAGIC)]
        torn = version == 1 or _FRAME_MAGIC.startswith(partial) or not data[at:].strip(b"\0")
        return _Frame(begin, begin, False) if torn else None
    if version != 1 and checksum(data[at : at + layout.size]) != _HEAD_CRC.unpack_from(data, at + layout.size)[0]:
        return None
    length, crc = layout.unpack_from(data, at)[-2:]
    stop = begin + length
    return _Frame(begin, stop, stop <= len(data) and length > 0 and checksum(data[begin:stop]) == crc)


def _next_frame(data: bytes, at: int, version: int) -> int:
    """Offset of the next frame whose head is whole; the end of the data if there is none."""
    while (at := data.find(_FRAME_MAGIC, at)) >= 0:
        if _frame_at(data, at, version) is not None:
            return at
        at += 1
    return len(data)


def _header(payload: bytes, path: Path) -> dict[str, Any]:
    try:
        header: Any = json.loads(payload)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise DatastoreCorruptError(f"{path} has a damaged header: restore it, or remove its folder")
    return header


def _decoded(payload: bytes, identity: Identity) -> list[Change] | None:
    """The changes of a payload; None: there are none, of another form, or with tokens outside the vocabulary."""
    if not payload:
        return None
    try:
        changes = list(_decode(payload.removeprefix(_NAMES), identity))
    except (struct.error, ValueError):
        return None
    for change in changes:
        if isinstance(change, Added):
            tokens = identity.codec.decode(change.document.stored)
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < identity.vocabulary:
                return None
    return changes


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
        elif kind != b"A":
            raise ValueError(f"a change of the kind {kind!r}")
        else:
            size, digest, added_at, used_at = take(_ADDED)
            dtype = identity.codec.dtype
            stored = np.frombuffer(payload, dtype, size // dtype.itemsize, at)
            at += size
            yield Added(Document(name, stored, digest, added_at, used_at))
