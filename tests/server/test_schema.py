"""schemathesis against the service's own OpenAPI description: no 5xx, and every answer as described."""

from __future__ import annotations

import os
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

EXAMPLES = 100 if os.environ.get("READER_RAG_ATTACK_SECONDS") else 8
"""Requests that are made for each operation."""

CHATS = ("/v1/chat/completions", "/v1/completions", "/api/race")
HOST = {"Host": "127.0.0.1"}


def test_every_answer_is_as_described(client: TestClient) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app, headers=HOST)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 15
    failures = [failure for operation in operations if (failure := _failure(operation))]
    assert not failures, "\n\n".join(failures)


def _failure(operation: Any) -> str | None:
    """What is wrong with the answers of an operation, as text; None: nothing."""
    # What a prompt and its settings need together is no matter of a schema: a context that is too short, for example.
    excluded = [checks.positive_data_acceptance] if operation.path in CHATS else []

    @given(operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        case.call_and_validate(headers=HOST, excluded_checks=excluded)

    try:
        check()
    except BaseException as error:  # hypothesis and schemathesis raise groups
        if isinstance(error, KeyboardInterrupt):
            raise
        parts = getattr(error, "exceptions", [error])
        return f"{operation.label}: " + "\n".join(str(part) for part in parts)
    return None
