"""The synthesizer: prompts measured with the LLM's tokenizer, streams, and answers without passages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.llms import MockLLM
from llama_index.core.schema import TextNode

from reader_rag.errors import PromptError
from reader_rag.rag import NOTHING_FOUND, FaissStore, SizedEmbedding, make_chat_engine, make_query_engine
from reader_rag.rag.synthesis import PromptBudget

MakeLLM = Callable[..., Any]


def test_a_question_longer_than_the_context_is_refused(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    for ask in (make_query_engine(animals, llm, embedding).query, make_chat_engine(animals, llm, embedding).chat):
        with pytest.raises(PromptError, match="context of 400 tokens, 50 of them reserved for the answer: shorten it"):
            ask("why " * 400)
    assert llm.prompts == []


def test_without_passages_the_llm_is_not_called(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    question = "zebra"
    assert str(make_query_engine(animals, llm, embedding, cutoff=0.9).query(question)) == NOTHING_FOUND
    streamed = make_query_engine(animals, llm, embedding, streaming=True, cutoff=0.9).query(question)
    assert isinstance(streamed, StreamingResponse)
    assert "".join(streamed.response_gen) == NOTHING_FOUND
    chat = make_chat_engine(animals, llm, embedding, cutoff=0.9)
    assert str(chat.chat(question)) == NOTHING_FOUND
    assert "".join(chat.stream_chat(question).response_gen) == NOTHING_FOUND
    assert llm.prompts == []


def test_passages_that_do_not_fit_one_prompt_are_refined_in_turn(embedding: SizedEmbedding, make_llm: MakeLLM) -> None:
    llm = make_llm(window=220)
    store = FaissStore()
    texts = [f"dogs {letter} " + f"{letter} " * 60 for letter in "abc"]
    store.add([TextNode(text=text, embedding=embedding.get_text_embedding(text)) for text in texts])
    make_query_engine(store, llm, embedding).query("dogs")
    assert len(llm.prompts) > 1
    assert all(len(prompt.split()) <= 220 - 50 for prompt in llm.prompts)
    assert "Answer so far: forty two it is" in llm.prompts[1]


def test_a_streamed_answer_arrives_in_pieces(animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM) -> None:
    response = make_query_engine(animals, make_llm(), embedding, streaming=True).query("dogs")
    assert isinstance(response, StreamingResponse)
    assert list(response.response_gen) == ["forty ", "two ", "it ", "is"]
    assert len(response.source_nodes) == 3


def test_closing_a_streamed_answer_ends_the_generation(
    animals: FaissStore, embedding: SizedEmbedding, make_llm: MakeLLM
) -> None:
    llm = make_llm()
    response = make_query_engine(animals, llm, embedding, streaming=True).query("dogs")
    assert isinstance(response, StreamingResponse)
    assert next(response.response_gen) == "forty "
    response.response_gen.close()
    assert llm.closed


def test_an_llm_without_a_tokenizer_works(animals: FaissStore, embedding: SizedEmbedding) -> None:
    response = make_query_engine(animals, MockLLM(max_tokens=5), embedding).query("dogs")
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
