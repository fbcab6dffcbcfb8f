"""How retrieved text reaches the engine: explicit sources, the predict family, query engines, chat engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import PromptHelper, PromptTemplate
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from scripted_engine import ScriptedEngine

from reader_rag.engine.outputs import Passage
from reader_rag.errors import ConfigError
from reader_rag.llm import ReaderLLM


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def llm(engine: ScriptedEngine) -> ReaderLLM:
    return ReaderLLM.from_engine(engine)


class TestSources:
    def test_nodes_become_passages_in_their_order(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        node = TextNode(id_="n1", text="A cat.", metadata={"file": "cats.txt"})
        scored = NodeWithScore(node=TextNode(id_="n2", text="A dog."), score=0.5)
        llm.with_sources([node, scored, "A cow.", Passage("p", "A hen."), ""]).complete("Hi")
        assert engine.calls[0].passages == (
            Passage("n1", "A cat."),
            Passage("n2", "A dog."),
            Passage("source-3", "A cow."),
            Passage("p", "A hen."),
        )

    def test_the_original_is_left_alone(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        first = llm.with_sources(["A cat."])
        second = first.with_sources(["A dog."])
        for one in (llm, first, second):
            one.complete("Hi")
        assert [call.passages for call in engine.calls] == [
            (),
            (Passage("source-1", "A cat."),),
            (Passage("source-1", "A dog."),),
        ]

    def test_a_stream_keeps_the_sources_it_was_opened_with(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        bound = llm.with_sources(["A cat."])
        responses = bound.stream_complete("Hi")
        bound = bound.with_sources(["A dog."])
        list(responses)
        assert [call.passages for call in engine.calls] == [(Passage("source-1", "A cat."),)]

    @pytest.mark.parametrize("one", ["A cat.", TextNode(text="A cat."), NodeWithScore(node=TextNode(text="A cat."))])
    def test_one_source_without_a_list_is_refused(self, llm: ReaderLLM, one: Any) -> None:
        with pytest.raises(ConfigError, match="put it into a list"):
            llm.with_sources(one)

    def test_other_things_are_refused(self, llm: ReaderLLM) -> None:
        with pytest.raises(ConfigError, match="source 2 is a int"):
            llm.with_sources(["A cat.", 3])  # type: ignore[list-item]

    def test_sources_come_before_the_context(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.with_sources(["A cat."]).predict(PromptTemplate("{context_str}"), context_str="A dog.")
        assert engine.calls[0].passages == (Passage("source-1", "A cat."), Passage("context", "A dog."))


class Animal(BaseModel):
    """An animal."""

    name: str


class TestPredictFamily:
    prompt = PromptTemplate("Context: {context_str} Question: {query_str}")
    context = (Passage("context", "A cat."),)

    def test_predict(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.predict(self.prompt, context_str="A cat.", query_str="Who?")
        assert engine.calls[0].passages == self.context

    def test_refine_calls_it_context_msg(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.predict(PromptTemplate("{context_msg}"), context_msg="A cat.")
        assert engine.calls[0].passages == self.context

    def test_a_context_that_was_filled_in_before_counts(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.predict(self.prompt.partial_format(context_str="A cat."), query_str="Who?")
        assert engine.calls[0].passages == self.context

    async def test_apredict(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        await llm.apredict(self.prompt, context_str="A cat.", query_str="Who?")
        assert engine.calls[0].passages == self.context

    def test_stream(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.script = ["a", "b"]
        assert list(llm.stream(self.prompt, context_str="A cat.", query_str="Who?")) == ["a", "b"]
        assert engine.calls[0].passages == self.context

    async def test_astream(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.script = ["a", "b"]
        tokens = await llm.astream(self.prompt, context_str="A cat.", query_str="Who?")
        assert [token async for token in tokens] == ["a", "b"]
        assert engine.calls[0].passages == self.context

    async def test_structured(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.script = ['{"name": ', '"Tom"}']
        arguments = {"context_str": "A cat.", "query_str": "Who?"}
        tom = Animal(name="Tom")
        assert llm.structured_predict(Animal, self.prompt, **arguments) == tom
        assert await llm.astructured_predict(Animal, self.prompt, **arguments) == tom
        assert list(llm.stream_structured_predict(Animal, self.prompt, **arguments))[-1].name == "Tom"
        stream = await llm.astream_structured_predict(Animal, self.prompt, **arguments)
        assert [part async for part in stream][-1].name == "Tom"
        assert [call.passages for call in engine.calls] == [self.context] * 4

    def test_arguments_of_a_structured_call_are_honoured(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.script = ['{"name": "Tom"}']
        llm.structured_predict(Animal, PromptTemplate("Hi"), llm_kwargs={"seed": 5})
        assert engine.calls[0].generation.seed == 5

    def test_nothing_stays_bound_after_a_call(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.predict(self.prompt, context_str="A cat.", query_str="Who?")
        engine.fails_at = 0
        with pytest.raises(RuntimeError):
            llm.predict(self.prompt, context_str="A cat.", query_str="Who?")
        engine.fails_at = None
        llm.complete("Hi")
        assert engine.calls[-1].passages == ()

    def test_a_stream_that_is_being_read_binds_nothing_elsewhere(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.script = ['{"name":', ' "Tom"', "}"]
        stream = llm.stream_structured_predict(Animal, self.prompt, context_str="A cat.", query_str="Who?")
        next(stream)
        llm.complete("Hi")
        assert [call.passages for call in engine.calls] == [self.context, ()]


class TwoNodes(BaseRetriever):
    """Two nodes that name the question they were retrieved for."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        texts = (f"First fact on {query_bundle.query_str}.", f"Second fact on {query_bundle.query_str}.")
        return [NodeWithScore(node=TextNode(id_=text, text=text), score=1.0) for text in texts]


