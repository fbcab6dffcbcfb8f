"""What a hostile server can do to a client: nothing without a bound."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import time
from typing import Any

import httpx
import pytest
from hello import HELLO
from reader_rag.connectors import openai_transport
from reader_rag.connectors.openai import ServerLLM
from reader_rag.connectors.openai_transport import BoundExceededError, TimeBudget, _EventCheck, _retry_after_s
from scripted_server import CHAT, MODELS, Handler, Reply, Script, body, serving

from reader_rag.errors import BusyError, ReaderError, ServerError


def redirect(status: int, location: str) -> Reply:
    """A reply that redirects."""

    def reply(handler: Handler) -> None:
        handler.send_json(status, {}, location=location)

    return reply


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_to_another_server_gets_neither_prompt_nor_key(script: Script, url: str, status: int) -> None:
    other = Script()
    with serving(other) as elsewhere:
        llm = ServerLLM.connect(url, key="k-42")
        targets = [elsewhere + "/chat/completions", elsewhere.replace("http://", "//") + "/chat/completions"]
        for target in targets:
            script.replies[CHAT] = redirect(status, target)
            says = re.escape(f"redirects to another server, {elsewhere.removesuffix('/v1')}, which gets no prompt")
            with pytest.raises(ServerError, match=says):
                llm.chat(HELLO)
            with pytest.raises(ServerError, match=says):
                list(llm.stream_chat(HELLO))
            with pytest.raises(ServerError, match=says):
                await llm.achat(HELLO)
    assert other.asked == []


@pytest.mark.parametrize("location", ["https://127.0.0.1/v1", "http://[::1", "http://127.0.0.1:99999/", "ftp://x/"])
def test_other_schemes_and_invalid_addresses_are_no_redirects(script: Script, url: str, location: str) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = redirect(307, location)
    with pytest.raises(ServerError):
        llm.chat(HELLO)


def test_a_redirect_on_the_same_server_is_followed(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = redirect(307, "/moved")
    script.replies["/moved"] = lambda handler: handler.say()
    assert llm.chat(HELLO).message.content == "The heron stands still."


def endless(piece: bytes) -> Reply:
    """A reply that never ends, in chunks without a length."""

    def reply(handler: Handler) -> None:
        handler.start_stream()
        for _ in itertools.count():
            handler.send_chunk(piece.decode())

    return reply


def test_compressed_answers_are_refused_before_they_are_unpacked(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = body(gzip.compress(bytes(1 << 20)), content_encoding="gzip")
    with pytest.raises(ServerError, match="compresses its answer .gzip., which is not asked for"):
        llm.chat(HELLO)
    assert script.asked[-1].headers["accept-encoding"] == "identity"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of some kilobytes instead of megabytes."""
    monkeypatch.setattr(openai_transport, "MOST_BODY_BYTES", 1 << 16)
    monkeypatch.setattr(openai_transport, "MOST_ERROR_BYTES", 1 << 14)
    monkeypatch.setattr(openai_transport, "MOST_STREAM_BYTES", 1 << 17)
    monkeypatch.setattr(openai_transport, "MOST_EVENT_BYTES", 1 << 14)


TOO_LONG = "sends an (answer|event) of more than"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "reply",
    [
        body(b"[" * (1 << 17)),
        endless(b" " * 1000),
        endless(b"data: {}\n"),
        endless(b"data: x"),
        endless(b": ping\n\n"),
        lambda handler: handler.send_json(400, {"error": "x" * (1 << 15)}),
    ],
    ids=["long", "endless", "lines", "line", "comments", "error"],
)
async def test_answers_streams_events_and_errors_have_a_length(script: Script, url: str, reply: Reply) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = reply
    with pytest.raises(ServerError, match=TOO_LONG):
        llm.chat(HELLO)
    with pytest.raises(ServerError, match=TOO_LONG):
        list(llm.stream_chat(HELLO))
    with pytest.raises(ServerError, match=TOO_LONG):
        _ = [part async for part in await llm.astream_chat(HELLO)]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\r", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_end_at_blank_lines_wherever_the_stream_is_cut(end: bytes, size: int) -> None:
    stream = (b"data: {}" + end) * 2000
    check = _EventCheck(1 << 20)
    for start in range(0, len(stream), size):
        check(stream[start : start + size])
    assert check._event_bytes <= size
    check(b"data: x\n" * 900)
    with pytest.raises(BoundExceededError, match="1000 lines"):
        check(b"data: x\n" * 101)


def drop_by_drop(text: str, pause_s: float = 0.02) -> Reply:
    """A reply whose bytes come one by one, each long before the timeout."""

    def reply(handler: Handler) -> None:
        for byte in text.encode():
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(pause_s)

    return reply


@pytest.mark.parametrize(
    "text",
    [
        "HTTP/1.1 200 OK\r\nx-pad: " + "x" * 5000,
        "HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + " " * 5000,
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + "1\r\n:\r\n" * 5000,
    ],
    ids=["head", "body", "stream"],
)
async def test_an_answer_that_comes_byte_by_byte_ends_at_the_total_timeout(script: Script, url: str, text: str) -> None:
    llm = ServerLLM.connect(url, total_timeout_s=0.4)
    script.replies[CHAT] = drop_by_drop(text)
    says = r"did not complete its answer within 0.4 s: .* raise total_timeout_s"
    with pytest.raises(ServerError, match=says):
        llm.chat(HELLO)
    with pytest.raises(ServerError, match=says):
        list(llm.stream_chat(HELLO))
    with pytest.raises(ServerError, match=says):
        await llm.achat(HELLO)
    assert len(script.bodies(CHAT)) <= 3  # none is repeated; on a busy machine the time is over before one is sent


