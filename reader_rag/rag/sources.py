"""What `ingest` is given: paths, LlamaIndex documents, and LlamaIndex readers."""

from __future__ import annotations

import hashlib
import inspect
import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llama_index.core.readers.base import BaseReader, ReaderConfig
from llama_index.core.schema import Document, MetadataMode

from reader_rag.errors import ConfigError, IngestError
from reader_rag.rag.reading.text import UnusableFileError
from reader_rag.util.encodable import is_encodable

Source = str | Path | Document | BaseReader | ReaderConfig


@dataclass
class Sources:
    """What was given, by kind.

    Attributes:
        paths: Files and folders.
        documents: The documents, and those that the readers gave, by id; several of one id are parts of one document.
    """

    paths: list[Path] = field(default_factory=list)
    documents: dict[str, list[Document]] = field(default_factory=dict)


def sort_sources(sources: Source | Iterable[Source]) -> Sources:
    """Sort what was given by kind, and call the readers.

    Args:
        sources: Paths, documents and readers, or a single one.

    Raises:
        ConfigError: One is of another type, or a reader that needs arguments.
        IngestError: A reader gave no document.
    """
    by_kind = Sources()
    single = isinstance(sources, (str, Path, Document, BaseReader, ReaderConfig))
    if not single and not isinstance(sources, Iterable):
        raise _unknown(sources)
    for source in [sources] if single else sources:  # type: ignore[union-attr]
        if isinstance(source, (str, Path)):
            by_kind.paths.append(Path(source))
            continue
        for document in _documents(source):
            by_kind.documents.setdefault(document.node_id, []).append(document)
    return by_kind


def _documents(source: object) -> Sequence[Document]:
    if isinstance(source, Document):
        return [source]
    if isinstance(source, ReaderConfig):
        found, name = source.read(), type(source.reader).__name__
    elif isinstance(source, BaseReader):
        name = type(source).__name__
        try:
            inspect.signature(source.load_data).bind()
        except TypeError as error:
            raise ConfigError(f"{name} needs arguments: pass what it loads, {name}(...).load_data(...)") from error
        found = source.load_data()
    else:
        raise _unknown(source)
    if not found:
        raise IngestError(f"{name} gave no documents; nothing was changed")
    return found


def _unknown(source: object) -> ConfigError:
    return ConfigError(f"ingest takes paths, LlamaIndex Documents and readers, not {type(source).__name__}")


def check_document(parts: Sequence[Document]) -> None:
    """Check that a document can be stored.

    Args:
        parts: The document, or its parts.

    Raises:
        UnusableFileError: It holds no text, its id or text has a lone surrogate, or its metadata is no JSON.
    """
    if not any(part.text.strip() for part in parts):
        raise UnusableFileError("holds no text")
    for part in parts:
        try:
            json.dumps(part.metadata, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UnusableFileError(f"its metadata cannot be stored as JSON: {error}") from error
        if not is_encodable(part.text) or not is_encodable(json.dumps(part.metadata, ensure_ascii=False)):
            raise UnusableFileError("its text or metadata has a lone surrogate, which is no character")
    if not is_encodable(parts[0].node_id):
        raise UnusableFileError("its id has a lone surrogate, which is no character")


def document_hash(parts: Sequence[Document], settings: str) -> str:
    """Hash of a document and of how it becomes nodes, without its id.

    Args:
        parts: The document, or its parts.
        settings: Description of the chunk settings.
    """
    described = [
        [
            part.text,
            part.metadata,
            part.text_template,
            part.metadata_template,
            part.get_metadata_str(mode=MetadataMode.EMBED),
            part.get_metadata_str(mode=MetadataMode.LLM),
        ]
        for part in parts
    ]
    return hashlib.sha256(json.dumps([settings, described], sort_keys=True).encode()).hexdigest()


def is_random_id(document_id: str) -> bool:
    """Whether a document's id is one that LlamaIndex makes up: another each time the same document is loaded.

    Args:
        document_id: The id.
    """
    try:
        return uuid.UUID(document_id).version == 4
    except ValueError:
        return False
