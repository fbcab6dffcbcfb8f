from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.llms import MockLLM
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters

from reader_rag.errors import ConfigError, PromptError, StoreNotFoundError
from reader_rag.rag import (
    NOTHING_FOUND,
    FaissStore,
    SizedEmbedding,
    make_chat_engine,
    make_query_engine,
    make_retriever,
    open_store,
)
from reader_rag.rag.synthesis import PromptBudget

TEXTS = {"cats": "Cats purr when content.", "dogs": "Dogs bark at strangers.", "birds": "Birds sing at dawn."}
MakeLLM = Callable[..., Any]


@pytest.fixture
def store(embedding: SizedEmbedding) -> FaissStore:
    store = FaissStore(embed_model=embedding)
    store.add(
        [
            TextNode(id_=name, text=text, metadata={"animal": name}, excluded_llm_metadata_keys=["animal"],
                     embedding=embedding.get_text_embedding(text))
            for name, text in TEXTS.items()
        ]
    )  # fmt: skip
    return store


def test_open_store_opens_what_is_there(tmp_path: Path, embedding: SizedEmbedding) -> None:
    FaissStore(tmp_path / "s", embed_model=embedding).close()
    assert open_store(tmp_path / "s", embedding).num_nodes == 0
    with pytest.raises(StoreNotFoundError):
        open_store(tmp_path / "other", embedding)


def test_the_retriever_finds_the_nearest(store: FaissStore, embedding: SizedEmbedding) -> None:
    found = make_retriever(store, embedding, top_k=2).retrieve("what do dogs bark at")
    assert [node.node_id for node in found] == ["dogs", "birds"]
    assert (found[0].score or 0) > (found[1].score or 0) > 0


def test_the_retriever_keeps_to_cutoff_and_filters(store: FaissStore, embedding: SizedEmbedding) -> None:
    only_cats = MetadataFilters(filters=[MetadataFilter(key="animal", value="cats")])
    found = make_retriever(store, embedding, filters=only_cats).retrieve("what do dogs bark at")
    assert [node.node_id for node in found] == ["cats"]
    assert [n.node_id for n in make_retriever(store, embedding, cutoff=0.6).retrieve("dogs bark at noon")] == ["dogs"]


def test_a_text_that_several_files_share_is_retrieved_once(store: FaissStore, embedding: SizedEmbedding) -> None:
    copy = TextNode(id_="copy", text=TEXTS["dogs"], embedding=embedding.get_text_embedding(TEXTS["dogs"]))
    store.add([copy])
    found = make_retriever(store, embedding, top_k=3).retrieve("what do dogs bark at")
    assert [node.get_content() for node in found] == [TEXTS["dogs"], TEXTS["birds"]]


@pytest.mark.parametrize(("top_k", "cutoff"), [(0, None), (4, 1.5), (4, -2.0)])
def test_settings_out_of_range_are_refused(
    store: FaissStore, embedding: SizedEmbedding, top_k: int, cutoff: float | None
) -> None:
    with pytest.raises(ConfigError):
        make_retriever(store, embedding, top_k, cutoff)


