"""Limits of reading one file of a format that a parser turns into text."""

from __future__ import annotations

from dataclasses import dataclass

from reader_rag.config.setting import Settings, setting


@dataclass(frozen=True)
class ReadLimits(Settings):
    """Limits of reading one file; a file beyond one is skipped and reported."""

    file_bytes: int = setting(256 << 20, "Most bytes of a file.", ge=1)
    unpacked_bytes: int = setting(
        256 << 20, "Most bytes of all parts of an archive (docx, xlsx, epub ...) unpacked, and of a file's text.", ge=1
    )
    unpack_ratio: float = setting(
        200.0, "Most bytes that a byte of an archive unpacks to, beyond its first 10 MiB.", ge=1.0
    )
    read_seconds: float = setting(120.0, "Most seconds until a file is text; then its reader is ended.", gt=0.0)
    memory_bytes: int = setting(
        1 << 30, "Most bytes of memory that the reader of a file takes besides its code.", ge=1 << 20
    )
