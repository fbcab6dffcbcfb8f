from __future__ import annotations

import asyncio
import threading
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


def test_similarity_is_the_cosine_and_the_nearest_comes_first(store: FaissStore) -> None:
    found = result(store, [10.0, 0.0])
    assert found.ids == ["east", "northeast", "north", "west"]
    assert found.similarities == pytest.approx([1.0, 2**-0.5, 0.0, -1.0], abs=1e-6)
    assert [node.get_content() for node in found.nodes or []][:2] == ["text of east", "text of northeast"]


def test_top_k_and_cutoff_bound_the_result(store: FaissStore) -> None:
    assert ask(store, [1.0, 0.0], 2) == ["east", "northeast"]
    query = VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=10)
    assert store.query(query, similarity_cutoff=0.5).ids == ["east", "northeast"]
    store.similarity_cutoff = -0.5
    assert store.query(query).ids == ["east", "northeast", "north"]
    assert store.query(query, similarity_cutoff=None).ids == ["east", "northeast", "north", "west"]


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


def test_filters_work_inside_the_search_so_that_top_k_stays_full(make_node: MakeNode) -> None:
    store = FaissStore()
    near = [make_node(f"near{i}", [1.0, i / 1000], kind="noise") for i in range(200)]
    far = [make_node(f"far{i}", [-1.0, float(i)], kind="wanted") for i in range(3)]
    store.add([*near, *far])
    wanted = MetadataFilters(filters=[where("kind", "wanted")])
    assert ask(store, [1.0, 0.0], 3, filters=wanted) == ["far2", "far1", "far0"]


def test_a_query_can_be_kept_to_nodes_and_documents(store: FaissStore) -> None:
    assert ask(store, [1.0, 0.0], node_ids=["west", "north", "unknown"]) == ["north", "west"]
    assert ask(store, [1.0, 0.0], doc_ids=["a", "unknown"]) == ["east", "northeast"]
    assert ask(store, [1.0, 0.0], doc_ids=["a"], node_ids=["east", "west"]) == ["east"]


def test_an_empty_list_of_ids_restricts_nothing_as_llama_index_means_it(store: FaissStore) -> None:
    assert ask(store, [1.0, 0.0], 1, node_ids=[], doc_ids=[]) == ["east"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (VectorStoreQuery([1.0, 0.0], mode=VectorStoreQueryMode.HYBRID), "mode 'default' only, not 'hybrid'"),
        (VectorStoreQuery([1.0, 0.0], mode=VectorStoreQueryMode.MMR), "mode 'default' only, not 'mmr'"),
        (VectorStoreQuery(None), "no query_embedding"),
        (VectorStoreQuery([1.0, 0.0], similarity_top_k=0), "at least 1, not 0"),
        (VectorStoreQuery([float("nan"), 0.0]), "NaN or infinity"),
        (
            VectorStoreQuery([1.0, 0.0], filters=MetadataFilters(filters=[where("year", "x", FilterOperator.GT)])),
            "filter cannot be applied",
        ),
    ],
)
def test_what_cannot_be_answered_is_said(store: FaissStore, query: VectorStoreQuery, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        store.query(query)


def test_vectors_of_another_length_are_refused(store: FaissStore, make_node: MakeNode) -> None:
    with pytest.raises(StoreMismatchError, match="vectors of 2 numbers, not 3"):
        store.add([make_node("new", [1.0, 0.0, 0.0])])
    with pytest.raises(StoreMismatchError, match="vectors of 2 numbers, not 3"):
        ask(store, [1.0, 0.0, 0.0])
    assert store.num_nodes == 4


def test_an_empty_store_answers_with_nothing() -> None:
    assert result(FaissStore(), [1.0, 2.0]).nodes == []


def test_delete_takes_one_document(store: FaissStore) -> None:
    store.delete("a")
    store.delete("unknown")
    assert ask(store, [1.0, 0.0]) == ["north", "west"]


def test_delete_nodes_takes_what_meets_every_condition(store: FaissStore) -> None:
    after_2001 = MetadataFilters(filters=[where("year", 2001, FilterOperator.GT)])
    store.delete_nodes(["east", "west"], filters=after_2001)
    assert ask(store, [1.0, 0.0]) == ["east", "northeast", "north"]
    with pytest.raises(ConfigError, match="use clear"):
        store.delete_nodes()


def test_clear_takes_everything_and_frees_the_store_for_other_vectors(store: FaissStore, make_node: MakeNode) -> None:
    store.clear()
    assert store.get_nodes() == []
    store.add([make_node("new", [1.0, 0.0, 0.0])])
    assert ask(store, [1.0, 0.0, 0.0]) == ["new"]


def test_adding_a_node_again_replaces_it(store: FaissStore, make_node: MakeNode) -> None:
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


def test_get_nodes_keeps_the_order_of_adding(store: FaissStore) -> None:
    assert [n.node_id for n in store.get_nodes()] == ["east", "northeast", "north", "west"]
    assert [n.node_id for n in store.get_nodes(["west", "east"])] == ["east", "west"]


def test_another_embedding_model_is_refused_by_size_and_by_its_vectors(
    tmp_path: Path, embedding: SizedEmbedding, other_embedding: SizedEmbedding, wide_embedding: SizedEmbedding
) -> None:
    with FaissStore(tmp_path, embed_model=embedding) as store:
        store.add([TextNode(text="a", embedding=embedding.get_text_embedding("a b c"))])
    with pytest.raises(StoreMismatchError, match=r"'words' \(64 numbers per vector\), not 'wide words' \(128\)"):
        FaissStore.open(tmp_path, embed_model=wide_embedding)
    with pytest.raises(StoreMismatchError, match="'words', and 'other words' gives other vectors"):
        FaissStore.open(tmp_path, embed_model=other_embedding)


def test_the_same_embedding_model_under_another_name_is_accepted(tmp_path: Path, embedding: SizedEmbedding) -> None:
    with FaissStore(tmp_path, embed_model=embedding) as store:
        store.add([TextNode(text="a", embedding=embedding.get_text_embedding("a b c"))])
    renamed = embedding.model_copy(update={"model_name": "some/folder"})
    with FaissStore.open(tmp_path, embed_model=renamed) as store:
        assert store.num_nodes == 1


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


def test_threads_can_add_delete_and_ask_at_once(tmp_path: Path, make_node: MakeNode) -> None:
    store = FaissStore(tmp_path)
    store.add([make_node("fixed", [1.0, 0.0])])
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for i in range(8):
                store.add([make_node(f"{name}-{i}", [0.0, 1.0], doc=f"doc{name}")])
                assert ask(store, [1.0, 0.0], 1) == ["fixed"]
            store.delete(f"doc{name}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [n.node_id for n in store.get_nodes()] == ["fixed"]


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
        self.store._memory.forget("")

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
