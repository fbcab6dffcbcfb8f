from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.vector_stores.milvus", reason="pip install 'reader-rag[milvus]'")
from reader_rag.connectors.milvus import MilvusStore

from reader_rag.testing.document_store import DocumentStoreContract


class TestEmbedded(DocumentStoreContract):
    def make_store(self, place: Path, **options: Any) -> MilvusStore:
        return MilvusStore(f"milvus://{place}/lite.db/passages", **options)

    def break_connection(self, store: Any, place: Path) -> None:
        from milvus_lite.server_manager import server_manager_instance

        server_manager_instance.release_server(str(place / "lite.db"))
