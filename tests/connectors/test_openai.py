"""`ServerLLM`: what the server serves, how prompts are measured, and its answers."""

from __future__ import annotations

import asyncio

import pytest
from hello import HELLO
from llama_index.core.schema import NodeWithScore, TextNode
from reader_rag.connectors.openai import ServerLLM
from scripted_server import CHAT, COMPLETIONS, Script

from reader_rag.errors import ConfigError, ModelNotFoundError
from reader_rag.rag.prompts import QA_PROMPT, REFINE_PROMPT
from reader_rag.rag.synthesis import GroundedSynthesizer, PromptBudget


def test_the_only_model_is_taken_with_its_context_window(url: str) -> None:
    llm = ServerLLM.connect(url + "/")
    assert (llm.metadata.model_name, llm.metadata.context_window, llm.metadata.num_output) == ("bird", 2000, 256)
    assert llm.metadata.is_chat_model


def test_one_of_several_models_must_be_named(script: Script, url: str) -> None:
    script.models = [{"id": "bird", "max_model_len": 900}, {"id": "fish", "max_model_len": 700}]
    with pytest.raises(ModelNotFoundError, match=r"has several models; pass one of them as model: bird, fish$"):
        ServerLLM.connect(url)
    with pytest.raises(ModelNotFoundError, match="has no model 'frog'; pass one that it has: bird, fish$"):
        ServerLLM.connect(url, "frog")
    assert ServerLLM.connect(url, "fish").metadata.context_window == 700


def test_an_adapter_has_the_window_of_its_model(script: Script, url: str) -> None:
    script.models.append({"id": "bird-poet", "parent": "bird", "max_model_len": None})
    assert ServerLLM.connect(url, "bird-poet").metadata.context_window == 2000


def test_a_server_without_a_model_raises(script: Script, url: str) -> None:
    script.models = None
    with pytest.raises(ModelNotFoundError, match="has no model; load one there"):
        ServerLLM.connect(url)


def test_an_answer_longer_than_the_window_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens \(2000\) leaves no room .*\(2000 tokens\)"):
        ServerLLM.connect(url, max_tokens=2000)


def test_a_setting_out_of_its_range_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^temperature: .* 2, not 9$"):
        ServerLLM.connect(url, temperature=9)


def test_the_key_is_sent_and_in_no_field(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url, key="k-42")
    llm.chat(HELLO)
    assert {asked.headers["authorization"] for asked in script.asked} == {"Bearer k-42"}
    assert "k-42" not in llm.to_json()
    assert "k-42" not in str(llm.to_payload())


def test_a_timeout_must_be_positive(url: str) -> None:
    with pytest.raises(ConfigError, match="timeout_s must be a number of seconds above 0, not 0"):
        ServerLLM.connect(url, timeout_s=0)


def test_prompts_are_measured_with_the_servers_tokenizer_and_template(script: Script, url: str) -> None:
    budget = PromptBudget.of(ServerLLM.connect(url))
    assert len(budget.encode("one two three")) == 3
    assert (budget.context_window, budget.template_tokens, budget.message_tokens) == (2000, 2, 2)
    assert {"model": "bird", "prompt": "one two three", "add_special_tokens": False} in script.bodies("/tokenize")
    sent = len(script.asked)
    assert len(budget.encode("one two three")) == 3
    assert len(script.asked) == sent  # counted before


def test_what_does_not_fit_into_the_window_is_cut(script: Script, url: str) -> None:
    script.models[0]["max_model_len"] = 600
    llm = ServerLLM.connect(url, max_tokens=100)
    nodes = [NodeWithScore(node=TextNode(text=f"{bird} " * 300), score=0.5) for bird in ("heron", "owl")]
    response = GroundedSynthesizer(llm, QA_PROMPT, REFINE_PROMPT).synthesize("Who?", nodes)
    assert str(response) == "The heron stands still."
    prompts = [" ".join(m["content"] for m in body["messages"]) for body in script.bodies(CHAT)]
    assert len(prompts) == 2
    assert all(len(prompt.split()) <= 500 for prompt in prompts)
    assert sum(prompt.count("heron ") + prompt.count("owl ") for prompt in prompts) >= 598


