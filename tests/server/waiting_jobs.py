"""Uploads in tests."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient
from waiting import wait_until


def upload(client: TestClient, **files: str | bytes) -> dict[str, Any]:
    """Upload files (name without suffix -> content, as .txt) and wait until they are ingested."""
    return upload_files(client, {f"{name}.txt": content for name, content in files.items()})


def upload_files(client: TestClient, files: dict[str, str | bytes]) -> dict[str, Any]:
    """Upload files (name -> content) and wait until they are ingested; returns the job's state."""
    sent = [
        ("files", (name, content.encode() if isinstance(content, str) else content)) for name, content in files.items()
    ]
    answer = client.post("/api/documents", files=sent)
    assert answer.status_code == 202, answer.text
    return wait_for(client, answer.json()["job"])


def wait_for(client: TestClient, job: str) -> dict[str, Any]:
    """Wait until an ingestion has ended; returns the job's state."""
    states: list[dict[str, Any]] = []

    def ended() -> bool:
        states.append(client.get(f"/api/jobs/{job}").json())
        return states[-1]["state"] in ("done", "failed")

    wait_until(ended, "the ingestion")
    return states[-1]
