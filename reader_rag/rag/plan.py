"""What an ingestion changes in a store."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_index.core.schema import BaseNode, Document, RelatedNodeInfo

from reader_rag.errors import ConfigError
from reader_rag.rag.chunking import Splitter
from reader_rag.rag.files import FoundFiles, UnusableFileError, content_hash, parse, printable, read_bytes
from reader_rag.rag.reading.process import ReadingProcess
from reader_rag.rag.sources import check_document, document_hash, is_random_id
from reader_rag.rag.stores.records import DocumentRecord

FileMetadata = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True)
class SkippedFile:
    """What could not be ingested; as text, one line that can be printed whatever the path holds.

    Attributes:
        path: Absolute path of a file or folder, or the id of a document; a file name that is not valid UTF-8 has lone
            surrogates, as everywhere in Python.
        reason: The reason in a few words.
        kept_old: Whether the store keeps the content of an earlier ingestion.
    """

    path: Path | str
    reason: str
    kept_old: bool = False

    def __str__(self) -> str:
        kept = "; its earlier version stays in the store" if self.kept_old else ""
        return f"{printable(self.path)}: {self.reason}{kept}"


@dataclass
class Plan:
    """The changes that one ingestion commits."""

    records: list[DocumentRecord] = field(default_factory=list)
    nodes: list[BaseNode] = field(default_factory=list)
    added: list[Path | str] = field(default_factory=list)
    updated: list[Path | str] = field(default_factory=list)
    unchanged: list[Path | str] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)


class Planner:
    """Plans what to store of files and documents.

    Args:
        known: The tenant's records in the store, by path or id.
        splitter: Splits documents.
        reading: The process that parses files.
        tenant: The tenant who owns the documents.
        metadata: More metadata of a file, by its path.
        encoding: Encoding of text in files that declare none.
    """

    def __init__(
        self,
        known: dict[str, DocumentRecord],
        splitter: Splitter,
        reading: ReadingProcess,
        tenant: str,
        metadata: FileMetadata | None,
        encoding: str,
    ) -> None:
        self.plan = Plan()
        self._known = known
        self._splitter = splitter
        self._reading = reading
        self._tenant = tenant
        self._metadata = metadata
        self._encoding = encoding
        # Of documents, not of files: documents with random ids are recognised by their content.
        self._contents = {record.hash: path for path, record in known.items() if not record.root}

    def add_file(self, file: Path, root: Path) -> None:
        """Plan a file.

        Args:
            file: Its absolute path.
            root: The path that the user passed: a folder above the file, or the file itself.

        Raises:
            ConfigError: Its metadata cannot be stored.
        """
        old = self._known.get(str(file))
        metadata = self._metadata_of(file)
        settings = self._splitter.settings
        if self._encoding != "utf-8":
            settings += f", {self._encoding}"
        if metadata:
            settings += f", {json.dumps(metadata, sort_keys=True)}"
        try:
            data = read_bytes(file, self._reading.limits.file_bytes)
            digest = content_hash(file, data, settings)
            if old is not None and old.hash == digest:
                self.plan.unchanged.append(file)
                return
            parts = parse(file, data, self._reading, encoding=self._encoding, metadata=metadata)
            nodes = self._splitter.split(parts)
        except UnusableFileError as error:
            self.plan.skipped.append(SkippedFile(file, str(error), kept_old=old is not None))
            return
        self._add_nodes(nodes, str(file), digest)
        self.plan.records.append(DocumentRecord(str(file), (old and old.root) or str(root), digest))
        (self.plan.added if old is None else self.plan.updated).append(file)

    def add_document(self, parts: Sequence[Document]) -> None:
        """Plan a document.

        Args:
            parts: The document; or several of its id, as its parts.
        """
        name = parts[0].node_id
        old = self._known.get(name)
        try:
            check_document(parts)
            digest = document_hash(parts, self._splitter.settings)
            same = self._contents.get(digest) if old is None and is_random_id(name) else None
            if same is not None or (old is not None and old.hash == digest):
                self.plan.unchanged.append(same or name)
                return
            nodes = self._splitter.split(parts)
        except UnusableFileError as error:
            self.plan.skipped.append(SkippedFile(name, str(error), kept_old=old is not None))
            return
        self._contents[digest] = name
        self._add_nodes(nodes, name, digest)
        self.plan.records.append(DocumentRecord(name, "", digest))
        (self.plan.added if old is None else self.plan.updated).append(name)

    def add_missing(self, roots: Sequence[FoundFiles]) -> None:
        """Plan the removal of known files that their root no longer has, except below folders that cannot be listed.

        Args:
            roots: What was found.
        """
        unlisted = [(folder, reason) for found in roots for folder, reason in found.unlisted]
        for found in roots:
            self.plan.skipped.extend(SkippedFile(link, reason) for link, reason in found.links)
        for folder, reason in unlisted:
            kept = any(Path(path).is_relative_to(folder) for path in self._known)
            self.plan.skipped.append(SkippedFile(folder, reason, kept_old=kept))
        found_now = {str(file) for found in roots for file in found.files}
        root_names = {str(found.root) for found in roots}
        for path, record in self._known.items():
            covered = any(Path(path).is_relative_to(found.root) for found in roots)
            unknown = any(Path(path).is_relative_to(folder) for folder, _ in unlisted)
            if not covered or unknown or path in found_now:
                continue
            if not record.root:  # of a document that was not a file, whatever its id looks like
                continue
            # A root inside a hidden folder is not listed by the roots around it, which must not remove its files.
            if record.root in root_names or not os.path.lexists(path):
                self.plan.removed.append(Path(path))

    def _metadata_of(self, file: Path) -> Mapping[str, Any]:
        metadata = dict(self._metadata(file)) if self._metadata is not None else {}
        if "file_path" in metadata:
            raise ConfigError("metadata cannot set file_path, which is the file's own; set file_name, or another name")
        try:
            json.dumps(metadata, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the metadata of {printable(file)} cannot be stored as JSON: {error}") from error
        return metadata

    def _add_nodes(self, nodes: Sequence[BaseNode], name: str, digest: str) -> None:
        """Plan nodes, with ids that are the same whenever the same content is ingested."""
        # Tenants with the same file have nodes of different ids.
        owner = f"\0{self._tenant}" if self._tenant else ""
        ids = {node.node_id: _node_id(f"{name}\0{digest}\0{number}{owner}") for number, node in enumerate(nodes)}
        for node in nodes:
            node.id_ = ids[node.node_id]
            for related in node.relationships.values():  # parsers relate nodes by the ids that they had
                for one in [related] if isinstance(related, RelatedNodeInfo) else related:
                    one.node_id = ids.get(one.node_id, one.node_id)
        self.plan.nodes.extend(nodes)


def _node_id(text: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, text))
