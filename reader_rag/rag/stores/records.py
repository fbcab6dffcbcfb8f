"""Record types of the store contract. They need no LlamaIndex, so that reading a store's file stays quick to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DocumentRecord:
    """A file, or a LlamaIndex document, that was ingested.

    Attributes:
        path: Absolute path of the file, or the document's id; also the `ref_doc_id` of its nodes.
        root: The path that the user passed to the ingestion: a folder above the file, or the file itself. "" for a
            document.
        hash: Hash of the content and of the chunk settings; equal hashes give equal nodes.
    """

    path: str
    root: str
    hash: str


@dataclass(frozen=True)
class TenantSize:
    """How much a store holds of one tenant.

    Attributes:
        tenant: Name of the tenant.
        documents: Number of ingested files.
        nodes: Number of nodes.
    """

    tenant: str
    documents: int
    nodes: int
