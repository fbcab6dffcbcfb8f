"""Passages around the retrieved ones, for drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms import MockLLM
from llama_index.core.schema import BaseNode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from scripted_engine import ScriptedEngine

from reader_rag.llm import ReaderLLM
from reader_rag.rag import FaissStore, SizedEmbedding, make_chat_engine, make_query_engine
from reader_rag.rag.surroundings import Surroundings


def chunk(document: str, number: int, embedding: SizedEmbedding) -> TextNode:
    """The n-th passage of a document: ten characters."""
    text = f"{document} part {number}"
    return TextNode(
        id_=f"{document}{number}",
        text=text,
        embedding=embedding.get_text_embedding(text),
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)},
    )


@pytest.fixture
def store(embedding: SizedEmbedding) -> FaissStore:
    store = FaissStore(embed_model=embedding)
    store.add([chunk(document, number, embedding) for document in ("cat", "dog") for number in range(5)])
    store.add([TextNode(id_="alone", text="of no document", embedding=embedding.get_text_embedding("alone"))])
    return store


def around(store: FaissStore, ids: Sequence[str], most: int = 10_000) -> list[str]:
    nodes = {node.node_id: node for node in store.get_nodes()}
    return [node.node_id for node in Surroundings(store, most).of([NodeWithScore(node=nodes[id_]) for id_ in ids])]


def test_surrounding_passages_are_ordered_by_distance(store: FaissStore) -> None:
    assert around(store, ["cat3"]) == ["cat2", "cat4", "cat1", "cat0"]


def test_at_equal_distance_the_more_similar_document_comes_first(store: FaissStore) -> None:
    assert around(store, ["dog0", "cat4"]) == ["dog1", "cat3", "dog2", "cat2", "dog3", "cat1", "dog4", "cat0"]


def test_retrieved_passages_are_not_among_the_surrounding_ones(store: FaissStore) -> None:
    assert around(store, ["cat0", "cat1", "cat2", "cat3", "cat4"]) == []


def test_a_passage_without_a_document_has_no_surroundings(store: FaissStore) -> None:
    assert around(store, ["alone"]) == []


@pytest.mark.parametrize(("most", "found"), [(0, 0), (9, 0), (10, 1), (29, 2), (40, 4)])
def test_surrounding_passages_stay_within_the_limit(store: FaissStore, most: int, found: int) -> None:
    assert len(around(store, ["cat0"], most)) == found


class Listening(MockLLM):
    """Notes which sources it was given."""

    seen: list[list[str]] = Field(default_factory=list)

    def with_sources(self, nodes: Sequence[NodeWithScore | BaseNode]) -> Listening:
        self.seen.append([node.node_id for node in nodes])
        return self


@pytest.mark.parametrize(
    ("options", "expected"), [({}, ["cat2", "cat1", "cat3", "cat0", "cat4"]), ({"beyond": 0}, ["cat2"])]
)
def test_engines_give_the_llm_the_passages_and_their_surroundings(
    store: FaissStore, embedding: SizedEmbedding, options: dict[str, Any], expected: list[str]
) -> None:
    llm = Listening(max_tokens=4)
    query = make_query_engine(store, llm, embedding, top_k=1, **options)
    chat = make_chat_engine(store, llm, embedding, top_k=1, **options)
    query.query("cat part 2")
    asyncio.run(query.aquery("cat part 2"))
    "".join(chat.stream_chat("cat part 2").response_gen)
    assert llm.seen == [expected] * 3


def test_the_calls_of_an_engine_search_the_passages_and_their_surroundings(
    store: FaissStore, embedding: SizedEmbedding
) -> None:
    engine = ScriptedEngine(script=["well"])
    llm = ReaderLLM.from_engine(engine)
    query = make_query_engine(store, llm, embedding, top_k=1)
    query.query("cat part 2")
    asyncio.run(query.aquery("cat part 2"))
    make_chat_engine(store, llm, embedding, top_k=1).chat("cat part 2")
    searched = [[passage.id for passage in call.passages] for call in engine.calls]
    assert searched == [["cat2", "cat1", "cat3", "cat0", "cat4"]] * 3


def test_an_llm_without_with_sources_is_used_unchanged(store: FaissStore, embedding: SizedEmbedding) -> None:
    assert str(make_query_engine(store, MockLLM(max_tokens=4), embedding).query("cat part 2"))
