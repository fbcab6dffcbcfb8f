"""Completions, models, and what is refused, by OpenAI's own client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from served import Serve

from reader_rag.engine.engine import Engine
from reader_rag.llm import ReaderLLM
from reader_rag.llm.settings import SAMPLING_SETTINGS
from reader_rag.server.openai.schemas import ChatRequest

TEXT = "the man and the inn"
ASKED: list[Any] = [{"role": "user", "content": TEXT}]


@pytest.fixture
def llm(tiny_engine: Engine) -> ReaderLLM:
    return ReaderLLM.from_engine(tiny_engine, max_tokens=32)


class TestCompletions:
    def test_a_text_is_continued_as_the_llm_does(self, client: openai.OpenAI, llm: ReaderLLM) -> None:
        expected = llm.complete(TEXT, formatted=True).text
        tokens = list(llm.engine.encode(TEXT).token_ids)
        for prompt in (TEXT, [TEXT], tokens, [tokens]):
            assert client.completions.create(model="tiny", prompt=prompt).choices[0].text == expected
        stream = client.completions.create(model="tiny", prompt=TEXT, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected

    def test_several_prompts_and_choices(self, client: openai.OpenAI) -> None:
        settings: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 6, "logit_bias": {"2": -100}}
        # No answer ends before its sixth token.
        answer = client.completions.create(model="tiny", prompt=["one", "two"], n=2, **settings)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        alone = client.completions.create(model="tiny", prompt="two", n=2, **settings)
        assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 24

    def test_usage_and_logprobs_in_a_stream(self, client: openai.OpenAI) -> None:
        settings: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "logprobs": 2, "max_tokens": 6}
        whole = client.completions.create(**settings)
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.tokens or ()) == 6
        chunks = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage == whole.usage
        streamed = [t for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
                    for t in chunk.choices[0].logprobs.token_logprobs or ()]  # fmt: skip
        assert streamed == whole.choices[0].logprobs.token_logprobs

    @pytest.mark.parametrize("refused", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"prompt": ""}, {"n": 17}])
    def test_what_is_not_offered_is_refused(self, client: openai.OpenAI, refused: dict[str, Any]) -> None:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{"model": "tiny", "prompt": TEXT} | refused)

    def test_the_model_with_documents_answers_chats(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="POST /v1/chat/completions"):
            client.completions.create(model="tiny+docs", prompt=TEXT)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "tiny+docs"]
    assert client.models.retrieve("tiny+docs").id == "tiny+docs"
    with pytest.raises(openai.NotFoundError, match="there is no model of that name; there are tiny and tiny\\+docs"):
        client.models.retrieve("other")


def test_responses_are_not_offered(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="use POST /v1/chat/completions"):
        client.responses.create(model="tiny", input="x")


def test_every_sampling_parameter_can_be_asked_for() -> None:
    elsewhere = {"grammar", "logprobs"}  # `response_format`, and OpenAI's two fields
    assert SAMPLING_SETTINGS.keys() - elsewhere <= ChatRequest.model_fields.keys()


class TestErrors:
    def test_an_unknown_model(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-4o", messages=ASKED)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

    def test_a_prompt_that_is_too_long(self, client: openai.OpenAI) -> None:
        for create in (
            lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a b " * 2000}]),
            lambda: client.completions.create(model="tiny", prompt="a b " * 2000, stream=True),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                create()
            assert caught.value.code == "context_length_exceeded"

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"extra_body": {"colour": 1}}, "Unknown parameter: 'colour'"),
            ({"temperature": -1}, "temperature"),
            ({"temperature": "1"}, "temperature"),
            ({"n": 0}, "n"),
            ({"top_logprobs": 2}, "top_logprobs are allowed with logprobs=true only"),
            ({"stream_options": {"include_usage": True}}, "stream_options are allowed with stream=true only"),
            ({"tool_choice": "auto"}, "tool_choice is allowed where tools are given only"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"99999999": 1}}, "logit_bias has the token id 99999999"),
            ({"response_format": {"type": "json_schema"}}, "json_schema must have a name and a schema"),
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "not"),
            ({"messages": []}, "messages"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                "text only",
            ),
            ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
            ({"prediction": {"type": "content", "content": 5}}, "prediction"),
            ({"functions": []}, "functions"),
            ({"modalities": ["audio"]}, "modalities"),
        ],
    )
    def test_a_request_that_cannot_be_answered(
        self, client: openai.OpenAI, given: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.chat.completions.create(**{"model": "tiny", "messages": ASKED} | given)
        assert caught.value.type == "invalid_request_error"
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["message"].count("\n") == 0

    def test_fields_without_effect_are_taken(self, client: openai.OpenAI) -> None:
        client.chat.completions.create(
            model="tiny",
            messages=ASKED,
            max_tokens=2,
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            reasoning_effort="low",
            verbosity="low",
            modalities=["text"],
            safety_identifier="s",
            prompt_cache_key="k",
        )

    def test_a_full_queue_is_429_and_the_client_tries_again(self, serve: Serve, tiny_engine: Engine) -> None:
        class Full(ReaderLLM):
            def submit(self, call: Any) -> Any:
                from reader_rag.errors import BusyError

                refused.append(call)
                if len(refused) < 3:
                    raise BusyError("the queue is full; try again later")
                return super().submit(call)

        refused: list[Any] = []
        served = serve(llm=Full.from_engine(tiny_engine, max_tokens=4))
        with served.client() as client, pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="tiny", messages=ASKED)
        assert caught.value.response.headers["Retry-After"] == "2"
        with served.client(max_retries=2) as client:
            assert client.chat.completions.create(model="tiny", messages=ASKED).usage is not None
        assert len(refused) == 3

    def test_bodies_that_are_no_requests(self, serve: Serve) -> None:
        url = serve().url
        for body in (b"", b"{", b"[]", b"null", b"\xff", b'{"model": NaN}'):
            answer = httpx.post(
                f"{url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
