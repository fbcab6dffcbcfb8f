"""What is one tenant's is found, changed and removed on its behalf alone."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import MockLLM
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from scripted_engine import ScriptedEngine
from waiting import join

from reader_rag.errors import (
    ConfigError,
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreMismatchError,
    StoreWriteError,
)
from reader_rag.llm import ReaderLLM
from reader_rag.rag import (
    FaissStore,
    IngestReport,
    SizedEmbedding,
    make_chat_engine,
    make_query_engine,
    make_retriever,
    open_store,
)
from reader_rag.rag.files import content_hash
from reader_rag.rag.ingest import ingest
from reader_rag.rag.stores import sqlite_file as store_file
from reader_rag.rag.stores.records import DocumentRecord, TenantSize
from reader_rag.rag.stores.sqlite_file import FILE_NAME, FORMAT_VERSION, NodeRow

MakeNode = Callable[..., TextNode]
Write = Callable[[str, str | bytes], Path]
BAD_NAMES = ["two\nlines", "nul\0", "bell\x07", "esc\x1b[31m", "hidden\u200b", "half\ud800", "x" * 257]


def ask(store: FaissStore, vector: list[float], k: int = 10, **conditions: Any) -> VectorStoreQueryResult:
    return store.query(VectorStoreQuery(query_embedding=vector, similarity_top_k=k, **conditions))


def texts(store: FaissStore) -> list[str]:
    return [node.get_content() for node in store.get_nodes()]


@pytest.fixture
def store(make_node: MakeNode) -> FaissStore:
    """Two tenants with the same two node ids, of the same document, under other texts and vectors."""
    store = FaissStore()
    store.for_tenant("a").add(
        [make_node("one", [1.0, 0.0], doc="d", text="a one"), make_node("two", [0.0, 1.0], doc="d", text="a two")]
    )
    store.for_tenant("b").add(
        [make_node("one", [0.0, 1.0], doc="d", text="b one"), make_node("two", [1.0, 0.0], doc="d", text="b two")]
    )
    return store


# -- the store --


def test_a_tenant_finds_its_own_nodes_and_no_others(store: FaissStore) -> None:
    a, b = store.for_tenant("a"), store.for_tenant("b")
    assert [node.get_content() for node in ask(a, [1.0, 0.0]).nodes or []] == ["a one", "a two"]
    assert [node.get_content() for node in ask(b, [1.0, 0.0]).nodes or []] == ["b two", "b one"]
    assert (texts(a), texts(b)) == (["a one", "a two"], ["b one", "b two"])
    assert texts(store) == []
    assert [node.get_content() for node in a.get_nodes(["one"], doc_ids=["d"])] == ["a one"]
    assert [node.get_content() for node in ask(a, [1.0, 0.0], doc_ids=["d"], node_ids=["two"]).nodes or []] == ["a two"]
    assert (store.num_nodes, a.num_nodes, b.num_nodes) == (0, 2, 2)


def test_top_k_is_filled_from_the_tenants_own_nodes(store: FaissStore, make_node: MakeNode) -> None:
    store.for_tenant("b").add([make_node(f"near{i}", [1.0, i / 1000]) for i in range(200)])
    assert ask(store.for_tenant("a"), [1.0, 0.0], 2).ids == ["one", "two"]


def test_each_tenant_is_searched_in_an_index_of_its_own(store: FaissStore, make_node: MakeNode) -> None:
    a, b = store.for_tenant("a"), store.for_tenant("b")
    b.add([make_node(f"more{i}", [1.0, 1.0]) for i in range(50)])
    assert (a.client.ntotal, b.client.ntotal) == (2, 52)
    assert store.for_tenant("nobody").client is None


def test_changes_of_one_tenant_leave_anothers_documents(store: FaissStore, make_node: MakeNode) -> None:
    a, b = store.for_tenant("a"), store.for_tenant("b")
    a.add([make_node("one", [0.5, 0.5], doc="d", text="a new one")])
    assert (sorted(texts(a)), texts(b)) == (["a new one", "a two"], ["b one", "b two"])
    a.delete("d")
    assert (texts(a), texts(b)) == ([], ["b one", "b two"])
    b.delete_nodes(["one"])
    store.delete("d")
    store.delete_nodes(["two"])
    assert texts(b) == ["b two"]


def test_a_tenant_is_removed_with_all_it_has(tmp_path: Path, make_node: MakeNode) -> None:
    with FaissStore(tmp_path) as store:
        for name in ("a", "b"):
            node = make_node(f"{name}1", [1.0, 0.0], doc="d", text=f"secret of {name}")
            record = DocumentRecord("d", "d", "hash")
            store.for_tenant(name).replace_documents([node], [record])
        store.for_tenant("a").clear()
        assert store.tenants() == [TenantSize("b", 1, 1)]
        assert store.for_tenant("a").documents() == []
        assert len(store.for_tenant("b").documents()) == 1
        with pytest.raises(StoreMismatchError, match="vectors of 2 numbers"):
            store.for_tenant("a").add([make_node("wide", [1.0, 0.0, 0.0])])
        store.for_tenant("b").clear()
        store.for_tenant("a").add([make_node("wide", [1.0, 0.0, 0.0])])
        assert store.tenants() == [TenantSize("a", 0, 1)]
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        assert database.execute("SELECT tenant FROM tenants").fetchall() == [("a",)]


def test_asking_or_deleting_for_an_unknown_tenant_leaves_no_trace(tmp_path: Path, store: FaissStore) -> None:
    nobody = store.for_tenant("nobody")
    assert (ask(nobody, [1.0, 0.0]).ids, texts(nobody), nobody.documents()) == ([], [], [])
    nobody.delete("d")
    nobody.clear()
    assert [size.tenant for size in store.tenants()] == ["a", "b"]
    assert "nobody" not in store._indexes._loaded
    store.persist(str(tmp_path / "copy"))
    assert b"nobody" not in (tmp_path / "copy" / FILE_NAME).read_bytes()


def test_a_copy_of_the_store_holds_all_tenants(store: FaissStore, tmp_path: Path) -> None:
    store.for_tenant("a").persist(str(tmp_path))
    with FaissStore.open(tmp_path, tenant="b") as copy:
        assert (copy.tenant, texts(copy), texts(copy.for_tenant("a"))) == ("b", ["b one", "b two"], ["a one", "a two"])


def test_names_are_compared_character_by_character(make_node: MakeNode) -> None:
    names = ["", " ", "a", "A", "a ", "é", "e\u0301", "'; DROP TABLE nodes; --", "%", "_", "x" * 256]
    store = FaissStore()
    for name in names:
        store.for_tenant(name).add([make_node("n", [1.0, 0.0], text=f"of {name!r}")])
    assert [texts(store.for_tenant(name)) for name in names] == [[f"of {name!r}"] for name in names]
    assert [size.tenant for size in store.tenants()] == sorted(names)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_deceive_are_refused(name: str, tmp_path: Path, embedding: SizedEmbedding) -> None:
    (tmp_path / "a.txt").write_text("text")
    store, llm = FaissStore(), ReaderLLM.from_engine(ScriptedEngine())
    for use in (
        lambda: FaissStore(tmp_path / "store", tenant=name),
        lambda: FaissStore.open(tmp_path / "store", tenant=name),
        lambda: store.for_tenant(name),
        lambda: ingest([tmp_path], tmp_path / "store", embed_model=embedding, tenant=name),
        lambda: make_retriever(store, embedding, tenant=name),
        lambda: make_query_engine(store, llm, embedding, tenant=name),
        lambda: make_chat_engine(store, llm, embedding, tenant=name),
        lambda: llm.for_tenant(name),
    ):
        with pytest.raises(ConfigError, match="a tenant's name") as error:
            use()
        assert str(error.value).isprintable()
    assert not (tmp_path / "store").exists()


def test_a_name_that_is_no_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a string, not int"):
        FaissStore().for_tenant(7)  # type: ignore[arg-type]


def test_what_another_process_commits_for_a_tenant_is_seen_and_loads_no_other_tenant_again(
    tmp_path: Path, make_node: MakeNode
) -> None:
    with FaissStore(tmp_path) as here, FaissStore(tmp_path) as elsewhere:
        here.for_tenant("a").add([make_node("n", [1.0, 0.0])])
        here.for_tenant("b").add([make_node("n", [1.0, 0.0])])
        of_a, of_b = here.for_tenant("a").client, here.for_tenant("b").client
        elsewhere.for_tenant("b").add([make_node("later", [0.0, 1.0])])
        assert ask(here.for_tenant("b"), [0.0, 1.0], 1).ids == ["later"]
        assert here.for_tenant("a").client is of_a
        assert here.for_tenant("b").client is not of_b
        elsewhere.for_tenant("b").clear()
        assert ask(here.for_tenant("b"), [0.0, 1.0]).ids == []
        elsewhere.for_tenant("b").add([make_node("again", [0.0, 1.0])])
        assert ask(here.for_tenant("b"), [0.0, 1.0]).ids == ["again"]
        assert here.for_tenant("a").client is of_a


def test_a_store_that_another_process_emptied_and_made_for_wider_vectors(tmp_path: Path, make_node: MakeNode) -> None:
    with FaissStore(tmp_path) as here, FaissStore(tmp_path) as elsewhere:
        a = here.for_tenant("a")
        a.add([make_node("n", [1.0, 0.0])])
        a.delete_nodes(["n"])
        elsewhere.clear()
        elsewhere.for_tenant("b").add([make_node("wide", [1.0, 0.0, 0.0])])
        a.add([make_node("wide", [0.0, 0.0, 1.0])])
        assert ask(a, [0.0, 0.0, 1.0]).ids == ["wide"]
        assert here.dimension == 3


def test_a_tenants_nodes_are_loaded_when_they_are_asked_for_and_damage_in_them_hinders_no_other(
    tmp_path: Path, store: FaissStore
) -> None:
    store.persist(str(tmp_path))
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("UPDATE nodes SET node = replace(node, 'b one', 'b bad') WHERE tenant = 'b'")
    with FaissStore.open(tmp_path, tenant="a") as opened:
        assert list(opened._indexes._loaded) == ["a"]
        assert texts(opened) == ["a one", "a two"]
        with pytest.raises(StoreCorruptError, match="node one is damaged"):
            opened.for_tenant("b").get_nodes()
        assert ask(opened, [1.0, 0.0], 1).ids == ["one"]


def test_a_write_that_fails_leaves_every_tenant_as_it_was(store: FaissStore, make_node: MakeNode) -> None:
    a, b = store.for_tenant("a"), store.for_tenant("b")
    pages = store._file._database.execute("PRAGMA page_count").fetchone()[0]
    store._file._database.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(StoreWriteError):
        a.add([make_node(f"new{i}", [0.0, 1.0], text="x" * 2000) for i in range(100)])
    assert (texts(a), texts(b)) == (["a one", "a two"], ["b one", "b two"])
    assert (a.client.ntotal, b.client.ntotal) == (2, 2)


def test_closing_one_closes_all(store: FaissStore) -> None:
    store.for_tenant("a").close()
    with pytest.raises(StoreError, match="is closed"):
        store.for_tenant("b").get_nodes()


def test_threads_of_many_tenants_at_once(tmp_path: Path, make_node: MakeNode) -> None:
    store = FaissStore(tmp_path)
    failures: list[BaseException] = []

    def work(tenant: str) -> None:
        try:
            own = store.for_tenant(tenant)
            for i in range(8):
                own.add([make_node(f"n{i}", [1.0, float(i)], doc=f"d{i}", text=f"{tenant} {i}")])
                found = ask(own, [1.0, float(i)], 1)
                assert [node.get_content() for node in found.nodes or []] == [f"{tenant} {i}"]
            own.delete("d3")
            assert texts(own) == [f"{tenant} {i}" for i in range(8) if i != 3]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("", "a", "b", "c")]
    for thread in threads:
        thread.start()
    join(*threads)
    assert failures == []
    assert store.tenants() == [TenantSize(name, 0, 7) for name in ("", "a", "b", "c")]


def test_an_ordinary_llama_index_keeps_to_the_tenant(embedding: SizedEmbedding) -> None:
    store = FaissStore()
    for name, text in (("a", "cats purr"), ("b", "cats bite")):
        context = StorageContext.from_defaults(vector_store=store.for_tenant(name))
        VectorStoreIndex.from_documents(
            [Document(text=text, id_="cats")], storage_context=context, embed_model=embedding
        )
    index = VectorStoreIndex.from_vector_store(store.for_tenant("b"), embed_model=embedding)
    assert [node.get_content() for node in index.as_retriever().retrieve("cats")] == ["cats bite"]
    index.delete_ref_doc("cats")
    assert (texts(store.for_tenant("a")), texts(store.for_tenant("b"))) == (["cats purr"], [])


class ApartMachine(RuleBasedStateMachine):
    """Tenants of one store against stores of their own: every answer is the same, to the last bit."""

    tenants = st.sampled_from(["", "a", "b"])
    vectors = st.lists(st.integers(-3, 3), min_size=3, max_size=3).filter(any)
    names = st.sampled_from([f"n{i}" for i in range(6)])
    documents = st.sampled_from(["x", "y"])

    @initialize()
    def start(self) -> None:
        self.shared = FaissStore()
        # Never cleared to the end, so that both keep the length of their vectors.
        self.shared.for_tenant("keeper").add([TextNode(id_="k", text="k", embedding=[1.0, 0.0, 0.0])])
        self.apart = {name: FaissStore() for name in ("", "a", "b")}

    def both(self, tenant: str) -> tuple[FaissStore, FaissStore]:
        return self.shared.for_tenant(tenant), self.apart[tenant]

    @rule(tenant=tenants, batch=st.lists(st.tuples(names, documents, vectors), max_size=4))
    def add(self, tenant: str, batch: list[tuple[str, str, list[int]]]) -> None:
        for store in self.both(tenant):
            nodes = []
            for name, document, vector in batch:
                node = TextNode(id_=name, text=f"{tenant} {name}", embedding=[float(x) for x in vector])
                node.metadata = {"length": sum(vector)}
                node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
                nodes.append(node)
            store.add(nodes)

    @rule(tenant=tenants, document=documents)
    def delete(self, tenant: str, document: str) -> None:
        for store in self.both(tenant):
            store.delete(document)

    @rule(tenant=tenants, chosen=st.lists(names, max_size=3))
    def delete_nodes(self, tenant: str, chosen: list[str]) -> None:
        for store in self.both(tenant):
            store.delete_nodes(chosen)

    @rule(tenant=tenants)
    def clear(self, tenant: str) -> None:
        for store in self.both(tenant):
            store.clear()

    @rule(tenant=tenants)
    def load_again(self, tenant: str) -> None:
        self.shared._indexes.unload(tenant)

    @rule(tenant=tenants, vector=vectors, k=st.integers(1, 8), least=st.none() | st.integers(-3, 3))
    def query(self, tenant: str, vector: list[int], k: int, least: int | None) -> None:
        some = None
        if least is not None:
            some = MetadataFilters(filters=[MetadataFilter(key="length", value=least, operator=">=")])
        found, expected = (ask(store, [float(x) for x in vector], k, filters=some) for store in self.both(tenant))
        assert (found.ids, found.similarities) == (expected.ids, expected.similarities)
        assert found.nodes == expected.nodes

    @rule(tenant=tenants)
    def get_nodes(self, tenant: str) -> None:
        shared, apart = self.both(tenant)
        assert shared.get_nodes() == apart.get_nodes()


ApartMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_a_tenant_is_answered_as_if_there_were_no_others = ApartMachine.TestCase


# -- files of the format before --

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
            values = (row.id, row.node_id, row.ref_doc_id, row.node_type, row.node, row.blob, row.crc)
            database.execute(f"INSERT INTO nodes {columns} VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        database.execute("DELETE FROM nodes WHERE node_id = 'n3'")
    return folder


def format_of(folder: Path) -> int:
    with sqlite3.connect(folder / FILE_NAME) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_a_file_of_the_format_before_opens_and_is_of_no_named_tenant(old: Path, make_node: MakeNode) -> None:
    with FaissStore.open(old) as store:
        assert ask(store, [1.0, 0.0]).ids == ["n0", "n1", "n2"]
        assert [(d.path, d.root, d.hash) for d in store.documents()] == [("d", "root", "hash")]
        assert store.tenants() == [TenantSize("", 1, 3)]
        assert store.get_nodes(["n2"])[0].metadata == {"year": 2002}
        store.for_tenant("a").add([make_node("n0", [1.0, 0.0], doc="d", text="of a")])
        assert [row.id for row in store._file.nodes("a")] == [5]
    assert format_of(old) == FORMAT_VERSION
    with FaissStore.open(old) as store:
        assert len(texts(store)) == 3
        assert texts(store.for_tenant("a")) == ["of a"]


def test_a_migrated_file_has_the_tables_of_a_new_one(old: Path, tmp_path: Path) -> None:
    def schema(folder: Path) -> list[tuple[str, str]]:
        with sqlite3.connect(folder / FILE_NAME) as database:
            return sorted(database.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))

    FaissStore.open(old).close()
    FaissStore(tmp_path / "new").close()
    assert schema(old) == schema(tmp_path / "new")


def test_ids_go_on_after_a_migration_also_where_all_nodes_were_deleted(old: Path, make_node: MakeNode) -> None:
    with sqlite3.connect(old / FILE_NAME) as database:
        database.execute("DELETE FROM nodes")
    with FaissStore.open(old) as store:
        store.add([make_node("new", [1.0, 0.0])])
        assert [row.id for row in store._file.nodes("")] == [5]


def test_two_that_open_a_file_of_the_format_before_at_once(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate = store_file.StoreFile._migrate

    def behind_another(file: store_file.StoreFile) -> None:
        monkeypatch.setattr(store_file.StoreFile, "_migrate", migrate)
        FaissStore.open(old).close()
        migrate(file)

    monkeypatch.setattr(store_file.StoreFile, "_migrate", behind_another)
    with FaissStore.open(old) as store:
        assert len(texts(store)) == 3


@pytest.mark.parametrize("done", [1, 4, 6, 10])
def test_a_migration_that_is_broken_off_leaves_the_file_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    before = (old / FILE_NAME).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(store_file, "_FROM_FORMAT_1", (*store_file._FROM_FORMAT_1[:done], "INSERT INTO nowhere"))
        with pytest.raises(StoreWriteError, match="intact"):
            FaissStore.open(old)
    assert (old / FILE_NAME).read_bytes() == before
    with FaissStore.open(old) as store:
        assert len(texts(store)) == 3


def test_a_damaged_file_of_the_format_before_is_refused_before_it_is_changed(old: Path) -> None:
    path = old / FILE_NAME
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreCorruptError):
        FaissStore.open(old)
    assert int.from_bytes(path.read_bytes()[60:64]) == 1  # the format, where SQLite writes it


# -- ingestion --


@pytest.fixture
def run(tmp_path: Path, embedding: SizedEmbedding) -> Callable[..., IngestReport]:
    """Ingests the folder `docs` into the folder `store` for a tenant."""

    def run(tenant: str = "", *paths: Path) -> IngestReport:
        return ingest(paths or [tmp_path / "docs"], tmp_path / "store", embed_model=embedding, tenant=tenant)

    return run


def contents(folder: Path, tenant: str) -> dict[str, str]:
    with FaissStore.open(folder / "store", tenant=tenant) as store:
        return {node.metadata["file_name"]: node.get_content() for node in store.get_nodes()}


def test_two_tenants_ingest_the_same_files(run: Any, write: Write, tmp_path: Path) -> None:
    write("one.txt", "the first")
    write("two.txt", "the second")
    for tenant in ("", "a", "b"):
        report = run(tenant)
        assert (len(report.added), report.chunks, report.total_chunks) == (2, 2, 2)
    expected = {"one.txt": "the first", "two.txt": "the second"}
    assert [contents(tmp_path, tenant) for tenant in ("", "a", "b")] == [expected] * 3
    with FaissStore.open(tmp_path / "store") as store:
        ids = [node.node_id for tenant in ("", "a", "b") for node in store.for_tenant(tenant).get_nodes()]
        assert store.tenants() == [TenantSize(tenant, 2, 2) for tenant in ("", "a", "b")]
    assert len(set(ids)) == 6


def test_a_new_version_of_a_file_reaches_only_who_ingests_it(run: Any, write: Write, tmp_path: Path) -> None:
    write("one.txt", "old")
    run("a")
    run("b")
    path = write("one.txt", "new")
    assert run("b").updated == (path,)
    assert (contents(tmp_path, "a"), contents(tmp_path, "b")) == ({"one.txt": "old"}, {"one.txt": "new"})
    assert run("a").updated == (path,)
    assert run("b").unchanged == (path,)
    assert contents(tmp_path, "a") == {"one.txt": "new"}


def test_files_that_are_gone_go_out_for_the_tenant_of_the_run_alone(run: Any, write: Write, tmp_path: Path) -> None:
    write("one.txt", "first")
    gone = write("two.txt", "second")
    for tenant in ("", "a", "b"):
        run(tenant)
    gone.unlink()
    assert run("a").removed == (gone,)
    assert contents(tmp_path, "a") == {"one.txt": "first"}
    assert contents(tmp_path, "") == contents(tmp_path, "b") == {"one.txt": "first", "two.txt": "second"}
    assert run("").removed == (gone,)
    assert contents(tmp_path, "b") == {"one.txt": "first", "two.txt": "second"}


def test_a_tenant_that_was_removed_can_ingest_again(run: Any, write: Write, tmp_path: Path) -> None:
    write("one.txt", "first")
    run("a")
    run("b")
    with FaissStore.open(tmp_path / "store") as store:
        store.for_tenant("a").clear()
    report = run("a")
    assert (len(report.added), report.unchanged) == (1, ())
    assert contents(tmp_path, "a") == contents(tmp_path, "b") == {"one.txt": "first"}


def test_node_ids_without_a_tenant_are_those_of_stores_that_exist(run: Any, write: Write, tmp_path: Path) -> None:
    path = write("one.txt", "first")
    run()
    digest = content_hash(b"first", "chunker 1, 48 tokens, overlap 32")
    with FaissStore.open(tmp_path / "store") as store:
        (node,) = store.get_nodes()
    assert node.node_id == str(uuid.uuid5(uuid.NAMESPACE_URL, f"{path}\0{digest}\x000"))


def test_a_store_of_the_format_before_is_ingested_into(
    old: Path, write: Write, tmp_path: Path, embedding: SizedEmbedding, wide_embedding: SizedEmbedding
) -> None:
    write("one.txt", "first")
    with sqlite3.connect(old / FILE_NAME) as database:
        database.execute("DELETE FROM nodes")
        database.execute("DELETE FROM documents")
        database.execute("DELETE FROM meta")
    for tenant in ("", "a"):
        assert ingest([tmp_path / "docs"], old, embed_model=embedding, tenant=tenant).total_chunks == 1
    with pytest.raises(StoreMismatchError):
        ingest([tmp_path / "docs"], old, embed_model=wide_embedding, tenant="b")


def test_ingestions_of_two_tenants_may_go_on_at_once(run: Any, write: Write, tmp_path: Path) -> None:
    write("one.txt", "first")
    run("a")
    (lock,) = (path for path in (tmp_path / "store").iterdir() if path.name.startswith("ingest-"))
    with FileLock(lock):
        with pytest.raises(StoreBusyError, match="is ingesting"):
            run("a")
        assert run("b").chunks == run("").chunks == 1
    with FileLock(tmp_path / "store" / "ingest.lock"):
        assert run("a").ok


def test_their_commits_wait_for_one_another(run: Any, write: Write, tmp_path: Path) -> None:
    write("one.txt", "first")
    run("a")
    reports: list[IngestReport] = []
    with FileLock(tmp_path / "store" / "commit.lock"):
        thread = threading.Thread(target=lambda: reports.append(run("b")))
        thread.start()
        thread.join(0.5)
        assert reports == []
    join(thread)
    assert reports[0].chunks == 1


# -- retrieval and engines --


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(script=["well"])


@pytest.fixture
def llm(engine: ScriptedEngine) -> ReaderLLM:
    return ReaderLLM.from_engine(engine)


@pytest.fixture
def pets(embedding: SizedEmbedding) -> FaissStore:
    """Each tenant's pets, in documents of two passages."""
    store = FaissStore(embed_model=embedding)
    for tenant, animal in (("a", "cat"), ("b", "dog"), ("", "cow")):
        nodes = []
        for part in ("eats", "sleeps"):
            text = f"My {animal} {part}."
            node = TextNode(id_=part, text=text, embedding=embedding.get_text_embedding(text))
            node.metadata = {"part": part}
            node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="pets")
            nodes.append(node)
        store.for_tenant(tenant).add(nodes)
    return store


