"""`ServerLLM` and `--engine`: an OpenAI-compatible server answers, over HTTP, well or badly."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from reader_rag.connectors.openai import ServerLLM
from scripted_server import Handler, Reply, Script, serving
from typer.testing import CliRunner, Result
from word_embedding import WordEmbedding

from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.main import app
from reader_rag.errors import BusyError, ConfigError, ModelNotFoundError, PromptError, ReaderError, ServerError
from reader_rag.rag.prompts import QA_PROMPT, REFINE_PROMPT
from reader_rag.rag.synthesis import GroundedSynthesizer, PromptBudget

HELLO = [ChatMessage(role="user", content="Hello?")]
CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


def failing(status: int, message: str, code: Any = None) -> Reply:
    return lambda handler: handler.fail(status, message, code)


def breaking_off(handler: Handler) -> None:
    handler.start_stream()
    handler.send_piece("The heron ")
    handler.close_connection = True


def silent(handler: Handler) -> None:
    handler.server.script.left.wait(5)
    handler.close_connection = True


# -- what the server serves --


def test_the_only_model_is_taken_with_its_context_window(url: str) -> None:
    llm = ServerLLM.connect(url + "/")
    assert (llm.metadata.model_name, llm.metadata.context_window, llm.metadata.num_output) == ("bird", 2000, 256)
    assert llm.metadata.is_chat_model


def test_one_of_several_models_must_be_named(script: Script, url: str) -> None:
    script.models = [{"id": "bird", "max_model_len": 900}, {"id": "fish", "max_model_len": 700}]
    with pytest.raises(ModelNotFoundError, match=r"has several models: name one \(--model\): bird, fish$"):
        ServerLLM.connect(url)
    with pytest.raises(ModelNotFoundError, match="has no model 'frog'; it has: bird, fish$"):
        ServerLLM.connect(url, "frog")
    assert ServerLLM.connect(url, "fish").metadata.context_window == 700


def test_an_adapter_has_the_window_of_its_model(script: Script, url: str) -> None:
    script.models.append({"id": "bird-poet", "parent": "bird", "max_model_len": None})
    assert ServerLLM.connect(url, "bird-poet").metadata.context_window == 2000


def test_a_server_without_a_model_is_said(script: Script, url: str) -> None:
    script.models = None
    with pytest.raises(ModelNotFoundError, match="has no model; load one there"):
        ServerLLM.connect(url)


def test_an_answer_longer_than_the_window_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens \(2000\) leaves no room .*\(2000 tokens\)"):
        ServerLLM.connect(url, max_tokens=2000)


def test_a_setting_out_of_its_range_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^temperature: .* 2, not 9$"):
        ServerLLM.connect(url, temperature=9)


@pytest.mark.parametrize("address", ["", "localhost:8000", "ftp://host/v1", "http:///v1", "http://host:none/v1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{address!r} is not the address of a server")):
        ServerLLM.connect(address)


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="READER_RAG_ENGINE_KEY") as caught:
        ServerLLM.connect("http://ann:secret@host/v1")
    assert "secret" not in str(caught.value)


def test_the_key_is_sent_and_stands_in_no_field(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url, key="k-42")
    llm.chat(HELLO)
    assert {asked.headers["authorization"] for asked in script.asked} == {"Bearer k-42"}
    assert "k-42" not in llm.to_json()
    assert "k-42" not in str(llm.to_payload())


def test_a_key_of_another_service_is_not_sent(script: Script, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-openai")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-openai")
    ServerLLM.connect(url).chat(HELLO)
    sent = str([asked.headers for asked in script.asked])
    assert "k-openai" not in sent
    assert "org-openai" not in sent


# -- how prompts are measured --


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


def test_a_tokenizer_of_another_kind_is_not_taken(script: Script, url: str) -> None:
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


# -- answers --


def test_a_stream_comes_in_pieces_and_ends_with_the_report(script: Script, url: str) -> None:
    script.pause_s = 0.01
    *parts, last = ServerLLM.connect(url, max_tokens=7).stream_chat(HELLO)
    assert [part.delta for part in parts if part.delta] == ["The heron ", "stands still."]
    assert (last.delta, last.message.content) == ("", "The heron stands still.")
    assert last.raw == {
        "model": "bird",
        "usage": {"prompt_tokens": 40, "completion_tokens": 5},
        "finish_reason": "stop",
    }
    told = last.additional_kwargs
    assert (told["prompt_tokens"], told["completion_tokens"]) == (40, 5)
    assert set(told) == {"prompt_tokens", "completion_tokens", "ttft_s", "tokens_per_s"}
    assert told["ttft_s"] > 0.0
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


def test_a_server_that_counts_nothing_is_not_guessed_at(script: Script, url: str) -> None:
    script.usage = None
    *_, last = ServerLLM.connect(url).stream_chat(HELLO)
    assert set(last.additional_kwargs) == {"ttft_s"}
    assert last.raw["usage"] is None


async def test_async_calls_are_the_same(script: Script, url: str) -> None:
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


# -- failures, each one sentence --


def test_a_server_that_is_down_is_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=rf"http://127.0.0.1:{port}/v1 cannot be reached .*check the address"):
        ServerLLM.connect(f"http://127.0.0.1:{port}/v1")


def test_an_address_without_v1_is_recognised(url: str) -> None:
    with pytest.raises(ServerError, match=r"has no OpenAI-compatible API there \(404\): does the address end in /v1"):
        ServerLLM.connect(url.removesuffix("/v1"))


@pytest.mark.parametrize("answer", [{"data": [{"name": "x"}]}, {"data": 3}, [], "hello", None])
def test_a_list_of_models_that_is_none_is_one_line(script: Script, url: str, answer: Any) -> None:
    script.replies[MODELS] = lambda handler: handler.send_json(200, answer)
    with pytest.raises(ServerError, match="does the address end in /v1"):
        ServerLLM.connect(url)


def test_another_kind_of_server_is_one_line(script: Script, url: str) -> None:
    def page(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "13")
        handler.end_headers()
        handler.wfile.write(b"<html></html>")

    script.replies[MODELS] = page
    with pytest.raises(ServerError, match="not as an OpenAI-compatible API does"):
        ServerLLM.connect(url)


def test_a_key_that_is_missing_or_wrong_is_said(script: Script, url: str) -> None:
    script.replies[MODELS] = failing(401, "Unauthorized")
    with pytest.raises(ServerError, match="requires an API key: put the right one into READER_RAG_ENGINE_KEY"):
        ServerLLM.connect(url)
    with pytest.raises(ServerError, match="does not accept the API key") as caught:
        ServerLLM.connect(url, key="k-42")
    assert "k-42" not in str(caught.value)


FAILURES: list[tuple[Reply, type[ReaderError], str]] = [
    (failing(500, "out of\nmemory"), ServerError, r"failed \(500: out of memory\): its log may say why"),
    (failing(503, "loading"), BusyError, r"overloaded \(loading\): try again later"),
    (failing(429, "slow down"), BusyError, r"overloaded \(slow down\): try again later"),
    (failing(404, "The model `bird` does not exist."), ModelNotFoundError, "does not have the model any more"),
    (failing(400, "This model's maximum context length is 600 tokens."), PromptError, "prompt too long"),
    (failing(400, "too many", "context_length_exceeded"), PromptError, "too long"),
    (failing(400, "roles must alternate"), ServerError, r"refuses the request \(400: roles must alternate\)"),
    (lambda handler: handler.send_json(200, {"choices": []}), ServerError, "not as an OpenAI-compatible API does"),
]


@pytest.mark.parametrize(("reply", "error", "says"), FAILURES)
def test_what_a_server_refuses_is_one_line(
    script: Script, url: str, reply: Reply, error: type[ReaderError], says: str
) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = reply
    with pytest.raises(error, match=says) as caught:
        llm.chat(HELLO)
    assert "\n" not in str(caught.value)


def test_a_failure_that_passes_is_not_seen(script: Script, url: str) -> None:
    def once(handler: Handler) -> None:
        del script.replies[CHAT]
        handler.fail(503, "loading")

    llm = ServerLLM.connect(url)
    script.replies[CHAT] = once
    assert llm.chat(HELLO).message.content == "The heron stands still."


def garbage(handler: Handler) -> None:
    handler.start_stream()
    handler.send_chunk("data: {not json\n\n")
    handler.send_chunk("")


def error_event(handler: Handler) -> None:
    handler.start_stream()
    handler.send_piece("The heron ")
    handler.send_event({"error": {"message": "the engine died", "code": 500}})
    handler.send_chunk("")


def without_an_end(handler: Handler) -> None:
    handler.server.script.finish_reason = None
    handler.say()


BROKEN: list[tuple[Reply, str]] = [
    (breaking_off, r"broke off \(.*\): send the question again; the server's log may say why"),
    (without_an_end, r"broke off \(the answer has no end\)"),
    (error_event, r"failed \(the engine died\)"),
    (garbage, "not as an OpenAI-compatible API does"),
]


@pytest.mark.parametrize(("reply", "says"), BROKEN)
async def test_a_stream_that_breaks_off_is_one_line(script: Script, url: str, reply: Reply, says: str) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = reply
    with pytest.raises(ServerError, match=says):
        list(llm.stream_chat(HELLO))
    with pytest.raises(ServerError, match=says):
        _ = [part async for part in await llm.astream_chat(HELLO)]


async def test_a_server_that_is_slow_is_given_up_and_not_asked_again(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url, timeout_s=0.2)
    script.replies[CHAT] = silent
    says = r"sent nothing for 0.2 s: .* \(timeout_s, --engine-timeout\)"
    with pytest.raises(ServerError, match=says):
        llm.chat(HELLO)
    with pytest.raises(ServerError, match=says):
        list(llm.stream_chat(HELLO))
    with pytest.raises(ServerError, match=says):
        await llm.achat(HELLO)
    assert len(script.bodies(CHAT)) == 3
    script.left.set()


def test_a_server_that_falls_silent_in_an_answer_is_given_up(script: Script, url: str) -> None:
    def stalling(handler: Handler) -> None:
        handler.start_stream()
        handler.send_piece("The heron ")
        script.left.wait(5)

    llm = ServerLLM.connect(url, timeout_s=0.2)
    script.replies[CHAT] = stalling
    stream = llm.stream_chat(HELLO)
    assert next(stream).delta == "The heron "
    with pytest.raises(ServerError, match=r"sent nothing for 0.2 s"):
        next(stream)
    script.left.set()


def test_a_time_out_must_be_positive(url: str) -> None:
    with pytest.raises(ConfigError, match="timeout_s must be above 0, not 0"):
        ServerLLM.connect(url, timeout_s=0)


# -- the programs --


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files about birds; the programs embed by counting words."""
    monkeypatch.setattr(ModelOptions, "load_embedding", lambda self: WordEmbedding(model_name="words"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "heron.txt").write_text("The heron stands still in shallow water.\n")
    (tmp_path / "docs" / "owl.txt").write_text("The owl hunts at night.\n")
    assert run("ingest", tmp_path / "docs", "--store", tmp_path / "store").exit_code == 0
    return tmp_path / "store"


def run(*arguments: str | Path, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)


def refused(result: Result, *words: str, status: int = 1) -> None:
    assert result.exit_code == status, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert [word for word in words if word not in result.stderr] == []


def test_ask_shows_the_servers_answer_with_sources_and_what_is_known(script: Script, store: Path, url: str) -> None:
    script.pause_s = 0.01
    result = run("ask", "Is the heron in shallow water?", "--store", store, "--engine", url)
    assert (result.exit_code, result.stderr) == (0, "")
    said, _, rest = result.stdout.partition("Sources\n")
    assert said.strip() == "The heron stands still."
    assert re.search(r"\[1\] heron\.txt \(score 0\.\d\d, characters 0-40\)", rest)
    assert re.search(r"\n5 tokens; \d+\.\d tokens/s; prompt of 40 tokens read in \d+\.\d s\n", rest)
    assert "Copied word for word" not in rest
    assert "drafted" not in rest
    (body,) = script.bodies(CHAT)
    assert "The heron stands still in shallow water." in str(body["messages"])


def test_ask_json_keeps_its_shape_and_leaves_out_what_nobody_knows(script: Script, store: Path, url: str) -> None:
    script.finish_reason = "length"
    report = json.loads(run("ask", "heron?", "--store", store, "--engine", url, "--json", "--max-tokens", "5").stdout)
    assert list(report) == [
        "model",
        "question",
        "answer",
        "finish_reason",
        "sources",
        "citations",
        "stats",
        "comparison",
    ]
    assert (report["model"], report["answer"], report["finish_reason"]) == (
        "bird",
        "The heron stands still.",
        "length",
    )
    assert Path(report["sources"][0]["file"]).name == "heron.txt"
    assert (report["citations"], report["comparison"]) == (None, None)
    assert set(report["stats"]) <= {"prompt_tokens", "completion_tokens", "ttft_s", "tokens_per_s"}
    assert report["stats"]["completion_tokens"] == 5


def test_an_answer_that_was_cut_is_said(script: Script, store: Path, url: str) -> None:
    script.finish_reason = "length"
    script.usage = None
    text = run("ask", "heron?", "--store", store, "--engine", url).stdout
    assert re.search(r"\nfirst word after \d+\.\d s\nThe answer was cut at the most tokens allowed", text)


def test_the_programs_take_key_and_time_out(
    script: Script, store: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READER_RAG_ENGINE_KEY", "k-42")
    script.replies[CHAT] = silent
    refused(
        run("ask", "heron?", "--store", store, "--engine", url, "--engine-timeout", "0.2"), "sent nothing for 0.2 s"
    )
    script.left.set()
    assert script.asked[-1].headers["authorization"] == "Bearer k-42"


def test_nothing_retrieved_asks_no_server(script: Script, store: Path, url: str) -> None:
    arguments = ("--store", store, "--engine", url, "--cutoff", "0.9")
    assert json.loads(run("ask", "zebra", *arguments, "--json").stdout)["model"] is None
    assert script.asked == []


def test_an_unknown_model_lists_those_that_there_are(script: Script, store: Path, url: str) -> None:
    result = run("ask", "heron?", "--store", store, "--engine", url, "--model", "smollm2-135m")
    refused(result, "has no model 'smollm2-135m'; it has: bird")


def test_a_stream_that_breaks_off_ends_ask_with_one_line(script: Script, store: Path, url: str) -> None:
    script.replies[CHAT] = breaking_off
    result = run("ask", "heron?", "--store", store, "--engine", url)
    refused(result, "broke off")
    assert result.stdout.startswith("The heron ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "float32"], ["leave out --dtype"]),
        (["--exactness", "strict"], ["leave out --exactness"]),
        (["--datastore", "d", "--keep-answers"], ["leave out --datastore and --keep-answers"]),
        (["--keep-answers"], ["name its folder (--datastore)"]),
        (["--engine-timeout", "0"], ["--engine-timeout"]),
    ],
)
@pytest.mark.parametrize("command", [["ask", "heron?"], ["chat"]])
def test_options_of_a_local_model_are_refused_before_anything_is_loaded(
    command: list[str], options: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ModelOptions, "load_embedding")
    result = run(*command, "--store", "s", "--engine", "http://localhost/v1", *options)
    refused(result, *words, status=2 if "--engine-timeout" in options else 1)


def test_compare_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelOptions, "load_embedding")
    refused(run("ask", "heron?", "--store", "s", "--engine", "http://localhost/v1", "--compare"), "leave out --engine")