def test_a_fifth_of_the_window_is_kept_free_where_tokens_are_estimated(script: Script, url: str) -> None:
    script.counts_tokens = False
    llm = ServerLLM.connect(url)
    assert (llm.metadata.context_window, llm.tokenizer) == (1600, None)
    script.models = [{"id": "bird"}]
    assert ServerLLM.connect(url).metadata.context_window == 3120  # of LlamaIndex's 3,900


def test_another_kind_of_tokenize_endpoint_is_not_used(script: Script, url: str) -> None:
    script.replies["/tokenize"] = lambda handler: handler.send_json(200, {"tokens": []})  # llama.cpp
    assert ServerLLM.connect(url).tokenizer is None


def test_a_model_without_a_template_completes_text(script: Script, url: str) -> None:
    script.has_template = False
    llm = ServerLLM.connect(url)
    assert not llm.metadata.is_chat_model
    assert llm.complete("The bird?").text == "The heron stands still."
    assert "".join(part.delta or "" for part in llm.stream_complete("The bird?")) == "The heron stands still."
    assert script.bodies(CHAT) == []
    assert [body["prompt"] for body in script.bodies(COMPLETIONS)] == ["The bird?", "The bird?"]


def test_a_stream_ends_with_the_report(script: Script, url: str) -> None:
    script.pause_s = 0.01
    *parts, last = ServerLLM.connect(url, max_tokens=7).stream_chat(HELLO)
    assert [part.delta for part in parts if part.delta] == ["The heron ", "stands still."]
    assert (last.delta, last.message.content) == ("", "The heron stands still.")
    assert last.raw == {
        "model": "bird",
        "usage": {"prompt_tokens": 40, "completion_tokens": 5},
        "finish_reason": "stop",
    }
    reported = last.additional_kwargs
    assert (reported["prompt_tokens"], reported["completion_tokens"]) == (40, 5)
    assert set(reported) == {"prompt_tokens", "completion_tokens", "ttft_s", "tokens_per_s"}
    assert reported["ttft_s"] > 0.0
    (body,) = script.bodies(CHAT)
    assert body["messages"] == [{"role": "user", "content": "Hello?"}]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("bird", 7, 0.0)


def test_a_whole_answer_reports_the_same(script: Script, url: str) -> None:
    script.finish_reason = "length"
    script.usage = {"prompt_tokens": 40, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 32}}
    response = ServerLLM.connect(url).chat(HELLO)
    assert response.message.content == "The heron stands still."
    assert response.raw["finish_reason"] == "length"
    assert response.additional_kwargs == {"prompt_tokens": 40, "completion_tokens": 5, "reused_tokens": 32}
    assert "stream_options" not in script.bodies(CHAT)[0]


def test_counts_that_the_server_does_not_report_are_absent(script: Script, url: str) -> None:
    script.usage = None
    *_, last = ServerLLM.connect(url).stream_chat(HELLO)
    assert set(last.additional_kwargs) == {"ttft_s"}
    assert last.raw["usage"] is None


async def test_async_calls_return_the_same(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url)
    assert (await llm.achat(HELLO)).additional_kwargs == {"prompt_tokens": 40, "completion_tokens": 5}
    parts = [part async for part in await llm.astream_chat(HELLO)]
    assert "".join(part.delta or "" for part in parts) == "The heron stands still."
    assert parts[-1].raw["finish_reason"] == "stop"
    script.has_template = False
    llm = ServerLLM.connect(url)
    assert (await llm.acomplete("The bird?")).raw["finish_reason"] == "stop"
    texts = [part.text async for part in await llm.astream_complete("The bird?")]
    assert texts[-1] == "The heron stands still."


@pytest.mark.parametrize("asynchronous", [False, True])
def test_closing_a_stream_ends_it_on_the_server(script: Script, url: str, asynchronous: bool) -> None:
    script.pieces, script.pause_s = ("word ",) * 1000, 0.005
    llm = ServerLLM.connect(url)

    async def read_one() -> None:
        stream = await llm.astream_chat(HELLO)
        await anext(stream)
        await stream.aclose()
        assert await asyncio.to_thread(script.left.wait, 3)

    if asynchronous:
        asyncio.run(read_one())
    else:
        stream = llm.stream_chat(HELLO)
        next(stream)
        stream.close()
    assert script.left.wait(3)
