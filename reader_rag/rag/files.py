"""Reads files into LlamaIndex documents; a file that cannot be read as text is reported with the reason."""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from llama_index.core.readers.file.base import SimpleDirectoryReader
from llama_index.core.schema import Document

from reader_rag.errors import IngestError
from reader_rag.util.one_line import first_line

# Formats that llama-index-readers-file turns into text; every other file is read as text itself.
OFFICE_SUFFIXES = frozenset({".pdf", ".docx", ".pptx", ".pptm", ".ppt", ".epub", ".hwp", ".xls", ".xlsx"})

_BYTE_ORDER_MARKS = (
    # UTF-32 first: its little-endian mark begins with the one of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NOT_UTF8 = "the name is not valid UTF-8; rename it"
_MOST_CONTROL_CHARACTERS = 0.01  # share of all characters; text has none or a single one


class UnusableFileError(Exception):
    """A file that cannot be ingested; the message is the reason, shown to the user."""


@dataclass
class FoundFiles:
    """The files under a root.

    Attributes:
        root: Absolute path of the file or folder that the user passed.
        files: Absolute paths, sorted, without hidden files and folders.
        unlisted: Files and folders that cannot be listed or stored, with the reason.
    """

    root: Path
    files: list[Path] = field(default_factory=list)
    unlisted: list[tuple[Path, str]] = field(default_factory=list)


def find_files(root: Path, exclude: Path | None) -> FoundFiles:
    """List the files under a root.

    Args:
        root: A folder, or a single file.
        exclude: A folder to skip: the store's own; None: no folder.

    Raises:
        IngestError: There is no such path, it cannot be read, or its name cannot be stored.
    """
    try:
        root = Path(os.path.realpath(root))
        kind = root.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or error
        raise IngestError(f"there is no file or folder {printable(root)} to read ({reason}); check the path") from error
    if not _is_utf8(str(root)):
        raise IngestError(f"{printable(root)}: {_NOT_UTF8}; nothing was changed")
    excluded = None if exclude is None else Path(os.path.realpath(exclude))
    found = FoundFiles(root)
    if not stat.S_ISDIR(kind):
        found.files.append(root)
        return found
    folders = [root]
    while folders:  # not by recursion: folders may be nested deeper than Python's stack
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = folder / entry.name
                    if entry.name.startswith(".") or path == excluded:
                        continue
                    if not _is_utf8(entry.name):
                        found.unlisted.append((path, _NOT_UTF8))
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(path)
                    elif not path.is_dir():
                        found.files.append(path)
        except OSError as error:
            found.unlisted.append((folder, f"folder cannot be listed: {error.strerror}"))
    found.files.sort()
    found.unlisted.sort()
    return found


def printable(path: Path) -> str:
    """A path as text in one line that every stream can write: other bytes and control characters as escapes.

    Args:
        path: The path.
    """
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def _is_utf8(text: str) -> bool:
    """Whether a text can be stored. A file name that is not valid UTF-8 has lone surrogates in Python."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_bytes(path: Path) -> bytes:
    """Read a file.

    Args:
        path: Path of the file.

    Raises:
        UnusableFileError: The file cannot be read, is empty, or is not a regular file (reading a pipe would block).
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnusableFileError("not a regular file")
        data = path.read_bytes()
    except OSError as error:
        raise UnusableFileError(f"cannot be read: {error.strerror or error}") from error
    if not data.strip():
        raise UnusableFileError("empty")
    return data


def parse(path: Path, data: bytes) -> list[Document]:
    """Turn a file's content into documents.

    Args:
        path: Path of the file; its suffix selects the reader.
        data: The file's content.

    Returns:
        One document, or one for each page of a format with pages. `id_` is the path. The metadata (`file_path`,
        `file_name`, and `page_label` from readers of formats with pages) is hidden from the LLM and the embedding.

    Raises:
        UnusableFileError: The content is binary, in an unknown encoding or without text, or its reader is missing.
    """
    office = path.suffix.lower() in OFFICE_SUFFIXES
    documents = _read_office_file(path) if office else [Document(text=decode(data))]
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise UnusableFileError("holds no text")
    for document in documents:
        document.set_content(_encodable(document.text))
        own = {key: _encodable(str(value)) for key, value in document.metadata.items() if key in ("page_label",)}
        document.id_ = str(path)
        document.metadata = {"file_path": str(path), "file_name": path.name, **own}
        document.excluded_llm_metadata_keys = list(document.metadata)
        document.excluded_embed_metadata_keys = list(document.metadata)
    return documents


def decode(data: bytes) -> str:
    """Decode text: UTF-8, or UTF-16 and UTF-32 with a byte order mark.

    Args:
        data: The encoded text.

    Returns:
        The text with newlines as line ends and without a byte order mark, as `Path.read_text` returns it.

    Raises:
        UnusableFileError: The content is binary or in another encoding.
    """
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")
    if encoding == "utf-8" and b"\0" in data:
        raise UnusableFileError("binary")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnusableFileError(f"not {error.encoding} text (byte {error.start}); convert it to UTF-8") from error
    if len(_CONTROL_CHARACTERS.findall(text)) > _MOST_CONTROL_CHARACTERS * len(text):
        raise UnusableFileError("binary")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _encodable(text: str) -> str:
    """The text with a question mark for each lone surrogate, which readers return for broken characters of a file."""
    return text if _is_utf8(text) else text.encode("utf-8", "replace").decode()


def content_hash(data: bytes, settings: str) -> str:
    """Hash of a file and of the chunk settings.

    Args:
        data: The file's content.
        settings: Description of the chunk settings.
    """
    return hashlib.sha256(settings.encode() + b"\0" + data).hexdigest()


def _read_office_file(path: Path) -> list[Document]:
    if importlib.util.find_spec("llama_index.readers") is None or (
        importlib.util.find_spec("llama_index.readers.file") is None
    ):
        raise UnusableFileError(f"{path.suffix} files need the extra: pip install 'reader-rag[files]'")
    try:
        return SimpleDirectoryReader.load_file(path, file_metadata=lambda _: {}, file_extractor={}, raise_on_error=True)
    except ImportError as error:
        raise UnusableFileError(f"the reader of {path.suffix} files lacks a package: {first_line(error)}") from error
    except Exception as error:  # readers raise errors of many libraries, wrapped in a bare Exception
        raise UnusableFileError(f"not a readable {path.suffix} file: {first_line(error.__cause__ or error)}") from error