def test_an_answer_is_asked_for_from_the_passages(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    response = make_query_engine(store, llm, embedding, top_k=2).query("what do dogs bark at")
    assert str(response) == "forty two it is"
    assert [node.node_id for node in response.source_nodes] == ["dogs", "birds"]
    (prompt,) = llm.prompts
    assert "Text:\nDogs bark at strangers.\n\nBirds sing at dawn.\n\nQuestion: what do dogs bark at" in prompt
    assert "animal" not in prompt


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_question_is_refused(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM, question: str
) -> None:
    llm = make_llm()
    engine, chat = make_query_engine(store, llm, embedding), make_chat_engine(store, llm, embedding)
    for ask in (engine.query, chat.chat, chat.stream_chat):
        with pytest.raises(PromptError, match="the question is empty"):
            ask(question)
    with pytest.raises(PromptError, match="the question is empty"):
        asyncio.run(engine.aquery(question))
    assert llm.prompts == []


def test_a_question_longer_than_the_context_is_refused(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    for ask in (make_query_engine(store, llm, embedding).query, make_chat_engine(store, llm, embedding).chat):
        with pytest.raises(PromptError, match="context of 400 tokens, 50 of them reserved for the answer: shorten it"):
            ask("why " * 400)
    assert llm.prompts == []


def test_nothing_found_is_said_without_asking_the_llm(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    question = "zebra"
    assert str(make_query_engine(store, llm, embedding, cutoff=0.9).query(question)) == NOTHING_FOUND
    streamed = make_query_engine(store, llm, embedding, streaming=True, cutoff=0.9).query(question)
    assert isinstance(streamed, StreamingResponse)
    assert "".join(streamed.response_gen) == NOTHING_FOUND
    chat = make_chat_engine(store, llm, embedding, cutoff=0.9)
    assert str(chat.chat(question)) == NOTHING_FOUND
    assert "".join(chat.stream_chat(question).response_gen) == NOTHING_FOUND
    assert llm.prompts == []


def test_passages_that_do_not_fit_one_prompt_are_read_one_after_another(
    embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm(window=220)
    store = FaissStore()
    texts = [f"dogs {letter} " + f"{letter} " * 60 for letter in "abc"]
    store.add([TextNode(text=text, embedding=embedding.get_text_embedding(text)) for text in texts])
    make_query_engine(store, llm, embedding).query("dogs")
    assert len(llm.prompts) > 1
    assert all(len(prompt.split()) <= 220 - 50 for prompt in llm.prompts)
    assert "Answer so far: forty two it is" in llm.prompts[1]


def test_a_streamed_answer_comes_piece_by_piece(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    response = make_query_engine(store, make_llm(), embedding, streaming=True).query("dogs")
    assert isinstance(response, StreamingResponse)
    assert list(response.response_gen) == ["forty ", "two ", "it ", "is"]
    assert len(response.source_nodes) == 3


def test_closing_a_streamed_answer_ends_the_generation(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    response = make_query_engine(store, llm, embedding, streaming=True).query("dogs")
    assert isinstance(response, StreamingResponse)
    assert next(response.response_gen) == "forty "
    response.response_gen.close()
    assert llm.closed


def test_async_queries_give_the_same(store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM) -> None:
    response = asyncio.run(make_query_engine(store, make_llm(), embedding).aquery("dogs bark"))
    assert (str(response), response.source_nodes[0].node_id) == ("forty two it is", "dogs")


def test_a_chat_remembers_and_sees_new_passages_for_each_message(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    chat = make_chat_engine(store, llm, embedding, top_k=1)
    assert str(chat.chat("what do dogs bark at")) == "forty two it is"
    second = chat.chat("and when do birds sing")
    assert [node.node_id for node in second.source_nodes] == ["birds"]
    prompt = llm.prompts[-1]
    assert "Birds sing at dawn." in prompt
    assert "Dogs bark" not in prompt
    assert prompt.index("what do dogs bark at") < prompt.index("forty two") < prompt.index("and when do birds sing")
    assert [(m.role.value, m.content) for m in chat.chat_history] == [
        ("user", "what do dogs bark at"),
        ("assistant", "forty two it is"),
        ("user", "and when do birds sing"),
        ("assistant", "forty two it is"),
    ]
    chat.reset()
    assert chat.chat_history == []


def test_braces_in_earlier_messages_stay_text(store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM) -> None:
    llm = make_llm(answer="use {query_str} and {x}")
    chat = make_chat_engine(store, llm, embedding, system_prompt="Be {brief}.")
    chat.chat("what is {context_str}?")
    chat.chat("why?")
    for text in ("what is {context_str}?", "use {query_str} and {x}", "Be {brief}."):
        assert text in llm.prompts[-1]


def test_a_long_chat_forgets_its_beginning_but_fits(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    chat = make_chat_engine(store, llm, embedding)
    for i in range(20):
        chat.chat(f"question {i} about dogs and why they do bark at all")
    assert all(len(prompt.split()) <= 350 for prompt in llm.prompts)
    assert "question 18 " in llm.prompts[-1]
    assert "question 1 " not in llm.prompts[-1]
    assert len(chat.chat_history) == 40


def test_a_chat_can_begin_with_earlier_messages(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    earlier = [ChatMessage(content="I am Ada", role=MessageRole.USER)]
    chat = make_chat_engine(store, llm, embedding, chat_history=earlier)
    chat.chat("dogs")
    assert "I am Ada" in llm.prompts[0]
    with pytest.raises(ConfigError, match="not both"):
        make_chat_engine(store, llm, embedding, chat_history=earlier, memory=chat._memory)


def test_a_streamed_chat_is_remembered_when_it_has_been_read(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    chat = make_chat_engine(store, make_llm(), embedding)
    stream = chat.stream_chat("dogs")
    assert chat.chat_history == []
    assert list(stream.response_gen) == ["forty ", "two ", "it ", "is"]
    assert stream.response == "forty two it is"
    assert [m.content for m in chat.chat_history] == ["dogs", "forty two it is"]


def test_closing_a_streamed_chat_ends_the_generation_and_keeps_what_was_said(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    chat = make_chat_engine(store, llm, embedding)
    answer = chat.stream_chat("dogs").response_gen
    assert [next(answer), next(answer)] == ["forty ", "two "]
    answer.close()
    assert llm.closed
    assert [m.content for m in chat.chat_history] == ["dogs", "forty two"]


def test_a_streamed_chat_that_fails_raises_and_leaves_the_history_alone(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    chat = make_chat_engine(store, make_llm(fail=True), embedding)
    with pytest.raises(RuntimeError, match="the model broke"):
        list(chat.stream_chat("dogs").response_gen)
    assert chat.chat_history == []


def test_async_chats_do_the_same(store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM) -> None:
    llm = make_llm()
    chat = make_chat_engine(store, llm, embedding)

    async def use() -> list[str]:
        said = [str(await chat.achat("dogs"))]
        stream = await chat.astream_chat("birds")
        said += [delta async for delta in stream.async_response_gen()]
        cut = (await chat.astream_chat("cats")).async_response_gen()
        said.append(await anext(cut))
        await cut.aclose()
        return said

    assert asyncio.run(use()) == ["forty two it is", "forty ", "two ", "it ", "is", "forty "]
    assert [m.content for m in chat.chat_history] == [
        "dogs", "forty two it is", "birds", "forty two it is", "cats", "forty",
    ]  # fmt: skip
    assert llm.closed


def test_the_global_settings_of_llama_index_are_left_alone(
    store: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    names = ("_llm", "_embed_model", "_tokenizer", "_node_parser", "_prompt_helper", "_transformations")
    before = {name: getattr(Settings, name) for name in names}
    make_query_engine(store, make_llm(), embedding).query("dogs")
    chat = make_chat_engine(store, make_llm(), embedding)
    chat.chat("dogs")
    list(chat.stream_chat("dogs").response_gen)
    assert {name: getattr(Settings, name) for name in names} == before
    assert llama_index.core.global_tokenizer is None


def test_an_llm_without_a_tokenizer_works(store: FaissStore, embedding: SizedEmbedding) -> None:
    response = make_query_engine(store, MockLLM(max_tokens=5), embedding).query("dogs")
    assert str(response)


def test_a_chat_template_is_counted_once_and_for_each_message(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def apply(self: Any, messages: list[dict[str, str]], **kwargs: Any) -> Any:
        said = "".join(f"<{m['role']}> {m['content']} </s> " for m in messages)
        return self.encode(f"system be nice {said}<assistant>")

    monkeypatch.setattr(type(llm.tokenizer), "chat_template", "some template")
    monkeypatch.setattr(type(llm.tokenizer), "apply_chat_template", apply, raising=False)
    budget = PromptBudget.of(llm)
    assert (budget.context_window, budget.num_output) == (400, 50)
    assert (budget.template_tokens, budget.message_tokens) == (6, 2)
