"""The SQLite file of a `FaissStore`: damage, failing disks, killed and concurrent processes, and format 1."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery

from reader_rag.errors import (
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreWriteError,
)
from reader_rag.rag import FaissStore, SizedEmbedding
from reader_rag.rag.ingest import ingest
from reader_rag.rag.stores import sqlite_file as store_file
from reader_rag.rag.stores import sqlite_schema as schema
from reader_rag.rag.stores.records import DocumentRecord, TenantSize
from reader_rag.rag.stores.sqlite_file import FILE_NAME, FORMAT_VERSION, NodeRow, StoreFile
from reader_rag.rag.stores.sqlite_schema import old_checksum

MakeNode = Callable[..., TextNode]
Write = Callable[[str, str | bytes], Path]

# What child processes run first (the file alone: it starts faster than the whole store): more nodes than SQLite keeps
# in memory when its limit is low.
CHILD = """
import os, resource, signal, sys
from pathlib import Path
import numpy as np
from reader_rag.errors import StoreError
from reader_rag.rag.stores.sqlite_file import FILE_NAME, NodeRow, StoreFile
folder = Path(sys.argv[1])
node = '{"id_": "%s", "text": "' + "x" * 2000 + '", "class_name": "TextNode"}'
many = [NodeRow(f"new{i}", None, "TextNode", node % f"new{i}", np.array([0, 1], "f4")) for i in range(300)]
"""


def run_child(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = CHILD + textwrap.dedent(code)
    command = [sys.executable, "-c", source, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path, make_node: MakeNode) -> Path:
    """A closed store with 40 nodes."""
    with FaissStore(tmp_path / "store") as store:
        store.add([make_node(f"n{i}", [1.0, float(i)], text="word " * 100) for i in range(40)])
    return tmp_path / "store"


def node_ids(folder: Path) -> list[str]:
    with FaissStore.open(folder) as store:
        return [node.node_id for node in store.get_nodes()]


def test_a_store_that_does_not_exist_is_not_found_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="reader-rag ingest"):
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


def test_another_format_version_is_refused(folder: Path) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreMismatchError, match="format version 99, this program reads 1 to 3"):
        FaissStore.open(folder)


CHANGES = [
    "UPDATE nodes SET tenant = 'other' WHERE node_id = 'n3'",
    "UPDATE nodes SET node_id = 'm3' WHERE node_id = 'n3'",
    "UPDATE nodes SET ref_doc_id = 'other' WHERE node_id = 'n3'",
    "UPDATE nodes SET node_type = 'Other' WHERE node_id = 'n3'",
    "UPDATE nodes SET node = 'null' WHERE node_id = 'n3'",
    "UPDATE nodes SET node = 5 WHERE node_id = 'n3'",
    "UPDATE nodes SET vector = 'text' WHERE node_id = 'n3'",
    "UPDATE nodes SET vector = 5 WHERE node_id = 'n3'",
    "UPDATE nodes SET vector = x'00' WHERE node_id = 'n3'",
    "UPDATE nodes SET crc = 'x' WHERE node_id = 'n3'",
    "DELETE FROM nodes WHERE node_id = 'n3'",
    "UPDATE documents SET hash = 'x'",
    "UPDATE documents SET root = '/'",
    "UPDATE documents SET path = path || 'x'",
    "UPDATE documents SET tenant = 'other'; UPDATE documents SET tenant = ''",
    "UPDATE documents SET hash = x'ff'",
    "UPDATE meta SET value = '3' WHERE key = 'dimension'",
    "UPDATE meta SET value = 'x' WHERE key = 'dimension'",
    "UPDATE meta SET value = x'ff' WHERE key = 'dimension'",
    "UPDATE meta SET key = 'dimensions' WHERE key = 'dimension'",
    "DELETE FROM meta WHERE key = 'dimension'",
    "DELETE FROM meta",
    "UPDATE tenants SET version = 'x'",
    "UPDATE tenants SET nodes = 3",
    "UPDATE tenants SET nodes = 'x'",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_row_is_detected(folder: Path, change: str) -> None:
    with FaissStore(folder) as store:
        store._file._database.execute("BEGIN")
        store._file.put_documents("", [DocumentRecord("d", "root", "hash")])
        store._file._database.execute("COMMIT")
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.executescript(change)
    unchanged = change.startswith("UPDATE documents SET tenant")
    try:
        with FaissStore.open(folder) as store:
            store.query(VectorStoreQuery([1.0, 0.0], 10))
            store.get_nodes()
            store.documents()
        found = False
    except StoreError:
        found = True
    assert found != unchanged


SCHEMAS = [
    "CREATE TRIGGER copies AFTER INSERT ON nodes BEGIN INSERT INTO nodes (tenant, node_id, ref_doc_id, node_type, node,"
    " vector, crc) VALUES ('spy', NEW.node_id, NEW.ref_doc_id, NEW.node_type, NEW.node, NEW.vector, NEW.crc); END",
    "CREATE TEMP TABLE harmless (x); CREATE VIEW extra AS SELECT 1",
    "ALTER TABLE meta RENAME TO kept; CREATE VIEW meta AS"
    " WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS key, x AS value FROM n",
    "DROP INDEX nodes_by_tenant",
    "CREATE INDEX more ON nodes (node)",
    "ALTER TABLE nodes ADD COLUMN more TEXT",
    "ALTER TABLE documents RENAME COLUMN root TO roots",
    "CREATE TABLE more (x)",
    "DROP TABLE documents; CREATE TABLE documents (tenant, path, root, hash, crc)",
    "DROP TABLE tenants",
    "CREATE VIRTUAL TABLE words USING fts5(x)",
]


@pytest.mark.parametrize("change", SCHEMAS)
def test_another_schema_is_refused_before_anything_is_read(folder: Path, change: str) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        try:
            database.executescript(change)
        except sqlite3.OperationalError as error:
            pytest.skip(f"this SQLite cannot do it: {error}")
    with pytest.raises(StoreCorruptError, match="has other tables than a store"):
        FaissStore.open(folder)
    with pytest.raises(StoreCorruptError, match="has other tables than a store"):
        FaissStore(folder)


def test_flipped_bytes_raise_store_errors_only(folder: Path) -> None:
    path = folder / FILE_NAME
    whole = path.read_bytes()
    with FaissStore.open(folder) as store:
        expected = [node.to_dict() for node in store.get_nodes()]
    random = np.random.default_rng(7)
    found = 0
    for at in random.integers(0, len(whole), 150):
        damaged = bytearray(whole)
        damaged[at] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        try:
            with FaissStore.open(folder) as store:
                store.query(VectorStoreQuery([1.0, 0.0], 3))
                nodes = [node.to_dict() for node in store.get_nodes()]
                store.documents()
                store.tenants()
            assert nodes == expected
        except StoreError:
            found += 1
    assert found > 30


@pytest.fixture
def format_2(folder: Path) -> Path:
    """The store of `folder` in format 2."""
    with FaissStore.open(folder) as store:
        rows = list(store._file.nodes(""))
    path = folder / FILE_NAME
    path.unlink()
    with sqlite3.connect(path) as database:
        tables = ";".join((schema._META, *schema._TABLES_2))
        database.executescript(f"{tables}; PRAGMA application_id = {0x52526167}; PRAGMA user_version = 2;")
        database.execute("INSERT INTO meta VALUES ('dimension', ?)", (str(len(rows[0].vector)),))
        database.execute("INSERT INTO tenants VALUES ('', 'v')")
        database.execute("INSERT INTO documents VALUES ('', 'd', 'root', 'hash')")
        for row in rows:
            values = (row.id, "", row.node_id, row.ref_doc_id, row.node_type, row.node, row.blob)
            crc = old_checksum(row.node, row.blob)
            database.execute("INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, crc))
    return folder


def test_a_file_of_format_2_is_migrated_whole_or_not_at_all(format_2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (format_2 / FILE_NAME).read_bytes()
    for done in range(len(schema._FROM_FORMAT_2)):
        with monkeypatch.context() as patch:
            patch.setattr(schema, "_FROM_FORMAT_2", (*schema._FROM_FORMAT_2[:done], "INSERT INTO nowhere"))
            with pytest.raises(StoreError):
                FaissStore.open(format_2)
        assert format_of(format_2) == 2
    with sqlite3.connect(f"file:{format_2 / FILE_NAME}?mode=ro", uri=True) as database:
        ids = [row[0] for row in database.execute("SELECT node_id FROM nodes ORDER BY id")]
    assert len(before) > 0
    with FaissStore.open(format_2) as store:
        assert [node.node_id for node in store.get_nodes()] == ids
        assert store.documents() == [DocumentRecord("d", "root", "hash")]
    assert format_of(format_2) == 3
    with FaissStore.open(format_2) as store:
        assert len(store.get_nodes()) == len(ids)


@pytest.mark.parametrize("column", ["vector", "node"])
def test_a_flipped_byte_in_a_node_is_detected(folder: Path, column: str) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        old = database.execute(f"SELECT {column} FROM nodes WHERE node_id = 'n7'").fetchone()[0]
        new = old.replace("word", "ward", 1) if isinstance(old, str) else bytes([old[0] ^ 1]) + old[1:]
        database.execute(f"UPDATE nodes SET {column} = ? WHERE node_id = 'n7'", (new,))
    with pytest.raises(StoreCorruptError, match="node n7 is damaged"):
        FaissStore.open(folder)


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
                    file.insert_node("", row)
        except StoreError as error:
            with file.reading():
                print(type(error).__name__, len(list(file.nodes(""))))
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
                file.insert_node("", row)
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
                file.delete_nodes("", [1])
                file.insert_node("", many[4])
                file.new_version("")
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


FORMAT_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (path TEXT PRIMARY KEY, root TEXT NOT NULL, hash TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice, also after a delete
    node_id TEXT NOT NULL UNIQUE,
    ref_doc_id TEXT,
    node_type TEXT NOT NULL,
    node TEXT NOT NULL,
    vector BLOB NOT NULL,                  -- float32, little endian, length 1
    crc INTEGER NOT NULL                   -- of node and vector
);
CREATE INDEX nodes_by_document ON nodes (ref_doc_id);
PRAGMA application_id = 1381105000;
PRAGMA user_version = 1;
"""


