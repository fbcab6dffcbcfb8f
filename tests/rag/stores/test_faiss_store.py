"""What `FaissStore` does beyond what all stores do (test_store_contract.py), and the store against brute force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import Document, ImageNode, IndexNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from reader_rag.errors import ConfigError, StoreMismatchError
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


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (MetadataFilters(filters=[where("year", 2002, FilterOperator.GT)]), ["north", "west"]),
        (MetadataFilters(filters=[where("tags", "sun", FilterOperator.CONTAINS)]), ["east", "northeast"]),
        (MetadataFilters(filters=[where("tags", None, FilterOperator.IS_EMPTY)]), ["north"]),
        (MetadataFilters(filters=[where("ref_doc_id", "a"), where("year", 2001)]), ["east"]),
        (
            MetadataFilters(filters=[where("year", 2001), where("year", 2004)], condition=FilterCondition.OR),
            ["east", "west"],
        ),
        (MetadataFilters(filters=[where("ref_doc_id", "a")], condition=FilterCondition.NOT), ["north", "west"]),
        (
            MetadataFilters(
                filters=[
                    where("year", 2003, FilterOperator.LTE),
                    MetadataFilters(filters=[where("ref_doc_id", "a")], condition=FilterCondition.NOT),
                ]
            ),
            ["north"],
        ),
        (MetadataFilters(filters=[]), ["east", "northeast", "north", "west"]),
        (MetadataFilters(filters=[where("nothing", 1)]), []),
    ],
)
def test_filters_choose_by_metadata(store: FaissStore, filters: MetadataFilters, expected: list[str]) -> None:
    assert ask(store, [1.0, 0.0], filters=filters) == expected


def test_a_query_can_be_kept_to_nodes_and_documents(store: FaissStore) -> None:
    assert ask(store, [1.0, 0.0], node_ids=["west", "north", "unknown"]) == ["north", "west"]
    assert ask(store, [1.0, 0.0], doc_ids=["a", "unknown"]) == ["east", "northeast"]
    assert ask(store, [1.0, 0.0], doc_ids=["a"], node_ids=["east", "west"]) == ["east"]


def test_vectors_of_another_length_are_refused(store: FaissStore, make_node: MakeNode) -> None:
    with pytest.raises(StoreMismatchError, match="vectors of 2 numbers, not 3"):
        store.add([make_node("new", [1.0, 0.0, 0.0])])
    with pytest.raises(StoreMismatchError, match="vectors of 2 numbers, not 3"):
        ask(store, [1.0, 0.0, 0.0])
    assert store.num_nodes == 4


def test_a_query_may_ask_for_no_cutoff(store: FaissStore) -> None:
    query = VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=10)
    store.similarity_cutoff = -0.5
    assert store.query(query).ids == ["east", "northeast", "north"]
    assert store.query(query, similarity_cutoff=None).ids == ["east", "northeast", "north", "west"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (VectorStoreQuery([1.0, 0.0], mode=VectorStoreQueryMode.MMR), "mode 'default' only, not 'mmr'"),
        (
            VectorStoreQuery([1.0, 0.0], filters=MetadataFilters(filters=[where("year", "x", FilterOperator.GT)])),
            "filter cannot be applied",
        ),
    ],
)
def test_what_cannot_be_answered_is_said(store: FaissStore, query: VectorStoreQuery, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        store.query(query)


def test_of_a_node_that_is_added_twice_at_once_the_last_stays(store: FaissStore, make_node: MakeNode) -> None:
    store.add([make_node("east", [0.0, -1.0], doc="b"), make_node("east", [0.0, -2.0], doc="c", text="newest")])
    assert store.num_nodes == 4
    nearest = result(store, [0.0, -1.0], 1)
    assert nearest.ids == ["east"]
    assert [(n.get_content(), n.ref_doc_id) for n in nearest.nodes or []] == [("newest", "c")]
    assert ask(store, [1.0, 0.0], doc_ids=["a"]) == ["northeast"]


def test_ids_only_grow_also_after_a_delete_and_a_reopening(tmp_path: Path, make_node: MakeNode) -> None:
    def numbers(store: FaissStore) -> list[int]:
        return sorted(row.id for row in store._file.nodes(""))

    with FaissStore(tmp_path) as store:
        store.add([make_node("a", [1.0, 0.0]), make_node("b", [1.0, 0.0])])
        store.delete_nodes(["b"])
        store.add([make_node("c", [1.0, 0.0])])
        assert numbers(store) == [1, 3]
        store.clear()
    with FaissStore(tmp_path) as store:
        store.add([make_node("d", [1.0, 0.0])])
        assert numbers(store) == [4]


def test_nodes_come_back_as_they_went_in(tmp_path: Path) -> None:
    text = TextNode(
        id_="t", text="naïve \U0001f40d", metadata={"n": 1, "list": ["x"]}, start_char_idx=5, end_char_idx=12,
        excluded_llm_metadata_keys=["n"], embedding=[1.0, 0.0],
    )  # fmt: skip
    text.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="doc", metadata={"k": "v"})
    index = IndexNode(id_="i", text="points", index_id="elsewhere", embedding=[1.0, 0.0])
    image = ImageNode(id_="m", text="seen", image_path="a.png", embedding=[1.0, 0.0])
    with FaissStore(tmp_path) as store:
        store.add([text, index, image])
    with FaissStore.open(tmp_path) as store:
        back = store.get_nodes()
    assert [type(node) for node in back] == [TextNode, IndexNode, ImageNode]
    assert back[0] == text.model_copy(update={"embedding": None})
    assert [node.to_dict() for node in back[1:]] == [
        n.model_copy(update={"embedding": None}).to_dict() for n in (index, image)
    ]


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


def test_async_methods_do_the_same(make_node: MakeNode) -> None:
    async def use() -> list[list[str]]:
        store = FaissStore()
        await store.async_add([make_node("a", [1.0, 0.0], doc="x"), make_node("b", [0.0, 1.0], doc="y")])
        seen = [(await store.aquery(VectorStoreQuery([1.0, 0.0], 5))).ids or []]
        await store.adelete("x")
        seen.append([n.node_id for n in await store.aget_nodes()])
        await store.adelete_nodes(["b"])
        seen.append([n.node_id for n in await store.aget_nodes()])
        await store.aclear()
        return seen

    assert asyncio.run(use()) == [["a", "b"], ["b"], []]


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
