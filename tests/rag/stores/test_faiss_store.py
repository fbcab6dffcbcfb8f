"""`FaissStore`: its own features besides the contract (test_contract.py), and the store against brute force."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from llama_index.core import StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from reader_rag.errors import ConfigError, StoreNotFoundError
from reader_rag.rag import FaissStore, SizedEmbedding

MakeNode = Callable[..., TextNode]


def ask(store: FaissStore, vector: list[float], k: int = 10, **conditions: Any) -> list[str]:
    return result(store, vector, k, **conditions).ids or []


def result(store: FaissStore, vector: list[float], k: int = 10, **conditions: Any) -> VectorStoreQueryResult:
    return store.query(VectorStoreQuery(query_embedding=vector, similarity_top_k=k, **conditions))


def where(key: str, value: Any, operator: FilterOperator = FilterOperator.EQ) -> MetadataFilter:
    return MetadataFilter(key=key, value=value, operator=operator)


@pytest.fixture
def store(make_node: MakeNode) -> FaissStore:
    """Four nodes of three documents: east, north-east, north, west."""
    store = FaissStore()
    store.add(
        [
            make_node("east", [2.0, 0.0], doc="a", year=2001, tags=["sun", "day"]),
            make_node("northeast", [0.5, 0.5], doc="a", year=2002, tags=["sun"]),
            make_node("north", [0.0, 3.0], doc="b", year=2003, tags=[]),
            make_node("west", [-1.0, 0.0], doc="c", year=2004, tags=["night"]),
        ]
    )
    return store


def test_a_filter_that_compares_text_with_numbers_raises(store: FaissStore) -> None:
    filters = MetadataFilters(filters=[where("year", "x", FilterOperator.GT)])
    with pytest.raises(ConfigError, match="filter cannot be applied"):
        ask(store, [1.0, 0.0], filters=filters)


def test_ids_are_never_reused_after_deletes_and_reopening(tmp_path: Path, make_node: MakeNode) -> None:
    def numbers(store: FaissStore) -> list[int]:
        return sorted(row.id for row in store._file.rows.nodes(""))

    with FaissStore(tmp_path) as store:
        store.add([make_node("a", [1.0, 0.0]), make_node("b", [1.0, 0.0])])
        store.delete_nodes(["b"])
        store.add([make_node("c", [1.0, 0.0])])
        assert numbers(store) == [1, 3]
        store.clear()
    with FaissStore(tmp_path) as store:
        store.add([make_node("d", [1.0, 0.0])])
        assert numbers(store) == [4]


def test_persist_copies_a_store_out_of_memory(store: FaissStore, tmp_path: Path) -> None:
    store.persist(str(tmp_path / "copy"))
    with FaissStore.open(tmp_path / "copy") as copy:
        assert ask(copy, [1.0, 0.0]) == ["east", "northeast", "north", "west"]
        copy.persist()
    with pytest.raises(ConfigError, match="in memory"):
        store.persist()


def test_an_ordinary_llama_index_uses_the_store(embedding: SizedEmbedding) -> None:
    store = FaissStore()
    context = StorageContext.from_defaults(vector_store=store)
    documents = [Document(text="cats purr", id_="cats"), Document(text="dogs bark", id_="dogs")]
    index = VectorStoreIndex.from_documents(documents, storage_context=context, embed_model=embedding)
    assert index.as_retriever(similarity_top_k=1).retrieve("what do cats do")[0].get_content() == "cats purr"
    index.delete_ref_doc("cats")
    assert [n.get_content() for n in store.get_nodes()] == ["dogs bark"]


def test_an_ordinary_llama_index_reads_and_deletes_for_its_tenant(embedding: SizedEmbedding) -> None:
    store = FaissStore()
    for name, text in (("a", "cats purr"), ("b", "cats bite")):
        context = StorageContext.from_defaults(vector_store=store.for_tenant(name))
        VectorStoreIndex.from_documents(
            [Document(text=text, id_="cats")], storage_context=context, embed_model=embedding
        )
    index = VectorStoreIndex.from_vector_store(store.for_tenant("b"), embed_model=embedding)
    assert [node.get_content() for node in index.as_retriever().retrieve("cats")] == ["cats bite"]
    index.delete_ref_doc("cats")
    assert [[n.get_content() for n in store.for_tenant(name).get_nodes()] for name in "ab"] == [["cats purr"], []]


class TwinMachine(RuleBasedStateMachine):
    """The store against a dictionary and a matrix product, through adds, deletes, clears and reopenings."""

    vectors = st.lists(st.integers(-3, 3), min_size=3, max_size=3).filter(any)
    names = st.sampled_from([f"n{i}" for i in range(12)])
    documents = st.sampled_from(["a", "b", "c"])

    @initialize()
    def start(self) -> None:
        self.store = FaissStore()
        self.twin: dict[str, tuple[str, int, list[int]]] = {}

    @rule(batch=st.lists(st.tuples(names, documents, st.integers(0, 4), vectors), max_size=4))
    def add(self, batch: list[tuple[str, str, int, list[int]]]) -> None:
        nodes = []
        for name, doc, level, vector in batch:
            node = TextNode(id_=name, text=name, embedding=[float(x) for x in vector], metadata={"level": level})
            node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=doc)
            nodes.append(node)
            self.twin[name] = (doc, level, vector)
        self.store.add(nodes)

    @rule(doc=documents)
    def delete(self, doc: str) -> None:
        self.store.delete(doc)
        self.twin = {name: node for name, node in self.twin.items() if node[0] != doc}

    @rule(chosen=st.lists(names, max_size=3))
    def delete_nodes(self, chosen: list[str]) -> None:
        self.store.delete_nodes(chosen)
        self.twin = {name: node for name, node in self.twin.items() if name not in chosen}

    @rule()
    def load_again(self) -> None:
        self.store._indexes.unload("")

    @rule(vector=vectors, k=st.integers(1, 15), most=st.integers(0, 4), docs=st.none() | st.lists(documents))
    def query(self, vector: list[int], k: int, most: int, docs: list[str] | None) -> None:
        filters = MetadataFilters(filters=[where("level", most, FilterOperator.LTE)])
        found = result(self.store, [float(x) for x in vector], k, filters=filters, doc_ids=docs)
        unit = np.array(vector) / np.linalg.norm(vector)
        scores = {
            name: float(np.array(v) / np.linalg.norm(v) @ unit)
            for name, (doc, level, v) in self.twin.items()
            if level <= most and (not docs or doc in docs)
        }
        best = sorted(scores.values(), reverse=True)[:k]
        assert found.similarities == pytest.approx(best, abs=1e-5)
        assert [scores[id_] for id_ in found.ids or []] == pytest.approx(best, abs=1e-5)
        assert len(set(found.ids or [])) == len(best)

    @invariant()
    def holds_the_same(self) -> None:
        assert {node.node_id for node in self.store.get_nodes()} == set(self.twin)


TwinMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_the_store_agrees_with_brute_force = TwinMachine.TestCase


class TestStorageContext:
    @pytest.mark.parametrize("on_disk", [False, True])
    def test_what_llama_index_persists_it_loads(self, on_disk: bool, tmp_path: Path, embedding: SizedEmbedding) -> None:
        store = FaissStore(tmp_path / "store" if on_disk else None, embed_model=embedding)
        context = StorageContext.from_defaults(vector_store=store)
        documents = [Document(text="Owls hunt at night."), Document(text="Herons eat fish.")]
        VectorStoreIndex.from_documents(documents, storage_context=context, embed_model=embedding)
        context.persist(tmp_path / "saved")
        with FaissStore.from_persist_dir(tmp_path / "saved", embed_model=embedding) as loaded:
            context = StorageContext.from_defaults(vector_store=loaded, persist_dir=str(tmp_path / "saved"))
            index = load_index_from_storage(context, embed_model=embedding)
            (found,) = index.as_retriever(similarity_top_k=1).retrieve("What do herons eat?")
            assert found.node.get_content() == "Herons eat fish."
        with pytest.raises(StoreNotFoundError):
            FaissStore.from_persist_dir(tmp_path / "elsewhere")


class TestMarginalRelevance:
    def test_the_second_result_differs_from_the_first(self, make_node: MakeNode) -> None:
        store = FaissStore()
        store.add([make_node("a", [1, 0.1]), make_node("twin", [1, 0.11]), make_node("b", [0.6, -0.8])])
        query = VectorStoreQuery([1.0, 0.0], similarity_top_k=2, mode=VectorStoreQueryMode.MMR)
        assert store.query(query, mmr_threshold=1.0).ids == ["a", "twin"]
        diverse = store.query(query, mmr_threshold=0.1)
        assert diverse.ids == ["a", "b"]
        assert diverse.similarities == pytest.approx([1 / 1.01**0.5, 0.6], abs=1e-5)
        query.node_ids = ["twin", "b"]
        assert set(store.query(query).ids or ()) == {"twin", "b"}
        assert store.query(query, mmr_prefetch_factor=1).ids == ["twin", "b"]
        assert FaissStore().query(query).ids == []
        with pytest.raises(ConfigError, match=r"mmr_threshold must be 0\.\.1"):
            store.query(query, mmr_threshold=2)