@pytest.fixture
def old(tmp_path: Path, make_node: MakeNode) -> Path:
    """A store of format 1: the document `d` with nodes `n0`, `n1`, `n2`; a later `n3` was deleted."""
    made = FaissStore()
    made.add([make_node(f"n{i}", [1.0, float(i)], doc="d", year=2000 + i) for i in range(4)])
    rows: list[NodeRow] = list(made._file.nodes(""))
    folder = tmp_path / "old"
    folder.mkdir()
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.executescript(FORMAT_1.replace("1381105000", str(0x52526167)))
        database.execute("INSERT INTO meta VALUES ('dimension', '2')")
        database.execute("INSERT INTO documents VALUES ('d', 'root', 'hash')")
        columns = "(id, node_id, ref_doc_id, node_type, node, vector, crc)"
        for row in rows:
            values = (
                row.id,
                row.node_id,
                row.ref_doc_id,
                row.node_type,
                row.node,
                row.blob,
                old_checksum(row.node, row.blob),
            )
            database.execute(f"INSERT INTO nodes {columns} VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        database.execute("DELETE FROM nodes WHERE node_id = 'n3'")
    return folder


def format_of(folder: Path) -> int:
    with sqlite3.connect(folder / FILE_NAME) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_a_file_of_format_1_belongs_to_the_default_tenant(old: Path, make_node: MakeNode) -> None:
    with FaissStore.open(old) as store:
        assert store.query(VectorStoreQuery([1.0, 0.0], 10)).ids == ["n0", "n1", "n2"]
        assert [(d.path, d.root, d.hash) for d in store.documents()] == [("d", "root", "hash")]
        assert store.tenants() == [TenantSize("", 1, 3)]
        assert store.get_nodes(["n2"])[0].metadata == {"year": 2002}
        store.for_tenant("a").add([make_node("n0", [1.0, 0.0], doc="d", text="of a")])
        assert [row.id for row in store._file.nodes("a")] == [5]
    assert format_of(old) == FORMAT_VERSION
    with FaissStore.open(old) as store:
        assert store.num_nodes == 3
        assert [node.get_content() for node in store.for_tenant("a").get_nodes()] == ["of a"]


def test_a_migrated_file_has_the_tables_of_a_new_one(old: Path, tmp_path: Path) -> None:
    def schema(folder: Path) -> list[tuple[str, str]]:
        with sqlite3.connect(folder / FILE_NAME) as database:
            return sorted(database.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))

    FaissStore.open(old).close()
    FaissStore(tmp_path / "new").close()
    assert schema(old) == schema(tmp_path / "new")


