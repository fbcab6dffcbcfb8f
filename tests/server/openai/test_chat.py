"""Chats by OpenAI's own client: what it gets is what `ReaderLLM` says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from llama_index.core.base.llms.types import ChatMessage
from saying import saying
from served import Serve
from waiting import wait_until

from reader_rag.config import Grammar
from reader_rag.engine.engine import Engine
from reader_rag.llm import ReaderLLM

ASKED: list[Any] = [{"role": "user", "content": "the man and the inn"}]


@pytest.fixture
def llm(tiny_engine: Engine) -> ReaderLLM:
    return ReaderLLM.from_engine(tiny_engine, max_tokens=32)


def text_of(chunks: Iterator[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


class TestAnswers:
    def test_they_are_those_of_the_llm(self, client: openai.OpenAI, llm: ReaderLLM) -> None:
        expected = llm.chat([ChatMessage(role="user", content=ASKED[0]["content"])])
        answer = client.chat.completions.create(model="tiny", messages=ASKED)
        assert answer.choices[0].message.content == expected.message.content
        assert answer.choices[0].finish_reason == expected.raw["finish_reason"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == expected.raw["usage"]["prompt_tokens"]
        assert answer.usage.total_tokens == expected.raw["usage"]["total_tokens"]
        assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "tiny", "chatcmpl-")

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"temperature": 0.9, "seed": 7, "top_p": 0.9},
            {"presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"logit_bias": {"40": 60.0, "50": -100.0}, "temperature": 1.0, "seed": 3},
            {"stop": ["a"]},
            {"max_tokens": 5},
        ],
    )
    def test_settings_have_their_effect_in_streams_and_whole_answers(
        self, client: openai.OpenAI, llm: ReaderLLM, settings: dict[str, Any]
    ) -> None:
        ours = dict(settings)
        if "logit_bias" in ours:
            ours["logit_bias"] = {int(token): bias for token, bias in ours["logit_bias"].items()}
        expected = llm.chat([ChatMessage(role="user", content=ASKED[0]["content"])], **ours).message.content
        answer = client.chat.completions.create(model="tiny", messages=ASKED, **settings)
        stream = client.chat.completions.create(model="tiny", messages=ASKED, stream=True, **settings)
        assert answer.choices[0].message.content == text_of(stream) == expected

    def test_settings_of_this_package_come_in_extra_body(self, client: openai.OpenAI, llm: ReaderLLM) -> None:
        more: dict[str, Any] = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "suppress_tokens": [40, 41]}
        settings: dict[str, Any] = {"temperature": 1.0, "seed": 5}
        expected = llm.chat([ChatMessage(role="user", content=ASKED[0]["content"])], **settings, **more)
        answer = client.chat.completions.create(model="tiny", messages=ASKED, **settings, extra_body=more)
        assert answer.choices[0].message.content == expected.message.content

    def test_max_completion_tokens_is_the_length(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=3)
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")

    def test_a_seed_may_be_negative(self, client: openai.OpenAI) -> None:
        def ask() -> str | None:
            answer = client.chat.completions.create(model="tiny", messages=ASKED, temperature=1.0, seed=-5)
            return answer.choices[0].message.content

        assert ask() == ask()

    def test_roles_and_parts(self, client: openai.OpenAI, llm: ReaderLLM) -> None:
        expected = llm.chat(
            [
                ChatMessage(role="system", content="be short"),
                ChatMessage(role="user", content="the man"),
                ChatMessage(role="assistant", content="the inn"),
                ChatMessage(role="user", content="and then"),
            ]
        )
        answer = client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "developer", "content": "be short"},
                {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "man"}]},
                {"role": "assistant", "content": "the inn"},
                {"role": "user", "content": "and then"},
            ],
            user="someone",
        )
        assert answer.choices[0].message.content == expected.message.content

    def test_several_choices(self, client: openai.OpenAI) -> None:
        settings: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 8}
        answer = client.chat.completions.create(model="tiny", messages=ASKED, n=3, **settings)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in answer.choices]
        for number, text in enumerate(texts):
            alone = client.chat.completions.create(model="tiny", messages=ASKED, **settings | {"seed": 11 + number})
            assert alone.choices[0].message.content == text
        streamed = ["", "", ""]
        for chunk in client.chat.completions.create(model="tiny", messages=ASKED, n=3, stream=True, **settings):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 24


class TestStreams:
    def test_chunks_are_openais(self, client: openai.OpenAI) -> None:
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=ASKED, stream=True, stream_options={"include_usage": True}
            )
        )
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 32
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-2].model_extra is not None
        assert chunks[-2].model_extra["reader"]["completion_tokens"] == 32

    def test_without_usage_no_chunk_has_it(self, client: openai.OpenAI) -> None:
        chunks = list(client.chat.completions.create(model="tiny", messages=ASKED, stream=True))
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)

    def test_a_client_that_goes_away_ends_its_request(self, serve: Serve) -> None:
        served = serve()
        engine = served.service.engine
        assert engine is not None
        with served.client() as client:
            stream = client.chat.completions.create(model="tiny", messages=ASKED, stream=True, max_tokens=1500)
            next(stream)
            stream.close()
        wait_idle(engine)

    def test_a_client_that_goes_away_ends_its_whole_answer(self, serve: Serve, llm: ReaderLLM) -> None:
        class Waiting(ReaderLLM):
            def _call(self, kwargs: dict[str, Any], respond: Any) -> Any:
                def wait(input_ids: Any, scores: Any) -> Any:
                    time.sleep(0.5)  # longer than the client waits
                    return scores

                return super()._call({**kwargs, "logits_processor": (wait,)}, respond)

        served = serve(llm=Waiting.from_engine(llm.engine, max_tokens=64))
        engine = served.service.engine
        assert engine is not None
        with served.client(timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=1900, n=4)
        wait_idle(engine)

    def test_an_error_midway_is_an_event(self, serve: Serve, llm: ReaderLLM) -> None:
        class Broken(ReaderLLM):
            def _call(self, kwargs: dict[str, Any], respond: Any) -> Any:
                def fail(input_ids: Any, scores: Any) -> Any:
                    if input_ids.shape[1] > 60:
                        raise RuntimeError("a secret of the question")
                    return scores

                return super()._call({**kwargs, "logits_processor": (fail,)}, respond)

        broken = Broken.from_engine(llm.engine, max_tokens=64)
        with serve(llm=broken).client() as client:
            stream = client.chat.completions.create(model="tiny", messages=ASKED, stream=True)
            with pytest.raises(openai.APIError, match="the server failed; its log says where") as caught:
                list(stream)
        assert "secret" not in str(caught.value)


def wait_idle(engine: Engine) -> None:
    wait_until(lambda: engine.busy.running == engine.busy.waiting == 0, "the end of all requests")


class TestLogprobs:
    def test_every_token_has_its_own(self, client: openai.OpenAI, llm: ReaderLLM) -> None:
        asked = [ChatMessage(role="user", content=ASKED[0]["content"])]
        expected = llm.chat(asked, logprobs=3, max_tokens=6).logprobs
        assert expected is not None
        answer = client.chat.completions.create(
            model="tiny", messages=ASKED, max_tokens=6, logprobs=True, top_logprobs=3
        )
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content
        assert content is not None
        assert [token.logprob for token in content] == [each[0].logprob for each in expected]
        assert [len(token.top_logprobs) for token in content] == [3] * 6
        spelled = b"".join(bytes(token.bytes or ()) for token in content)
        assert spelled.decode("utf-8", "replace") == answer.choices[0].message.content
        streamed = []
        for chunk in client.chat.completions.create(
            model="tiny", messages=ASKED, max_tokens=6, logprobs=True, top_logprobs=3, stream=True
        ):
            streamed += chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else []
        assert streamed == content


class TestJson:
    SCHEMA = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "wet": {"type": "boolean"}},
        "required": ["name", "wet"],
        "additionalProperties": False,
    }

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer_matches_its_schema(self, client: openai.OpenAI, llm: ReaderLLM, stream: bool) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "bird", "schema": self.SCHEMA, "strict": True}}
        settings: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 200, "response_format": form}
        if stream:
            text = text_of(client.chat.completions.create(**settings, stream=True))
        else:
            text = client.chat.completions.create(**settings).choices[0].message.content or ""
        assert set(json.loads(text)) == {"name", "wet"}
        asked = [ChatMessage(role="user", content=ASKED[0]["content"])]
        assert text == llm.chat(asked, grammar=Grammar.json_schema(self.SCHEMA), max_tokens=200).message.content

    def test_json_of_a_pydantic_class(self, client: openai.OpenAI) -> None:
        from pydantic import BaseModel

        class Bird(BaseModel):
            wet: bool

        parsed = client.chat.completions.parse(model="tiny", messages=ASKED, response_format=Bird)
        assert isinstance(parsed.choices[0].message.parsed, Bird)

    def test_an_object(self, client: openai.OpenAI, serve: Serve, tiny_engine: Engine) -> None:
        with serve(llm=saying(tiny_engine, '{"a": 1}')).client() as said:
            answer = said.chat.completions.create(model="tiny", messages=ASKED, response_format={"type": "json_object"})
        assert json.loads(answer.choices[0].message.content or "") == {"a": 1}


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
CALL = '{"name": "search", "arguments": {"query": "heron"}}'


class TestTools:
    def test_a_call(self, serve: Serve, tiny_engine: Engine) -> None:
        with serve(llm=saying(tiny_engine, CALL)).client() as client:
            answer = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, max_tokens=200)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "search"
        assert json.loads(call.function.arguments) == {"query": "heron"}

    def test_a_streamed_call_comes_piece_by_piece(self, serve: Serve, tiny_engine: Engine) -> None:
        with (
            serve(llm=saying(tiny_engine, CALL)).client() as client,
            client.chat.completions.stream(model="tiny", messages=ASKED, tools=TOOLS, max_tokens=200) as stream,
        ):
            done = stream.get_final_completion()
        assert done.choices[0].finish_reason == "tool_calls"
        assert done.choices[0].message.tool_calls is not None
        assert json.loads(done.choices[0].message.tool_calls[0].function.arguments) == {"query": "heron"}

    def test_a_required_call_and_its_result(self, serve: Serve, tiny_engine: Engine) -> None:
        llm = saying(tiny_engine, CALL, "It stands.")
        with serve(llm=llm).client() as client:
            first = client.chat.completions.create(
                model="tiny",
                messages=ASKED,
                tools=TOOLS,
                tool_choice={"type": "function", "function": {"name": "search"}},
                parallel_tool_calls=False,
                max_tokens=200,
            )
            message = first.choices[0].message
            assert message.tool_calls is not None
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It stands in water."}
            second = client.chat.completions.create(
                model="tiny", messages=[*ASKED, message.model_dump(), result], tools=TOOLS, max_tokens=200
            )
        assert second.choices[0].message.content == "It stands."

    def test_a_call_that_is_cut_off_ends_by_its_length(self, serve: Serve, tiny_engine: Engine) -> None:
        with serve(llm=saying(tiny_engine, CALL)).client() as client:
            answer = client.chat.completions.create(
                model="tiny", messages=ASKED, tools=TOOLS, tool_choice="required", max_tokens=45
            )
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.tool_calls is not None
        arguments = answer.choices[0].message.tool_calls[0].function.arguments
        assert '{"query": "heron"}'.startswith(arguments)
        assert len(arguments) < len('{"query": "heron"}')


class TestPredictions:
    def test_a_prediction_changes_steps_and_not_the_answer(self, client: openai.OpenAI, tiny_engine: Engine) -> None:
        plain = client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"speculate": False})
        text = plain.choices[0].message.content or ""
        for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
            answer = client.chat.completions.create(
                model="tiny", messages=ASKED, prediction={"type": "content", "content": content}
            )
            assert answer.choices[0].message.content == text
            assert answer.usage is not None
            details = answer.usage.completion_tokens_details
            assert details is not None
            accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
            assert accepted is not None
            assert rejected is not None
            assert accepted + rejected == len(tiny_engine.context.tokenize(text).token_ids)
            assert answer.usage.completion_tokens == 32
