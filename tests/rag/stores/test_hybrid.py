"""Hybrid retrieval: BM25 against its formula, the fusion, and a `FaissStore` that keeps both in step."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import (
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from word_embedding import WordEmbedding

from reader_rag.errors import ConfigError
from reader_rag.rag import FaissStore, make_retriever
from reader_rag.rag.stores.database_store import DatabaseStore
from reader_rag.rag.stores.hybrid import WordIndex, fuse, words_of

MakeNode = Callable[..., TextNode]
WORDS = ["heron", "owl", "swift", "wren", "raven", "fish", "mouse", "night", "water", "wing", "E-404", "X15"]


def bm25(texts: Mapping[int, str], question: str) -> dict[int, float]:
    """Lucene's BM25 with k1=1.5 and b=0.75, from its formula."""
    counts = {id_: Counter(words_of(text)) for id_, text in texts.items()}
    mean = sum(sum(count.values()) for count in counts.values()) / len(texts)
    scores = dict.fromkeys(texts, 0.0)
    for word in words_of(question):
        having = sum(word in count for count in counts.values())
        idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for id_, count in counts.items():
            norm = 1.5 * (1 - 0.75 + 0.75 * sum(count.values()) / mean)
            scores[id_] += idf * count[word] / (count[word] + norm)
    return {id_: score for id_, score in scores.items() if score > 0}


def ask(store: FaissStore, question: str, vector: Sequence[float], k: int = 3, **more: Any) -> VectorStoreQueryResult:
    options = {name: more.pop(name) for name in ("similarity_cutoff", "hybrid_prefetch_factor") if name in more}
    query = VectorStoreQuery(list(vector), k, query_str=question, mode=VectorStoreQueryMode.HYBRID, **more)
    return store.query(query, **options)


class TestWords:
    def test_case_width_and_punctuation_make_no_difference(self) -> None:
        assert words_of("The HERON's (X-15)!") == ["the", "heron", "s", "x", "15"]
        assert words_of("ＡＢＣ Straße") == ["abc", "strasse"]  # noqa: RUF001

    def test_scripts_without_spaces_count_by_characters(self) -> None:
        assert words_of("abc水鳥def カワ") == ["abc", "水", "鳥", "def", "カ", "ワ"]

    def test_a_text_without_words_has_none(self) -> None:
        assert words_of(" -- !") == []


