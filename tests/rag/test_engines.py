"""Retriever, query engine and chat engine: settings, retrieval, and the tenant of store and LLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import MockLLM
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters
from scripted_engine import ScriptedEngine

from reader_rag.errors import ConfigError, PromptError
from reader_rag.llm import ReaderLLM
from reader_rag.rag import FaissStore, SizedEmbedding, make_chat_engine, make_query_engine, make_retriever
from reader_rag.rag.ingest import ingest

MakeLLM = Callable[..., Any]
BAD_TENANTS = ["two\nlines", "nul\0", "bell\x07", "esc\x1b[31m", "hidden\u200b", "half\ud800", "x" * 257]


def test_the_retriever_finds_the_nearest(animals: FaissStore, embedding: SizedEmbedding) -> None:
    found = make_retriever(animals, embedding, top_k=2).retrieve("what do dogs bark at")
    assert [node.node_id for node in found] == ["dogs", "birds"]
    assert (found[0].score or 0) > (found[1].score or 0) > 0


def test_the_retriever_applies_cutoff_and_filters(animals: FaissStore, embedding: SizedEmbedding) -> None:
    only_cats = MetadataFilters(filters=[MetadataFilter(key="animal", value="cats")])
    found = make_retriever(animals, embedding, filters=only_cats).retrieve("what do dogs bark at")
    assert [node.node_id for node in found] == ["cats"]
    assert [n.node_id for n in make_retriever(animals, embedding, cutoff=0.6).retrieve("dogs bark at noon")] == ["dogs"]


def test_a_text_that_several_files_share_is_retrieved_once(animals: FaissStore, embedding: SizedEmbedding) -> None:
    copy = TextNode(
        id_="copy", text="Dogs bark at strangers.", embedding=embedding.get_text_embedding("Dogs bark at strangers.")
    )
    animals.add([copy])
    found = make_retriever(animals, embedding, top_k=3).retrieve("what do dogs bark at")
    assert [node.get_content() for node in found] == ["Dogs bark at strangers.", "Birds sing at dawn."]


@pytest.mark.parametrize(("top_k", "cutoff"), [(0, None), (4, 1.5), (4, -2.0)])
def test_settings_out_of_range_are_refused(
    animals: FaissStore, embedding: SizedEmbedding, top_k: int, cutoff: float | None
) -> None:
    with pytest.raises(ConfigError):
        make_retriever(animals, embedding, top_k, cutoff)


def test_the_prompt_has_the_retrieved_passages(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    response = make_query_engine(animals, llm, embedding, top_k=2).query("what do dogs bark at")
    assert str(response) == "forty two it is"
    assert [node.node_id for node in response.source_nodes] == ["dogs", "birds"]
    (prompt,) = llm.prompts
    assert "Text:\nDogs bark at strangers.\n\nBirds sing at dawn.\n\nQuestion: what do dogs bark at" in prompt
    assert "animal" not in prompt


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_question_is_refused(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM, question: str
) -> None:
    llm = make_llm()
    engine, chat = make_query_engine(animals, llm, embedding), make_chat_engine(animals, llm, embedding)
    for ask in (engine.query, chat.chat, chat.stream_chat):
        with pytest.raises(PromptError, match="the question is empty"):
            ask(question)
    with pytest.raises(PromptError, match="the question is empty"):
        asyncio.run(engine.aquery(question))
    assert llm.prompts == []


def test_async_queries_return_the_same(animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM) -> None:
    response = asyncio.run(make_query_engine(animals, make_llm(), embedding).aquery("dogs bark"))
    assert (str(response), response.source_nodes[0].node_id) == ("forty two it is", "dogs")


def test_the_global_settings_of_llama_index_do_not_change(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    names = ("_llm", "_embed_model", "_tokenizer", "_node_parser", "_prompt_helper", "_transformations")
    before = {name: getattr(Settings, name) for name in names}
    make_query_engine(animals, make_llm(), embedding).query("dogs")
    chat = make_chat_engine(animals, make_llm(), embedding)
    chat.chat("dogs")
    list(chat.stream_chat("dogs").response_gen)
    assert {name: getattr(Settings, name) for name in names} == before
    assert llama_index.core.global_tokenizer is None


@pytest.mark.parametrize("name", BAD_TENANTS)
def test_invalid_tenant_names_raise(name: str, tmp_path: Path, embedding: SizedEmbedding) -> None:
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


def calls_of(engine: ScriptedEngine) -> list[tuple[str, list[str]]]:
    """The tenant of each call and the sorted texts of its passages, without the context."""
    return [
        (call.tenant, sorted(passage.text for passage in call.passages if passage.id != "context"))
        for call in engine.calls
    ]


def test_a_retriever_searches_its_tenant_only(pets: FaissStore, embedding: SizedEmbedding) -> None:
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


def test_query_engines_search_and_call_for_their_tenant(
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
    assert calls_of(engine) == [("a", ["My cat eats.", "My cat sleeps."])] * 4
    assert all("cat" in call.prompt.text and "dog" not in call.prompt.text for call in engine.calls)


def test_chat_engines_search_and_call_for_their_tenant(
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
    assert calls_of(engine) == [("b", ["My dog eats.", "My dog sleeps."])] * 4


def test_every_call_of_a_refined_answer_has_the_tenant(engine: ScriptedEngine, embedding: SizedEmbedding) -> None:
    llm = ReaderLLM.from_engine(engine, context_window=700, max_tokens=60)
    store = FaissStore()
    texts = [f"dogs {letter} " + f"{letter} " * 120 for letter in "abc"]
    store.for_tenant("a").add([TextNode(text=text, embedding=embedding.get_text_embedding(text)) for text in texts])
    make_query_engine(store, llm, embedding, tenant="a").query("dogs")
    assert len(engine.calls) > 1
    assert {call.tenant for call in engine.calls} == {"a"}


@pytest.mark.parametrize(
    ("of_store", "of_llm", "named", "documents", "caller"),
    [
        ("", "", None, "cow", ""),
        ("a", "", None, "cat", "a"),
        ("", "b", None, "cow", "b"),  # documents for all, conversations apart
        ("a", "a", None, "cat", "a"),
        ("a", "b", "b", "dog", "b"),
        ("a", "b", "", "cow", ""),
    ],
)
def test_store_llm_and_argument_determine_the_tenant(
    pets: FaissStore,
    llm: ReaderLLM,
    engine: ScriptedEngine,
    embedding: SizedEmbedding,
    of_store: str,
    of_llm: str,
    named: str | None,
    documents: str,
    caller: str,
) -> None:
    store, llm = pets.for_tenant(of_store), llm.for_tenant(of_llm)
    make_query_engine(store, llm, embedding, tenant=named).query("pets")
    make_chat_engine(store, llm, embedding, tenant=named).chat("pets")
    assert calls_of(engine) == [(caller, [f"My {documents} eats.", f"My {documents} sleeps."])] * 2
    assert (store.tenant, llm.tenant) == (of_store, of_llm)


def test_a_store_and_an_llm_of_different_tenants_raise(
    pets: FaissStore, llm: ReaderLLM, embedding: SizedEmbedding
) -> None:
    for make in (make_query_engine, make_chat_engine):
        with pytest.raises(ConfigError, match="bound to the tenant 'a' and the LLM to 'b': pass the tenant"):
            make(pets.for_tenant("a"), llm.for_tenant("b"), embedding)


class Pet(BaseModel):
    """A pet."""

    name: str


def test_a_structured_llm_is_bound_to_the_tenant(
    pets: FaissStore, engine: ScriptedEngine, llm: ReaderLLM, embedding: SizedEmbedding
) -> None:
    engine.script = ['{"name": "Tom"}']
    objects = llm.as_structured_llm(Pet)
    assert str(make_query_engine(pets, objects, embedding, tenant="a").query("cat"))
    assert [call.tenant for call in engine.calls] == ["a"]
    assert llm.tenant == ""


def test_an_llm_without_tenants_is_used_unchanged(pets: FaissStore, embedding: SizedEmbedding) -> None:
    response = make_query_engine(pets, MockLLM(max_tokens=4), embedding, tenant="a").query("cat")
    assert sorted(node.get_content() for node in response.source_nodes) == ["My cat eats.", "My cat sleeps."]


def test_an_index_in_place_of_a_store_is_told_what_to_pass(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: Callable[..., Any]
) -> None:
    index = VectorStoreIndex.from_vector_store(animals, embed_model=embedding)
    with pytest.raises(ConfigError, match=r"not a VectorStoreIndex: pass index\.vector_store"):
        make_query_engine(index, make_llm(), embedding)  # type: ignore[arg-type]
    assert make_query_engine(index.vector_store, make_llm(), embedding)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not a str: pass FaissStore\.open"):
        make_chat_engine("store", make_llm(), embedding)  # type: ignore[arg-type]
