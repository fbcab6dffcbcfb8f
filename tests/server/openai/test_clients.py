"""Clients of other projects, unmodified: LlamaIndex's `OpenAILike` and LangChain's `ChatOpenAI`."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from saying import saying
from served import TEXTS, Serve, Served

from reader_rag.engine.engine import Engine
from reader_rag.llm import ReaderLLM

TEXT = "the man and the inn"
CALL = '{"name": "search", "arguments": {"query": "heron"}}'
ANSWER = "It is said: The heron stands still in shallow water."


class Bird(BaseModel):
    """A bird."""

    name: str = Field(max_length=5)
    wet: bool


@pytest.fixture
def expected(tiny_engine: Engine) -> str:
    llm = ReaderLLM.from_engine(tiny_engine, max_tokens=24)
    return str(llm.chat([ChatMessage(role="user", content=TEXT)]).message.content)


def openai_like(served: Served, model: str = "tiny", **settings: Any) -> OpenAILike:
    given: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0.0}
    given |= {"context_window": 2048, "max_tokens": 24}
    return OpenAILike(model=model, api_base=f"{served.url}/v1", api_key="none", **given | settings)


def langchain(served: Served, model: str = "tiny", **settings: Any) -> ChatOpenAI:
    given = {"temperature": 0, "max_tokens": 24, "max_retries": 0} | settings
    return ChatOpenAI(model=model, base_url=f"{served.url}/v1", api_key="none", **given)


class TestOpenAILike:
    def test_answers_and_streams(self, serve: Serve, expected: str) -> None:
        llm = openai_like(serve())
        asked = [ChatMessage(role="user", content=TEXT)]
        assert llm.chat(asked).message.content == expected
        assert [part.message.content for part in llm.stream_chat(asked)][-1] == expected

    async def test_event_loops(self, serve: Serve, expected: str) -> None:
        llm = openai_like(serve())
        asked = [ChatMessage(role="user", content=TEXT)]
        assert (await llm.achat(asked)).message.content == expected
        parts = [part async for part in await llm.astream_chat(asked)]
        assert parts[-1].message.content == expected

    def test_completions(self, serve: Serve, tiny_engine: Engine) -> None:
        llm = openai_like(serve(), is_chat_model=False)
        ours = ReaderLLM.from_engine(tiny_engine, max_tokens=24).complete(TEXT, formatted=True).text
        assert llm.complete(TEXT).text == ours

    def test_tools(self, serve: Serve, tiny_engine: Engine) -> None:
        def search(query: str) -> str:
            """Search the documents."""
            return f"found {query}"

        llm = openai_like(serve(llm=saying(tiny_engine, CALL)), max_tokens=200)
        answer = llm.predict_and_call([FunctionTool.from_defaults(search)], TEXT)
        assert str(answer) == "found heron"

    def test_json_of_a_class(self, serve: Serve) -> None:
        llm = openai_like(serve(), should_use_structured_outputs=True, max_tokens=200)
        assert isinstance(llm.as_structured_llm(Bird).complete(TEXT).raw, Bird)


class TestLangChain:
    def test_answers_and_streams(self, serve: Serve, expected: str) -> None:
        llm = langchain(serve())
        answer = llm.invoke(TEXT)
        assert answer.text == expected
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == 24
        assert "".join(part.text for part in llm.stream(TEXT)) == expected

    async def test_event_loops(self, serve: Serve, expected: str) -> None:
        llm = langchain(serve())
        assert (await llm.ainvoke(TEXT)).text == expected
        assert [answer.text for answer in await llm.abatch([TEXT] * 4)] == [expected] * 4

    def test_tools(self, serve: Serve, tiny_engine: Engine) -> None:
        @tool
        def search(query: str) -> str:
            """Search the documents."""
            return f"found {query}"

        llm = langchain(serve(llm=saying(tiny_engine, CALL, "Found.")), max_tokens=200).bind_tools([search])
        first = llm.invoke(TEXT)
        assert [(call["name"], call["args"]) for call in first.tool_calls] == [("search", {"query": "heron"})]
        second = llm.invoke([HumanMessage(TEXT), first, search.invoke(first.tool_calls[0])])
        assert second.text == "Found."

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_json_of_a_class(self, serve: Serve, method: Any) -> None:
        llm = langchain(serve(), max_tokens=200).with_structured_output(Bird, method=method)
        assert isinstance(llm.invoke(TEXT), Bird)

    def test_documents(self, serve: Serve, tiny_engine: Engine) -> None:
        served = serve(TEXTS, llm=saying(tiny_engine, ANSWER))
        llm = langchain(served, "tiny+docs", max_tokens=200, extra_body={"reader": {"top_k": 2, "footer": True}})
        answer = llm.invoke("Where does the heron stand?")
        assert answer.text.startswith(ANSWER)
        assert f"[heron\\.txt]({served.url}/#/documents/" in answer.text
