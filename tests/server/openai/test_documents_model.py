"""`NAME+docs`: answers from documents, with citations that are the documents' characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import openai
import pytest
from llama_index.core.base.llms.types import ChatMessage
from saying import saying
from served import TEXTS, Serve, Served, fill
from word_embedding import WordEmbedding

from reader_rag.engine.engine import Engine
from reader_rag.rag.prompts import NOTHING_FOUND
from reader_rag.server.documents.text import document_id, document_text
from reader_rag.server.openai.annotations import footer
from reader_rag.server.openai.retrieval import Question

ASKED: list[Any] = [{"role": "user", "content": "Where does the heron stand?"}]
ANSWER = "Well 😀: The heron stands still in shallow water. I know no more."
QUOTED = "The heron stands still in shallow water."


def ask(served: Served, messages: Sequence[Any] = ASKED, **settings: Any) -> Any:
    with served.client() as client:
        answer: Any = client.chat.completions.create(model="tiny+docs", messages=list(messages), **settings)
        return list(answer) if settings.get("stream") else answer


def cited(served: Served, annotation: Any) -> str:
    """The characters of the document that an annotation's address names."""
    assert served.service.store is not None
    address = urlsplit(annotation.url_citation.url)
    path, _, query = address.fragment.partition("?")
    named = {name: values[0] for name, values in parse_qs(query).items()}
    assert address.path == "/"
    id_ = path.removeprefix("/documents/")
    (record,) = [record for record in served.service.store.documents() if document_id(record.path) == id_]
    document = document_text(served.service.store.get_nodes(doc_ids=[record.path]))
    assert named["v"] == document.version
    return document.text[int(named["start"]) : int(named["end"])]