@pytest.mark.parametrize("command", [["ask", "heron?"], ["chat"]])
def test_answers_without_a_datastore_are_refused_before_anything_is_loaded(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ModelOptions, "load_embedding")
    refused(run(*command, "--store", "s", "--keep-answers"), "name its folder (--datastore)")


def test_chat_answers_remembers_and_shows_what_is_known(script: Script, store: Path, url: str) -> None:
    typed = "Is the heron in water?\n/sources\n/stats\nAnd then?\n"
    result = run("chat", "--store", store, "--engine", url, typed=typed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("The heron stands still.\nSources\n[1] heron.txt")
    assert re.search(r"\n5 tokens;.* prompt of 40 tokens", result.stdout)
    said = [(m["role"], m["content"]) for m in script.bodies(CHAT)[-1]["messages"][1:]]
    assert said == [("user", "Is the heron in water?"), ("assistant", "The heron stands still."), ("user", "And then?")]


def test_chat_goes_on_after_a_failure(script: Script, store: Path, url: str) -> None:
    def once(handler: Handler) -> None:
        del script.replies[CHAT]
        breaking_off(handler)

    script.replies[CHAT] = once
    result = run("chat", "--store", store, "--engine", url, typed="heron?\n/stats\nheron?\n")
    assert result.exit_code == 0
    assert re.fullmatch(r"error: the server at .* broke off \(.*\): .*\n", result.stderr)
    assert "There is no finished answer to count." in result.stdout
    assert result.stdout.endswith("The heron stands still.\n")


def pressing(after: int) -> Callable[[Handler], None]:
    """Says some words, then Ctrl-C is pressed while the next is waited for."""

    def say(handler: Handler) -> None:
        handler.start_stream()
        for _ in range(after):
            handler.send_piece("word ")
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.005)
            handler.send_chunk(": still here\n\n")

    return say


@pytest.mark.parametrize("words", [0, 2])
def test_ctrl_c_ends_the_answer_here_and_on_the_server(script: Script, store: Path, url: str, words: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        script.replies[CHAT] = pressing(words)
        result = run("chat", "--store", store, "--engine", url, typed="heron?\n/stats\n/sources\n")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("word " * words + "\n[stopped]\nThere is no finished answer to count.\n")
    assert script.left.wait(3)
