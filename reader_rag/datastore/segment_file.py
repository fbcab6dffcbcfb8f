"""Segment files: one segment each, written once, mapped into memory, with checksums.

A file is: a magic, a version, the length and checksum of the header; the header (JSON); tables, each at a multiple of
64 bytes, little-endian. The tables of documents are small; each has one checksum, which is compared when the file is
opened. The text and the suffix array have a checksum for each MiB, so that damage is located; `verify_segment` compares
them, because that reads the whole file.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore.segment import DocumentNames, Segment
from reader_rag.datastore.token_codec import Identity, check_version, checksum
from reader_rag.errors import DatastoreCorruptError
from reader_rag.util.files import Files, open_regular

MAGIC = b"RRAGSEG\n"
FORMAT_VERSION = 1
BLOCK = 1 << 20
"""Bytes of the text or of the suffix array that share a checksum."""

_FIXED = struct.Struct("<8sIII")
_ALIGNMENT = 64
_BLOCK_TABLES = ("tokens", "places")
_TABLES = {
    "firsts": "<i4",
    "starts": "<u4",
    "name_text": "u1",
    "name_ends": "<u4",
    "name_order": "<i4",
    "digests": "<u8",
    "added": "<u4",
    "used": "<u4",
    "blocks": "<u4",
}
"""Names in the file: "places" is the suffix array, "firsts" the bucket starts, "blocks" the checksums of blocks."""


def write_segment(files: Files, path: Path, segment: Segment, identity: Identity) -> int:
    """Write a segment to a file, durably.

    Args:
        files: File layer.
        path: The file; overwritten if it exists.
        segment: What is written.
        identity: Identity of the datastore.

    Returns:
        CRC-32 of the header. The header holds all other checksums, so this number identifies the content.
    """
    arrays: dict[str, NDArray[Any]] = {
        "tokens": segment.tokens,
        "places": segment.positions,
        "firsts": segment.bucket_starts,
        "starts": segment.starts,
        "name_text": segment.names.text,
        "name_ends": segment.names.ends,
        "name_order": segment.names.order,
        "digests": segment.digests,
        "added": segment.added_at,
        "used": segment.used_at,
    }
    blocks = [checksum(block) for name in _BLOCK_TABLES for block in _blocks(arrays[name])]
    arrays["blocks"] = np.array(blocks, np.uint32)
    tables: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        tables[name] = {"at": offset, "bytes": array.nbytes}
        if name in _TABLES:
            tables[name]["crc"] = checksum(np.ascontiguousarray(array))
        offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = {
        "tokenizer": identity.tokenizer,
        "vocabulary": identity.vocabulary,
        "token_bytes": segment.codec.bytes,
        "tokens": segment.size,
        "documents": segment.document_count,
        "block": BLOCK,
        "body_bytes": offset,
        "tables": tables,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    crc = checksum(text)
    head = _FIXED.pack(MAGIC, FORMAT_VERSION, len(text), crc) + text
    head += bytes(-len(head) % _ALIGNMENT)

    def chunks() -> Iterator[Any]:
        yield head
        for array in arrays.values():
            if array.nbytes:
                yield np.ascontiguousarray(array)
                yield bytes(-array.nbytes % _ALIGNMENT)

    files.create(path, chunks())
    return crc


def open_segment(path: Path, identity: Identity, crc: int | None = None) -> Segment:
    """Map a segment into memory.

    Args:
        path: The file.
        identity: Identity of the datastore.
        crc: What `write_segment` returned; None: not checked.

    Raises:
        DatastoreCorruptError: The file is missing, damaged, truncated, or has other content.
        DatastoreMismatchError: The file is of another version, tokenizer or vocabulary.
    """
    try:
        with open_regular(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as cause:
        raise DatastoreCorruptError(f"{path} cannot be read ({cause}); {_REMEDY}") from cause
    header, start = _read_header(data, path, crc)
    identity.check(header, path)
    if len(data) != start + header["body_bytes"]:
        raise _damaged(path, f"it has {len(data)} bytes instead of {start + header['body_bytes']}")
    if hasattr(data, "madvise") and hasattr(mmap, "MADV_RANDOM"):
        data.madvise(mmap.MADV_RANDOM)  # a search touches single pages; reading ahead is useless
    codec = identity.codec
    try:
        arrays = {
            name: _array(data, start, header["tables"][name], np.dtype(kind))
            for name, kind in {"tokens": codec.dtype.str, "places": "<i4", **_TABLES}.items()
        }
    except (KeyError, TypeError, ValueError) as cause:
        raise _damaged(path, "its header is inconsistent") from cause
    for name in _TABLES:
        if checksum(arrays[name]) != header["tables"][name].get("crc"):
            raise _damaged(path, f"its table {name!r} has a wrong checksum")
    segment = Segment(
        codec=codec,
        tokens=arrays["tokens"],
        positions=arrays["places"],
        bucket_starts=arrays["firsts"],
        starts=arrays["starts"],
        names=DocumentNames(arrays["name_text"], arrays["name_ends"], arrays["name_order"]),
        digests=arrays["digests"],
        added_at=arrays["added"],
        used_at=arrays["used"],
        file=path.name,
    )
    if len(segment.starts) != segment.document_count + 1 or len(segment.tokens) != segment.size * codec.elements:
        raise _damaged(path, "its tables do not match each other")
    return segment


@dataclass(frozen=True)
class DamagedBlock:
    """A range of a segment file that differs from what was written.

    Attributes:
        table: "tokens" or "suffix array".
        start: First byte of the range in that table.
        stop: Byte behind the last.
        documents: Names of the documents whose tokens lie in it; empty for the suffix array, which is of all.
    """

    table: str
    start: int
    stop: int
    documents: tuple[str, ...]


def verify_segment(path: Path, segment: Segment) -> list[DamagedBlock]:
    """Read a segment's text and suffix array and compare their checksums.

    Args:
        path: The segment's file.
        segment: What `open_segment` returned for it.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header, start = _read_header(data, path, None)
    expected = _array(data, start, header["tables"]["blocks"], np.dtype("<u4")).tolist()
    damaged = []
    k = 0
    for table, array in (("tokens", segment.tokens), ("suffix array", segment.positions)):
        for n, block in enumerate(_blocks(array)):
            if k >= len(expected) or checksum(block) != expected[k]:
                first, last = n * BLOCK, n * BLOCK + block.nbytes
                documents = _documents_between(segment, first, last) if table == "tokens" else ()
                damaged.append(DamagedBlock(table, first, last, documents))
            k += 1
    return damaged