def asked(engine: ScriptedEngine) -> list[tuple[str, list[str]]]:
    """For each call its tenant and its sources, sorted; the context itself left out."""
    return [
        (call.tenant, sorted(passage.text for passage in call.passages if passage.id != "context"))
        for call in engine.calls
    ]


def test_a_retriever_keeps_to_its_tenant(pets: FaissStore, embedding: SizedEmbedding) -> None:
    def found(tenant: str | None, **options: Any) -> list[str]:
        nodes = make_retriever(pets, embedding, tenant=tenant, **options).retrieve("does my dog eat")
        return sorted(node.get_content() for node in nodes)

    assert found("a") == ["My cat eats.", "My cat sleeps."]
    assert found("b", top_k=1) == ["My dog eats."]
    assert found(None) == found("") == ["My cow eats.", "My cow sleeps."]
    assert found("nobody") == []
    only = MetadataFilters(filters=[MetadataFilter(key="part", value="sleeps")])
    assert found("a", filters=only) == ["My cat sleeps."]
    of_b = make_retriever(pets.for_tenant("b"), embedding)
    assert sorted(node.get_content() for node in asyncio.run(of_b.aretrieve("dog"))) == [
        "My dog eats.",
        "My dog sleeps.",
    ]


def test_query_engines_answer_on_behalf_of_their_tenant(
    pets: FaissStore, llm: ReaderLLM, engine: ScriptedEngine, embedding: SizedEmbedding
) -> None:
    query = make_query_engine(pets, llm, embedding, top_k=1, tenant="a")
    streaming = make_query_engine(pets, llm, embedding, top_k=1, tenant="a", streaming=True)
    query.query("cat")
    streamed = streaming.query("cat")
    assert isinstance(streamed, StreamingResponse)
    assert "".join(streamed.response_gen) == "well"

    async def use() -> None:
        await query.aquery("cat")
        response = await streaming.aquery("cat")
        assert [text async for text in response.response_gen] == ["well"]  # type: ignore[union-attr]

    asyncio.run(use())
    assert asked(engine) == [("a", ["My cat eats.", "My cat sleeps."])] * 4
    assert all("cat" in call.prompt.text and "dog" not in call.prompt.text for call in engine.calls)


