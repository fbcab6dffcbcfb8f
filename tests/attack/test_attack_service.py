"""Hostile requests to the HTTP service, of two tenants."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from word_embedding import WordEmbedding

from reader_rag.config import ServerConfig
from reader_rag.engine.engine import Engine
from reader_rag.llm import ReaderLLM
from reader_rag.rag import FaissStore

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from fastapi.testclient import TestClient

from reader_rag.server.app import create_app
from reader_rag.server.keys import KeyFile, KeyRing
from reader_rag.server.running import open_service

TENANTS = ("ann", "bob")
ODD: list[Any] = [None, True, 0, -1, 10**30, 1.5, "", "x", "\ud800", "\0", "a" * 5000, [], [None], {}, {"a": 1}]
NAMES = [
    "a.txt",
    "b.md",
    "..",
    "a/../../b.txt",
    "\u202ex.txt",
    "é.txt",
    "e\u0301.txt",
    "x" * 400 + ".txt",
    ".previous-a.txt",
    "p.html",
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "heron"}], "max_tokens": 3},
    "/v1/completions": {"model": "tiny", "prompt": "heron", "max_tokens": 3, "stop": ["x"], "n": 1},
    "/v1/embeddings": {"model": "words", "input": ["heron", "owl"]},
    "/api/conversations": {"title": "t", "messages": [{"role": "user", "content": "x", "reader": {"a": 1}}]},
    "/api/documents/undo": {"undo": "x"},
}


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy of JSON in which some values are odd ones, or missing."""
    if not rng.randrange(8):
        return rng.choice(ODD)
    if isinstance(value, dict):
        return {name: mutated(each, rng) for name, each in value.items() if rng.randrange(12)}
    if isinstance(value, list):
        return [mutated(each, rng) for each in value]
    return value


@pytest.fixture
def clients(tiny_engine: Engine, tmp_path: Path) -> Iterator[dict[str, TestClient]]:
    """A client of each tenant, of one service."""
    logging.getLogger("reader_rag.server").setLevel(logging.CRITICAL)
    embedding = WordEmbedding(model_name="words", embedded=[])
    file = KeyFile(tmp_path / "keys.json")
    keys = {tenant: file.add(tenant) for tenant in TENANTS}
    llm = ReaderLLM.from_engine(tiny_engine, max_tokens=4)
    folder = tmp_path / "store"
    with FaissStore(folder, embed_model=embedding) as store, ExitStack() as opened:
        config = ServerConfig(jobs_per_tenant=1000)
        service = open_service(
            llm, "tiny", store=store, embedding=embedding, folder=folder, config=config, keys=KeyRing(file)
        )
        app, made = create_app(service), {}
        for tenant, key in keys.items():
            client = TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)
            client.headers["Authorization"] = f"Bearer {key}"
            made[tenant] = client
        opened.enter_context(made[TENANTS[0]])
        yield made
        service.close()


def test_hostile_requests_to_the_service_are_answered_and_show_nobody_elses_texts(attack, clients) -> None:  # type: ignore[no-untyped-def]
    ids: dict[str, list[str]] = {
        "documents": ["0" * 24],
        "conversations": ["0" * 32],
        "jobs": ["0" * 32],
        "undo": ["x"],
    }

    def upload(client: TestClient, tenant: str, rng: random.Random) -> Any:
        content = f"secret of {tenant} ".encode() + rng.randbytes(rng.choice((0, 0, 40)))
        name = rng.choice(NAMES).encode("utf-8", "surrogatepass").replace(b'"', b"%22")
        head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="' + name + b'"\r\n\r\n'
        body = (head + content + b"\r\n") * rng.choice((1, 1, 2)) + b"--b--\r\n"
        if not rng.randrange(4):
            at = rng.randrange(len(body))
            body = body[:at] + rng.randbytes(rng.randrange(3)) + body[at + rng.randrange(3) :]
        return client.post("/api/documents", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})

    def post(client: TestClient, tenant: str, rng: random.Random) -> Any:
        path = rng.choice(list(BODIES))
        body = mutated(BODIES[path], rng)
        if path.endswith("undo") and rng.randrange(2):
            body = {"undo": rng.choice(ids["undo"])}
        if path.endswith("conversations") and rng.randrange(2):
            body = {"title": f"secret of {tenant}", "messages": [{"role": "user", "content": f"secret of {tenant}"}]}
        data = json.dumps(body).encode()
        if not rng.randrange(6):
            data = data[: rng.randrange(len(data))] + rng.randbytes(rng.randrange(3))
        return client.post(path, content=data, headers={"Content-Type": "application/json"})

    def read(client: TestClient, tenant: str, rng: random.Random) -> Any:
        kind = rng.choice(("documents", "conversations", "jobs"))
        path = f"/api/{kind}" if not rng.randrange(3) else f"/api/{kind}/{rng.choice(ids[kind])}"
        path += rng.choice(
            ("", "", "/original", "/export", "?q=secret", "?limit=0", "?after=" + rng.choice(ids["documents"]))
        )
        return client.request(rng.choice(("GET", "GET", "GET", "DELETE", "PUT")), path)

    def one(rng: random.Random) -> None:
        tenant, other = rng.sample(TENANTS, 2)
        answer = rng.choice((upload, post, read, read))(clients[tenant], tenant, rng)
        text = answer.text
        assert f"secret of {other}" not in text
        if answer.status_code >= 400:
            assert answer.status_code in (*range(400, 500), 501)
            message = answer.json()["error"]["message"]
            assert message.isprintable()
            assert message
        elif answer.headers["content-type"] == "application/json":
            found = answer.json()
            for kind, name in (("documents", "documents"), ("conversations", "conversations")):
                ids[kind] += [each["id"] for each in found.get(name, ())] if isinstance(found, dict) else []
            ids["jobs"] += [found["job"]] if "job" in found else []
            ids["undo"] += [found["undo"]] if "undo" in found else []
        for kind in ids:
            del ids[kind][1:-50]

    attack(one)