def _documents_between(segment: Segment, start: int, stop: int) -> tuple[str, ...]:
    """Names of the documents in a range of bytes of the text."""
    first = max(segment.document_at(start // segment.codec.bytes), 0)
    last = min(segment.document_at((stop - 1) // segment.codec.bytes), segment.document_count - 1)
    return tuple(segment.names[k] for k in range(first, last + 1))


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    data = np.ascontiguousarray(array).view(np.uint8)
    for start in range(0, len(data), BLOCK):
        yield data[start : start + BLOCK]


def _read_header(data: Any, path: Path, crc: int | None) -> tuple[dict[str, Any], int]:
    """The header, and where the tables begin."""
    if len(data) < _FIXED.size or data[: len(MAGIC)] != MAGIC:
        raise _damaged(path, "it is not a segment")
    _, version, length, found = _FIXED.unpack(data[: _FIXED.size])
    check_version(path, version, FORMAT_VERSION)
    text = data[_FIXED.size : _FIXED.size + length]
    if len(text) != length or checksum(text) != found:
        raise _damaged(path, "its header has a wrong checksum")
    if crc is not None and crc != found:
        raise _damaged(path, "it is not the one that the manifest names")
    header: dict[str, Any] = json.loads(text)
    return header, -(-(_FIXED.size + length) // _ALIGNMENT) * _ALIGNMENT


def _array(data: Any, start: int, table: dict[str, int], kind: np.dtype[Any]) -> NDArray[Any]:
    count, rest = divmod(table["bytes"], kind.itemsize)
    if rest or table["at"] < 0:
        raise ValueError("the size or offset of a table is invalid")
    return np.frombuffer(data, kind, count, start + table["at"]) if count else np.zeros(0, kind)


_REMEDY = "restore it, or build its documents again"


def _damaged(path: Path, what: str) -> DatastoreCorruptError:
    return DatastoreCorruptError(f"{path} is damaged: {what}; {_REMEDY}")
