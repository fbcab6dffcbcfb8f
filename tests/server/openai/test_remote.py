"""`--engine URL`: another OpenAI-compatible server decodes, here a service like this one."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from reader_rag.connectors.openai import ServerLLM
from saying import saying
from served import TEXTS, Serve, Served

from reader_rag.engine.engine import Engine
from reader_rag.rag.prompts import NOTHING_FOUND

ASKED: list[Any] = [{"role": "user", "content": "Where does the heron stand?"}]
ANSWER = "Well 😀: The heron stands still in shallow water. I know no more."


def behind(serve: Serve, texts: dict[str, str] | None = None, **first: Any) -> tuple[Served, Served]:
    """A service that decodes, and one in front of it."""
    decoding = serve(**first)
    llm = ServerLLM.connect(f"{decoding.url}/v1", "tiny", max_tokens=200)
    return decoding, serve(texts, llm=llm, model="front")


class TestModel:
    def test_answers_are_those_of_the_other_server(self, serve: Serve) -> None:
        decoding, front = behind(serve)
        settings: dict[str, Any] = {"messages": ASKED, "max_tokens": 16, "logprobs": True, "top_logprobs": 1}
        with decoding.client() as one, front.client() as other:
            expected = one.chat.completions.create(model="tiny", **settings)
            answer = other.chat.completions.create(model="front", **settings)
            chunks = list(other.chat.completions.create(model="front", stream=True, **settings))
            text = other.completions.create(model="front", prompt="the man", max_tokens=9).choices[0].text
            assert text == one.completions.create(model="tiny", prompt="the man", max_tokens=9).choices[0].text
        assert answer.choices == expected.choices
        assert (answer.model, answer.usage) == ("front", expected.usage)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.choices[0].message.content

    def test_what_it_refuses_is_refused(self, serve: Serve) -> None:
        _, front = behind(serve)
        for stream in (False, True):
            with front.client() as client, pytest.raises(openai.BadRequestError, match="logit_bias"):
                client.chat.completions.create(model="front", messages=ASKED, logit_bias={"99999999": 1}, stream=stream)

    def test_a_client_that_goes_away_leaves_the_other_server_too(self, serve: Serve, tiny_engine: Engine) -> None:
        from waiting import wait_until

        _, front = behind(serve)
        with front.client() as client:
            stream = client.chat.completions.create(model="front", messages=ASKED, stream=True, max_tokens=1500)
            next(iter(stream))
            stream.close()
        wait_until(lambda: tiny_engine.busy.running == tiny_engine.busy.waiting == 0, "the end of the request")


class TestDocuments:
    @pytest.mark.parametrize("stream", [False, True])
    def test_citations_are_found_by_matching(self, serve: Serve, tiny_engine: Engine, stream: bool) -> None:
        _, front = behind(serve, TEXTS, llm=saying(tiny_engine, ANSWER))
        with front.client() as client:
            answer: Any = client.chat.completions.create(model="front+docs", messages=ASKED, stream=stream)
            if stream:
                chunks = [chunk for chunk in answer if chunk.choices]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                (annotation,) = chunks[-1].choices[0].delta.annotations
                span, reader = annotation["url_citation"], chunks[-1].reader
            else:
                text = answer.choices[0].message.content
                (annotation,) = answer.choices[0].message.annotations
                span, reader = annotation.url_citation.model_dump(), answer.reader
        assert text == ANSWER
        assert text[span["start_index"] : span["end_index"]] == "The heron stands still in shallow water."
        assert span["title"] == "heron.txt"
        assert [passage["title"] for passage in reader["passages"] if passage["copied"]] == ["heron.txt"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_empty_store_says_so(self, serve: Serve, stream: bool) -> None:
        _, front = behind(serve)
        with front.client() as client:
            answer: Any = client.chat.completions.create(model="front+docs", messages=ASKED, stream=stream)
            found = next(iter(answer)).choices[0].delta if stream else answer.choices[0].message
        assert found.content == NOTHING_FOUND
