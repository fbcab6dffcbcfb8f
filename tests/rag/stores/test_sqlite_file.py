"""The SQLite file of a `FaissStore`: damage, failing disks, killed and concurrent processes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery

from reader_rag.errors import (
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreNotFoundError,
    StoreWriteError,
)
from reader_rag.rag import FaissStore
from reader_rag.rag.stores import sqlite_file as store_file
from reader_rag.rag.stores.sqlite_file import FILE_NAME, StoreFile

MakeNode = Callable[..., TextNode]

# What child processes run first (the file alone: it starts faster than the whole store): more nodes than SQLite keeps
# in memory when its limit is low.
CHILD = """
import os, resource, signal, sys
from pathlib import Path
import numpy as np
from reader_rag.errors import StoreError
from reader_rag.rag.stores.sqlite_file import FILE_NAME, StoreFile
from reader_rag.rag.stores.sqlite_rows import NodeRow
folder = Path(sys.argv[1])
node = '{"id_": "%s", "text": "' + "x" * 2000 + '", "class_name": "TextNode"}'
many = [NodeRow(f"new{i}", None, "TextNode", node % f"new{i}", np.array([0, 1], "f4")) for i in range(300)]
"""


def run_child(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = CHILD + textwrap.dedent(code)
    command = [sys.executable, "-c", source, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def node_ids(folder: Path) -> list[str]:
    with FaissStore.open(folder) as store:
        return [node.node_id for node in store.get_nodes()]


def test_a_store_that_does_not_exist_is_not_found_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="ingest documents into it first"):
        FaissStore.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.25, 0.5, 0.75, 0.99])
def test_a_truncated_file_is_refused(folder: Path, share: float) -> None:
    path = folder / FILE_NAME
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(StoreCorruptError, match="restore it from a backup, or delete it"):
        FaissStore.open(folder)


def test_a_truncated_file_is_not_replaced_by_an_empty_store(folder: Path) -> None:
    os.truncate(folder / FILE_NAME, 0)
    with pytest.raises(StoreCorruptError):
        FaissStore(folder)


def test_a_file_that_is_not_a_database_is_refused(folder: Path) -> None:
    (folder / FILE_NAME).write_text("these are my notes\n" * 500)
    with pytest.raises(StoreCorruptError, match="not a store"):
        FaissStore.open(folder)


def test_another_programs_database_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")
    before = path.read_bytes()
    with pytest.raises(StoreCorruptError, match="another program"):
        FaissStore(tmp_path)
    assert path.read_bytes() == before


def test_garbage_in_the_middle_of_the_file_is_refused(folder: Path) -> None:
    path = folder / FILE_NAME
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = os.urandom(4096)
    path.write_bytes(data)
    with pytest.raises(StoreCorruptError):
        FaissStore.open(folder)


def test_a_full_disk_while_writing_changes_neither_disk_nor_memory(folder: Path, make_node: MakeNode) -> None:
    with FaissStore.open(folder) as store:
        pages = store._file._database.execute("PRAGMA page_count").fetchone()[0]
        store._file._database.execute(f"PRAGMA max_page_count = {pages + 1}")
        before = [node.node_id for node in store.get_nodes()]
        with pytest.raises(StoreWriteError, match="intact: make room"):
            store.add([make_node(f"new{i}", [0.0, 1.0], text="x" * 2000) for i in range(100)])
        assert [node.node_id for node in store.get_nodes()] == before
        store._file._database.execute("PRAGMA max_page_count = 1000000")
        store.add([make_node("later", [0.0, 1.0])])
    assert node_ids(folder) == [*before, "later"]


def test_a_read_only_store_is_not_written(folder: Path, make_node: MakeNode) -> None:
    with FaissStore.open(folder) as store:
        store._file._database.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreWriteError, match="check permissions"):
            store.add([make_node("new", [0.0, 1.0])])
        assert store.num_nodes == 40


def test_a_file_size_limit_hit_by_the_commit_leaves_the_last_commit(folder: Path) -> None:
    before = node_ids(folder)
    child = run_child(
        """
        file = StoreFile.open(folder)
        size = os.path.getsize(folder / FILE_NAME) + 20_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            with file.writing():
                for row in many:
                    file.rows.insert_node("", row)
        except StoreError as error:
            with file.reading():
                print(type(error).__name__, len(list(file.rows.nodes(""))))
        """,
        folder,
    )
    assert child.stdout.split() == ["StoreWriteError", "40"], child.stderr
    assert node_ids(folder) == before


def test_no_store_is_made_on_a_full_disk(tmp_path: Path) -> None:
    child = run_child(
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            StoreFile.create(folder)
        except StoreError as error:
            print(type(error).__name__, os.listdir(folder))
        """,
        tmp_path / "new",
    )
    assert child.stdout == "StoreWriteError []\n", child.stderr


