"""Key A sees nothing of key B."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from saying import saying
from waiting_jobs import upload

from reader_rag.engine.engine import Engine
from reader_rag.rag.prompts import NOTHING_FOUND
from reader_rag.server.documents.jobs import JobState
from reader_rag.server.keys import KeyFile, KeyRing

Callers = tuple[TestClient, dict[str, dict[str, str]]]

TEXT = "The heron stands in the shallow water and waits for fish."


@pytest.fixture
def headers(key_file: KeyFile) -> dict[str, dict[str, str]]:
    """The headers of the callers a, b, and a2: another key of a's tenant."""
    made = {"a": key_file.add("a", "acme"), "a2": key_file.add("a2", "acme"), "b": key_file.add("b", "birds")}
    return {name: {"Authorization": f"Bearer {key}"} for name, key in made.items()}


@pytest.fixture
def callers(
    make_client: Any, key_file: KeyFile, headers: dict[str, dict[str, str]]
) -> tuple[TestClient, dict[str, dict[str, str]]]:
    """A client without a key of its own, and the headers of the callers."""
    return make_client(keys=KeyRing(key_file)), headers


def test_documents_jobs_and_undo_are_of_one_tenant(callers: Callers) -> None:
    client, headers = callers
    client.headers.update(headers["a"])
    job = upload(client, heron=TEXT)
    (document,) = client.get("/api/documents").json()["documents"]
    client.headers.update(headers["b"])
    paths = [f"/api/documents/{document['id']}", f"/api/documents/{document['id']}/original", f"/api/jobs/{job['id']}"]
    for path in (*paths, f"/api/jobs/{job['id']}/events"):
        unknown = path.replace(document["id"], "0" * 24).replace(job["id"], "0" * 32)
        assert client.get(path).status_code == 404
        assert client.get(path).json() == client.get(unknown).json()
    assert client.delete(f"/api/documents/{document['id']}").status_code == 404
    assert client.get("/api/documents").json() == {"documents": [], "next": None, "total": 0}
    client.headers.update(headers["a2"])  # of the same tenant
    assert client.get("/api/documents").json()["documents"] == [document]
    undo = client.delete(f"/api/documents/{document['id']}").json()["undo"]
    client.headers.update(headers["b"])
    assert client.post("/api/documents/undo", json={"undo": undo}).status_code == 404
    client.headers.update(headers["a"])
    assert client.post("/api/documents/undo", json={"undo": undo}).status_code == 200


def test_a_file_of_the_same_name_is_another_document(callers: Callers) -> None:
    client, headers = callers
    for name, text in (("a", TEXT), ("b", "The owl hunts at night.")):
        client.headers.update(headers[name])
        upload(client, bird=text)
    (of_b,) = client.get("/api/documents").json()["documents"]
    assert client.get(f"/api/documents/{of_b['id']}/original").text == "The owl hunts at night."
    client.headers.update(headers["a"])
    (of_a,) = client.get("/api/documents").json()["documents"]
    assert of_a["id"] != of_b["id"]
    assert client.get(f"/api/documents/{of_a['id']}").json()["text"] == TEXT


def test_conversations_are_of_one_key(callers: Callers) -> None:
    client, headers = callers
    body = {"title": "Herons", "messages": [{"role": "user", "content": "What waits?"}]}
    id_ = client.post("/api/conversations", json=body, headers=headers["a"]).json()["id"]
    for other in ("a2", "b"):
        assert client.get("/api/conversations?q=herons", headers=headers[other]).json() == {"conversations": []}
        for path in (f"/api/conversations/{id_}", f"/api/conversations/{id_}/export"):
            assert client.get(path, headers=headers[other]).status_code == 404
        assert client.put(f"/api/conversations/{id_}", json=body, headers=headers[other]).status_code == 404
        assert client.delete(f"/api/conversations/{id_}", headers=headers[other]).status_code == 404
    assert client.get(f"/api/conversations/{id_}", headers=headers["a"]).json()["title"] == "Herons"


def test_one_tenants_uploads_do_not_use_up_anothers(callers: Callers) -> None:
    client, headers = callers
    service = client.app.state.service  # type: ignore[attr-defined]
    with service.jobs._lock:
        service.jobs._states.update(
            {str(number): JobState(str(number), "acme") for number in range(service.config.jobs_per_tenant)}
        )
    client.headers.update(headers["a"])
    assert client.post("/api/documents", files=[("files", ("a.txt", b"x"))]).status_code == 429
    client.headers.update(headers["b"])
    assert upload(client, bird=TEXT)["state"] == "done"


def _ask(client: TestClient, headers: dict[str, str], **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Where does the heron stand?"}], "max_tokens": 100}
    return client.post("/v1/chat/completions", json=body | fields, headers=headers)


def test_answers_and_citations_are_from_the_callers_documents(
    make_client: Any, key_file: KeyFile, headers: dict[str, dict[str, str]], tiny_engine: Engine
) -> None:
    client = make_client(keys=KeyRing(key_file), llm=saying(tiny_engine, TEXT))
    client.headers.update(headers["a"])
    upload(client, heron=TEXT)
    (document,) = client.get("/api/documents").json()["documents"]
    of_a = _ask(client, headers["a"], model="tiny+docs").json()
    (annotation,) = of_a["choices"][0]["message"]["annotations"]
    assert document["id"] in annotation["url_citation"]["url"]
    of_b = _ask(client, headers["b"], model="tiny+docs")
    assert of_b.json()["choices"][0]["message"]["content"] == NOTHING_FOUND
    assert document["id"] not in of_b.text
    assert "heron.txt" not in of_b.text
    client.headers.update(headers["b"])
    upload(client, owl="The owl hunts at night.")
    of_b = _ask(client, headers["b"], model="tiny+docs")
    assert document["id"] not in of_b.text
    assert "heron.txt" not in of_b.text
    named = _ask(client, headers["b"], model="tiny+docs", reader={"documents": [document["id"]]})
    unknown = _ask(client, headers["b"], model="tiny+docs", reader={"documents": ["0" * 24]})
    assert named.status_code == unknown.status_code == 404
    assert named.text == unknown.text.replace("0" * 24, document["id"])


def test_what_one_tenant_asked_is_in_no_other_tenants_cache(callers: Callers) -> None:
    client, headers = callers
    messages = [{"role": "user", "content": "A question that is long enough for several blocks. " * 24}]

    def cached(name: str) -> int:
        answer = _ask(client, headers[name], model="tiny", messages=messages, max_tokens=4).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("a") == 0
    assert cached("a2") > 0  # of the same tenant
    assert cached("b") == 0


def test_no_metric_names_a_tenant_a_key_or_a_document(
    make_client: Any, key_file: KeyFile, headers: dict[str, dict[str, str]]
) -> None:
    operator = {"Authorization": f"Bearer {key_file.add('root', operator=True)}"}
    client = make_client(keys=KeyRing(key_file))
    client.headers.update(headers["a"])
    job = upload(client, heron=TEXT)
    (document,) = client.get("/api/documents").json()["documents"]
    client.get(f"/api/documents/{document['id']}")
    for name in ("a", "b"):
        assert client.get("/metrics", headers=headers[name]).status_code == 403
    metrics = client.get("/metrics", headers=operator).text
    assert 'route="/api/documents/{document}"' in metrics
    for secret in ("acme", "birds", "root", "heron", document["id"], job["id"]):
        assert secret not in metrics
