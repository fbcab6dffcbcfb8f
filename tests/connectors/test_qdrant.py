"""Qdrant as a document store: embedded, and on a server where READER_RAG_TEST_QDRANT names one (HOST:PORT)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilters

from reader_rag.errors import (
    ConfigError,
    MissingDependencyError,
    StoreBusyError,
    StoreConnectionError,
    StoreMismatchError,
    StoreNotFoundError,
)
from reader_rag.rag.stores.location import open_store
from reader_rag.rag.stores.records import DocumentRecord
from reader_rag.testing.document_store import DocumentStoreContract
from reader_rag.testing.vector_store import EAST, NORTH, WEST, found, make_node, texts, where

pytest.importorskip("llama_index.vector_stores.qdrant", reason="pip install 'reader-rag[qdrant]'")

from qdrant_client import QdrantClient, models
from reader_rag.connectors.qdrant import QdrantDatabase, QdrantStore

SERVER = os.environ.get("READER_RAG_TEST_QDRANT")


class TestEmbedded(DocumentStoreContract):
    def make_store(self, place: Path, **options: Any) -> QdrantStore:
        return QdrantStore(f"qdrant://{place}/passages", **options)

    def break_connection(self, store: Any, place: Path) -> None:
        store.client.close()


if SERVER is not None:  # not skipped one by one: that would be fifty lines of a report

    class TestServer(DocumentStoreContract):
        def make_store(self, place: Path, **options: Any) -> QdrantStore:
            return QdrantStore(f"qdrant://{SERVER}/{place.name}", **options)


@pytest.mark.skipif(SERVER is None, reason="READER_RAG_TEST_QDRANT names no server (HOST:PORT)")
def test_the_contract_runs_against_the_server() -> None:
    assert issubclass(TestServer, DocumentStoreContract)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[QdrantStore]:
    with QdrantStore(f"qdrant://{tmp_path}/passages") as store:
        yield store


def test_a_server_that_does_not_answer_raises_with_its_url() -> None:
    with pytest.raises(
        StoreConnectionError, match=r"Qdrant does not answer at qdrant://127\.0\.0\.1:1/birds \(.*\): start it"
    ):
        QdrantStore("qdrant://127.0.0.1:1/birds")


def test_a_folder_takes_one_process_at_a_time(store: QdrantStore, tmp_path: Path) -> None:
    with pytest.raises(StoreBusyError, match="another process uses .*run a Qdrant server"):
        QdrantStore(f"qdrant://{tmp_path}/passages")


def test_a_missing_store_raises_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="there is no store at qdrant:///"):
        open_store(f"qdrant://{tmp_path}/none/passages")
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreNotFoundError, match="there is no store at"):
        open_store(f"qdrant://{tmp_path}/empty/passages")


@pytest.mark.parametrize("vectors", [{}, {"passage": models.VectorParams(size=2, distance=models.Distance.DOT)}])
def test_a_collection_of_another_program_is_refused(tmp_path: Path, vectors: dict[str, Any]) -> None:
    client = QdrantClient(path=str(tmp_path))
    client.create_collection("theirs", vectors_config=vectors)
    client.upsert("theirs", [models.PointStruct(id=1, vector={name: [1.0, 0.0] for name in vectors}, payload={})])
    client.close()
    with pytest.raises(StoreMismatchError, match="made by another program: use another"):
        QdrantStore(f"qdrant://{tmp_path}/theirs")


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (where("name", "x", FilterOperator.TEXT_MATCH_INSENSITIVE), "no operator like 'text_match_insensitive'"),
        (where("name", "x", FilterOperator.GT), "compares only numbers by greater and less, not 'x'"),
        (where("name", None), "cannot compare a NoneType"),
    ],
)
def test_filters_without_an_equivalent_in_qdrant_raise(store: QdrantStore, condition: Any, message: str) -> None:
    store.add([make_node("east", EAST)])
    with pytest.raises(ConfigError, match=message):
        found(store, EAST, filters=MetadataFilters(filters=[condition]))


def test_an_interrupted_ingestion_is_repeated(store: QdrantStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record = DocumentRecord("a", "root", "1")
    store.replace_documents([make_node("old", EAST, "a")], [record])

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(QdrantDatabase, "remove", fail)
        with pytest.raises(KeyboardInterrupt):
            store.replace_documents([make_node("new", NORTH, "a")], [DocumentRecord("a", "root", "2")])
    assert store.documents() == [record]  # so the next ingestion sees that the file has changed
    store.replace_documents([make_node("new", NORTH, "a")], [DocumentRecord("a", "root", "2")])
    assert texts(store.get_nodes()) == ["new"]


def test_of_two_concurrent_ingestions_of_a_document_one_raises(
    store: QdrantStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = QdrantDatabase.remove

    def after_another(database: QdrantDatabase, condition: MetadataFilters) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(QdrantDatabase, "remove", remove)
            store.replace_documents([make_node("theirs", WEST, "a")], [DocumentRecord("a", "root", "theirs")])
        monkeypatch.setattr(QdrantDatabase, "remove", remove)
        remove(database, condition)

    monkeypatch.setattr(QdrantDatabase, "remove", after_another)
    with pytest.raises(StoreBusyError, match="another process ingested the same documents"):
        store.replace_documents([make_node("ours", EAST, "a")], [DocumentRecord("a", "root", "ours")])
    assert (store.get_nodes(), store.documents()) == ([], [])  # nothing is taken for done: the next ingestion does all


def test_a_missing_package_raises_with_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    monkeypatch.delitem(sys.modules, "reader_rag.connectors.qdrant")
    with pytest.raises(MissingDependencyError, match=r"pip install 'reader-rag\[qdrant\]'"):
        open_store(f"qdrant://{tmp_path}/passages", must_exist=False)