class TestWordIndex:
    def test_scores_are_those_of_the_formula_after_every_change(self) -> None:
        draw = random.Random(7)
        index, texts = WordIndex(), dict[int, str]()
        for step in range(60):
            if texts and draw.random() < 0.3:
                gone = draw.sample(sorted(texts), draw.randint(1, min(3, len(texts))))
                index.remove([*gone, 10_000])
                for id_ in gone:
                    del texts[id_]
            else:
                new = {100 * step + i: " ".join(draw.choices(WORDS, k=draw.randint(0, 9))) for i in range(3)}
                index.add(list(new), list(new.values()))
                texts |= new
            question = " ".join(draw.choices([*WORDS, "unknown"], k=3))
            allowed = draw.sample(sorted(texts), len(texts) // 2) if draw.random() < 0.5 else None
            expected = bm25(texts, question) if texts and any(map(words_of, texts.values())) else {}
            expected = {id_: score for id_, score in expected.items() if allowed is None or id_ in allowed}
            found = index.search(question, 1000, allowed)
            assert dict(found) == pytest.approx(expected, rel=1e-5)
            assert found == sorted(found, key=lambda pair: (-pair[1], pair[0]))
            assert index.search(question, 2, allowed) == found[:2]
            assert len(index) == len(texts)

    def test_nothing_is_found_without_words(self) -> None:
        index = WordIndex()
        assert index.search("heron", 5, None) == []
        index.add([1], ["..."])
        assert index.search("heron", 5, None) == []
        index.add([2], ["a heron"])
        assert index.search("?", 5, None) == []
        assert index.search("owl", 5, None) == []
        assert [id_ for id_, _ in index.search("Heron!", 5, None)] == [2]


class TestFusion:
    def test_ranks_are_weighted(self) -> None:
        assert fuse([1, 2], [2, 3], 0.5) == [
            (2, pytest.approx(0.5 * 61 / 62 + 0.5)),
            (1, 0.5),
            (3, pytest.approx(0.5 * 61 / 62)),
        ]
        assert fuse([1, 2], [1], 0.25)[0] == (1, 1.0)

    def test_one_side_alone_keeps_its_order(self) -> None:
        assert [id_ for id_, _ in fuse([3, 1, 2], [2, 9], 1.0)] == [3, 1, 2]
        assert [id_ for id_, _ in fuse([3, 1, 2], [2, 9], 0.0)] == [2, 9]

    def test_equal_scores_go_by_id(self) -> None:
        assert [id_ for id_, _ in fuse([5], [4], 0.5)] == [4, 5]


@pytest.fixture
def store(make_node: MakeNode) -> FaissStore:
    """Four nodes; the error code is in the one whose vector is farthest from the question's."""
    store = FaissStore()
    store.add(
        [
            make_node("near", [1.0, 0.0], doc="a", text="Errors are listed in the manual.", year=1),
            make_node("second", [0.9, 0.1], doc="a", text="An error ends the program.", year=2),
            make_node("third", [0.8, 0.3], doc="b", text="The program prints a line.", year=1),
            make_node("code", [-1.0, 0.2], doc="b", text="E404: the page is missing.", year=2),
        ]
    )
    return store


class TestStore:
    def test_a_rare_word_finds_what_the_vector_misses(self, store: FaissStore) -> None:
        by_vector = store.query(VectorStoreQuery([1.0, 0.0], 2))
        assert by_vector.ids == ["near", "second"]
        assert ask(store, "E404", [1.0, 0.0], k=2).ids == ["code", "near"]
        assert ask(store, "e404?", [1.0, 0.0], alpha=0.0).ids == ["code"]
        assert ask(store, "E404", [1.0, 0.0], alpha=1.0).ids == ["near", "second", "third"]

    def test_scores_are_fused_ranks(self, store: FaissStore) -> None:
        found = ask(store, "manual", [1.0, 0.0], k=2)
        assert found.ids == ["near", "second"]
        assert found.similarities == pytest.approx([1.0, 0.5 * 61 / 62])

    def test_numbers_of_results_and_ranks(self, store: FaissStore) -> None:
        assert ask(store, "E404", [1.0, 0.0], k=1, hybrid_top_k=4).ids == ["code", "near", "second", "third"]
        few = ask(store, "the program", [1.0, 0.0], k=1, hybrid_top_k=4, sparse_top_k=1, hybrid_prefetch_factor=1)
        assert few.ids is not None
        assert len(few.ids) <= 2

    def test_filters_hold_for_words_too(self, store: FaissStore) -> None:
        first = MetadataFilters(filters=[MetadataFilter(key="year", value=1)])
        assert ask(store, "E404 error", [1.0, 0.0], filters=first).ids == ["near", "third"]
        assert ask(store, "E404", [1.0, 0.0], doc_ids=["b"], alpha=0.4).ids == ["code", "third"]
        assert ask(store, "E404", [1.0, 0.0], node_ids=["second"]).ids == ["second"]

    def test_the_cutoff_is_a_cosine(self, store: FaissStore) -> None:
        assert ask(store, "E404", [1.0, 0.0], similarity_cutoff=0.97).ids == ["near", "second"]
        store.similarity_cutoff = 0.97
        assert ask(store, "E404", [1.0, 0.0]).ids == ["near", "second"]
        assert "code" in (ask(store, "E404", [1.0, 0.0], similarity_cutoff=-1.0).ids or ())

    def test_words_follow_adds_deletes_and_other_processes(self, tmp_path: Path, make_node: MakeNode) -> None:
        with FaissStore(tmp_path) as one, FaissStore(tmp_path) as two:
            one.add([make_node("a", [1.0, 0.0], doc="d", text="a heron")])
            assert ask(two, "heron", [0.0, 1.0], alpha=0.0).ids == ["a"]
            one.add([make_node("b", [1.0, 0.0], doc="e", text="a heron, a heron")])
            assert ask(two, "heron", [0.0, 1.0], alpha=0.0).ids == ["b", "a"]
            two.add([make_node("a", [1.0, 0.0], doc="d", text="an owl")])
            assert ask(two, "heron", [0.0, 1.0], alpha=0.0).ids == ["b"]
            assert ask(one, "owl", [0.0, 1.0], alpha=0.0).ids == ["a"]
            one.delete("e")
            assert ask(one, "heron", [0.0, 1.0], alpha=0.0).ids == []
            one.clear()
            assert ask(two, "owl", [0.0, 1.0]).ids == []
        with FaissStore.open(tmp_path) as again:
            again.add([make_node("c", [1.0, 0.0], text="a swift")])
            assert ask(again, "swift", [0.0, 1.0], alpha=0.0).ids == ["c"]

    def test_other_tenants_change_no_score(self, make_node: MakeNode) -> None:
        def filled() -> FaissStore:
            store = FaissStore()
            texts = ["heron", "heron owl", "wren wren swift", "raven"]
            store.for_tenant("ann").add([make_node(f"n{i}", [1.0, i], text=text) for i, text in enumerate(texts)])
            return store

        alone, shared = filled(), filled()
        shared.for_tenant("bob").add([make_node(f"b{i}", [1.0, 1.0], text="raven owl heron") for i in range(30)])
        for question in ("heron raven", "wren", "owl"):
            first, second = (ask(s.for_tenant("ann"), question, [1.0, 0.5], k=4, alpha=0.3) for s in (alone, shared))
            assert (first.ids, first.similarities) == (second.ids, second.similarities)
            scores = [s._indexes.words("ann").search(question, 9, None) for s in (alone, shared)]
            assert [score for _, score in scores[0]] == [score for _, score in scores[1]]
        assert ask(shared.for_tenant("nobody"), "heron", [1.0, 0.0]).ids == []

    def test_random_stores_against_brute_force(self, make_node: MakeNode) -> None:
        draw = random.Random(3)
        for _ in range(20):
            store = FaissStore()
            texts = {i: " ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for i in range(1, 13)}
            angles = {i: draw.uniform(0, 3) for i in texts}
            vectors = {i: [math.cos(angle), math.sin(angle)] for i, angle in angles.items()}
            store.add([make_node(str(i), vectors[i], text=text, parity=i % 2) for i, text in texts.items()])
            question, alpha = " ".join(draw.choices(WORDS, k=2)), draw.choice([0.0, 0.2, 0.5, 1.0])
            odd = MetadataFilters(filters=[MetadataFilter(key="parity", value=1)]) if draw.random() < 0.5 else None
            kept = {i for i in texts if odd is None or i % 2}
            metadata = {node.node_id: node.get_content("embed") for node in store.get_nodes()}  # type: ignore[arg-type]
            scores = bm25({i: metadata[str(i)] for i in texts}, question)
            by_words = sorted(kept & scores.keys(), key=lambda i: (-np.float32(scores[i]), i))
            by_vector = sorted(kept, key=lambda i: angles[i])
            expected = fuse(by_vector[:8], by_words[:8], alpha)[:2]
            found = ask(store, question, [1.0, 0.0], k=2, alpha=alpha, filters=odd)
            assert found.ids == [str(i) for i, _ in expected]
            assert found.similarities == pytest.approx([score for _, score in expected])

    def test_what_cannot_be_asked_says_why(self, store: FaissStore) -> None:
        with pytest.raises(ConfigError, match="no query_str"):
            store.query(VectorStoreQuery([1.0, 0.0], 2, mode=VectorStoreQueryMode.HYBRID))
        for wrong in ({"alpha": 1.5}, {"hybrid_prefetch_factor": 0}, {"hybrid_top_k": 0}, {"sparse_top_k": 0}):
            with pytest.raises(ConfigError, match=r"alpha must be 0\.\.1"):
                ask(store, "a", [1.0, 0.0], **wrong)


class TestRetrievers:
    @pytest.fixture
    def embedding(self) -> WordEmbedding:
        return WordEmbedding(model_name="words", embedded=[])

    @pytest.fixture
    def filled(self, embedding: WordEmbedding) -> FaissStore:
        store = FaissStore(embed_model=embedding)
        texts = {"heron": "herons stand in water", "code": "order X15 has three wings", "owl": "owls hunt at night"}
        nodes = [TextNode(id_=id_, text=text) for id_, text in texts.items()]
        for node in nodes:
            node.embedding = embedding.get_text_embedding(node.text)
        store.add(nodes)
        return store

    def test_the_own_retriever(self, filled: FaissStore, embedding: WordEmbedding) -> None:
        found = make_retriever(filled, embedding, 2, alpha=0.3).retrieve("Which order has X15?")
        assert found[0].node.node_id == "code"
        assert found[0].score == pytest.approx(1.0)
        with pytest.raises(ConfigError, match=r"weight of the vectors in hybrid retrieval, 0\.\.1"):
            make_retriever(filled, embedding, alpha=2)

    def test_the_stock_retriever(self, filled: FaissStore, embedding: WordEmbedding) -> None:
        index = VectorStoreIndex.from_vector_store(filled, embed_model=embedding)
        retriever = index.as_retriever(vector_store_query_mode="hybrid", alpha=0.0, similarity_top_k=2)
        assert [found.node.node_id for found in retriever.retrieve("X15")] == ["code"]

    def test_a_store_without_it_says_so(self, embedding: WordEmbedding, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FaissStore, "_modes", DatabaseStore._modes)
        with pytest.raises(ConfigError, match="FaissStore has no hybrid retrieval"):
            make_retriever(FaissStore(), embedding, alpha=0.5)
