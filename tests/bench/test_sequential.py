"""`bench generate`: the contract of its report, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.generate.methods import METHODS, Task
from reader_rag.bench.generate.sequential import compare
from reader_rag.config import SamplingParams
from reader_rag.errors import ConfigError

PROMPTS = ["the cat and the hat and the cat and the hat and", "on the other side of the other side of the"]


@pytest.fixture(scope="module")
def report(tiny_engine: Any) -> dict[str, Any]:
    tasks = [
        (str(number), Task(tiny_engine.encode(text), SamplingParams(max_tokens=24)))
        for number, text in enumerate(PROMPTS)
    ]
    return compare(tiny_engine, tasks, list(METHODS))


def test_every_method_reports_speed_steps_and_memory(report: dict[str, Any]) -> None:
    assert set(report["methods"]) == {"plain", "reader", "hf", "hf-lookup"}
    for row in report["methods"].values():
        assert {"decode_tokens_per_s", "ttft_s", "mat", "cache_mb", "peak_mb"} <= set(row)
        assert row["decode_tokens_per_s"] > 0
    assert report["batch"] == 1


def test_plain_decoding_emits_one_token_a_step(report: dict[str, Any]) -> None:
    assert report["methods"]["plain"]["mat"] == 1.0
    assert report["methods"]["hf"]["mat"] == 1.0


def test_ratios_are_given_against_every_other_method(report: dict[str, Any]) -> None:
    assert set(report["ratios"]) == {"reader/plain", "reader/hf", "reader/hf-lookup"}
    for ratio in report["ratios"].values():
        assert ratio["min"] <= ratio["median"] <= ratio["max"]


def test_tokens_of_reader_and_plain_are_compared(report: dict[str, Any]) -> None:
    assert report["identical"] == {"compared": 2, "different": []}


def test_the_methods_emit_the_same_tokens(tiny_engine: Any) -> None:
    task = Task(tiny_engine.encode(PROMPTS[0]), SamplingParams(max_tokens=24))
    answers = {name: run(tiny_engine, task).tokens for variants in METHODS.values() for name, run in variants.items()}
    assert set(answers.values()) == {answers["plain"]}


def test_a_trace_is_followed_whatever_the_weights_say(tiny_engine: Any) -> None:
    forced = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8)
    task = Task(tiny_engine.encode(PROMPTS[0]), SamplingParams(), forced)
    for method in ("plain", "reader"):
        assert METHODS[method][method](tiny_engine, task).tokens == (forced,)


def test_generate_cannot_follow_a_trace(tiny_engine: Any) -> None:
    task = Task(tiny_engine.encode(PROMPTS[0]), SamplingParams(), (5, 6))
    with pytest.raises(ConfigError, match="--methods plain,reader only"):
        compare(tiny_engine, [("1", task)], ["plain", "hf"])


def test_an_unknown_method_is_named(tiny_engine: Any) -> None:
    with pytest.raises(ConfigError, match="unknown method fast; there are plain, reader, hf, hf-lookup"):
        compare(tiny_engine, [], ["fast"])


def test_a_configuration_alone_serves_to_replay_traces(tmp_path: Path, tiny_model: Any) -> None:
    tiny_model.config.save_pretrained(tmp_path)
    traces = tmp_path / "traces.jsonl"
    traces.write_text(
        '{"id": 1, "category": "rag", "model": "m", "prompt": [5, 6, 7, 8, 5, 6], "output": [7, 8, 5, 6, 7, 8, 9]}\n'
    )
    result = CliRunner().invoke(
        app,
        f"generate --replay {traces} --model {tmp_path / 'config.json'} --dtype float32 --methods plain,reader --json",
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["identical"] == {"compared": 1, "different": []}
    assert report["methods"]["reader"]["mat"] >= 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --prompts FILE or --replay TRACES"),
        (["--prompts", "p.jsonl", "--model", "config.json"], "is a configuration without weights"),
    ],
)
def test_contradictory_arguments_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
