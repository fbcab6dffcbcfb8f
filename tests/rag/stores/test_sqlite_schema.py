"""The tables of a store file: other ones are refused, files of format 1 and 2 are migrated."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery

from reader_rag.errors import StoreCorruptError, StoreError, StoreMismatchError, StoreWriteError
from reader_rag.rag import FaissStore, SizedEmbedding
from reader_rag.rag.ingest import ingest
from reader_rag.rag.stores import sqlite_file as store_file
from reader_rag.rag.stores import sqlite_schema as schema
from reader_rag.rag.stores.records import DocumentRecord, TenantSize
from reader_rag.rag.stores.sqlite_file import FILE_NAME, FORMAT_VERSION
from reader_rag.rag.stores.sqlite_rows import NodeRow
from reader_rag.rag.stores.sqlite_schema import old_checksum

MakeNode = Callable[..., TextNode]
Write = Callable[[str, str | bytes], Path]

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


def test_another_format_version_is_refused(folder: Path) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreMismatchError, match="format version 99, this program reads 1 to 3"):
        FaissStore.open(folder)


FORMAT_2 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tenants (tenant TEXT PRIMARY KEY, version TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (
    tenant TEXT NOT NULL,
    path TEXT NOT NULL,
    root TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (tenant, path)
) WITHOUT ROWID;
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice, also after a delete
    tenant TEXT NOT NULL,
    node_id TEXT NOT NULL,
    ref_doc_id TEXT,
    node_type TEXT NOT NULL,
    node TEXT NOT NULL,
    vector BLOB NOT NULL,                  -- float32, little endian, length 1
    crc INTEGER NOT NULL,                  -- of node and vector
    UNIQUE (tenant, node_id)
);
CREATE INDEX nodes_by_tenant ON nodes (tenant);
PRAGMA application_id = 1381130599;
PRAGMA user_version = 2;
"""


@pytest.fixture
def format_2(folder: Path) -> Path:
    """The store of `folder` in format 2."""
    with FaissStore.open(folder) as store:
        rows = list(store._file.rows.nodes(""))
    path = folder / FILE_NAME
    path.unlink()
    with sqlite3.connect(path) as database:
        database.executescript(FORMAT_2)
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
PRAGMA application_id = 1381130599;
PRAGMA user_version = 1;
"""


@pytest.fixture
def old(tmp_path: Path, make_node: MakeNode) -> Path:
    """A store of format 1: the document `d` with nodes `n0`, `n1`, `n2`; a later `n3` was deleted."""
    made = FaissStore()
    made.add([make_node(f"n{i}", [1.0, float(i)], doc="d", year=2000 + i) for i in range(4)])
    rows: list[NodeRow] = list(made._file.rows.nodes(""))
    folder = tmp_path / "old"
    folder.mkdir()
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.executescript(FORMAT_1)
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
        assert [row.id for row in store._file.rows.nodes("a")] == [5]
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
        assert [row.id for row in store._file.rows.nodes("")] == [5]


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
