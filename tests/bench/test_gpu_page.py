"""`bench gpu` runs on the CPU with a tiny model, and says that this is not a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from call_recorder import CallRecorder
from random_trees import random_tokens
from tiny_models import COMMON, VOCABULARY, make_model
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.gpu.page import page_of
from reader_rag.bench.gpu.steps import StepTime, measure_steps
from reader_rag.model.fixed_step.select import add_fixed_step
from reader_rag.model.target import Target

SHAPE: dict[str, Any] = COMMON | {"model_type": "llama"}


def test_the_page_has_steps_answers_and_memory(tmp_path: Path) -> None:
    config, traces, out = tmp_path / "config.json", tmp_path / "traces.jsonl", tmp_path / "gpu.md"
    config.write_text(json.dumps(SHAPE))
    prompt = random_tokens(1, 40, VOCABULARY)
    trace = {"id": "a", "category": "rag", "model": "m", "prompt": prompt, "output": prompt[5:25]}
    traces.write_text(json.dumps(trace) + "\n")
    arguments = ["gpu", "--model", config, "--out", out, "--replay", traces, "--dtype", "float32", "--device", "cpu"]
    arguments += ["--widths", "1,8", "--contexts", "20", "--batch", "1,3", "--repeats", "1"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    page = out.read_text()
    assert "**This is not a GPU.**" in page
    lines = page.splitlines()
    assert "| sequences | positions of each | behind | dynamic | called | replayed |" in lines
    for shape in ("| 1 | 1 | 20 |", "| 1 | 8 | 20 |", "| 3 | 1 | 20 |", "| 3 | 8 | 20 |"):
        (row,) = [line for line in lines if line.startswith(shape)]
        *_, dynamic, called, replayed, _ = [cell.strip() for cell in row.split("|")]
        assert float(dynamic) > 0
        assert float(called) > 0
        assert replayed == "-"
    assert page.count("## Replayed answers") == 4
    # Strict is refused where this machine's kernels do not keep the bits.
    assert page.count("reader/plain: ") + page.count("Refused: ") == 4
    assert page.count("reader/plain: ") >= 2
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


def test_a_page_of_a_gpu_makes_no_excuse() -> None:
    report = {"machine": {"device": "A|B"}, "is_gpu": True, "memory_bytes": {"weights": 2**20}, "graphs": {"kept": 1}}
    page = page_of(report, [StepTime("replayed", 1, 4, 100, 1.234)], {})
    assert "not a GPU" not in page
    assert "| device | A/B |" in page
    assert "| 1 | 4 | 100 | - | - | 1.23 |" in page
    assert "| weights | 1.0 |" in page
