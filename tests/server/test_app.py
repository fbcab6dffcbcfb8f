"""The app: health, session, headers, errors."""

from __future__ import annotations

from fastapi.testclient import TestClient

from reader_rag import __version__


def test_health_and_readiness(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ok"}


def test_session_tells_what_a_client_needs(client: TestClient) -> None:
    session = client.get("/api/session").json()
    assert session["auth"] == "none"
    assert session["models"] == ["tiny", "tiny+docs"]
    assert session["docs_model"] == "tiny+docs"
    assert session["version"] == __version__
    assert session["limits"]["files_per_request"] == 100


def test_every_answer_has_the_safe_headers(client: TestClient) -> None:
    for path in ("/healthz", "/api/session", "/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_unknown_paths_are_answered_in_the_form_of_errors(client: TestClient) -> None:
    answer = client.get("/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"
