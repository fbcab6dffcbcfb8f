"""Limits of bodies and headers, over real sockets; attacks leave the service alive."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from live import exchange, live
from waiting import LIMIT_S, join, wait_until
from waiting_jobs import upload_files

from reader_rag.errors import BusyError
from reader_rag.server.health import router
from reader_rag.server.service import Service

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
HEAD = b"POST /api/conversations HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def _with(service: Service, **config: Any) -> Service:
    return replace(service, config=replace(service.config, port=0, **config))


@pytest.fixture(autouse=True)
def log_of_the_service(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="reader_rag.server")


def _refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "reader_rag.server"]


def test_a_body_that_is_announced_too_large_is_refused_unread(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with live(_with(service, body_bytes=2000)) as (_, port):
        answer = exchange(port, HEAD + b"Content-Length: 2001\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert exchange(port, HEALTH).endswith(b'"ok"}')
    assert len(_refusals(caplog)) == 1


def test_a_body_that_grows_too_large_is_refused(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    with live(_with(service, body_bytes=2000)) as (_, port):
        answer = exchange(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"message"' in answer
    assert len(_refusals(caplog)) == 1


def test_a_body_that_comes_too_slowly_is_refused(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with live(_with(service, body_seconds=0.2)) as (_, port):
        answer = exchange(port, HEAD + b"Content-Length: 100\r\n\r\n", b"{")
        assert answer.startswith(b"HTTP/1.1 408 ")
    assert len(_refusals(caplog)) == 1


def test_headers_that_come_too_slowly_are_refused(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with live(_with(service, header_seconds=0.2)) as (_, port):
        assert exchange(port, b"GET /healthz HTTP/1.1\r\nHost: 127") == b""
        assert exchange(port) == b""
    assert len(_refusals(caplog)) == 2


def test_an_upload_has_limits_of_its_own(make_client: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = make_client({"body_bytes": 1024, "upload_bytes": 4096})
    assert upload_files(client, {"a.txt": b"word " * 400})["state"] == "done"
    answer = client.post("/api/documents", files=[("files", ("b.txt", b"x" * 5000))])
    assert answer.status_code == 413
    assert len(_refusals(caplog)) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/api/documents/..%2f..%2fetc%2fpasswd",
        "/api/documents/../../etc/passwd",
        "/api/documents/%2e%2e/original",
        "/page/../keys.json",
        "/page/%2e%2e/%2e%2e/config/server.py",
        "/page/..%5c..%5capp.py",
        "//etc/passwd",
        "/api/conversations/%00",
    ],
)
def test_paths_lead_nowhere_else(service: Service, path: str) -> None:
    with live(_with(service)) as (_, port):
        answer = exchange(port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        assert answer.split()[1] in (b"400", b"404", b"405")
        assert b"root:" not in answer


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: x\r\n\r\n",
        bytes(range(256)) + b"\r\n",
    ],
)
def test_what_is_no_request_is_refused(service: Service, request_: bytes) -> None:
    with live(_with(service, header_seconds=0.5)) as (_, port):
        answer = exchange(port, request_)
        assert answer == b"" or answer.split()[1] == b"400"
        assert b"200 OK" in exchange(port, HEALTH)


@pytest.mark.parametrize("name", ["../../escape.txt", "/etc/cron.d/x.txt", "..\\..\\x.txt", "a/../../../b.txt"])
def test_names_of_uploads_do_not_leave_their_folder(client: TestClient, service: Service, name: str) -> None:
    assert service.library is not None
    before = {path for path in service.library.folder.parent.rglob("*") if path.is_file()}
    job = upload_files(client, {name: "The heron waits."})
    assert job["state"] == "done"
    made = {path for path in service.library.folder.parent.rglob("*") if path.is_file()} - before
    kept = [path for path in made if path.read_bytes() == b"The heron waits."]
    assert [path.is_relative_to(service.library.folder / "originals") for path in kept] == [True]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upload_that_is_broken_off_leaves_nothing(service: Service, reset: bool, chunked: bool) -> None:
    assert service.library is not None
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 9000000"
    part = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n' + b"heron " * 400_000
    head = b"POST /api/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    with live(_with(service)) as (_, port):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
                connection.sendall(head + length + b"\r\n\r\n" + (b"%x\r\n" % len(part) if chunked else b"") + part)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert b"200 OK" in exchange(port, HEALTH)
    assert service.library.records("") == []
    assert not [*(service.library.folder / "incoming").iterdir(), *(service.library.folder / "originals").iterdir()]


def test_an_abandoned_stream_of_progress_does_not_end_the_job(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.library is not None
    leave = threading.Event()
    monkeypatch.setattr(service.library, "bound_originals", lambda tenant: leave.wait(LIMIT_S))
    body = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nThe heron.\r\n--b--\r\n'
    head = f"POST /api/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    with live(_with(service)) as (_, port):
        try:
            answer = exchange(port, head.encode() + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + body)
            job = json.loads(answer.partition(b"\r\n\r\n")[2])["job"]
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
                    connection.sendall(f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
                    assert b"200 OK" in connection.recv(1 << 16)
        finally:
            leave.set()
        read = f"GET /api/jobs/{job} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
        wait_until(lambda: b'"state":"done"' in exchange(port, read), "the end of the ingestion")


def test_markup_stays_text_in_names_and_documents(client: TestClient) -> None:
    name, text = "<img src=x onerror=alert(1)>.txt", "<script>alert('x')</script> & <b>bold</b>"
    upload_files(client, {name: text})
    answer = client.get("/api/documents")
    assert answer.headers["content-type"] == "application/json"
    (document,) = answer.json()["documents"]
    assert document["name"] == name
    shown = client.get(f"/api/documents/{document['id']}")
    assert shown.headers["content-type"] == "application/json"
    assert shown.json()["text"] == text


def test_a_full_queue_is_429_with_the_time_to_wait(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> Any:
        raise BusyError("the queue is full; try again later")

    assert client.app.state.service.jobs is not None
    monkeypatch.setattr(client.app.state.service.jobs, "submit", busy)
    answer = client.post("/api/documents", files=[("files", ("a.txt", b"x"))])
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"] == {
        "message": "the queue is full; try again later",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


def test_a_bug_is_answered_and_logged_without_what_was_asked(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("the secret question")

    monkeypatch.setattr(client.app.state.service.conversations, "list", fail)
    answer = client.get("/api/conversations?q=secret")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed; its log says where"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    (line,) = _refusals(caplog)
    assert "RuntimeError" in line
    assert "secret" not in caplog.text


def test_a_request_that_runs_is_finished_when_the_service_is_ended(service: Service) -> None:
    entered, leave = threading.Event(), threading.Event()

    @router.get("/api/slow-for-the-test", include_in_schema=False)
    def slow() -> str:
        entered.set()
        leave.wait(30)
        return "done"

    answers: list[bytes] = []
    try:
        with live(_with(service)) as (server, port):
            request = b"GET /api/slow-for-the-test HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            asking = threading.Thread(target=lambda: answers.append(exchange(port, request)))
            asking.start()
            assert entered.wait(30)
            server.should_exit = True
            leave.set()
            asking.join(30)
    finally:
        router.routes.pop()
    assert answers[0].startswith(b"HTTP/1.1 200 OK")
    assert answers[0].endswith(b'"done"')


def _read_into(answer: bytearray, port: int, request: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        connection.sendall(request)
        while data := connection.recv(1 << 16):
            answer.extend(data)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_at_the_end_of_the_grace_says_so(
    service: Service, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = service.engine
    assert engine is not None
    leave, answer = threading.Event(), bytearray()
    body = json.dumps({"model": "tiny", "stream": stream, "messages": [{"role": "user", "content": "Hello?"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    stopping = threading.Thread(target=engine.between_steps, args=(leave.wait,))  # nothing is decoded meanwhile
    stopping.start()
    try:
        with live(_with(service, grace=0.0)) as (server, port):
            asking = threading.Thread(target=_read_into, args=(answer, port, request))
            asking.start()
            wait_until(lambda: b"assistant" in answer if stream else engine.busy.waiting, "the begin of the answer")
            server.should_exit = True
            join(asking)
    finally:
        leave.set()
        join(stopping)
    if stream:
        assert answer.startswith(b"HTTP/1.1 200 OK")
        *_, error, done = answer.split(b"data: ")
        assert json.loads(error)["error"]["code"] == "shutting_down"
        assert done.startswith(b"[DONE]")
        assert answer.endswith(b"\r\n0\r\n\r\n")  # complete for HTTP
    else:
        assert answer.startswith(b"HTTP/1.1 503")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
    wait_until(lambda: not engine.busy.waiting + engine.busy.running, "the end of the request in the engine")
    assert "Traceback" not in caplog.text