def test_chat_engines_answer_on_behalf_of_their_tenant(
    pets: FaissStore, llm: ReaderLLM, engine: ScriptedEngine, embedding: SizedEmbedding
) -> None:
    chat = make_chat_engine(pets, llm, embedding, top_k=1, tenant="b")
    chat.chat("dog")
    "".join(chat.stream_chat("dog").response_gen)

    async def use() -> None:
        await chat.achat("dog")
        stream = await chat.astream_chat("dog")
        assert [text async for text in stream.async_response_gen()] == ["well"]

    asyncio.run(use())
    assert asked(engine) == [("b", ["My dog eats.", "My dog sleeps."])] * 4


def test_every_call_of_a_refined_answer_has_the_tenant(
    engine: ScriptedEngine, embedding: SizedEmbedding, make_node: MakeNode
) -> None:
    llm = ReaderLLM.from_engine(engine, context_window=700, max_tokens=60)
    store = FaissStore()
    texts = [f"dogs {letter} " + f"{letter} " * 120 for letter in "abc"]
    store.for_tenant("a").add([TextNode(text=text, embedding=embedding.get_text_embedding(text)) for text in texts])
    make_query_engine(store, llm, embedding, tenant="a").query("dogs")
    assert len(engine.calls) > 1
    assert {call.tenant for call in engine.calls} == {"a"}


