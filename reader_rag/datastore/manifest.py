"""Small files that are replaced at once: what a namespace consists of, and what a datastore was made with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reader_rag.datastore.token_codec import checksum
from reader_rag.errors import DatastoreCorruptError, DatastoreMismatchError
from reader_rag.util.files import Files

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_MAGIC = "reader_rag-datastore"


@dataclass(frozen=True)
class SegmentEntry:
    """A segment of a namespace.

    Attributes:
        file: Its name in the namespace's folder.
        crc: Of its header, which has the checksums of all the rest.
        tokens: Separators included.
        documents: The removed ones included.
        dead: Which of them were removed, rising.
    """

    file: str
    crc: int
    tokens: int
    documents: int
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The committed state of a namespace, together with the log that it names.

    Attributes:
        namespace: Its name.
        generation: Grows by one each time the manifest is replaced.
        log: File name of the log of what came since.
        segments: The segments.
        damaged: Files of segments that were set aside.
        max_tokens: Documents that were longest of no use go when there are more; None: no bound.
        max_age_s: Documents that were put in longer ago go; None: none do.
    """

    namespace: str
    generation: int = 0
    log: str = ""
    segments: tuple[SegmentEntry, ...] = ()
    damaged: tuple[str, ...] = ()
    max_tokens: int | None = None
    max_age_s: float | None = None

    @property
    def limited(self) -> bool:
        """Whether documents go by themselves."""
        return self.max_tokens is not None or self.max_age_s is not None


@dataclass(frozen=True)
class Root:
    """What a datastore was made with, and the namespaces that every request sees."""

    tokenizer: str
    vocabulary: int
    shared: tuple[str, ...] = field(default=())


def write_manifest(files: Files, folder: Path, manifest: Manifest) -> None:
    """Replace a namespace's manifest at once."""
    files.put(folder / MANIFEST, _seal(asdict(manifest)))


def read_manifest(folder: Path) -> Manifest:
    """A namespace's manifest.

    Raises:
        FileNotFoundError: There is none.
        DatastoreCorruptError: It is damaged.
        DatastoreMismatchError: It is of another version.
    """
    path = folder / MANIFEST
    try:
        held = _unseal(path)
        segments = tuple(SegmentEntry(**{**entry, "dead": tuple(entry["dead"])}) for entry in held.pop("segments"))
        return Manifest(**{**held, "damaged": tuple(held["damaged"]), "segments": segments})
    except (TypeError, KeyError) as cause:
        raise _damaged(path) from cause


def write_root(files: Files, path: Path, root: Root) -> None:
    """Replace the datastore's own file at once."""
    files.put(path, _seal(asdict(root)))


def read_root(path: Path) -> Root:
    """The datastore's own file; raises as `read_manifest` does."""
    try:
        held = _unseal(path)
        return Root(**{**held, "shared": tuple(held["shared"])})
    except (TypeError, KeyError) as cause:
        raise _damaged(path) from cause


def _seal(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, separators=(",", ":"))
    return f"{_MAGIC} {FORMAT_VERSION} {checksum(text.encode()):08x}\n{text}\n".encode()


def _unseal(path: Path) -> dict[str, Any]:
    head, _, text = path.read_bytes().partition(b"\n")
    words = head.decode(errors="replace").split(" ")
    if len(words) != 3 or words[0] != _MAGIC:
        raise _damaged(path)
    if words[1] != str(FORMAT_VERSION):
        raise DatastoreMismatchError(
            f"{path} has format {words[1]} and this version reads {FORMAT_VERSION}: use the version that wrote it, or "
            "build another datastore in a new folder"
        )
    text = text.removesuffix(b"\n")
    if words[2] != f"{checksum(text):08x}":
        raise _damaged(path)
    content: dict[str, Any] = json.loads(text)
    return content


def _damaged(path: Path) -> DatastoreCorruptError:
    return DatastoreCorruptError(f"{path} is damaged: restore it, or build its documents again in a new folder")
