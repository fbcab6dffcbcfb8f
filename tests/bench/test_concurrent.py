"""`bench load`: what it counts, and that it would see a wrong answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.load.concurrent import LoadPlan, run_load
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.sequence import DecodeSequence

TEXTS = ("the cat and the hat and the cat and the hat and", "on the other side", "a")
PLAN = LoadPlan(requests=40, at_once=8, rounds=2)


@pytest.fixture
def engine(tiny_model: Any, tiny_tokenizer: Any) -> Engine:
    return Engine(tiny_model, tiny_tokenizer)


def test_all_ends_are_counted_and_nothing_is_left(engine: Engine) -> None:
    said: list[str] = []
    prompts = [engine.encode(text) for text in TEXTS]
    report = run_load(engine, prompts, SamplingParams(max_tokens=24, ignore_eos=True), PLAN, said.append)
    for row in report["rounds"]:
        counts = [row[name] for name in ("right", "wrong", "cancelled", "refused", "not_refused")]
        assert counts == [34, 0, 4, 2, 0]
        assert (row["running"], row["waiting"], row["cache_bytes"]) == (0, 0, 0)
    assert said == ["plain 1/3", "plain 2/3", "plain 3/3", "round 1/2", "round 2/2"]


def test_a_wrong_answer_is_seen(engine: Engine) -> None:
    verify = engine.target.verify_batch

    def wrong(steps: Sequence[Any], asked: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        logits = verify(steps, asked)
        return [rows.roll(1, dims=-1) for rows in logits] if len(steps) > 1 else logits

    engine.target.verify_batch = wrong  # type: ignore[method-assign]
    prompts = [engine.encode(text) for text in TEXTS]
    report = run_load(engine, prompts, SamplingParams(max_tokens=24, ignore_eos=True), PLAN)
    assert report["rounds"][0]["wrong"] > 10


def test_what_is_not_freed_is_seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[Any] = []
    release = DecodeSequence.release

    def forgets(self: DecodeSequence) -> None:
        if self._state is not None and not leaked:
            leaked.append(self._state)
            self._state = None
        release(self)

    monkeypatch.setattr(DecodeSequence, "release", forgets)
    report = run_load(engine, [engine.encode("a")], SamplingParams(max_tokens=4), PLAN)
    assert report["rounds"][0]["cache_bytes"] > 0


def test_fates_are_the_same_every_time() -> None:
    plan = LoadPlan(requests=200)
    assert plan.fates(1) == plan.fates(1) != plan.fates(2)
    assert [plan.fates(0).count(fate) for fate in ("answered", "cancelled", "bad")] == [170, 20, 10]


def test_the_command(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "1", "category": "rag", "turns": ["the cat"]}))
    arguments = ["load", "--prompts", str(file), "--requests", "20", "--rounds", "1", "--max-tokens", "4"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rounds"][0]["right"] == 17
    assert "right" in CliRunner().invoke(app, arguments).stdout
    refused = CliRunner().invoke(app, [*arguments, "--cancelled", "0.7", "--bad", "0.7"])
    assert "are shares of the same requests" in str(refused.exception)