@pytest.mark.parametrize(
    ("of_store", "of_llm", "named", "documents", "speaker"),
    [
        ("", "", None, "cow", ""),
        ("a", "", None, "cat", "a"),
        ("", "b", None, "cow", "b"),  # documents for all, conversations apart
        ("a", "a", None, "cat", "a"),
        ("a", "b", "b", "dog", "b"),
        ("a", "b", "", "cow", ""),
    ],
)
def test_whose_documents_and_whose_call(
    pets: FaissStore,
    llm: ReaderLLM,
    engine: ScriptedEngine,
    embedding: SizedEmbedding,
    of_store: str,
    of_llm: str,
    named: str | None,
    documents: str,
    speaker: str,
) -> None:
    store, llm = pets.for_tenant(of_store), llm.for_tenant(of_llm)
    make_query_engine(store, llm, embedding, tenant=named).query("pets")
    make_chat_engine(store, llm, embedding, tenant=named).chat("pets")
    assert asked(engine) == [(speaker, [f"My {documents} eats.", f"My {documents} sleeps."])] * 2
    assert (store.tenant, llm.tenant) == (of_store, of_llm)


def test_a_store_and_an_llm_of_two_tenants_are_refused(
    pets: FaissStore, llm: ReaderLLM, embedding: SizedEmbedding
) -> None:
    for make in (make_query_engine, make_chat_engine):
        with pytest.raises(ConfigError, match="bound to the tenant 'a' and the LLM to 'b': pass the tenant"):
            make(pets.for_tenant("a"), llm.for_tenant("b"), embedding)


