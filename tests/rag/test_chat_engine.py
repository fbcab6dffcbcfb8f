"""The chat engine: history, streams, and text in braces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole

from reader_rag.errors import ConfigError
from reader_rag.rag import FaissStore, SizedEmbedding, make_chat_engine

MakeLLM = Callable[..., Any]


def test_a_chat_keeps_its_history_and_retrieves_for_each_message(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    chat = make_chat_engine(animals, llm, embedding, top_k=1)
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


def test_braces_in_earlier_messages_stay_text(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm(answer="use {query_str} and {x}")
    chat = make_chat_engine(animals, llm, embedding, system_prompt="Be {brief}.")
    chat.chat("what is {context_str}?")
    chat.chat("why?")
    for text in ("what is {context_str}?", "use {query_str} and {x}", "Be {brief}."):
        assert text in llm.prompts[-1]


def test_a_long_chat_drops_its_oldest_messages_from_the_prompt(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    chat = make_chat_engine(animals, llm, embedding)
    for i in range(20):
        chat.chat(f"question {i} about dogs and why they do bark at all")
    assert all(len(prompt.split()) <= 350 for prompt in llm.prompts)
    assert "question 18 " in llm.prompts[-1]
    assert "question 1 " not in llm.prompts[-1]
    assert len(chat.chat_history) == 40


def test_a_chat_can_start_with_a_history(animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM) -> None:
    llm = make_llm()
    earlier = [ChatMessage(content="I am Ada", role=MessageRole.USER)]
    chat = make_chat_engine(animals, llm, embedding, chat_history=earlier)
    chat.chat("dogs")
    assert "I am Ada" in llm.prompts[0]
    with pytest.raises(ConfigError, match="not both"):
        make_chat_engine(animals, llm, embedding, chat_history=earlier, memory=chat._memory)


def test_a_streamed_answer_enters_the_history_when_it_has_been_read(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    chat = make_chat_engine(animals, make_llm(), embedding)
    stream = chat.stream_chat("dogs")
    assert chat.chat_history == []
    assert list(stream.response_gen) == ["forty ", "two ", "it ", "is"]
    assert stream.response == "forty two it is"
    assert [m.content for m in chat.chat_history] == ["dogs", "forty two it is"]


def test_closing_a_streamed_answer_ends_the_generation_and_keeps_its_text(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    chat = make_chat_engine(animals, llm, embedding)
    answer = chat.stream_chat("dogs").response_gen
    assert [next(answer), next(answer)] == ["forty ", "two "]
    answer.close()
    assert llm.closed
    assert [m.content for m in chat.chat_history] == ["dogs", "forty two"]


def test_a_failing_stream_raises_and_leaves_the_history_unchanged(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    chat = make_chat_engine(animals, make_llm(fail=True), embedding)
    with pytest.raises(RuntimeError, match="the model broke"):
        list(chat.stream_chat("dogs").response_gen)
    assert chat.chat_history == []


def test_async_chats_answer_stream_and_close(animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM) -> None:
    llm = make_llm()
    chat = make_chat_engine(animals, llm, embedding)

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
