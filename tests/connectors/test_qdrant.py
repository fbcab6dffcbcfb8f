"""Qdrant as a document store, embedded; on a server where one is named by READER_RAG_TEST_QDRANT."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.vector_stores.qdrant", reason="pip install 'reader-rag[qdrant]'")

from reader_rag.connectors.qdrant import QdrantStore

from reader_rag.testing.document_store import DocumentStoreContract

SERVER = os.environ.get("READER_RAG_TEST_QDRANT")  # HOST:PORT


class TestEmbedded(DocumentStoreContract):
    def make_store(self, place: Path, **options: Any) -> QdrantStore:
        return QdrantStore(f"qdrant://{place}/passages", **options)

    def break_connection(self, store: Any, place: Path) -> None:
        store.client.close()
