"""Who may call: Host, Origin, keys."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from reader_rag.errors import ConfigError, ServeError
from reader_rag.server import access, keys
from reader_rag.server.keys import KeyFile, KeyRing

MakeClient = Any


def _error(answer: Any) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:9", "LOCALHOST", "[::1]:8000", "localhost."])
def test_this_machines_names_may_come(client: TestClient, host: str) -> None:
    assert client.get("/api/session", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.168.0.9", "localhost@evil"]
)
def test_a_rebound_name_is_refused_in_one_logged_line(
    client: TestClient, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("/", "/api/session", "/v1/models"):
        caplog.clear()
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code in (400, 421)
        (record,) = [record for record in caplog.records if record.name == "reader_rag.server"]
        assert "Host" in record.getMessage()
        assert record.getMessage().isprintable()


@pytest.mark.parametrize("host", ["", "127.0.0.1:port", "x/y", "[::1"])
def test_a_host_that_is_none_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/api/session", headers={"Host": host}).status_code == 400


def test_named_hosts_may_come_and_no_others(make_client: MakeClient, key_file: KeyFile) -> None:
    key = key_file.add("alice")
    client = make_client({"host": "0.0.0.0", "allowed_hosts": ("docs.example",)}, KeyRing(key_file), key)
    for host in ("docs.example", "Docs.Example:443", "10.1.2.3:8000", "[fe80::1]", "localhost"):
        assert client.get("/api/session", headers={"Host": host}).status_code == 200
    assert client.get("/api/session", headers={"Host": "other.example"}).status_code == 421


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9000", "https://localhost:8000", "x://127.0.0.1:8000"]
)
def test_pages_of_other_sites_may_not_call(client: TestClient, origin: str) -> None:
    body = {"title": "x", "messages": []}
    answer = client.post("/api/conversations", json=body, headers={"Origin": origin})
    assert answer.status_code == 403
    assert client.get("/api/conversations").json() == {"conversations": []}


def test_a_form_of_another_site_changes_nothing(client: TestClient) -> None:
    headers = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert client.post("/api/documents", files=[("files", ("a.txt", b"x"))], headers=headers).status_code == 403
    text = '{"title": "x", "messages": []}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):  # no preflight for these
        assert client.post("/api/conversations", content=text, headers={"Content-Type": kind}).status_code == 400
    assert client.get("/api/session", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.get("/api/documents").json()["total"] == 0


def test_the_pages_own_calls_are_let_in(client: TestClient) -> None:
    headers = {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/api/conversations", json={"title": "x"}, headers=headers).status_code == 201


def test_cors_is_for_named_origins_only(make_client: MakeClient, key_file: KeyFile) -> None:
    key = key_file.add("alice")
    client = make_client({"cors_origins": ("https://app.example",)}, KeyRing(key_file))
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = client.options("/v1/embeddings", headers={"Origin": "https://app.example"} | ask)
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    answer = client.get("/api/session", headers={"Origin": "https://app.example", "Authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert client.options("/v1/embeddings", headers={"Origin": "https://evil.example"} | ask).status_code == 403


def test_what_is_asked_for_needs_a_key_and_the_page_none(make_client: MakeClient, key_file: KeyFile) -> None:
    key = key_file.add("alice")
    client = make_client(keys=KeyRing(key_file))
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
    for path in ("/api/session", "/api/documents", "/v1/embeddings", "/metrics", "/openapi.json", "/api/nothing"):
        answer = client.get(path)
        assert _error(answer) == (401, "missing_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    session = client.get("/api/session", headers={"Authorization": f"bearer {key}"}).json()
    assert (session["auth"], session["tenant_name"]) == ("key", "alice")


def test_wrong_keys_are_limited_and_those_who_are_in_stay_in(
    make_client: MakeClient, key_file: KeyFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, late = key_file.add("alice"), key_file.add("bob")
    client = make_client({"wrong_keys_per_minute": 3}, KeyRing(key_file))

    def ask(key: str) -> Any:
        return client.get("/api/session", headers={"Authorization": f"Bearer {key}"})

    now = [1000.0]
    monkeypatch.setattr(access.time, "monotonic", lambda: now[0])
    assert ask(right).status_code == 200
    assert [_error(ask(f"wrong-{number}")) for number in range(3)] == [(401, "invalid_api_key")] * 3
    limited = ask(late)  # not even a right key is looked at
    assert _error(limited) == (429, "too_many_wrong_keys")
    assert 0 < int(limited.headers["retry-after"]) <= 61
    assert ask(right).status_code == 200
    now[0] += 61.0
    assert ask(late).status_code == 200
    assert "wrong-" not in caplog.text
    assert right not in caplog.text


def test_metrics_are_for_operators(make_client: MakeClient, key_file: KeyFile) -> None:
    user, operator = key_file.add("alice"), key_file.add("root", operator=True)
    client = make_client(keys=KeyRing(key_file))
    assert client.get("/metrics", headers={"Authorization": f"Bearer {user}"}).status_code == 403
    client.get("/api/session", headers={"Authorization": f"Bearer {user}"})
    text = client.get("/metrics", headers={"Authorization": f"Bearer {operator}"}).text
    assert 'reader_rag_http_requests_total{method="GET",route="/api/session",status="200"} 1.0' in text
    assert "reader_rag_requests_total" in text  # of the engine
    assert "alice" not in text


def test_keys_are_stored_as_hashes_that_only_the_owner_reads(key_file: KeyFile) -> None:
    key = key_file.add("alice", "acme")
    assert key.startswith(keys.PREFIX)
    assert key not in key_file.path.read_text()
    assert stat.S_IMODE(key_file.path.stat().st_mode) == 0o600
    (entry,) = key_file.read()
    assert (entry.name, entry.tenant, entry.operator) == ("alice", "acme", False)
    ring = KeyRing(key_file)
    assert ring.find(key) == entry
    assert ring.find(key[:-1]) is None
    with pytest.raises(ConfigError, match="there is a key named 'alice'"):
        key_file.add("alice")


def test_a_running_service_takes_changes_of_the_file(key_file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_CHECK_S", 0.0)
    first = key_file.add("first")
    ring = KeyRing(key_file)
    second = key_file.add("second")
    assert ring.find(second) is not None
    key_file.remove("first")
    assert ring.find(first) is None
    key_file.path.unlink()
    assert ring.find(second) is None


def test_a_file_that_becomes_unreadable_lets_nobody_in_and_stops_nothing(
    make_client: MakeClient, key_file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_CHECK_S", 0.0)
    key = key_file.add("alice")
    client = make_client(keys=KeyRing(key_file), key=key)
    assert client.get("/api/session").status_code == 200
    key_file.path.write_text("{")
    assert client.get("/api/session").status_code == 401
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "keys": []}',
        '{"format": 1, "keys": [{"name": 1, "tenant": "", "hash": ""}]}',
        "\x00",
        '{"format": 1, "keys": []}',
        '{"format": 1, "keys": [{"name": "a", "tenant": "a", "hash": "' + "é" * 64 + '"}]}',
        '{"format": 1, "keys": [{"name": "a", "tenant": "\\ud800", "hash": "' + "0" * 64 + '"}]}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_none_of_keys_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ServeError) as caught:
        KeyRing(KeyFile(path))
    assert "reader-rag keys add" in str(caught.value)


def test_no_file_of_keys_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="cannot be read"):
        KeyRing(KeyFile(tmp_path / "none.json"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_a_device_in_place_of_the_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ServeError, match="cannot be read"):
            KeyRing(KeyFile(path))


def test_the_file_is_json_that_other_programs_can_write(key_file: KeyFile) -> None:
    key_file.add("alice", "", operator=True)
    entry = json.loads(key_file.path.read_text())["keys"][0]
    assert sorted(entry) == ["hash", "name", "operator", "tenant"]


@pytest.fixture(autouse=True)
def log_of_the_service(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="reader_rag.server")
