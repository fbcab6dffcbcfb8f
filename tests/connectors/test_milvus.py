"""Milvus as a document store: embedded, and on a server of Milvus Lite in another process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
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
from reader_rag.testing.document_store import DocumentStoreContract
from reader_rag.testing.vector_store import EAST, found, make_node, where

pytest.importorskip("llama_index.vector_stores.milvus", reason="pip install 'reader-rag[milvus]'")
pytest.importorskip("milvus_lite", reason="pip install 'reader-rag[milvus]'")

from milvus_lite.server_manager import server_manager_instance
from pymilvus import MilvusClient
from reader_rag.connectors.milvus import MilvusStore

_RUN = "from milvus_lite.adapter.grpc.server import run_server; run_server({folder!r}, '127.0.0.1', {port})"
_MOST_TRIES = 200


class Server:
    """A server of Milvus Lite that can be ended and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Does nothing where it runs."""
        if self._process is not None:
            return
        code = _RUN.format(folder=str(self.folder), port=self.port)
        self._process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        for _ in range(_MOST_TRIES):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError("the server does not start")

    def stop(self) -> None:
        """As by a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=60)
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of this module; each has a collection of its own."""
    server = Server(tmp_path_factory.mktemp("milvus") / "server.db")
    yield server
    server.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MilvusStore]:
    with MilvusStore(f"milvus://{tmp_path}/lite.db/passages") as store:
        yield store


class TestEmbedded(DocumentStoreContract):
    def make_store(self, place: Path, **options: Any) -> MilvusStore:
        return MilvusStore(f"milvus://{place}/lite.db/passages", **options)

    def break_connection(self, store: Any, place: Path) -> None:
        server_manager_instance.release_server(str(place / "lite.db"))


class TestServer(DocumentStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make_store(self, place: Path, **options: Any) -> MilvusStore:
        self.server.start()
        return MilvusStore(f"milvus://127.0.0.1:{self.server.port}/{place.name}", **options)

    def break_connection(self, store: Any, place: Path) -> None:
        self.server.stop()


def test_a_server_that_does_not_answer_raises_with_its_url() -> None:
    with pytest.raises(
        StoreConnectionError, match=r"Milvus does not answer at milvus://127\.0\.0\.1:1/birds \(.*\): start it"
    ):
        MilvusStore("milvus://127.0.0.1:1/birds")


def test_a_file_takes_one_process_at_a_time(tmp_path: Path) -> None:
    server = Server(tmp_path / "lite.db")
    server.start()
    try:
        with pytest.raises(StoreBusyError, match="cannot be opened: another process uses it"):
            MilvusStore(f"milvus://{tmp_path}/lite.db/passages")
    finally:
        server.stop()


def test_a_missing_store_raises_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="there is no store at milvus:///"):
        open_store(f"milvus://{tmp_path}/none.db/passages")
    assert not (tmp_path / "none.db").exists()


def test_a_collection_of_another_program_is_refused(tmp_path: Path) -> None:
    client = MilvusClient(str(tmp_path / "lite.db"))
    client.create_collection("theirs", dimension=2)
    with pytest.raises(StoreMismatchError, match="made by another program: use another"):
        MilvusStore(f"milvus://{tmp_path}/lite.db/theirs")


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (where("name", "x", FilterOperator.TEXT_MATCH_INSENSITIVE), "no operator like 'text_match_insensitive'"),
        (where("a name", "x", FilterOperator.CONTAINS), "does not allow 'a name' as the name of a list"),
        (where("name", None), "cannot compare a NoneType"),
    ],
)
def test_filters_without_an_equivalent_in_milvus_raise(store: MilvusStore, condition: Any, message: str) -> None:
    store.add([make_node("east", EAST)])
    with pytest.raises(ConfigError, match=message):
        found(store, EAST, filters=MetadataFilters(filters=[condition]))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("milvus:///tmp/lite/passages", "ends in .db: write milvus:///PATH/NAME.db/passages"),
        ("milvus://localhost/my-passages", "does not begin with a digit: 'my-passages' is not allowed"),
        ("milvus://localhost/1st", "'1st' is not allowed"),
    ],
)
def test_names_that_milvus_does_not_allow_raise(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MilvusStore(url)


def test_importing_the_client_keeps_the_level_of_its_logger() -> None:
    code = (
        "import logging; logging.getLogger('pymilvus').setLevel(logging.CRITICAL); import reader_rag.connectors.milvus;"
        "print(logging.getLogger('pymilvus').getEffectiveLevel() == logging.CRITICAL)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_missing_package_raises_with_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    monkeypatch.delitem(sys.modules, "reader_rag.connectors.milvus")
    with pytest.raises(MissingDependencyError, match=r"pip install 'reader-rag\[milvus\]'"):
        open_store(f"milvus://{tmp_path}/lite.db/passages", must_exist=False)
