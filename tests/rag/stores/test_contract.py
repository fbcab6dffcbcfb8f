"""`FaissStore` keeps the contract of document stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reader_rag.rag import FaissStore
from reader_rag.testing.document_store import DocumentStoreContract


class TestFaissStore(DocumentStoreContract):
    def make_store(self, place: Path, **options: Any) -> FaissStore:
        return FaissStore(place, **options)

    def break_connection(self, store: Any, place: Path) -> None:
        store._file._database.close()