class TestCitations:
    def test_a_copied_span_is_an_annotation(self, serve: Serve, tiny_engine: Engine) -> None:
        served = serve(TEXTS, llm=saying(tiny_engine, ANSWER))
        answer = ask(served, max_tokens=200)
        message = answer.choices[0].message
        assert message.content == ANSWER
        assert message.annotations
        (annotation,) = message.annotations
        span = annotation.url_citation
        assert annotation.type == "url_citation"
        assert message.content[span.start_index : span.end_index] == QUOTED  # code points, behind an emoji
        assert cited(served, annotation) == QUOTED
        assert span.title == "heron.txt"
        assert span.url.startswith(f"{served.url}/#/documents/")

    def test_annotations_come_with_the_last_chunk_of_a_stream(self, serve: Serve, tiny_engine: Engine) -> None:
        served = serve(TEXTS, llm=saying(tiny_engine, ANSWER))
        chunks = ask(served, max_tokens=200, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        last = chunks[-1]
        assert last.choices[0].finish_reason == "stop"
        (annotation,) = last.choices[0].delta.annotations
        assert ANSWER[annotation["url_citation"]["start_index"] : annotation["url_citation"]["end_index"]] == QUOTED
        assert annotation["type"] == "url_citation"
        passages = last.reader["passages"]
        assert [passage["title"] for passage in passages if passage["copied"]] == ["heron.txt"]
        assert len(passages) > 1

    def test_an_answer_of_its_own_words_cites_nothing(self, serve: Serve, tiny_engine: Engine) -> None:
        answer = ask(serve(TEXTS, llm=saying(tiny_engine, "I do not know.")), max_tokens=100)
        assert answer.choices[0].message.annotations == []
        assert not any(passage["copied"] for passage in answer.reader["passages"])

    def test_a_prediction_is_never_cited(self, serve: Serve, tiny_engine: Engine) -> None:
        said = "An eel swims upstream in spring."
        prediction = {"type": "content", "content": said}
        answer = ask(serve(TEXTS, llm=saying(tiny_engine, said)), max_tokens=100, prediction=prediction)
        assert answer.choices[0].message.content == said
        assert answer.choices[0].message.annotations == []

    def test_a_document_that_changed_meanwhile_is_not_cited(
        self, serve: Serve, tiny_engine: Engine, embedding: WordEmbedding
    ) -> None:
        served = serve(TEXTS, llm=saying(tiny_engine, ANSWER))
        assert served.service.store is not None
        with served.client() as client:
            stream = client.chat.completions.create(model="tiny+docs", messages=ASKED, max_tokens=200, stream=True)
            next(stream)
            fill(served.service.store, embedding, {"/docs/heron.txt": "Something else."})
            chunks = list(stream)
        assert getattr(chunks[-1].choices[0].delta, "annotations", None) is None

    def test_a_footer_for_clients_that_drop_annotations(self, serve: Serve, tiny_engine: Engine) -> None:
        served = serve(TEXTS, llm=saying(tiny_engine, ANSWER, ANSWER, "I do not know."))
        answer = ask(served, max_tokens=200, extra_body={"reader": {"footer": True}})
        content = answer.choices[0].message.content
        (annotation,) = answer.choices[0].message.annotations
        assert content.startswith(ANSWER)
        assert f"]({annotation.url_citation.url}): “{QUOTED[:-1]}" in content
        chunks = ask(served, max_tokens=200, stream=True, extra_body={"reader": {"footer": True}})
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
        assert ask(served, extra_body={"reader": {"footer": True}}).choices[0].message.content == "I do not know."

    def test_a_footer_is_text(self) -> None:
        made = footer([("a](http://x)<b>.txt", "http://u", "one\n# two *three*")])
        assert made.splitlines()[-1] == (r"1. [a\]\(http://x\)\<b\>\.txt](http://u): “one \# two \*three\*”")


class TestRetrieval:
    def test_the_passages_are_in_the_prompt(self, serve: Serve) -> None:
        answer = ask(serve(TEXTS))
        assert answer.reader["question"] == ASKED[0]["content"]
        assert answer.usage.prompt_tokens > 40
        assert answer.choices[0].message.content

    def test_options_of_the_search(self, serve: Serve) -> None:
        served = serve(TEXTS)
        owl = document_id("/docs/owl.txt")
        for options in (
            {"documents": [owl]},
            {"filters": {"file_name": "owl.txt"}},
            {"filters": {"file_name": ["owl.txt"]}},
        ):
            passages = ask(served, extra_body={"reader": {**options, "top_k": 1}}).reader["passages"]
            assert [passage["document_id"] for passage in passages] == [owl]
        with pytest.raises(openai.NotFoundError, match="there is no such document"):
            ask(served, extra_body={"reader": {"documents": ["none"]}})

    def test_options_of_the_search_belong_to_the_model_with_documents(self, serve: Serve) -> None:
        with serve(TEXTS).client() as client, pytest.raises(openai.BadRequestError, match="reader"):
            client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"reader": {"top_k": 1}})

    def test_a_follow_up_is_searched_for_with_what_was_said(self, serve: Serve, tiny_engine: Engine) -> None:
        served = serve(TEXTS, llm=saying(tiny_engine, "Where does the owl sleep?", "In towers."))
        said = [
            {"role": "user", "content": "Tell me of owls."},
            {"role": "assistant", "content": "Owls hunt at night."},
            {"role": "user", "content": "And where do they sleep?"},
        ]
        answer = ask(served, said)
        assert answer.reader["question"] == "And where do they sleep?\nWhere does the owl sleep?"
        assert answer.choices[0].message.content == "In towers."

    def test_it_may_be_searched_for_as_it_is(self, serve: Serve, tiny_engine: Engine) -> None:
        served = serve(TEXTS, llm=saying(tiny_engine, "In towers."))
        said = [
            {"role": "user", "content": "Tell me of owls."},
            {"role": "user", "content": "And where do they sleep?"},
        ]
        answer = ask(served, said, extra_body={"reader": {"condense": False}})
        assert (answer.reader["question"], answer.choices[0].message.content) == (said[1]["content"], "In towers.")

    def test_the_oldest_turns_go_where_the_context_is_full(self, serve: Serve) -> None:
        turn = [{"role": "user", "content": "a b c d " * 40}, {"role": "assistant", "content": "e f g h " * 40}]
        answer = ask(serve(TEXTS), [*turn * 5, *ASKED], extra_body={"reader": {"condense": False}})
        (note,) = answer.reader["notes"]
        assert re.fullmatch(r"the \d oldest turns of the conversation were left out", note)
        assert answer.usage.prompt_tokens > 1000

    def test_a_question_without_room_is_refused(self, serve: Serve) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(serve(TEXTS), [{"role": "user", "content": "a b " * 1000}])
        assert caught.value.code == "context_length_exceeded"

    def test_an_empty_store_says_so(self, serve: Serve) -> None:
        answer = ask(serve())
        assert answer.choices[0].message.content == NOTHING_FOUND
        assert answer.usage.total_tokens == 0
        chunks = ask(serve(), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == NOTHING_FOUND

    @pytest.mark.parametrize("messages", [[{"role": "system", "content": "x"}], [{"role": "user", "content": " "}]])
    def test_a_chat_without_a_question_is_refused(self, serve: Serve, messages: list[Any]) -> None:
        with pytest.raises(openai.BadRequestError, match="the last question is empty"):
            ask(serve(TEXTS), messages)


def test_a_chat_is_split_at_its_questions() -> None:
    roles = ["system", "user", "assistant", "tool", "user", "assistant", "tool"]
    question = Question.of([ChatMessage(role=role, content=f"{role}{k}") for k, role in enumerate(roles)])
    assert question.system == "system0"
    assert [[message.content for message in turn] for turn in question.turns] == [["user1", "assistant2", "tool3"]]
    assert [message.content for message in question.last] == ["user4", "assistant5", "tool6"]
