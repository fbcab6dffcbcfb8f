"""What a datastore holds, and what of it is damaged."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from reader_rag.datastore.namespace import Namespace
from reader_rag.datastore.segment import verify_segment


@dataclass(frozen=True)
class NamespaceStats:
    """What a namespace holds.

    Attributes:
        documents: Documents that can be found.
        tokens: Of them.
        segments: Files of sorted text.
        live_tokens: Tokens that are in the log and in memory.
        removed_tokens: Tokens of removed documents that are still in segments.
        bytes: On the disk.
        shared: Whether every request sees it.
        damaged: What cannot be read, in words.
    """

    documents: int
    tokens: int
    segments: int
    live_tokens: int
    removed_tokens: int
    bytes: int
    shared: bool
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class Damage:
    """Something that is not what was written.

    Attributes:
        namespace: Where.
        file: Which file.
        what: What is wrong, in words.
        documents: Those that are known to be concerned.
    """

    namespace: str
    file: str
    what: str
    documents: tuple[str, ...] = ()


def measure(space: Namespace, shared: bool) -> NamespaceStats:
    """What a namespace holds."""
    with space.lock:
        return NamespaceStats(
            documents=space.documents,
            tokens=space.tokens,
            segments=len(space.segments),
            live_tokens=space.live.tokens,
            removed_tokens=sum(held.tokens_of(held.dead) for held in space.segments),
            bytes=sum(path.stat().st_size for path in space.folder.rglob("*") if path.is_file()),
            shared=shared,
            damaged=(*space.damaged, *(f"{file} was set aside" for file in space.manifest.damaged)),
        )


def find_damage(name: str, space: Namespace) -> list[Damage]:
    """Read all of a namespace and compare checksums."""
    with space.lock:
        found = [Damage(name, "", what) for what in space.damaged]
        segments = list(space.segments)
    for held in segments:
        with contextlib.suppress(FileNotFoundError):  # merged meanwhile
            for bad in verify_segment(space.folder / held.part.file, held.part):
                what = f"bytes {bad.start} to {bad.stop} of its {bad.table}"
                found.append(Damage(name, held.part.file, what, bad.documents))
    return found
