"""Tenants in a `FaissStore`: an index of their own each, in one file."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from waiting import join

from reader_rag.errors import StoreCorruptError, StoreError, StoreMismatchError, StoreWriteError
from reader_rag.rag import FaissStore
from reader_rag.rag.stores.records import DocumentRecord, TenantSize
from reader_rag.rag.stores.sqlite_file import FILE_NAME

MakeNode = Callable[..., TextNode]


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


def test_each_tenant_is_searched_in_an_index_of_its_own(store: FaissStore, make_node: MakeNode) -> None:
    a, b = store.for_tenant("a"), store.for_tenant("b")
    b.add([make_node(f"more{i}", [1.0, 1.0]) for i in range(50)])
    assert (a.client.ntotal, b.client.ntotal) == (2, 52)
    assert store.for_tenant("nobody").client is None


def test_clear_removes_a_tenant_from_the_file(tmp_path: Path, make_node: MakeNode) -> None:
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


def test_reads_and_deletes_of_an_unknown_tenant_store_nothing(tmp_path: Path, store: FaissStore) -> None:
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


def test_a_commit_of_another_process_reloads_its_tenants_index_only(tmp_path: Path, make_node: MakeNode) -> None:
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


def test_another_process_may_empty_the_store_and_store_longer_vectors(tmp_path: Path, make_node: MakeNode) -> None:
    with FaissStore(tmp_path) as here, FaissStore(tmp_path) as elsewhere:
        a = here.for_tenant("a")
        a.add([make_node("n", [1.0, 0.0])])
        a.delete_nodes(["n"])
        elsewhere.clear()
        elsewhere.for_tenant("b").add([make_node("wide", [1.0, 0.0, 0.0])])
        a.add([make_node("wide", [0.0, 0.0, 1.0])])
        assert ask(a, [0.0, 0.0, 1.0]).ids == ["wide"]
        assert here.dimension == 3


def test_nodes_are_loaded_at_first_use_and_damage_concerns_their_tenant_only(tmp_path: Path, store: FaissStore) -> None:
    store.persist(str(tmp_path))
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("UPDATE nodes SET node = replace(node, 'b one', 'b bad') WHERE tenant = 'b'")
    with FaissStore.open(tmp_path, tenant="a") as opened:
        assert list(opened._indexes._loaded) == ["a"]
        assert texts(opened) == ["a one", "a two"]
        with pytest.raises(StoreCorruptError, match="node one is damaged"):
            opened.for_tenant("b").get_nodes()
        assert ask(opened, [1.0, 0.0], 1).ids == ["one"]


def test_a_failed_write_changes_no_tenant(store: FaissStore, make_node: MakeNode) -> None:
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


class ApartMachine(RuleBasedStateMachine):
    """Tenants of one store against separate stores: all results are equal, to the last bit."""

    tenants = st.sampled_from(["", "a", "b"])
    vectors = st.lists(st.integers(-3, 3), min_size=3, max_size=3).filter(any)
    names = st.sampled_from([f"n{i}" for i in range(6)])
    documents = st.sampled_from(["x", "y"])

    @initialize()
    def start(self) -> None:
        self.shared = FaissStore()
        # Never cleared, so that the shared store keeps the length of its vectors.
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
test_results_do_not_depend_on_other_tenants = ApartMachine.TestCase
