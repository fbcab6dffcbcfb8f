"""`bench generate`: the contract of its report, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.generate.methods import METHODS, Task
from reader_rag.bench.generate.runs import Run, Runs, make_report
from reader_rag.bench.generate.sequential import compare
from reader_rag.bench.generate.tables import show_report
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
        assert {"decode_tokens_per_s", "prompt_tokens_per_s", "ttft_s", "mat", "cache_mb", "peak_mb"} <= set(row)
        assert row["decode_tokens_per_s"] > 0
        assert row["tokens"] == 48
    assert report["batch"] == 1


def test_no_prompt_begins_when_the_time_is_over_but_the_first(tiny_engine: Any) -> None:
    tasks = [(text, Task(tiny_engine.encode(text), SamplingParams(max_tokens=4))) for text in PROMPTS]
    assert compare(tiny_engine, tasks, ["plain", "reader"], seconds=0.0)["prompts"] == 1
    assert compare(tiny_engine, tasks, ["plain", "reader"], seconds=600.0)["prompts"] == 2


def test_whole_questions_are_prompt_and_answer(report: dict[str, Any]) -> None:
    for row in report["methods"].values():
        assert 0 < row["ttft_s"] < row["question_s"] < row["questions_total_s"]


def test_plain_decoding_emits_one_token_a_step(report: dict[str, Any]) -> None:
    assert report["methods"]["plain"]["mat"] == 1.0
    assert report["methods"]["hf"]["mat"] == 1.0


def test_ratios_are_given_against_every_other_method(report: dict[str, Any]) -> None:
    assert set(report["ratios"]) == {"reader/plain", "reader/hf", "reader/hf-lookup"}
    for ratio in report["ratios"].values():
        for found in (ratio, ratio["questions"]):
            assert found["min"] <= found["median"] <= found["max"]
            assert found["min"] <= found["total"] <= found["max"]


def run(ttft_s: float, decode_s: float) -> Run:
    return Run.of_one(100, (1, 2, 3, 4), ttft_s, decode_s, 3, 0)


def test_ratios_are_those_of_the_same_prompt(tiny_engine: Any) -> None:
    ours, theirs = [run(1.0, 1.0), run(1.0, 2.0), run(2.0, 2.0)], [run(1.0, 4.0), run(4.0, 2.0), run(2.0, 1.0)]
    measured = {"reader": Runs(ours), "plain": Runs(theirs)}
    made = make_report(tiny_engine, ["a", "b", "c"], measured, {"reader": "reader", "plain": "plain"}, 1)
    ratio = made["ratios"]["reader/plain"]
    # Seconds of decoding 4/1, 2/2, 1/2; of whole questions 5/2, 6/3, 3/4.
    assert [ratio[name] for name in ("median", "min", "max", "total")] == [1.0, 0.5, 4.0, 1.4]
    assert ratio["questions"] == {"median": 2.0, "min": 0.75, "max": 2.5, "total": 1.556}
    row = made["methods"]["plain"]
    assert (row["ttft_s"], row["question_s"], row["questions_total_s"], row["tokens"]) == (2.0, 5.0, 14.0, 12)
    assert row["prompt_tokens_per_s"] == 42.86


def test_the_tables_fit_sixty_columns(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    show_report(report | {"machine": {"model": "m", "dtype": "float32", "quantization": "none", "device": "CPU"}})
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    assert "\u2026" not in shown  # nothing is cut
    for words in ("first", "question", "decoding", "questions", "hf-lookup n=2", "reader = plain: 2 of 2"):
        assert words in shown


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


def test_answers_have_one_length_where_their_end_is_ignored(tiny_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(tiny_engine.encode(PROMPTS[0]), SamplingParams(max_tokens=24))
    third = METHODS["plain"]["plain"](tiny_engine, task).tokens[0][2]
    monkeypatch.setattr(type(tiny_engine), "eos_ids", frozenset({third}))
    monkeypatch.setattr(tiny_engine.requests, "eos_ids", frozenset({third}))
    ignoring = replace(task, generation=replace(task.generation, ignore_eos=True))
    for name in ("plain", "hf", "hf-lookup n=2"):
        method = METHODS[name.split()[0]][name]
        assert method(tiny_engine, ignoring).lengths == (24,)
    assert METHODS["hf"]["hf"](tiny_engine, task).lengths[0] <= 3


def test_an_unknown_method_is_named(tiny_engine: Any) -> None:
    with pytest.raises(ConfigError, match="unknown method fast; there are plain, reader, hf, hf-lookup"):
        compare(tiny_engine, [], ["fast"])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_configuration_alone_serves_to_replay_traces(tmp_path: Path, tiny_model: Any, quantization: str) -> None:
    tiny_model.config.save_pretrained(tmp_path)
    traces = tmp_path / "traces.jsonl"
    traces.write_text(
        '{"id": 1, "category": "rag", "model": "m", "prompt": [5, 6, 7, 8, 5, 6], "output": [7, 8, 5, 6, 7, 8, 9]}\n'
    )
    result = CliRunner().invoke(
        app,
        f"generate --replay {traces} --model {tmp_path / 'config.json'} --dtype bfloat16 --quantization {quantization} "
        "--methods plain,reader --json",
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["identical"] == {"compared": 1, "different": []}
    assert report["methods"]["reader"]["mat"] >= 1.0
    assert (report["machine"]["quantization"], report["machine"]["dtype"]) == (quantization, "bfloat16")


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