def query_engine(llm: ReaderLLM, mode: ResponseMode, streaming: bool = False) -> RetrieverQueryEngine:
    synthesizer = get_response_synthesizer(
        llm=llm,
        response_mode=mode,
        streaming=streaming,
        prompt_helper=PromptHelper(context_window=4096, num_output=256, tokenizer=llm.tokenizer.encode),
    )
    return RetrieverQueryEngine(TwoNodes(), response_synthesizer=synthesizer)


BOTH = "First fact on owls.\n\nSecond fact on owls."
CONTEXTS = {
    ResponseMode.COMPACT: [BOTH],
    ResponseMode.TREE_SUMMARIZE: [BOTH],
    ResponseMode.REFINE: ["First fact on owls.", "Second fact on owls."],
}


@pytest.mark.parametrize("mode", CONTEXTS)
class TestQueryEngines:
    """The text that a synthesizer puts into the prompt is the passage that drafts are searched in."""

    def check(self, engine: ScriptedEngine, mode: ResponseMode) -> None:
        assert [call.passages for call in engine.calls] == [(Passage("context", text),) for text in CONTEXTS[mode]]
        assert all(call.passages[0].text in call.prompt.text for call in engine.calls)

    def test_query(self, llm: ReaderLLM, engine: ScriptedEngine, mode: ResponseMode) -> None:
        query_engine(llm, mode).query("owls")
        self.check(engine, mode)

    def test_streaming_query(self, llm: ReaderLLM, engine: ScriptedEngine, mode: ResponseMode) -> None:
        engine.script = ["a", "b"]
        response = query_engine(llm, mode, streaming=True).query("owls")
        assert "".join(response.response_gen) == "ab"
        self.check(engine, mode)

    async def test_async_query(self, llm: ReaderLLM, engine: ScriptedEngine, mode: ResponseMode) -> None:
        await query_engine(llm, mode).aquery("owls")
        self.check(engine, mode)

    async def test_async_streaming_query(self, llm: ReaderLLM, engine: ScriptedEngine, mode: ResponseMode) -> None:
        engine.script = ["a", "b"]
        response = await query_engine(llm, mode, streaming=True).aquery("owls")
        assert "".join([token async for token in response.response_gen]) == "ab"
        self.check(engine, mode)

    async def test_forty_at_once_each_with_its_own_context(
        self, llm: ReaderLLM, engine: ScriptedEngine, mode: ResponseMode
    ) -> None:
        engines = query_engine(llm, mode)
        await asyncio.gather(*(engines.aquery(f"topic-{number}-") for number in range(40)))
        assert len(engine.calls) == 40 * len(CONTEXTS[mode])
        assert all(call.passages[0].text in call.prompt.text for call in engine.calls)


def test_a_chat_engine_passes_its_context(llm: ReaderLLM, engine: ScriptedEngine) -> None:
    ContextChatEngine.from_defaults(retriever=TwoNodes(), llm=llm, system_prompt="Be brief.").chat("owls")
    assert engine.calls[0].passages == (Passage("context", BOTH),)
    assert engine.chats[0][0]["content"].endswith("Be brief.")
    assert [message["role"] for message in engine.chats[0]] == ["system", "user"]
