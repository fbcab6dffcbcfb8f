"""Finds files, reads them into LlamaIndex documents, and reports with the reason what cannot be read as text."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from llama_index.core.schema import Document

from reader_rag.config.reading import ReadLimits
from reader_rag.errors import IngestError
from reader_rag.rag.reading.formats import format_of, unread_reason
from reader_rag.rag.reading.process import ReadingProcess
from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError as UnusableFileError
from reader_rag.rag.reading.text import decode
from reader_rag.util.encodable import is_encodable
from reader_rag.util.files import READ_AT_ONCE

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NOT_UTF8 = "the name is not valid UTF-8; rename it"
_FOLLOW = "pass follow_links=True to read it"
_PIECE_BYTES = 1 << 24


@dataclass
class FoundFiles:
    """The files under a root.

    Attributes:
        root: Absolute path of the file or folder that the user passed.
        files: Absolute paths, sorted, without hidden files and folders.
        unlisted: Files and folders that cannot be listed or stored, with the reason.
        links: Links that are not followed, with the reason.
    """

    root: Path
    files: list[Path] = field(default_factory=list)
    unlisted: list[tuple[Path, str]] = field(default_factory=list)
    links: list[tuple[Path, str]] = field(default_factory=list)


def find_files(root: Path, exclude: Path | None, *, follow_links: bool = False) -> FoundFiles:
    """List the files under a root.

    Args:
        root: A folder, or a single file; it may itself be a link.
        exclude: A folder to skip: the store's own; None: no folder.
        follow_links: Whether links to files outside the root, and to hidden ones, are listed as files. Links to
            folders are never followed.

    Raises:
        IngestError: There is no such path, it cannot be read, or its name cannot be stored.
    """
    try:
        root = Path(os.path.realpath(root))
        kind = root.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or error
        raise IngestError(f"there is no file or folder {printable(root)} to read ({reason}); check the path") from error
    if not is_encodable(str(root)):
        raise IngestError(f"{printable(root)}: {_NOT_UTF8}; nothing was changed")
    found = FoundFiles(root)
    if not stat.S_ISDIR(kind):
        found.files.append(root)
        return found
    excluded = None if exclude is None else Path(os.path.realpath(exclude))
    folders = [root]
    while folders:  # not by recursion: folders may be nested deeper than Python's stack
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = folder / entry.name
                    if entry.name.startswith(".") or path == excluded:
                        continue
                    if not is_encodable(entry.name):
                        found.unlisted.append((path, _NOT_UTF8))
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(path)
                    elif not entry.is_symlink() or follow_links:
                        if not path.is_dir():
                            found.files.append(path)
                    else:
                        _add_link(found, path, excluded)
        except OSError as error:
            found.unlisted.append((folder, f"folder cannot be listed: {error.strerror}"))
    for paths in (found.files, found.unlisted, found.links):
        paths.sort()
    return found


def _add_link(found: FoundFiles, link: Path, excluded: Path | None) -> None:
    """Add a link to a file of the root to the files, and any other to the links; those to folders to neither."""
    target = Path(os.path.realpath(link))
    if target.is_dir():
        return
    if not target.is_relative_to(found.root):
        found.links.append((link, f"a link to a file outside of {printable(found.root)}; {_FOLLOW}"))
    elif any(part.startswith(".") for part in target.relative_to(found.root).parts):
        found.links.append((link, f"a link to a hidden file; {_FOLLOW}"))
    elif excluded is not None and target.is_relative_to(excluded):
        found.links.append((link, "a link to a file of the store"))
    else:
        found.files.append(link)


def printable(path: Path | str) -> str:
    """A path, or the id of a document, as text in one line that every stream can write.

    Other bytes and control characters are escapes.

    Args:
        path: The path or id.
    """
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:  # lone surrogates that stand for no byte
        encoded = str(path).encode("utf-8", "surrogatepass")
    text = encoded.decode("utf-8", "backslashreplace")
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def read_bytes(path: Path, most_bytes: int = ReadLimits.file_bytes) -> bytes:
    """Read a file, without waiting for data: a pipe or a device is refused.

    Args:
        path: Path of the file.
        most_bytes: Most bytes that it may have.

    Raises:
        UnusableFileError: The file cannot be read, is empty, too large, or not a regular file.
    """
    try:
        with FileIO(os.open(path, READ_AT_ONCE)) as file:
            data = _content(file, most_bytes)
    except (OSError, ValueError) as error:
        raise UnusableFileError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not data.strip():
        raise UnusableFileError("empty")
    return data


def _content(file: FileIO, most_bytes: int) -> bytes:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFileError("not a regular file")
    data = bytearray()
    too_large = status.st_size > most_bytes
    while not too_large:
        piece = file.read(_PIECE_BYTES)
        if piece is None:  # reading on would wait, as at /proc/kmsg
            raise UnusableFileError("not a regular file")
        if not piece:
            return bytes(data)
        data += piece
        too_large = len(data) > most_bytes  # some special files have a size of 0 and no end
    raise UnusableFileError(f"larger than {most_bytes >> 20} MiB; split it")


class FileDocument(Document):
    """A part of a file as a LlamaIndex document; the metadata is hidden from the LLM and the embedding.

    Attributes:
        start: Characters of the file's text before this part; see `Section`.
        line_key: Name in the metadata of chunks for the labels of their lines; "" for none.
        line_labels: Label of each line of the text; empty for none.
    """

    start: int = 0
    line_key: str = ""
    line_labels: tuple[str, ...] = ()


def parse(
    path: Path,
    data: bytes,
    reading: ReadingProcess | None = None,
    *,
    encoding: str = "utf-8",
    metadata: Mapping[str, Any] | None = None,
) -> list[FileDocument]:
    """Turn a file's content into documents.

    Args:
        path: Path of the file; its suffix selects the parser.
        data: The file's content.
        reading: The process that parses formats other than plain text; None starts one for this file.
        encoding: Encoding of text in files that declare none.
        metadata: More metadata of each document; it may replace `file_name`.

    Returns:
        One document, or one for each page, slide, sheet, chapter, message or part below a heading. `id_` is the path.
        The metadata has `file_path`, `file_name`, and where the part is in the file.

    Raises:
        UnusableFileError: The content is binary, in an unknown encoding or without text, its parser is missing, or
            parsing it exceeds the limits.
    """
    suffix = path.suffix.lower()
    format_ = format_of(suffix)
    if format_ is None:
        sections = [Section(_plain_text(data, suffix, encoding))]
    else:
        if not format_.is_installed:
            raise UnusableFileError(f"{suffix} files need the extra: pip install 'reader-rag[files]'")
        with ReadingProcess() if reading is None else nullcontext(reading) as process:
            sections = process.read(data, suffix, encoding)
    common = {"file_path": str(path), "file_name": path.name, **(metadata or {})}
    documents = [_document(path, section, common) for section in sections if section.text.strip()]
    if not documents:
        raise UnusableFileError("holds no text")
    return documents


def whole_text(documents: Sequence[FileDocument]) -> str:
    """The text of a file: the parts that `parse` returned, together.

    Args:
        documents: The parts.
    """
    parts: list[str] = []
    for document in documents:
        parts += ["\n" if parts and not document.start else "", document.text]
    return "".join(parts)


def _plain_text(data: bytes, suffix: str, encoding: str) -> str:
    try:
        return decode(data, encoding)
    except UnusableFileError as error:
        raise UnusableFileError(unread_reason(suffix) or str(error)) from error


def _document(path: Path, section: Section, common: Mapping[str, Any]) -> FileDocument:
    metadata = {**common, **section.metadata}
    hidden = [*metadata, *filter(None, [section.line_key])]
    fields: dict[str, Any] = {"id_": str(path), "text": section.text, "metadata": metadata}
    return FileDocument(
        excluded_llm_metadata_keys=hidden,
        excluded_embed_metadata_keys=list(hidden),
        start=section.start,
        line_key=section.line_key,
        line_labels=section.line_labels,
        **fields,
    )


def content_hash(path: Path, data: bytes, settings: str) -> str:
    """Hash of a file and of how it becomes chunks.

    Args:
        path: Path of the file; its suffix selects the parser.
        data: The file's content.
        settings: Description of the chunk settings.
    """
    format_ = format_of(path.suffix.lower())
    if format_ is not None and format_.version:
        settings += f", {format_.version}"  # earlier versions of a parser stored other text
    return hashlib.sha256(settings.encode() + b"\0" + data).hexdigest()