def test_ids_continue_after_a_migration_also_where_all_nodes_were_deleted(old: Path, make_node: MakeNode) -> None:
    with sqlite3.connect(old / FILE_NAME) as database:
        database.execute("DELETE FROM nodes")
    with FaissStore.open(old) as store:
        store.add([make_node("new", [1.0, 0.0])])
        assert [row.id for row in store._file.nodes("")] == [5]


def test_two_processes_may_migrate_a_file_at_once(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate = store_file.StoreFile._migrate

    def behind_another(file: store_file.StoreFile) -> None:
        monkeypatch.setattr(store_file.StoreFile, "_migrate", migrate)
        FaissStore.open(old).close()
        migrate(file)

    monkeypatch.setattr(store_file.StoreFile, "_migrate", behind_another)
    with FaissStore.open(old) as store:
        assert store.num_nodes == 3


@pytest.mark.parametrize("done", [1, 4, 6, 10])
def test_an_interrupted_migration_leaves_the_file_unchanged(
    old: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    before = (old / FILE_NAME).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(schema, "_FROM_FORMAT_1", (*schema._FROM_FORMAT_1[:done], "INSERT INTO nowhere"))
        with pytest.raises(StoreWriteError, match="intact"):
            FaissStore.open(old)
    assert (old / FILE_NAME).read_bytes() == before
    with FaissStore.open(old) as store:
        assert store.num_nodes == 3


def test_a_damaged_file_of_format_1_is_refused_and_unchanged(old: Path) -> None:
    path = old / FILE_NAME
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreCorruptError):
        FaissStore.open(old)
    assert int.from_bytes(path.read_bytes()[60:64]) == 1  # the format, where SQLite writes it


def test_a_store_of_format_1_can_be_ingested_into(
    old: Path, write: Write, tmp_path: Path, embedding: SizedEmbedding, wide_embedding: SizedEmbedding
) -> None:
    write("one.txt", "first")
    with sqlite3.connect(old / FILE_NAME) as database:
        database.execute("DELETE FROM nodes")
        database.execute("DELETE FROM documents")
        database.execute("DELETE FROM meta")
    for tenant in ("", "a"):
        assert ingest(tmp_path / "docs", old, embed_model=embedding, tenant=tenant).total_chunks == 1
    with pytest.raises(StoreMismatchError):
        ingest(tmp_path / "docs", old, embed_model=wide_embedding, tenant="b")
