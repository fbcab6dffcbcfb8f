"""Segment files: one part each, written once, mapped into memory, checked.

A file is: the magic, the version, the length and checksum of the header; the header (JSON); tables, each at a multiple
of 64 bytes, little-endian. The tables of documents and tokens are small, and one checksum each is checked when the file
is opened. Of the text and its places every mebibyte has a checksum, so that damage is located; they are checked by
`verify_segment`, not at each opening, which would read it all.
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

from reader_rag.datastore.part import Names, Part
from reader_rag.datastore.token_codec import Width, checksum
from reader_rag.errors import DatastoreCorruptError, DatastoreMismatchError
from reader_rag.util.files import Files

MAGIC = b"RRAGSEG\n"
FORMAT_VERSION = 1
BLOCK = 1 << 20
"""Bytes of text or places that have a checksum of their own."""

_FIXED = struct.Struct("<8sIII")
_ALIGNED = 64
_BODY = ("tokens", "places")
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


@dataclass(frozen=True)
class Identity:
    """What every file of a datastore is marked with.

    Attributes:
        tokenizer: Fingerprint of the tokenizer.
        vocabulary: Number of token ids.
    """

    tokenizer: str
    vocabulary: int

    @property
    def width(self) -> Width:
        """How tokens are stored."""
        return Width.of(self.vocabulary)

    def check(self, header: dict[str, Any], place: Path) -> None:
        """Compare with what a file says.

        Raises:
            DatastoreMismatchError: It is of another tokenizer or vocabulary.
        """
        for name, ours in (("tokenizer", self.tokenizer), ("vocabulary", self.vocabulary)):
            if header.get(name) != ours:
                raise DatastoreMismatchError(
                    f"{place} was made with {name} {header.get(name)!r}, not {ours!r}: open it with the model that "
                    "made it, or build another datastore in a new folder"
                )


def write_segment(files: Files, path: Path, part: Part, identity: Identity) -> int:
    """Write a part to a file and bring it to the disk.

    Returns:
        The checksum of the header, which a manifest keeps: it names exactly this content.
    """
    blocks = [checksum(block) for name in _BODY for block in _blocks(getattr(part, name))]
    arrays = {
        "tokens": part.tokens,
        "places": part.places,
        "firsts": part.firsts,
        "starts": part.starts,
        "name_text": part.names.text,
        "name_ends": part.names.ends,
        "name_order": part.names.order,
        "digests": part.digests,
        "added": part.added,
        "used": part.used,
        "blocks": np.array(blocks, np.uint32),
    }
    tables: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        tables[name] = {"at": offset, "bytes": array.nbytes}
        if name in _TABLES:
            tables[name]["crc"] = checksum(np.ascontiguousarray(array))
        offset += -(-array.nbytes // _ALIGNED) * _ALIGNED
    header = {
        "tokenizer": identity.tokenizer,
        "vocabulary": identity.vocabulary,
        "token_bytes": part.width.bytes,
        "tokens": part.size,
        "documents": part.documents,
        "block": BLOCK,
        "body_bytes": offset,
        "tables": tables,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    crc = checksum(text)
    begin = _FIXED.pack(MAGIC, FORMAT_VERSION, len(text), crc) + text
    begin += bytes(-len(begin) % _ALIGNED)

    def chunks() -> Iterator[Any]:
        yield begin
        for array in arrays.values():
            if array.nbytes:
                yield np.ascontiguousarray(array)
                yield bytes(-array.nbytes % _ALIGNED)

    files.create(path, chunks())
    return crc


def open_segment(path: Path, identity: Identity, crc: int | None = None) -> Part:
    """Map a segment.

    Args:
        path: The file.
        identity: What it must be of.
        crc: What `write_segment` returned, if it is known.

    Raises:
        DatastoreCorruptError: It is missing, damaged, cut off, or not the one that was written.
        DatastoreMismatchError: It is of another version, tokenizer or vocabulary.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as cause:
        raise DatastoreCorruptError(
            f"{path} cannot be read: {cause}; restore it, or build its documents again"
        ) from cause
    header, start = _header(data, path, crc)
    identity.check(header, path)
    if len(data) != start + header["body_bytes"]:
        raise _damaged(path, f"it has {len(data)} bytes instead of {start + header['body_bytes']}")
    if hasattr(data, "madvise") and hasattr(mmap, "MADV_RANDOM"):
        data.madvise(mmap.MADV_RANDOM)  # a search touches single pages: reading their neighbours, too, is of no use
    width = identity.width
    try:
        arrays = {
            name: _array(data, start, header["tables"][name], np.dtype(kind))
            for name, kind in {"tokens": width.dtype.str, "places": "<i4", **_TABLES}.items()
        }
    except (KeyError, TypeError, ValueError) as cause:
        raise _damaged(path, "its header makes no sense") from cause
    for name in _TABLES:
        if checksum(arrays[name]) != header["tables"][name].get("crc"):
            raise _damaged(path, f"its table {name!r} has a wrong checksum")
    part = Part(
        width=width,
        tokens=arrays["tokens"],
        places=arrays["places"],
        firsts=arrays["firsts"],
        starts=arrays["starts"],
        names=Names(arrays["name_text"], arrays["name_ends"], arrays["name_order"]),
        digests=arrays["digests"],
        added=arrays["added"],
        used=arrays["used"],
        file=path.name,
    )
    if len(part.starts) != part.documents + 1 or len(part.tokens) != part.size * width.each:
        raise _damaged(path, "its tables do not fit each other")
    return part