def test_a_process_killed_in_the_middle_of_a_commit_leaves_the_last_commit(folder: Path) -> None:
    before, bytes_before = node_ids(folder), (folder / FILE_NAME).read_bytes()
    child = run_child(
        """
        file = StoreFile.open(folder)
        file._database.execute("PRAGMA cache_size = 5")  # so that new pages reach the file before the commit
        file._commit = lambda: os.kill(os.getpid(), signal.SIGKILL)
        with file.writing():
            for row in many:
                file.rows.insert_node("", row)
        """,
        folder,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert (folder / FILE_NAME).read_bytes() != bytes_before
    assert (folder / f"{FILE_NAME}-journal").exists()
    assert node_ids(folder) == before


def test_a_process_sees_what_another_has_committed(folder: Path) -> None:
    with FaissStore.open(folder) as store:
        assert store.num_nodes == 40
        child = run_child(
            """
            file = StoreFile.open(folder)
            with file.writing():
                file.rows.delete_nodes("", [1])
                file.rows.insert_node("", many[4])
                file.rows.new_version("")
            """,
            folder,
        )
        assert child.returncode == 0, child.stderr
        ids = [node.node_id for node in store.get_nodes()]
        assert ids == [*(f"n{i}" for i in range(1, 40)), "new4"]
        nearest = store.query(VectorStoreQuery(query_embedding=[0.0, 1.0], similarity_top_k=1))
        assert nearest.ids == ["new4"]


def test_a_writer_waits_for_another_one_and_then_raises_that_the_store_is_busy(
    folder: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "_BUSY_TIMEOUT_S", 0.05)
    with FaissStore.open(folder) as store, FaissStore.open(folder) as other:
        with other._file.writing(), pytest.raises(StoreBusyError, match="another process"):
            store.add([make_node("late", [0.0, 1.0])])
        assert store.num_nodes == 40
        store.add([make_node("late", [0.0, 1.0])])
        assert other.num_nodes == 41


def test_two_processes_that_make_the_store_at_once_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    make = store_file._publish_empty

    def slower(place: Path) -> None:
        make(place)
        with FaissStore.open(place) as quick:
            quick.add([TextNode(id_="first", text="a", embedding=[1.0, 0.0])])
        make(place)

    monkeypatch.setattr(store_file, "_publish_empty", slower)
    with FaissStore(folder) as store:
        assert store.num_nodes == 1
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]


def test_a_closed_store_raises(folder: Path) -> None:
    store = FaissStore.open(folder)
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.get_nodes()


def test_a_folder_with_the_files_name_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StoreNotFoundError, match="there is no store"):
        StoreFile.open(tmp_path)


def test_a_folder_without_permission_raises_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: bool) -> os.stat_result:  # root may enter everything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(StoreError, match="cannot be opened .Permission denied"):
        FaissStore.open(tmp_path)
    with pytest.raises(StoreError, match="Permission denied"):
        FaissStore(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_a_special_file_beside_a_store_is_refused_and_never_waited_for(folder: Path, suffix: str) -> None:
    FaissStore(folder).close()
    beside = folder / f"{FILE_NAME}{suffix}"
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        make(beside)
        with pytest.raises(StoreCorruptError, match="is no regular file; remove it"):
            FaissStore.open(folder)
        beside.rmdir() if beside.is_dir() else beside.unlink()
    FaissStore.open(folder).close()
