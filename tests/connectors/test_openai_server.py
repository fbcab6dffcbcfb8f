"""The transport of `ServerLLM`: addresses, keys, and every failure as one line."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest
from hello import HELLO
from reader_rag.connectors.openai import ServerLLM
from scripted_server import CHAT, MODELS, Handler, Reply, Script, body, failing, interrupted, silent

from reader_rag.errors import BusyError, ConfigError, ModelNotFoundError, PromptError, ReaderError, ServerError


@pytest.mark.parametrize("address", ["", "localhost:8000", "ftp://host/v1", "http:///v1", "http://host:none/v1"])
def test_invalid_addresses_raise(address: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{address!r} is not the address of a server")):
        ServerLLM.connect(address)


def test_a_password_in_the_address_raises_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="READER_RAG_ENGINE_KEY") as caught:
        ServerLLM.connect("http://ann:secret@host/v1")
    assert "secret" not in str(caught.value)


def test_a_key_of_another_service_is_not_sent(script: Script, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-openai")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-openai")
    ServerLLM.connect(url).chat(HELLO)
    sent = str([asked.headers for asked in script.asked])
    assert "k-openai" not in sent
    assert "org-openai" not in sent


def test_a_server_that_is_down_raises_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=rf"http://127.0.0.1:{port}/v1 cannot be reached .*check the address"):
        ServerLLM.connect(f"http://127.0.0.1:{port}/v1")


def test_an_address_without_v1_raises_a_hint(url: str) -> None:
    with pytest.raises(ServerError, match=r"has no OpenAI-compatible API there \(404\): does the address end in /v1"):
        ServerLLM.connect(url.removesuffix("/v1"))


@pytest.mark.parametrize("answer", [{"data": [{"name": "x"}]}, {"data": 3}, [], "hello", None])
def test_an_invalid_list_of_models_raises_one_line(script: Script, url: str, answer: Any) -> None:
    script.replies[MODELS] = lambda handler: handler.send_json(200, answer)
    with pytest.raises(ServerError, match="does the address end in /v1"):
        ServerLLM.connect(url)


def test_another_kind_of_server_raises_one_line(script: Script, url: str) -> None:
    script.replies[MODELS] = body(b"<html></html>")
    with pytest.raises(ServerError, match="not as an OpenAI-compatible API does"):
        ServerLLM.connect(url)


def test_a_missing_or_wrong_key_raises(script: Script, url: str) -> None:
    script.replies[MODELS] = failing(401, "Unauthorized")
    with pytest.raises(ServerError, match="requires an API key: pass the right one as key"):
        ServerLLM.connect(url)
    with pytest.raises(ServerError, match="does not accept the API key") as caught:
        ServerLLM.connect(url, key="k-42")
    assert "k-42" not in str(caught.value)


FAILURES: list[tuple[Reply, type[ReaderError], str]] = [
    (failing(500, "out of\nmemory"), ServerError, r"failed \(500: out of memory\): see its log"),
    (failing(503, "loading"), BusyError, r"overloaded \(loading\): try again later"),
    (failing(429, "slow down"), BusyError, r"overloaded \(slow down\): try again later"),
    (failing(404, "The model `bird` does not exist."), ModelNotFoundError, "no longer has the model"),
    (failing(400, "This model's maximum context length is 600 tokens."), PromptError, "prompt is too long"),
    (failing(400, "too many", "context_length_exceeded"), PromptError, "too long"),
    (failing(400, "roles must alternate"), ServerError, r"refuses the request \(400: roles must alternate\)"),
    (lambda handler: handler.send_json(200, {"choices": []}), ServerError, "not as an OpenAI-compatible API does"),
]


@pytest.mark.parametrize(("reply", "error", "says"), FAILURES)
def test_refused_requests_raise_one_line(
    script: Script, url: str, reply: Reply, error: type[ReaderError], says: str
) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = reply
    with pytest.raises(error, match=says) as caught:
        llm.chat(HELLO)
    assert "\n" not in str(caught.value)


def test_a_transient_failure_is_retried(script: Script, url: str) -> None:
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
    (interrupted, r"broke off the answer \(.*\): send the question again, or see the server's log"),
    (without_an_end, r"broke off the answer \(the answer has no end\)"),
    (error_event, r"failed \(the engine died\)"),
    (garbage, "not as an OpenAI-compatible API does"),
]


@pytest.mark.parametrize(("reply", "says"), BROKEN)
async def test_an_interrupted_stream_raises_one_line(script: Script, url: str, reply: Reply, says: str) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = reply
    with pytest.raises(ServerError, match=says):
        list(llm.stream_chat(HELLO))
    with pytest.raises(ServerError, match=says):
        _ = [part async for part in await llm.astream_chat(HELLO)]


async def test_a_slow_server_times_out_without_a_retry(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url, timeout_s=0.2)
    script.replies[CHAT] = silent
    says = r"sent nothing for 0.2 s: .* \(timeout_s\)"
    with pytest.raises(ServerError, match=says):
        llm.chat(HELLO)
    with pytest.raises(ServerError, match=says):
        list(llm.stream_chat(HELLO))
    with pytest.raises(ServerError, match=says):
        await llm.achat(HELLO)
    assert len(script.bodies(CHAT)) == 3
    script.left.set()


def test_a_server_that_stops_within_an_answer_times_out(script: Script, url: str) -> None:
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
