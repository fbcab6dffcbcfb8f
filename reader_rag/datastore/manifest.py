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
from reader_rag.util.files import Files

FORMAT_VERSION = 1
NAMESPACE_MANIFEST = "manifest.json"
DATASTORE_MANIFEST = "datastore.json"
_MAGIC = "reader_rag-datastore"
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
    try:
        content = _read(path)
        segments = tuple(SegmentEntry(tombstones=tuple(entry.pop("dead")), **entry) for entry in content["segments"])
        return NamespaceManifest(**{**content, "damaged": tuple(content["damaged"]), "segments": segments})
    except (TypeError, KeyError) as cause:
        raise _damaged(path) from cause


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
    try:
        content = _read(path)
        return DatastoreManifest(**{**content, "shared": tuple(content["shared"])})
    except (TypeError, KeyError) as cause:
        raise _damaged(path) from cause


def _encode(manifest: NamespaceManifest | DatastoreManifest) -> bytes:
    content = asdict(manifest, dict_factory=lambda items: {_FILE_KEYS.get(key, key): value for key, value in items})
    text = json.dumps(content, separators=(",", ":"))
    return f"{_MAGIC} {FORMAT_VERSION} {checksum(text.encode()):08x}\n{text}\n".encode()


def _read(path: Path) -> dict[str, Any]:
    head, _, text = path.read_bytes().partition(b"\n")
    words = head.decode(errors="replace").split(" ")
    if len(words) != 3 or words[0] != _MAGIC:
        raise _damaged(path)
    check_version(path, words[1], FORMAT_VERSION)
    text = text.removesuffix(b"\n")
    if words[2] != f"{checksum(text):08x}":
        raise _damaged(path)
    content: dict[str, Any] = json.loads(text)
    return content


def _damaged(path: Path) -> DatastoreCorruptError:
    return DatastoreCorruptError(f"{path} is damaged: restore it, or build its documents again in a new folder")
