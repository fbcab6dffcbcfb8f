"""`bench gpu` runs on the CPU with a tiny model, and says that this is not a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from random_trees import random_tokens
from tiny_models import COMMON, VOCABULARY, make_model
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.gpu.generate import GenerateTime, measure_generate
from reader_rag.bench.gpu.page import page_of
from reader_rag.bench.gpu.steps import StepTime, measure_steps
from reader_rag.model.fixed_step.select import add_fixed_step
from reader_rag.model.target import Target

SHAPE: dict[str, Any] = COMMON | {"model_type": "llama", "hidden_size": 64, "head_dim": 16}  # multiples of 16: int8


def test_the_page_has_steps_answers_and_memory(tmp_path: Path) -> None:
    config, traces, out = tmp_path / "config.json", tmp_path / "traces.jsonl", tmp_path / "gpu.md"
    config.write_text(json.dumps(SHAPE))
    prompt = random_tokens(1, 40, VOCABULARY)
    trace = {"id": "a", "category": "rag", "model": "m", "prompt": prompt, "output": prompt[5:25]}
    traces.write_text("".join(json.dumps(trace | {"id": name}) + "\n" for name in "abc"))
    arguments = ["gpu", "--model", config, "--out", out, "--replay", traces, "--dtype", "float32", "--device", "cpu"]
    arguments += ["--widths", "1,8", "--contexts", "20", "--batch", "1,3", "--repeats", "1"]
    arguments += ["--tokens", "3"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    page = out.read_text()
    assert "# One GPU, not measured yet" in page
    assert f"reader-rag bench gpu --model {config} --replay {traces} --dtype bfloat16 --device cuda --out" in page
    lines = page.splitlines()
    assert "| sequences | positions of each | behind | dynamic | called | replayed |" in lines
    for shape in ("| 1 | 1 | 20 |", "| 1 | 8 | 20 |", "| 3 | 1 | 20 |", "| 3 | 8 | 20 |"):
        rows = [line for line in lines if line.startswith(shape) and "cache" not in line]
        assert len(rows) == 2  # in float32 and in int8
        for row in rows:
            *_, dynamic, called, replayed, _ = [cell.strip() for cell in row.split("|")]
            assert float(dynamic) > 0
            assert float(called) > 0
            assert replayed == "-"
    assert [line for line in lines if line.startswith("### ")] == ["### Weights in float32", "### Weights in int8"]
    for rows in (1, 3):
        for cache in ("growing cache", "static cache"):
            (row,) = [line for line in lines if line.startswith(f"| {rows} | 20 | {cache} |")]
            assert float(row.split("|")[-2]) > 0
    assert "compiled" not in page  # on the CPU, `generate` compiles nothing
    titles = [line.removeprefix("## Replayed answers, ") for line in lines if line.startswith("## Replayed answers, ")]
    assert titles == [
        "fixed shapes",
        "3 at once, fixed shapes",
        "dynamic",
        "strict, fixed shapes",
        "strict",
        "int8, fixed shapes",
        "int8, strict, fixed shapes",
    ]
    # Strict is refused where this machine's kernels do not keep the bits.
    assert page.count("reader/plain: ") + page.count("Refused: ") == len(titles)
    assert page.count("reader/plain: ") >= 4
    assert page.count("Drafts: trees.") >= 4
    assert "No pass was behind a context that is long enough for two calls." in page
    assert "| key/value cache of the fixed step |" in page


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "nowhere" / "gpu.md"
    result = CliRunner().invoke(app, ["gpu", "--model", "config.json", "--out", str(out)])
    assert "there is no folder" in str(result.exception)


def test_steps_are_timed_in_every_way_and_leave_no_sequence() -> None:
    target = Target(make_model("Llama"), forward="torch")
    step = add_fixed_step(target, "on", name="x", recorder=CallRecorder())
    assert step is not None
    times = measure_steps(target, [(1, 4, 20), (2, 1, 20), (1, 70, 20)], repeats=2)
    ways = [(one.way, one.rows, one.width) for one in times]
    assert ways == [
        ("dynamic", 1, 4),
        ("called", 1, 4),
        ("replayed", 1, 4),
        ("dynamic", 2, 1),
        ("called", 2, 1),
        ("replayed", 2, 1),
        ("dynamic", 1, 70),  # wider than any fixed shape
    ]
    assert step.graphs.replays == 2 * (3 + 2)
    assert step.cache.sequences == 0
    assert target.fixed_step is step


def test_generate_is_timed_with_both_caches_and_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_model("Llama")
    times = measure_generate(model, [(1, 9), (2, 20)], tokens=4)
    assert [(one.rows, one.context, one.way) for one in times] == [
        (1, 9, "growing cache"),
        (1, 9, "static cache"),
        (2, 20, "growing cache"),
        (2, 20, "static cache"),
    ]
    assert all(one.ms is not None and one.ms > 0 for one in times)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if "cache_implementation" in kwargs:
            raise RuntimeError("no compiler found\nmore")
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model, "generate", fails)
    assert [(one.ms, one.why) for one in measure_generate(model, [(1, 9)], tokens=4)] == [
        (None, "out of memory"),
        (None, "no compiler found"),
    ]


def test_a_page_of_a_gpu_makes_no_excuse() -> None:
    report = {
        "machine": {"device": "A|B"},
        "is_gpu": True,
        "memory_bytes": {"weights": 2**20},
        "graphs": {"kept": 1},
        "attention": {(1, 16, 1024, 272): True, (8, 4, 512, 1028): False},
    }
    generate = [GenerateTime("growing cache", 1, 100, 25.0), GenerateTime("static cache", 1, 100, None, "no compiler")]
    steps = {"bfloat16": [StepTime("replayed", 1, 4, 100, 1.234)], "int8": "x has no int8"}
    page = page_of(report, steps, generate, {})
    assert "not measured" not in page
    assert "| 1 | 100 | growing cache | 25.00 |" in page
    assert "| 1 | 100 | static cache | failed: no compiler |" in page
    assert "### Weights in int8\n\nRefused: x has no int8" in page
    assert "| 1 | 16 | 1024 | 272 | two |" in page
    assert "| 8 | 4 | 512 | 1028 | one |" in page
    assert "| device | A/B |" in page
    assert "| 1 | 4 | 100 | - | - | 1.23 |" in page
    assert "| weights | 1.0 |" in page
