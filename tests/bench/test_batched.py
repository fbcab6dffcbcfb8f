"""`bench generate --batch`: the contract of its report, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.generate.batched import compare_batch, ours_together
from reader_rag.bench.generate.methods import Task
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError

PROMPTS = ("the cat and the hat and the cat and the hat and", "on the other side of the other side of the", "a") * 3


@pytest.fixture(scope="module")
def engine(tiny_model: Any, tiny_tokenizer: Any) -> Engine:
    return Engine(tiny_model, tiny_tokenizer, prefix_bytes=0)


def tasks(engine: Engine, **options: Any) -> list[tuple[str, Task]]:
    settings = SamplingParams(max_tokens=20, ignore_eos=True)
    return [(str(number), Task(engine.encode(text), settings, **options)) for number, text in enumerate(PROMPTS)]


def test_the_report_has_what_that_of_one_prompt_has(engine: Engine) -> None:
    report = compare_batch(engine, tasks(engine), ["plain", "reader", "hf-lookup"], 2)
    assert report["batch"] == 2
    assert set(report["methods"]) == {"plain", "reader"}
    for row in report["methods"].values():
        assert {"decode_tokens_per_s", "ttft_s", "mat", "cache_mb", "peak_mb", "tokens_per_s"} <= set(row)
        assert 0 < row["ttft_s"] < row["question_s"] < row["questions_total_s"]
        assert row["prompt_tokens_per_s"] is None  # prompts are read between steps of the others
    assert report["methods"]["plain"]["mat"] == 1.0
    assert report["identical"] == {"compared": 9, "different": []}
    ratio = report["ratios"]["reader/plain"]
    assert ratio["min"] <= ratio["median"] <= ratio["max"]
    assert ratio["min"] <= ratio["total"] <= ratio["max"]
    assert ratio["questions"]["min"] <= ratio["questions"]["median"] <= ratio["questions"]["max"]


def test_no_group_begins_when_the_time_is_over_but_the_first(engine: Engine) -> None:
    report = compare_batch(engine, tasks(engine), ["plain", "reader"], 2, seconds=0.0)
    assert report["prompts"] == report["identical"]["compared"] == 4


def test_a_question_waits_for_no_question_before_it(engine: Engine) -> None:
    run = ours_together(engine, [task for _, task in tasks(engine)][:4], speculate=False)
    assert len(run.question_s) == 4
    assert all(first < whole <= run.wall_s for first, whole in zip(run.ttft_s, run.question_s, strict=True))


def test_so_many_are_decoded_at_once(engine: Engine) -> None:
    report = compare_batch(engine, tasks(engine), ["plain"], 3)
    # Groups of six and of three, each answer of 19 steps; a prompt is read between two of them.
    assert 2.0 < report["methods"]["plain"]["rows_per_step"] <= 3.0


def test_generate_of_transformers_gives_the_same_answers(engine: Engine) -> None:
    settings = SamplingParams(max_tokens=20)
    asked = [(name, Task(task.prompt, settings)) for name, task in tasks(engine)]
    report = compare_batch(engine, asked, ["plain", "reader", "hf"], 3)
    assert report["identical"]["different"] == []
    assert report["methods"]["hf"]["mat"] == 1.0
    assert set(report["ratios"]) == {"reader/plain", "reader/hf"}


def test_traces_are_followed(engine: Engine) -> None:
    report = compare_batch(engine, tasks(engine, forced=(5, 6, 7, 8) * 4), ["plain", "reader"], 2)
    assert report["identical"] == {"compared": 9, "different": []}
    with pytest.raises(ConfigError, match="--methods plain,reader only"):
        compare_batch(engine, tasks(engine, forced=(5, 6, 7)), ["hf"], 2)


def test_unknown_methods_are_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="unknown method magic for a batch; there are plain, reader, hf"):
        compare_batch(engine, tasks(engine), ["magic"], 2)
    with pytest.raises(ConfigError, match="hf-lookup and llama-cpp decode one prompt at a time"):
        compare_batch(engine, tasks(engine), ["llama-cpp"], 2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": str(n), "category": "rag", "turns": [text]} for n, text in enumerate(PROMPTS[:3])]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_several_sizes_give_a_list(prompts: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    arguments = ["generate", "--prompts", str(prompts), "--batch", "1,2", "--max-tokens", "8", "--methods"]
    result = CliRunner().invoke(app, [*arguments, "plain,reader", "--json"])
    assert [report["batch"] for report in json.loads(result.stdout)] == [1, 2]
    shown = CliRunner().invoke(app, [*arguments, "plain,reader"])
    assert "2 at once" in shown.stdout


@pytest.mark.parametrize("batch", ["0", "two", "1,,2", "-1"])
def test_a_size_that_is_none_is_refused(prompts: Path, batch: str) -> None:
    result = CliRunner().invoke(app, ["generate", "--prompts", str(prompts), f"--batch={batch}"])
    assert isinstance(result.exception, ConfigError)
    assert "give whole numbers of at least 1" in str(result.exception)
