"""`POST /api/race`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fastapi.testclient import TestClient

from reader_rag.config import SamplingParams
from reader_rag.server.app import create_app
from reader_rag.server.service import Service

CHAT = {"messages": [{"role": "user", "content": "the heron and the owl"}], "model": "tiny", "max_tokens": 12}


def race(client: TestClient, **changed: Any) -> list[dict[str, Any]]:
    """The events of a race."""
    response = client.post("/api/race", json=CHAT | changed)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_race_tells_its_runs_and_that_the_tokens_agree(client: TestClient) -> None:
    *states, last = race(client)
    assert states == [{"state": "reader"}, {"state": "plain"}]
    result = last["result"]
    assert (result["agree"], result["first_difference"]) == (True, None)
    assert result["plain"]["tokens_per_step"] == 1.0
    texts = ["".join(text for _, text in result[name]["events"]) for name in ("reader", "plain")]
    assert texts[0] == texts[1]


def test_a_race_leaves_nothing_and_can_be_run_again(client: TestClient, service: Service) -> None:
    assert race(client)[-1].keys() == {"result"}
    assert race(client)[-1].keys() == {"result"}
    assert service.engine is not None
    assert service.engine.busy.running == 0


def test_a_race_is_refused_while_others_are_decoded(client: TestClient, service: Service) -> None:
    engine = service.engine
    assert engine is not None
    params = SamplingParams(max_tokens=1900, ignore_eos=True)
    with engine.submit(engine.encode("the heron"), params):
        refused = client.post("/api/race", json=CHAT)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "busy"


def test_what_cannot_be_raced_is_refused_in_one_form(client: TestClient) -> None:
    assert client.post("/api/race", json=CHAT | {"model": "other"}).status_code == 404
    for wrong in (
        {"model": "tiny\ud800"},
        {"max_tokens": 0},
        {"max_tokens": 1 << 80},
        {"messages": []},
        {"model": "x" * 9999},
    ):
        refused = client.post("/api/race", content=json.dumps(CHAT | wrong))
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["message"]


def test_without_passages_there_is_nothing_to_race(client: TestClient) -> None:
    refused = client.post("/api/race", json=CHAT | {"model": "tiny+docs"})
    assert refused.status_code == 400


def test_a_race_needs_the_engine_in_this_process(service: Service) -> None:
    from llama_index.core.llms import MockLLM

    with TestClient(create_app(replace(service, llm=MockLLM())), base_url="http://127.0.0.1:8000") as client:
        refused = client.post("/api/race", json=CHAT)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "no_engine"