class Pet(BaseModel):
    """A pet."""

    name: str


def test_an_llm_of_objects_is_called_on_behalf_of_the_tenant(
    pets: FaissStore, engine: ScriptedEngine, llm: ReaderLLM, embedding: SizedEmbedding
) -> None:
    engine.script = ['{"name": "Tom"}']
    objects = llm.as_structured_llm(Pet)
    assert str(make_query_engine(pets, objects, embedding, tenant="a").query("cat"))
    assert [call.tenant for call in engine.calls] == ["a"]
    assert llm.tenant == ""


def test_an_llm_that_knows_no_tenants_is_used_as_it_is(pets: FaissStore, embedding: SizedEmbedding) -> None:
    response = make_query_engine(pets, MockLLM(max_tokens=4), embedding, tenant="a").query("cat")
    assert sorted(node.get_content() for node in response.source_nodes) == ["My cat eats.", "My cat sleeps."]


def test_a_store_is_opened_for_a_tenant(run: Any, write: Write, tmp_path: Path, embedding: SizedEmbedding) -> None:
    write("one.txt", "first")
    run("a")
    with open_store(tmp_path / "store", embedding, "a") as store:
        assert texts(store) == ["first"]
    with open_store(tmp_path / "store", embedding) as store:
        assert texts(store) == []
