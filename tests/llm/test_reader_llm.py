"""ReaderLLM against a scripted engine: what it asks of the engine, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import copy
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from costs_stub import EverythingPays
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import ChatPromptTemplate
from scripted_engine import NO_SYSTEM_TEMPLATE, ScriptedEngine, backwards, make_tokenizer

from reader_rag.config import DraftConfig, EngineConfig, SamplingParams
from reader_rag.config.grammar import Grammar
from reader_rag.draft.source import Budget, Proposal, RequestState, Verified
from reader_rag.engine.outputs import Passage
from reader_rag.errors import ConfigError, PromptError
from reader_rag.llm import ReaderLLM

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def llm(engine: ScriptedEngine) -> ReaderLLM:
    return ReaderLLM.from_engine(engine)


def user(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=text)


def system(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.SYSTEM, content=text)


class TestPrompt:
    def test_chat_applies_the_template_once(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.chat([user("Hi"), ChatMessage(role="assistant", content="Hello"), user("Bye")])
        assert engine.calls[0].prompt.text == "<s>[user]Hi[assistant]Hello[user]Bye[assistant]"
        assert list(engine.calls[0].prompt.token_ids).count(0) == 1

    def test_complete_is_one_user_message(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.complete("Hi")
        assert engine.calls[0].prompt.text == "<s>[user]Hi[assistant]"

    def test_formatted_text_is_taken_as_it_is(self, engine: ScriptedEngine) -> None:
        ReaderLLM.from_engine(engine, system_prompt="Be brief.").complete("Once upon", formatted=True)
        assert engine.calls[0].prompt.text == "Once upon"

    def test_formatted_text_that_spells_out_its_bos_has_one(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.complete("<s>Hi", formatted=True)
        llm.complete("Hi", formatted=True)
        assert engine.calls[0].prompt.token_ids == engine.calls[1].prompt.token_ids
        assert engine.tokenizer.decode(engine.calls[0].prompt.token_ids) == "<s>Hi"

    def test_system_prompt_is_kept_in_chat_and_complete(self, engine: ScriptedEngine) -> None:
        llm = ReaderLLM.from_engine(engine, system_prompt="Be brief.")
        llm.chat([user("Hi")])
        llm.complete("Hi")
        expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        assert engine.chats == [expected, expected]

    def test_a_chat_with_its_own_system_message_keeps_that(self, engine: ScriptedEngine) -> None:
        ReaderLLM.from_engine(engine, system_prompt="Be brief.").chat([system("Be kind."), user("Hi")])
        assert engine.chats[0][0] == {"role": "system", "content": "Be kind."}

    def test_predict_joins_the_system_prompt_with_that_of_the_template(self, engine: ScriptedEngine) -> None:
        template = ChatPromptTemplate([system("Use the context."), user("{query_str}")])
        ReaderLLM.from_engine(engine, system_prompt="Be brief.").predict(template, query_str="Hi")
        assert engine.chats[0] == [
            {"role": "system", "content": "Be brief.\n\nUse the context."},
            {"role": "user", "content": "Hi"},
        ]

    def test_a_template_without_system_role_gets_it_in_the_first_user_message(self) -> None:
        engine = ScriptedEngine(make_tokenizer(NO_SYSTEM_TEMPLATE))
        ReaderLLM.from_engine(engine, system_prompt="Be brief.").chat([user("Hi")])
        assert engine.chats[0] == [{"role": "user", "content": "Be brief.\n\nHi"}]

    def test_without_a_template_prompts_are_plain_text(self) -> None:
        engine = ScriptedEngine(make_tokenizer(None))
        llm = ReaderLLM.from_engine(engine, system_prompt="Be brief.")
        llm.complete("Hi")
        llm.chat([user("Hi")])
        assert [call.prompt.text for call in engine.calls] == [
            "Be brief.\n\nHi",
            "system: Be brief.\nuser: Hi\nassistant: ",
        ]

    def test_own_prompt_functions_are_used(self, engine: ScriptedEngine) -> None:
        llm = ReaderLLM.from_engine(
            engine,
            messages_to_prompt=lambda messages: "|".join(str(m.content) for m in messages),
            completion_to_prompt=lambda prompt: f"Q: {prompt} A:",
        )
        llm.chat([user("a"), user("b")])
        llm.complete("c")
        assert [call.prompt.text for call in engine.calls] == ["a|b", "Q: c A:"]

    def test_text_blocks_are_joined(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="one"), TextBlock(text="two")])])
        assert engine.chats[0] == [{"role": "user", "content": "one\ntwo"}]

    def test_an_image_is_refused(self, llm: ReaderLLM) -> None:
        with pytest.raises(ConfigError, match="takes text only; leave the ImageBlock out"):
            llm.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"iVBORw0KGgo=")])])

    @pytest.mark.parametrize("prompt", ["", "  \n"])
    def test_an_empty_prompt_is_refused(self, llm: ReaderLLM, prompt: str) -> None:
        with pytest.raises(PromptError, match="prompt is empty"):
            llm.complete(prompt)

    def test_a_chat_without_messages_is_refused(self, llm: ReaderLLM) -> None:
        with pytest.raises(PromptError, match="no message to answer"):
            llm.chat([])


class TestSettings:
    def test_own_settings_reach_the_engine(self, engine: ScriptedEngine) -> None:
        llm = ReaderLLM.from_engine(
            engine, max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, seed=3, stop="END", max_nodes=8
        )
        llm.complete("Hi")
        call = engine.calls[0]
        assert call.generation == SamplingParams(
            max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, seed=3, stop=("END",)
        )
        assert call.draft == DraftConfig(max_nodes=8)
        assert call.tenant == ""
        assert call.recall

    @pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
    def test_arguments_of_a_call_win(self, llm: ReaderLLM, engine: ScriptedEngine, stop: Any) -> None:
        settings = {"max_tokens": 9, "temperature": 1.0, "top_p": 0.8, "top_k": 5, "seed": 4, "stop": stop}
        llm.complete("Hi", **settings, max_nodes=4, tenant="a", recall=False)
        call = engine.calls[0]
        assert call.generation == SamplingParams(
            max_tokens=9, temperature=1.0, top_p=0.8, top_k=5, seed=4, stop=("END",)
        )
        assert call.draft == DraftConfig(max_nodes=4)
        assert call.tenant == "a"
        assert not call.recall

    async def test_a_copy_for_a_tenant_calls_on_its_behalf_unless_the_call_names_another(
        self, llm: ReaderLLM, engine: ScriptedEngine
    ) -> None:
        bound = llm.for_tenant("a")
        bound.complete("Hi")
        list(bound.stream_chat([user("Hi")]))
        await bound.achat([user("Hi")])
        async for _ in await bound.astream_complete("Hi"):
            pass
        bound.with_sources(["A cat."]).plain().predict(PromptTemplate("{context_str}"), context_str="A dog.")
        copy.deepcopy(bound).complete("Hi", tenant=None)
        assert [call.tenant for call in engine.calls] == ["a"] * 6
        bound.complete("Hi", tenant="b")
        bound.complete("Hi", tenant="")
        bound.for_tenant("c").complete("Hi")
        llm.complete("Hi")
        assert [call.tenant for call in engine.calls[6:]] == ["b", "", "c", ""]
        assert (llm.tenant, bound.tenant) == ("", "a")
        assert bound.engine is llm.engine

    def test_a_tenants_name_is_in_nothing_that_llama_index_writes_of_an_llm(self, llm: ReaderLLM) -> None:
        bound = llm.for_tenant("secret")
        assert "secret" not in bound.to_json() + repr(bound)

    def test_every_setting_of_a_generation_can_be_given_with_a_call(
        self, llm: ReaderLLM, engine: ScriptedEngine
    ) -> None:
        given: dict[str, Any] = {
            "min_p": 0.1,
            "typical_p": 0.9,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "no_repeat_ngram": 3,
            "bad_words": ("x",),
            "suppress_tokens": (4,),
            "include_stop": True,
            "logprobs": 5,
            "grammar": Grammar.regex("a|b"),
        }

        def bias(ids: Any, scores: Any) -> Any:
            return scores

        llm.complete("Hi", **given, logits_processor=[bias], stopping_criteria=[bias])
        call = engine.calls[0]
        assert call.generation == SamplingParams(**given)
        assert (call.logits_processor, call.stopping_criteria) == ((bias,), (bias,))

    def test_penalties_may_be_settings_of_the_llm(self, engine: ScriptedEngine) -> None:
        given: dict[str, Any] = {"min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.2}
        given |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}
        llm = ReaderLLM.from_engine(engine, **given)
        llm.complete("Hi")
        llm.complete("Hi", min_p=0.0)
        assert [call.generation for call in engine.calls] == [
            SamplingParams(**given),
            SamplingParams(**given | {"min_p": 0.0}),
        ]

    def test_none_takes_the_own_setting(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        llm.complete("Hi", max_tokens=None, stop=None)
        assert engine.calls[0].generation == SamplingParams()

    def test_the_engines_draft_settings_are_kept(self) -> None:
        engine = ScriptedEngine(config=EngineConfig(draft=DraftConfig(max_nodes=32, max_depth=7)))
        llm = ReaderLLM.from_engine(engine)
        llm.complete("Hi")
        llm.complete("Hi", max_nodes=4)
        assert [call.draft for call in engine.calls] == [
            DraftConfig(max_nodes=32, max_depth=7),
            DraftConfig(max_nodes=4, max_depth=7),
        ]

    @pytest.mark.parametrize("off", [{"speculate": False}, {"max_nodes": 0}])
    def test_drafts_can_be_turned_off_for_a_call(
        self, llm: ReaderLLM, engine: ScriptedEngine, off: dict[str, Any]
    ) -> None:
        llm.complete("Hi", **off)
        llm.complete("Hi")
        assert [call.generation.speculate for call in engine.calls] == [False, True]

    def test_plain_is_the_same_engine_without_drafts(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        plain = llm.plain()
        plain.complete("Hi")
        llm.complete("Hi")
        assert plain.engine is llm.engine
        assert [call.generation.speculate for call in engine.calls] == [False, True]

    def test_an_unknown_argument_is_refused_with_the_one_that_was_meant(
        self, llm: ReaderLLM, engine: ScriptedEngine
    ) -> None:
        with pytest.raises(ConfigError, match="unknown argument 'max_new_tokens'; did you mean 'max_tokens'"):
            llm.complete("Hi", max_new_tokens=3)
        with pytest.raises(ConfigError, match=r"unknown argument 'tools'; known: .*tenant"):
            llm.complete("Hi", tools=[])
        assert engine.calls == []

    def test_http_headers_that_llama_index_passes_mean_nothing_here(self, llm: ReaderLLM) -> None:
        assert llm.chat([user("Hi")], extra_headers={"x": "y"}).message.content == "<s>[user]Hi[assistant] "

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"max_tokens": 0}, "max_tokens must be at least 1"),
            ({"temperature": -1.0}, "temperature must be at least 0"),
            ({"temperature": "hot"}, "temperature must be at least 0.0, not 'hot'"),
            ({"top_p": 0.0}, "top_p must be in"),
            ({"stop": [""]}, "stop must be a tuple of strings that are not empty"),
            ({"max_nodes": -1}, "max_nodes must be in 0..1024"),
            ({"speculate": True, "max_nodes": 0}, "speculate=True asks for drafts and max_nodes=0"),
            ({"speculate": False, "max_nodes": 4}, "speculate=False turns drafts off and max_nodes=4"),
        ],
    )
    def test_bad_arguments_are_refused_in_one_line(
        self, llm: ReaderLLM, engine: ScriptedEngine, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            llm.stream_complete("Hi", **arguments)
        assert "\n" not in str(caught.value)
        assert engine.calls == []

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"temprature": 1.0}, "unknown argument 'temprature'; did you mean 'temperature'"),
            ({"exactness": "exact"}, "exactness must be 'fast' or 'strict'"),
            ({"prefix_bytes": -1}, "prefix_bytes must be at least 0 or None"),
            ({"max_tokens": -1}, "max_tokens must be at least 1"),
            ({"max_nodes": 4000}, "max_nodes must be in 0..1024"),
            ({"query_wrapper_prompt": PromptTemplate("{query_str}")}, "use completion_to_prompt"),
        ],
    )
    def test_bad_settings_are_refused_before_a_model_is_loaded(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            ReaderLLM(model="/no/such/model", **settings)
        assert "\n" not in str(caught.value)

    def test_settings_of_the_engine_cannot_be_given_again(self, engine: ScriptedEngine) -> None:
        with pytest.raises(ConfigError, match="device, dtype: set when the engine was loaded"):
            ReaderLLM.from_engine(engine, dtype="float32", device="cpu")

    def test_settings_of_the_engine_can_be_read(self) -> None:
        llm = ReaderLLM.from_engine(ScriptedEngine(prefix_bytes=7))
        assert (llm.exactness, llm.prefix_bytes) == ("fast", 7)

    def test_an_answer_must_leave_room_for_its_prompt(self, engine: ScriptedEngine) -> None:
        with pytest.raises(ConfigError, match=r"max_tokens \(256\) leaves no room"):
            ReaderLLM.from_engine(engine, context_window=200)

    def test_a_window_wider_than_the_models_is_refused(self, engine: ScriptedEngine) -> None:
        with pytest.raises(ConfigError, match=r"context_window must be 1\.\.4096 here, not 5000"):
            ReaderLLM.from_engine(engine, context_window=5000)

    def test_a_narrower_window_bounds_prompt_and_answer(self, engine: ScriptedEngine) -> None:
        llm = ReaderLLM.from_engine(engine, context_window=40, max_tokens=30)
        llm.complete("twenty-one characters", formatted=True)  # 22 tokens with <s>
        assert engine.calls[0].generation.max_tokens == 18
        with pytest.raises(PromptError, match="has 41 tokens and context_window is 40"):
            llm.complete("x" * 40, formatted=True)

    def test_metadata(self, engine: ScriptedEngine) -> None:
        metadata = ReaderLLM.from_engine(engine, max_tokens=99).metadata
        assert metadata.context_window == 4096
        assert metadata.num_output == 99
        assert metadata.is_chat_model
        assert metadata.model_name == "scripted"
        assert not ReaderLLM.from_engine(ScriptedEngine(make_tokenizer(None))).metadata.is_chat_model

    def test_serialised_form_has_settings_and_no_engine(self, engine: ScriptedEngine) -> None:
        data = ReaderLLM.from_engine(engine, max_tokens=5).to_dict()
        assert data["class_name"] == "reader_llm"
        assert data["max_tokens"] == 5
        assert not {"engine", "_engine"} & data.keys()

    def test_copies_share_the_engine(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        copies = [llm.model_copy(), llm.model_copy(deep=True), copy.copy(llm), copy.deepcopy(llm)]
        assert all(one.engine is engine for one in copies)


class TestResponses:
    def test_usage_and_metrics_of_a_completion(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.script = ["Hel", "lo"]
        response = llm.complete("Hi")  # <s>[user]Hi[assistant]: 1 + 6 + 2 + 11 tokens
        assert response.text == "Hello"
        assert response.raw == {
            "model": "scripted",
            "usage": {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22},
            "finish_reason": "stop",
        }
        metrics = response.additional_kwargs
        assert (metrics["steps"], metrics["drafted"], metrics["accepted"]) == (4, 9, 5)
        assert metrics["tokens_per_step"] == 0.25
        assert metrics["copied"] == [
            {"passage_id": "node-1", "passage_start": 10, "passage_end": 14, "text_start": 0, "text_end": 4}
        ]

    def test_usage_and_metrics_of_a_chat(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.script = ["Hel", "lo"]
        response = llm.chat([user("Hi")])
        assert response.message.role == MessageRole.ASSISTANT
        assert response.message.content == "Hello"
        assert response.raw["usage"] == {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
        assert response.additional_kwargs["accepted"] == 5
        assert response.message.additional_kwargs == {}  # goes into the chat history, so nothing is kept there

    def test_a_stream_grows_and_reports_at_its_end(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.script = ["a", "", "b"]
        parts = list(llm.stream_complete("Hi"))
        assert [(part.text, part.delta) for part in parts] == [("a", "a"), ("a", ""), ("ab", "b")]
        assert [part.raw is None for part in parts] == [True, True, False]
        assert parts[-1].raw == llm.complete("Hi").raw
        assert parts[-1].additional_kwargs["accepted"] == 5

    async def test_all_eight_endpoints_give_the_same_answer(self, llm: ReaderLLM) -> None:
        messages = [user("one two three")]
        expected = "three[assistant] two <s>[user]one "
        assert llm.complete("one two three").text == expected
        assert llm.chat(messages).message.content == expected
        assert (await llm.acomplete("one two three")).text == expected
        assert (await llm.achat(messages)).message.content == expected
        assert list(llm.stream_complete("one two three"))[-1].text == expected
        assert list(llm.stream_chat(messages))[-1].message.content == expected
        assert [part.text async for part in await llm.astream_complete("one two three")][-1] == expected
        last = [part async for part in await llm.astream_chat(messages)][-1]
        assert last.message.content == expected
        assert last.raw["finish_reason"] == "stop"

    def test_an_answer_cut_at_max_tokens_says_so(self, llm: ReaderLLM) -> None:
        assert llm.complete("one two three", max_tokens=2).raw["finish_reason"] == "length"

    def test_llama_index_counts_the_tokens(self, engine: ScriptedEngine) -> None:
        counter = TokenCountingHandler(tokenizer=list)
        llm = ReaderLLM.from_engine(engine, callback_manager=CallbackManager([counter]))
        llm.complete("one two three")
        assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (31, 3)


class TestFailureAndClosing:
    @pytest.fixture(autouse=True)
    def script(self, engine: ScriptedEngine) -> None:
        engine.script = ["a", "b", "c"]

    async def test_an_error_reaches_the_caller_with_its_type(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.fails_at = 1
        messages = [user("Hi")]
        with pytest.raises(RuntimeError, match="caught fire"):
            llm.complete("Hi")
        with pytest.raises(RuntimeError, match="caught fire"):
            list(llm.stream_chat(messages))
        with pytest.raises(RuntimeError, match="caught fire"):
            await llm.achat(messages)
        with pytest.raises(RuntimeError, match="caught fire"):
            async for _ in await llm.astream_complete("Hi"):
                pass
        assert [stream.closed.is_set() for stream in engine.streams] == [True] * 4

    async def test_a_bad_prompt_fails_when_the_stream_is_opened(self, llm: ReaderLLM) -> None:
        with pytest.raises(PromptError, match="longer than the context window"):
            llm.stream_complete("x" * 5000)
        with pytest.raises(PromptError, match="longer than the context window"):
            await llm.astream_complete("x" * 5000)

    def test_the_llm_works_on_after_an_error(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        engine.fails_at = 1
        with pytest.raises(RuntimeError):
            llm.complete("Hi")
        engine.fails_at = None
        assert llm.complete("Hi").text == "abc"

    def test_closing_a_stream_closes_the_engines(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        responses = llm.stream_complete("Hi")
        assert next(responses).text == "a"
        responses.close()
        assert engine.streams[0].closed.is_set()
        assert engine.streams[0].steps == 1

    async def test_closing_an_async_stream_closes_the_engines(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        responses = await llm.astream_chat([user("Hi")])
        assert (await anext(responses)).delta == "a"
        await responses.aclose()
        assert await asyncio.to_thread(engine.streams[0].closed.wait, 20)
        assert engine.streams[0].steps == 1

    async def test_cancelling_a_call_in_the_middle_of_a_step_ends_it(
        self, llm: ReaderLLM, engine: ScriptedEngine
    ) -> None:
        engine.may_step.clear()
        task = asyncio.create_task(llm.acomplete("Hi"))
        assert await asyncio.to_thread(engine.step_begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # at once: the step is still running
        assert engine.streams[0].closed.is_set()
        engine.may_step.set()
        assert (await llm.acomplete("Hi")).text == "abc"  # runs after that step, on the same thread
        assert engine.streams[0].steps == 1

    async def test_cancelling_the_reader_of_a_stream_ends_it(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        async def read() -> None:
            async for _ in await llm.astream_complete("Hi"):
                pass

        engine.may_step.clear()
        task = asyncio.create_task(read())
        assert await asyncio.to_thread(engine.step_begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # at once: the step is still running
        assert engine.streams[0].closed.is_set()
        engine.may_step.set()
        assert (await llm.acomplete("Hi")).text == "abc"  # runs after that step, on the same thread
        assert engine.streams[0].steps == 1

    @pytest.mark.parametrize("endpoint", ["acomplete", "astream_complete"])
    async def test_the_event_loop_runs_while_the_engine_works(
        self, llm: ReaderLLM, engine: ScriptedEngine, endpoint: str
    ) -> None:
        async def answer() -> str:
            if endpoint == "acomplete":
                return (await llm.acomplete("Hi")).text
            return [part.text async for part in await llm.astream_complete("Hi")][-1]

        engine.may_step.clear()  # a step fails after 20 s unless another task of this loop lets it continue
        task = asyncio.create_task(answer())
        while not engine.step_begun.is_set():
            await asyncio.sleep(0.001)
        assert not task.done()
        engine.may_step.set()
        assert await task == "abc"


class TestConcurrency:
    """Forty calls at once: each gets the answer that it gets alone."""

    prompts = tuple(" ".join(f"{word}{number}" for word in "abcdefg"[: 2 + number % 6]) for number in range(40))
    expected = tuple("".join(backwards(prompt)) for prompt in prompts)

    def test_threads(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        def ask(prompt: str) -> str:
            return llm.with_sources([prompt]).complete(prompt, formatted=True).text

        with ThreadPoolExecutor(40) as pool:
            assert list(pool.map(ask, self.prompts)) == list(self.expected)
        assert all(call.passages == (Passage("source-1", call.prompt.text),) for call in engine.calls)

    async def test_async_calls(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        calls = (llm.with_sources([prompt]).acomplete(prompt, formatted=True) for prompt in self.prompts)
        assert [response.text for response in await asyncio.gather(*calls)] == list(self.expected)
        assert all(call.passages == (Passage("source-1", call.prompt.text),) for call in engine.calls)

    def test_streams_read_in_turn(self, llm: ReaderLLM) -> None:
        streams = [llm.stream_complete(prompt, formatted=True) for prompt in self.prompts]
        texts = [""] * 40
        for _ in range(7):
            for number, stream in enumerate(streams):
                texts[number] = next((part.text for part in stream), texts[number])
        assert texts == list(self.expected)

    async def test_async_streams_read_in_turn(self, llm: ReaderLLM) -> None:
        streams = [await llm.astream_complete(prompt, formatted=True) for prompt in self.prompts]
        texts = [""] * 40
        for _ in range(7):
            for number, stream in enumerate(streams):
                part = await anext(stream, None)
                texts[number] = texts[number] if part is None else part.text
        assert texts == list(self.expected)

    def test_an_unread_stream_keeps_nobody_waiting(self, llm: ReaderLLM, engine: ScriptedEngine) -> None:
        idle = llm.stream_complete("one two three", formatted=True)
        next(idle)
        assert llm.complete("four five", formatted=True).text == "five four "
        assert engine.streams[0].steps == 1


@pytest.fixture(scope="module")
def tiny(tiny_engine: Engine) -> ReaderLLM:
    return ReaderLLM.from_engine(tiny_engine, max_tokens=16)


@pytest.fixture(scope="module")
def questions(tiny: ReaderLLM) -> dict[str, str]:
    """Forty questions and the answers that they get alone, decoded plainly."""
    questions = [f"What is the colour of the {number}th tree in the garden?" for number in range(40)]
    return {question: tiny.plain().complete(question).text for question in questions}


class TestOnTheRealEngine:
    """Forty questions at once to a tiny model: each gets the answer that it gets alone."""

    def test_settings_of_the_engine_are_shown(self, tiny: ReaderLLM, tiny_engine: Engine) -> None:
        shown = tiny.to_dict()
        assert (shown["dtype"], shown["device"], shown["exactness"]) == ("float32", "cpu", "fast")
        assert tiny.metadata.context_window == tiny_engine.context_window == 2048
        assert tiny.metadata.is_chat_model

    def test_drafts_change_nothing(self, tiny: ReaderLLM, questions: dict[str, str]) -> None:
        assert len(set(questions.values())) > 20  # answers differ, so a mix-up would show
        assert {q: tiny.with_sources([q * 3]).complete(q).text for q in questions} == questions

    def test_log_probabilities_come_as_llama_index_names_them(self, tiny: ReaderLLM) -> None:
        chat = tiny.chat([user("the garden")], max_tokens=4, logprobs=2, temperature=3.0, seed=1)
        parts = list(tiny.stream_complete("the garden", max_tokens=4, logprobs=2, temperature=3.0, seed=1))
        assert chat.logprobs is not None
        assert [len(held) for held in chat.logprobs] == [3, 3, 3, 3]  # a drawn token, and the two that were likelier
        for held in chat.logprobs:
            assert held[0].logprob < held[2].logprob < held[1].logprob < 0.0
            assert held[0].bytes == list(held[0].token.encode())
        assert [held for part in parts for held in part.logprobs or ()] == chat.logprobs
        assert tiny.chat([user("the garden")], max_tokens=4).logprobs is None

    def test_a_copied_span_names_its_node_and_shows_its_text(self, tiny: ReaderLLM) -> None:
        text = tiny.complete("the garden", max_tokens=64).text
        response = tiny.with_sources([Passage("garden", f"In the beginning: {text}")]).complete(
            "the garden", max_tokens=64
        )
        spans = response.additional_kwargs["copied"]
        assert response.text == text
        assert spans
        assert {span["passage_id"] for span in spans} == {"garden"}

    def test_forty_threads(self, tiny: ReaderLLM, questions: dict[str, str]) -> None:
        def ask(question: str) -> str:
            return tiny.with_sources([question]).complete(question).text

        with ThreadPoolExecutor(40) as pool:
            assert list(pool.map(ask, questions)) == list(questions.values())

    async def test_forty_tasks(self, tiny: ReaderLLM, questions: dict[str, str]) -> None:
        responses = await asyncio.gather(*(tiny.with_sources([q]).acomplete(q) for q in questions))
        assert [response.text for response in responses] == list(questions.values())

    def test_forty_streams_read_in_turn(self, tiny: ReaderLLM, questions: dict[str, str]) -> None:
        streams = {question: tiny.stream_complete(question) for question in questions}
        texts = dict.fromkeys(questions, "")
        while streams:
            for question, stream in list(streams.items()):
                part = next(stream, None)
                if part is None:
                    del streams[question]
                else:
                    texts[question] += part.delta or ""
        assert texts == questions

    async def test_forty_async_streams_at_once(self, tiny: ReaderLLM, questions: dict[str, str]) -> None:
        async def read(question: str) -> str:
            stream = await tiny.astream_complete(question)
            return "".join([part.delta or "" async for part in stream])

        assert await asyncio.gather(*map(read, questions)) == list(questions.values())

    def test_a_prompt_longer_than_the_window_is_refused(self, tiny: ReaderLLM) -> None:
        with pytest.raises(PromptError, match="tokens"):
            tiny.complete("garden " * 2000)


class Repeating:
    """A draft source that proposes the last token again."""

    needs_hidden_states = False
    proposed = 0

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        self.proposed += 1
        return Proposal.chain(state.tokens[-1:].tolist())

    def observe(self, verified: Verified) -> None: ...

    def forget(self) -> None: ...


class TestFromModel:
    def test_a_loaded_model_answers_like_its_engine(self, tiny_engine: Engine) -> None:
        llm = ReaderLLM.from_model(tiny_engine.model, tiny_engine.tokenizer, max_tokens=6, max_nodes=8, forward="torch")
        assert llm.engine.config.forward == "torch"
        assert (llm.max_nodes, llm.engine.config.draft.max_nodes) == (8, 8)
        expected = ReaderLLM.from_engine(tiny_engine, max_tokens=6).complete("the cat and the")
        assert llm.complete("the cat and the").text == expected.text

    def test_draft_sources_propose_in_every_call(self, tiny_engine: Engine) -> None:
        made: list[Repeating] = []

        def make() -> Repeating:
            made.append(Repeating())
            return made[-1]

        llm = ReaderLLM.from_model(tiny_engine.model, tiny_engine.tokenizer, max_tokens=6, draft_sources=[make])
        llm.engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
        expected = ReaderLLM.from_engine(tiny_engine, max_tokens=6).complete("the cat and the")
        assert llm.complete("the cat and the").text == expected.text
        assert len(made) == 1
        assert made[0].proposed > 0
        with pytest.raises(ConfigError, match="draft_sources belong to the engine"):
            ReaderLLM(engine=tiny_engine, draft_sources=[make])

    def test_settings_of_loading_are_refused(self, tiny_engine: Engine) -> None:
        with pytest.raises(ConfigError, match="dtype: set when the engine was loaded"):
            ReaderLLM.from_model(tiny_engine.model, tiny_engine.tokenizer, dtype="float32")

    def test_a_loaded_model_in_place_of_a_name_is_told_where_to_go(self, tiny_engine: Engine) -> None:
        with pytest.raises(ConfigError, match="ReaderLLM.from_model"):
            ReaderLLM(tiny_engine.model)

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("num_output", "max_tokens"),
            ("generate_kwargs", "one by one"),
            ("model_kwargs", "from_model"),
            ("quantization_config", 'quantization="int8"'),
            ("tokenizer_name", "from_model"),
            ("device_map", "named by device"),
            ("model_name", "named by model"),
        ],
    )
    def test_names_of_other_llms_are_hinted_at(self, name: str, hint: str) -> None:
        with pytest.raises(ConfigError, match=f"unknown argument '{name}'; .*{hint}"):
            ReaderLLM(**{name: {}})


@pytest.mark.parametrize("value", ["false", "true", 0, 1, "no"])
@pytest.mark.parametrize("max_nodes", [0, 8])
def test_speculate_must_be_true_or_false(tiny_engine: Engine, value: Any, max_nodes: int) -> None:
    says = "speculate must be True or False"
    with pytest.raises(ConfigError, match=says):
        ReaderLLM(engine=tiny_engine, speculate=value, max_nodes=max_nodes)
    with pytest.raises(ConfigError, match=says):
        ReaderLLM(engine=tiny_engine).complete("a", formatted=True, speculate=value)


def test_the_program_of_the_docs_differs_from_that_of_another_llm_in_five_lines(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "llamaindex.md").read_text(encoding="utf-8")
    section = page[page.index("## From HuggingFaceLLM") : page.index("## Persistence")]
    theirs, ours = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    difference = set(filter(None, theirs.splitlines())) ^ set(filter(None, ours.splitlines()))
    assert len(difference) <= 5
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda name: tiny_engine.model)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: tiny_engine.tokenizer)
    programs = [ours]
    if find_spec("llama_index.llms.huggingface") is not None:
        programs.append(theirs)
    for program in programs:
        namespace: dict[str, Any] = {"name": "tiny"}
        exec(compile(program, "docs/llamaindex.md", "exec"), namespace)
        assert namespace["llm"].metadata.context_window == 2048
