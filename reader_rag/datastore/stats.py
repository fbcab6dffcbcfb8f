"""What a namespace holds, and what of it is damaged."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from reader_rag.datastore.namespace import Namespace
from reader_rag.datastore.segment_file import verify_segment


@dataclass(frozen=True)
class NamespaceStats:
    """What a namespace holds.

    Attributes:
        documents: Number of documents.
        tokens: Tokens of all documents.
        segments: Number of segment files.
        memtable_tokens: Tokens that are in the write-ahead log and in memory, and not yet in a segment.
        removed_tokens: Tokens of removed documents that are still in segments.
        bytes: Bytes on disk.
        shared: Whether every request searches it.
        damaged: What cannot be read, as messages.
    """

    documents: int
    tokens: int
    segments: int
    memtable_tokens: int
    removed_tokens: int
    bytes: int
    shared: bool
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class Damage:
    """A file that differs from what was written.

    Attributes:
        namespace: Name of the namespace.
        file: Name of the file.
        what: What is wrong, as a message.
        documents: Names of the documents that are known to be affected.
    """

    namespace: str
    file: str
    what: str
    documents: tuple[str, ...] = ()


def measure(namespace: Namespace, shared: bool) -> NamespaceStats:
    """Measure a namespace.

    Args:
        namespace: The namespace.
        shared: Whether every request searches it.
    """
    with namespace.lock:
        return NamespaceStats(
            documents=namespace.documents,
            tokens=namespace.tokens,
            segments=len(namespace.segments),
            memtable_tokens=namespace.memtable.tokens,
            removed_tokens=sum(state.tokens_of(state.tombstones) for state in namespace.segments),
            bytes=sum(path.stat().st_size for path in namespace.folder.rglob("*") if path.is_file()),
            shared=shared,
            damaged=(*namespace.damaged, *(f"{file} was set aside" for file in namespace.manifest.damaged)),
        )


def find_damage(name: str, namespace: Namespace) -> list[Damage]:
    """Read all segments of a namespace and compare their checksums.

    Args:
        name: Name of the namespace.
        namespace: The namespace.
    """
    with namespace.lock:
        found = [Damage(name, "", what) for what in namespace.damaged]
        segments = [state.segment for state in namespace.segments]
    for segment in segments:
        with contextlib.suppress(FileNotFoundError):  # merged meanwhile
            for block in verify_segment(namespace.folder / segment.file, segment):
                what = f"bytes {block.start} to {block.stop} of its {block.table}"
                found.append(Damage(name, segment.file, what, block.documents))
    return found