@dataclass(frozen=True)
class BadBlock:
    """A stretch of a segment that is not what was written.

    Attributes:
        table: "tokens" or "places".
        start: First byte of it in that table.
        stop: Byte behind the last.
        documents: Names of the documents whose tokens lie in it; empty for places, which belong to all.
    """

    table: str
    start: int
    stop: int
    documents: tuple[str, ...]


def verify_segment(path: Path, part: Part) -> list[BadBlock]:
    """Read all of a segment's text and places and compare their checksums.

    Args:
        path: The segment's file.
        part: What `open_segment` gave.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header, start = _header(data, path, None)
    expected = _array(data, start, header["tables"]["blocks"], np.dtype("<u4")).tolist()
    bad = []
    k = 0
    for table in _BODY:
        for n, block in enumerate(_blocks(getattr(part, table))):
            if k >= len(expected) or checksum(block) != expected[k]:
                first, last = n * BLOCK, n * BLOCK + block.nbytes
                bad.append(BadBlock(table, first, last, _between(part, first, last) if table == "tokens" else ()))
            k += 1
    return bad


def _between(part: Part, start: int, stop: int) -> tuple[str, ...]:
    first = max(part.document_at(start // part.width.bytes), 0)
    last = min(part.document_at((stop - 1) // part.width.bytes), part.documents - 1)
    return tuple(part.names[k] for k in range(first, last + 1))


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    data = np.ascontiguousarray(array).view(np.uint8)
    for start in range(0, len(data), BLOCK):
        yield data[start : start + BLOCK]


def _header(data: Any, path: Path, crc: int | None) -> tuple[dict[str, Any], int]:
    """The header, and where the tables begin."""
    if len(data) < _FIXED.size or data[: len(MAGIC)] != MAGIC:
        raise _damaged(path, "it is not a segment")
    _, version, length, found = _FIXED.unpack(data[: _FIXED.size])
    if version != FORMAT_VERSION:
        raise DatastoreMismatchError(
            f"{path} has format {version} and this version reads {FORMAT_VERSION}: use the version that wrote it, or "
            "build another datastore in a new folder"
        )
    text = data[_FIXED.size : _FIXED.size + length]
    if len(text) != length or checksum(text) != found:
        raise _damaged(path, "its header has a wrong checksum")
    if crc is not None and crc != found:
        raise _damaged(path, "it is not the one that the manifest names")
    header: dict[str, Any] = json.loads(text)
    return header, -(-(_FIXED.size + length) // _ALIGNED) * _ALIGNED


def _array(data: Any, start: int, table: dict[str, int], kind: np.dtype[Any]) -> NDArray[Any]:
    count, rest = divmod(table["bytes"], kind.itemsize)
    if rest or table["at"] < 0:
        raise ValueError("a table of a broken size")
    return np.frombuffer(data, kind, count, start + table["at"]) if count else np.zeros(0, kind)


def _damaged(path: Path, what: str) -> DatastoreCorruptError:
    return DatastoreCorruptError(f"{path} is damaged: {what}; restore it, or build its documents again")
