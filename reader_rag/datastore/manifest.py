"""The two JSON files that are replaced atomically: a namespace's manifest, and the datastore's own.

Each has a first line with the format's version and a CRC-32 of the rest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reader_rag.datastore.token_codec import check_version, checksum
from reader_rag.errors import DatastoreCorruptError
from reader_rag.util.encodable import is_encodable
from reader_rag.util.files import Files, read_regular

FORMAT_VERSION = 1
NAMESPACE_MANIFEST = "manifest.json"
DATASTORE_MANIFEST = "datastore.json"
_MAGIC = "reader_rag-datastore"
_REMEDY = "restore it, or build its documents again in a new folder"
_FILE_KEYS = {"tombstones": "dead"}
"""Attributes that have another key in the file."""


@dataclass(frozen=True)
class SegmentEntry:
    """A segment of a namespace.

    Attributes:
        file: File name in the namespace's folder.
        crc: CRC-32 of its header, which holds the checksums of all the rest.
        tokens: Tokens, separators included.
        documents: Documents, removed ones included.
        tombstones: Indices of removed documents, ascending.
    """

    file: str
    crc: int
    tokens: int
    documents: int
    tombstones: tuple[int, ...] = ()

    def is_valid(self) -> bool:
        """Whether all attributes are of their types and ranges."""
        ascending = all(map(_is_count, self.tombstones)) and list(self.tombstones) == sorted(set(self.tombstones))
        return _is_file_name(self.file) and all(map(_is_count, (self.crc, self.tokens, self.documents))) and ascending


@dataclass(frozen=True)
class NamespaceManifest:
    """The committed state of a namespace, together with the write-ahead log that it names.

    Attributes:
        namespace: Name of the namespace.
        generation: Grows by one each time the manifest is replaced.
        log: File name of the write-ahead log with the commits since.
        segments: The segments.
        damaged: File names of segments that were set aside.
        log_bytes: Least length of the log; a shorter one has lost a commit that removed documents. The log itself
            records its committed length.
        max_tokens: Above so many tokens the least recently used documents are evicted; None: no bound.
        max_age_s: Documents that were added longer ago are evicted, in seconds; None: no bound.
    """

    namespace: str
    generation: int = 0
    log: str = ""
    log_bytes: int = 0
    segments: tuple[SegmentEntry, ...] = ()
    damaged: tuple[str, ...] = ()
    max_tokens: int | None = None
    max_age_s: float | None = None

    @property
    def evicts(self) -> bool:
        """Whether the namespace is bounded."""
        return self.max_tokens is not None or self.max_age_s is not None

    def is_valid(self) -> bool:
        """Whether all attributes are of their types and ranges; the files are in the namespace's own folder."""
        age = self.max_age_s
        return (
            _is_name(self.namespace)
            and all(map(_is_file_name, (self.log, *self.damaged)))
            and all(map(_is_count, (self.generation, self.log_bytes)))
            and all(entry.is_valid() for entry in self.segments)
            and (self.max_tokens is None or _is_count(self.max_tokens))
            and (age is None or (isinstance(age, (int, float)) and not isinstance(age, bool)))
        )


@dataclass(frozen=True)
class DatastoreManifest:
    """The datastore's own file.

    Attributes:
        tokenizer: Fingerprint of the tokenizer.
        vocabulary: Number of token ids.
        shared: Namespaces that every request searches.
    """

    tokenizer: str
    vocabulary: int
    shared: tuple[str, ...] = ()

    def is_valid(self) -> bool:
        """Whether all attributes are of their types."""
        return all(map(_is_name, (self.tokenizer, *self.shared))) and _is_count(self.vocabulary)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and is_encodable(value)


def _is_file_name(value: Any) -> bool:
    """Whether a value names a file in the same folder."""
    return _is_name(value) and value not in ("", ".", "..") and not set("/\\\0:") & set(value)


def write_namespace_manifest(files: Files, folder: Path, manifest: NamespaceManifest) -> None:
    """Replace the manifest in a namespace's folder atomically."""
    files.replace(folder / NAMESPACE_MANIFEST, _encode(manifest))


def read_namespace_manifest(folder: Path) -> NamespaceManifest:
    """Read the manifest in a namespace's folder.

    Raises:
        FileNotFoundError: There is none.
        DatastoreCorruptError: It is damaged.
        DatastoreMismatchError: It is of another version.
    """
    path = folder / NAMESPACE_MANIFEST
    content = _read(path)
    try:
        segments = tuple(SegmentEntry(tombstones=tuple(entry.pop("dead")), **entry) for entry in content["segments"])
        manifest = NamespaceManifest(**{**content, "damaged": tuple(content["damaged"]), "segments": segments})
    except (AttributeError, LookupError, TypeError) as cause:
        raise _damaged(path) from cause
    if not manifest.is_valid():
        raise _damaged(path)
    return manifest


def write_datastore_manifest(files: Files, folder: Path, manifest: DatastoreManifest) -> None:
    """Replace the manifest in a datastore's folder atomically."""
    files.replace(folder / DATASTORE_MANIFEST, _encode(manifest))


def read_datastore_manifest(folder: Path) -> DatastoreManifest:
    """Read the manifest in a datastore's folder.

    Raises:
        FileNotFoundError: There is none.
        DatastoreCorruptError: It is damaged.
        DatastoreMismatchError: It is of another version.
    """
    path = folder / DATASTORE_MANIFEST
    content = _read(path)
    try:
        manifest = DatastoreManifest(**{**content, "shared": tuple(content["shared"])})
    except (LookupError, TypeError) as cause:
        raise _damaged(path) from cause
    if not manifest.is_valid():
        raise _damaged(path)
    return manifest


def _encode(manifest: NamespaceManifest | DatastoreManifest) -> bytes:
    content = asdict(manifest, dict_factory=lambda items: {_FILE_KEYS.get(key, key): value for key, value in items})
    text = json.dumps(content, separators=(",", ":"))
    return f"{_MAGIC} {FORMAT_VERSION} {checksum(text.encode()):08x}\n{text}\n".encode()


def _read(path: Path) -> dict[str, Any]:
    try:
        head, _, text = read_regular(path).partition(b"\n")
    except FileNotFoundError:
        raise
    except OSError as cause:
        raise DatastoreCorruptError(f"{path} cannot be read ({cause.strerror or cause}); {_REMEDY}") from cause
    words = head.decode(errors="replace").split(" ")
    if len(words) != 3 or words[0] != _MAGIC:
        raise _damaged(path)
    check_version(path, words[1], FORMAT_VERSION)
    text = text.removesuffix(b"\n")
    if words[2] != f"{checksum(text):08x}":
        raise _damaged(path)
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise _damaged(path) from cause
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _damaged(path: Path) -> DatastoreCorruptError:
    return DatastoreCorruptError(f"{path} is damaged: {_REMEDY}")