def test_the_time_in_which_a_stream_is_not_read_is_not_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(openai_transport.time, "monotonic", lambda: now)
    budget = TimeBudget(10.0)
    with budget.spending():
        now += 4.0
        assert budget.left_s == 6.0
    now += 1000.0
    with budget.spending():
        assert budget.left_s == 6.0
        now += 7.0
        assert budget.left_s < 0.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({}, 0.0),
    ],
)
def test_waits_before_a_retry_are_read(headers: dict[str, str], seconds: float | None) -> None:
    found = _retry_after_s(httpx.Headers(headers))
    assert found < 0 if seconds is None else found == seconds


def test_a_wait_beyond_the_total_timeout_is_not_begun(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url, total_timeout_s=10.0)
    error = {"error": {"message": "busy"}}
    script.replies[CHAT] = lambda handler: handler.send_json(503, error, retry_after="60")
    with pytest.raises(BusyError, match="busy"):
        llm.chat(HELLO)
    assert len(script.bodies(CHAT)) == 1


def test_escapes_in_messages_are_removed(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url)
    hostile = "\x1b]0;title\x07\x1b[2J\r\nok \u202etxt\x9b31m \ud800"
    script.replies[CHAT] = lambda handler: handler.fail(400, hostile)
    with pytest.raises(ServerError) as caught:
        llm.chat(HELLO)
    assert str(caught.value).isprintable()
    script.models = [{"id": hostile}, {"id": "b"}]
    with pytest.raises(ReaderError, match="has several models") as caught:
        ServerLLM.connect(url)
    assert str(caught.value).isprintable()


def choice(delta: Any, **more: Any) -> str:
    """An event with any delta."""
    fields = {"id": "c", "object": "x", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta, **more}]}
    return "data: " + json.dumps(fields) + "\n\n"


STREAMS = {
    "bytes": b"data: \xff\xfe\n\n",
    "deep": b"data: " + b"[" * 100_000 + b"\n\n",
    "list": b"data: [1]\n\n",
    "null": b"data: null\n\n",
    "no choices": b'data: {"choices": null}\n\n',
    "number": choice({"content": 5}).encode(),
    "nested": choice({"content": {"a": []}}).encode(),
    "choice": b'data: {"choices": [5]}\n\n',
    "usage": choice({"content": "x"}, finish_reason="stop").replace('"id"', '"usage": "many", "id"').encode(),
    "infinite": b'data: {"choices": [], "created": 1e999, "usage": {"prompt_tokens": 1e999}}\n\n',
    "long number": b'data: {"choices": [{"index": ' + b"9" * 5000 + b"}]}\n\n",
}


@pytest.mark.parametrize("name", STREAMS)
async def test_events_of_another_form_raise_one_line(script: Script, url: str, name: str) -> None:
    def reply(handler: Handler) -> None:
        handler.start_stream()
        data = STREAMS[name]
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))

    llm = ServerLLM.connect(url)
    script.replies[CHAT] = reply
    with pytest.raises(ServerError) as caught:
        list(llm.stream_chat(HELLO))
    assert "\n" not in str(caught.value)
    with pytest.raises(ServerError):
        _ = [part async for part in await llm.astream_chat(HELLO)]


@pytest.mark.parametrize("answer", [b"[" * 100_000, b"\xff", b'{"choices": [{"message": 5}]}', b'{"choices": 5}', b"5"])
async def test_answers_of_another_form_raise_one_line(script: Script, url: str, answer: bytes) -> None:
    llm = ServerLLM.connect(url)
    script.replies[CHAT] = body(answer, content_type="application/json")
    with pytest.raises(ServerError):
        llm.chat(HELLO)
    with pytest.raises(ServerError):
        await llm.achat(HELLO)
    script.replies[MODELS] = body(answer, content_type="application/json")
    with pytest.raises(ServerError):
        ServerLLM.connect(url)


def test_broken_characters_of_an_answer_are_replaced(script: Script, url: str) -> None:
    llm = ServerLLM.connect(url)
    script.pieces = ["a\ud800", "b"]
    assert llm.chat(HELLO).message.content == "a?b"
    parts = list(llm.stream_chat(HELLO))
    assert "".join(str(part.delta) for part in parts) == "a?b"
    assert parts[-1].message.content == "a?b"


def test_impossible_counts_are_left_out(script: Script, url: str) -> None:
    script.usage = {"prompt_tokens": 10**400, "completion_tokens": -3, "prompt_tokens_details": {"cached_tokens": "x"}}
    script.models[0]["max_model_len"] = 10**400
    llm = ServerLLM.connect(url)
    assert llm.context_window < 10**6
    last = list(llm.stream_chat(HELLO))[-1]
    assert {"prompt_tokens", "completion_tokens", "reused_tokens"}.isdisjoint(last.additional_kwargs)
