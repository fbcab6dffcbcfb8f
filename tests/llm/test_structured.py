"""Structured predictions: their prompts, and the objects of whole, partial and truncated answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from threading import Thread
from typing import Any, Literal

import pytest
from llama_index.core import ChatPromptTemplate, PromptTemplate
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import CustomLLM
from pydantic import RootModel

from reader_rag.config.grammar import Grammar
from reader_rag.engine.outputs import Passage
from reader_rag.errors import ConfigError, IncompleteAnswerError
from reader_rag.llm.structured import StructuredOutput


class ChatOnly(StructuredOutput, CustomLLM):
    """An LLM whose chats answer from a script and remember what they were asked."""

    pieces: list[str] = Field(default_factory=list)
    finish_reason: str = "stop"
    _asked: list[tuple[list[ChatMessage], dict[str, Any]]] = PrivateAttr(default_factory=list)
    _contexts: list[Passage | None] = PrivateAttr(default_factory=list)
    _closed: list[int] = PrivateAttr(default_factory=list)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True)

    def _with_context(self, passage: Passage | None) -> ChatOnly:
        self._contexts.append(passage)
        return self

    def _responses(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Iterator[ChatResponse]:
        self._asked.append((list(messages), kwargs))
        for number in range(1, len(self.pieces) + 1):
            message = ChatMessage(role="assistant", content="".join(self.pieces[:number]))
            raw = {"finish_reason": self.finish_reason} if number == len(self.pieces) else None
            yield ChatResponse(message=message, delta=self.pieces[number - 1], raw=raw)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return list(self._responses(messages, kwargs))[-1]

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.chat(messages, **kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        def responses() -> ChatResponseGen:
            read = 0
            try:
                for response in self._responses(messages, kwargs):
                    read += 1
                    yield response
            finally:
                self._closed.append(read)

        return responses()

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        async def responses() -> ChatResponseAsyncGen:
            stream = self.stream_chat(messages, **kwargs)
            try:
                for response in stream:
                    yield response
            finally:
                stream.close()  # type: ignore[attr-defined]

        return responses()

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        raise AssertionError("structured predictions are chats")

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        raise AssertionError("structured predictions are chats")


class Animal(BaseModel):
    """An animal of a story."""

    name: str = Field(description="How it is called")
    kind: Literal["cat", "dog"]
    legs: int = 4


PROMPT = PromptTemplate("Who is meant by {what}?")
PIECES = ['{"name": ', '"Tom"', ', "kind": "cat"', ', "legs": ', "3}"]
TOM = Animal(name="Tom", kind="cat", legs=3)


@pytest.fixture
def llm() -> ChatOnly:
    return ChatOnly(pieces=PIECES, system_prompt="Be brief.")


async def predict(llm: Any, how: str, output_cls: type[BaseModel] = Animal, **arguments: Any) -> Any:
    """The last object, by each of the four methods."""
    arguments = {"prompt": PROMPT, "what": "it", **arguments}
    if how == "predict":
        return llm.structured_predict(output_cls, **arguments)
    if how == "apredict":
        return await llm.astructured_predict(output_cls, **arguments)
    if how == "stream":
        return list(llm.stream_structured_predict(output_cls, **arguments))[-1]
    return [part async for part in await llm.astream_structured_predict(output_cls, **arguments)][-1]


@pytest.mark.parametrize("how", ["predict", "apredict", "stream", "astream"])
class TestEachMethod:
    async def test_an_object_comes_back(self, llm: ChatOnly, how: str) -> None:
        assert await predict(llm, how) == TOM

    async def test_the_class_is_the_grammar_and_other_arguments_are_passed_on(self, llm: ChatOnly, how: str) -> None:
        await predict(llm, how, llm_kwargs={"max_tokens": 7, "seed": 3})
        ((_, kwargs),) = llm._asked
        assert kwargs == {"grammar": Grammar.json_schema(Animal), "max_tokens": 7, "seed": 3}

    async def test_the_model_reads_prompt_schema_and_system_prompt(self, llm: ChatOnly, how: str) -> None:
        await predict(llm, how, what="the {hero}")
        (((system, question), _),) = llm._asked
        assert (system.role.value, system.content) == ("system", "Be brief.")
        assert (question.content or "").startswith("Who is meant by the {hero}?\n\nHere's a JSON schema")
        assert '{"name": {"description": "How it is called", ' in (question.content or "")
        assert "{{" not in (question.content or "")

    async def test_the_retrieved_text_still_reaches_the_drafts(self, llm: ChatOnly, how: str) -> None:
        await predict(llm, how, prompt=PromptTemplate("{context_str}"), context_str="A cat called Tom.")
        assert llm._contexts == [Passage("context", "A cat called Tom.")]

    async def test_sets_and_decimals(self, llm: ChatOnly, how: str) -> None:
        class Article(BaseModel):
            tags: set[str]
            price: Decimal

        pieces = ['{"tags": ["a"', ', "b", "a"], "price"', ': "0.10"', "}"]
        article = await predict(llm.model_copy(update={"pieces": pieces}), how, Article)
        assert (article.tags, str(article.price)) == ({"a", "b"}, "0.10")

    async def test_an_answer_that_was_cut_off_says_what_to_raise(self, llm: ChatOnly, how: str) -> None:
        cut = llm.model_copy(update={"pieces": PIECES[:-1], "finish_reason": "length"})
        with pytest.raises(IncompleteAnswerError, match="before its Animal was complete; raise max_tokens"):
            await predict(cut, how)

    async def test_a_stop_string_that_ends_it_is_named(self, llm: ChatOnly, how: str) -> None:
        stopped = llm.model_copy(update={"pieces": PIECES[:-1]})
        with pytest.raises(IncompleteAnswerError, match="a stop string ended it; take it out of stop"):
            await predict(stopped, how)

    async def test_an_object_that_ends_with_the_last_token_is_whole(self, llm: ChatOnly, how: str) -> None:
        assert await predict(llm.model_copy(update={"finish_reason": "length"}), how) == TOM

    async def test_a_number_that_was_cut_off_is_not(self, llm: ChatOnly, how: str) -> None:
        for finish, pieces in (("length", ["4", "2"]), ("stop", ["4", "2"])):
            numbers = llm.model_copy(update={"pieces": pieces, "finish_reason": finish})
            if finish == "stop":
                assert (await predict(numbers, how, RootModel[int])).root == 42
            else:
                with pytest.raises(IncompleteAnswerError, match="ended within a number.*raise max_tokens"):
                    await predict(numbers, how, RootModel[int])

    async def test_what_a_schema_cannot_say_is_the_classes_own_error(self, llm: ChatOnly, how: str) -> None:
        class Even(Animal):
            @field_validator("legs")
            @classmethod
            def pairs(cls, legs: int) -> int:
                if legs % 2:
                    raise ValueError("legs come in pairs")
                return legs

        with pytest.raises(ValidationError, match="legs come in pairs"):
            await predict(llm, how, Even)

    async def test_a_second_grammar_is_refused(self, llm: ChatOnly, how: str) -> None:
        with pytest.raises(ConfigError, match="leave grammar out of llm_kwargs"):
            await predict(llm, how, llm_kwargs={"grammar": Grammar.regex("x")})
        assert llm._asked == []

    async def test_the_template_is_left_as_it_was(self, llm: ChatOnly, how: str) -> None:
        prompt = PromptTemplate("Who?")
        await predict(llm, how, prompt=prompt)
        await predict(llm, how, prompt=prompt)
        assert prompt.output_parser is None
        first, second = (messages[-1].content for messages, _ in llm._asked)
        assert first == second
        assert (first or "").count("JSON schema") == 1

    async def test_watchers_are_told(self, llm: ChatOnly, how: str) -> None:
        class Watcher(BaseEventHandler):
            seen: list[Any] = Field(default_factory=list)

            def handle(self, event: Any, **kwargs: Any) -> None:
                self.seen.append(event)

        dispatcher, watcher = get_dispatcher("reader_rag.llm.structured"), Watcher()
        dispatcher.add_event_handler(watcher)
        try:
            await predict(llm, how)
        finally:
            dispatcher.event_handlers.remove(watcher)
        names = [event.class_name() for event in watcher.seen]
        parts = ["LLMStructuredPredictInProgressEvent"] * (len(PIECES) if "stream" in how else 0)
        assert names == ["LLMStructuredPredictStartEvent", *parts, "LLMStructuredPredictEndEvent"]
        assert (watcher.seen[0].output_cls, watcher.seen[0].template_args) == (Animal, {"what": "it"})
        assert watcher.seen[-1].output == TOM


class TestParts:
    def test_the_object_fills_up(self, llm: ChatOnly) -> None:
        parts = list(llm.stream_structured_predict(Animal, PROMPT, what="it"))
        fields = [part.model_dump(exclude_none=True, exclude_unset=True) for part in parts]
        assert fields[:3] == [{}, {"name": "Tom"}, {"name": "Tom", "kind": "cat"}]
        assert all(earlier.items() <= later.items() for earlier, later in pairwise(fields))
        assert (parts[-1], type(parts[-1])) == (TOM, Animal)

    def test_parts_come_before_the_error_of_an_answer_that_was_cut_off(self, llm: ChatOnly) -> None:
        cut = llm.model_copy(update={"pieces": PIECES[:2], "finish_reason": "length"})
        stream = cut.stream_structured_predict(Animal, PROMPT, what="it")
        assert [next(stream).name, next(stream).name] == [None, "Tom"]
        with pytest.raises(IncompleteAnswerError):
            next(stream)

    def test_nothing_is_asked_before_the_first_part_is_read(self, llm: ChatOnly) -> None:
        llm.stream_structured_predict(Animal, PROMPT, what="it")
        assert llm._asked == []

    def test_closing_it_closes_the_answer(self, llm: ChatOnly) -> None:
        stream = llm.stream_structured_predict(Animal, PROMPT, what="it")
        next(stream)
        stream.close()
        assert llm._closed == [1]

    async def test_closing_it_closes_the_asynchronous_answer(self, llm: ChatOnly) -> None:
        stream = await llm.astream_structured_predict(Animal, PROMPT, what="it")
        await anext(stream)
        await stream.aclose()
        assert llm._closed == [1]


class TestPrompts:
    def test_in_a_chat_the_schema_stands_with_the_question(self, llm: ChatOnly) -> None:
        messages = [ChatMessage(role="user", content="Hi {who}"), ChatMessage(role="user", content="Who is it?")]
        template = ChatPromptTemplate(message_templates=messages)
        llm.structured_predict(Animal, template, who="Ann")
        asked = [message.content or "" for message in llm._asked[0][0]]
        assert asked[:2] == ["Be brief.", "Hi Ann"]
        assert asked[2].startswith("Who is it?\n\nHere's a JSON schema")
        assert [message.content for message in messages] == ["Hi {who}", "Who is it?"]

    def test_a_class_without_a_schema_asks_nothing(self, llm: ChatOnly) -> None:
        class Odd(BaseModel):
            model_config = {"arbitrary_types_allowed": True}
            thread: Thread

        with pytest.raises(ConfigError, match="Odd has no JSON schema"):
            llm.structured_predict(Odd, PROMPT, what="it")
        assert llm._asked == []


class TestStructuredLLM:
    """LlamaIndex's own wrapper around the four methods."""

    question = [ChatMessage(role="user", content="Who is it?")]

    async def test_chats_and_completions(self, llm: ChatOnly) -> None:
        structured = llm.as_structured_llm(Animal)
        assert structured.chat(self.question, max_tokens=9).raw == TOM
        assert (await structured.achat(self.question)).message.content == TOM.model_dump_json()
        assert structured.complete("Who is it?").raw == TOM
        assert llm._asked[0][1]["max_tokens"] == 9

    async def test_streams(self, llm: ChatOnly) -> None:
        structured = llm.as_structured_llm(Animal)
        assert list(structured.stream_chat(self.question))[-1].raw == TOM
        assert [part async for part in await structured.astream_chat(self.question)][-1].raw == TOM
