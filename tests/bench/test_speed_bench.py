"""`bench speed-bench`: files in NVIDIA's form, and its report by category on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.generate.speed_bench import compare_categories, read_split
from reader_rag.bench.generate.tables import show_categories
from reader_rag.bench.inputs import BenchPrompt
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def row(number: int, category: str, *turns: str) -> dict[str, Any]:
    """A row with all columns of the data set."""
    return {
        "question_id": f"{category}-{number}",
        "category": category,
        "sub_category": None,
        "turns": list(turns),
        "source": "made",
        "src_id": None,
        "difficulty": None,
        "multiturn": len(turns) > 1,
    }


ROWS = [row(0, "rag", "the cat and the hat"), row(1, "math", "one and one", "and one more"), row(2, "rag", "a rose is")]
PROMPTS = [
    BenchPrompt("rag-0", "rag", "the cat and the hat"),
    BenchPrompt("math-1", "math", "one and one"),
    BenchPrompt("rag-2", "rag", "a rose is"),
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


@pytest.mark.parametrize("place", ["speed/qualitative/test.parquet", "qualitative/test-00000-of-00001.parquet"])
def test_parquet_files_are_read_as_nvidia_writes_them(place: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / place).parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / place)
    assert read_split(tmp_path, "qualitative") == PROMPTS


def test_lines_of_json_are_read_too_and_the_folder_of_the_split_may_be_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "throughput_1k" / "test.jsonl", ROWS)
    assert read_split(tmp_path, "throughput_1k") == PROMPTS
    assert read_split(tmp_path / "throughput_1k", "throughput_1k") == PROMPTS


def test_each_split_has_its_own_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "throughput_1k" / "test.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "throughput_16k" / "test.jsonl", ROWS[1:2])
    assert read_split(tmp_path, "throughput_1k") == PROMPTS[:1]
    assert read_split(tmp_path, "throughput_16k") == PROMPTS[1:2]
    with pytest.raises(ConfigError, match="has no qualitative/"):
        read_split(tmp_path, "qualitative")


def test_a_missing_folder_and_placeholders_name_the_program_that_writes_the_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such folder.*prepare_data\.py"):
        read_split(tmp_path / "none", "qualitative")
    write_jsonl(tmp_path / "qualitative" / "test.jsonl", [ROWS[0], row(3, "qa", PLACEHOLDER)])
    with pytest.raises(ConfigError, match=r"test\.jsonl, row 2: its text is a placeholder.*prepare_data\.py"):
        read_split(tmp_path, "qualitative")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"turns": "text"}, "turns is not a list of texts"), ({"turns": []}, "turns is not a list of texts")],
)
def test_rows_of_another_form_are_refused_with_their_number(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "qualitative" / "test.jsonl", [ROWS[0], ROWS[1] | changes])
    with pytest.raises(ConfigError, match=rf"row 2: not a row of SPEED-Bench.*{reason}"):
        read_split(tmp_path, "qualitative")


def test_a_row_without_a_column_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "qualitative" / "test.jsonl", [{"prompt": "text"}])
    with pytest.raises(ConfigError, match=r"row 1: not a row of SPEED-Bench with question_id, category, turns"):
        read_split(tmp_path, "qualitative")


def test_files_that_are_no_parquet_or_json_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name in ("test.parquet", "test.jsonl"):
        (tmp_path / name.replace(".", "-") / "qualitative").mkdir(parents=True)
        (tmp_path / name.replace(".", "-") / "qualitative" / name).write_text("neither")
        with pytest.raises(ConfigError, match=f"cannot read .*{name}"):
            read_split(tmp_path / name.replace(".", "-"), "qualitative")


def test_categories_are_compared_one_by_one_and_prompts_that_do_not_fit_are_left_out(
    tiny_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    long = BenchPrompt("long", "math", "on and on " * tiny_engine.context_window)
    reports, left_out = compare_categories(
        tiny_engine, [*PROMPTS, long], ["plain", "reader"], SamplingParams(max_tokens=8)
    )
    assert left_out == 1
    assert {category: report["prompts"] for category, report in reports.items()} == {"rag": 2, "math": 1}
    for report in reports.values():
        assert report["identical"]["different"] == []
        assert report["methods"]["plain"]["mat"] == 1.0
    show_categories({"splits": {"qualitative": {"left_out": left_out, "categories": reports}}})
    shown = capsys.readouterr().out
    assert "reader = plain: 3 of 3" in shown
    assert "1 prompts are longer" in shown
    with pytest.raises(ConfigError, match="no prompt fits the context window"):
        compare_categories(tiny_engine, [long], ["plain"], SamplingParams(max_tokens=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--splits", "throughput_3k"], "SPEED-Bench has qualitative, throughput_1k"),
        (["--methods", "llama-cpp"], "bench generate"),
        (["--categories", "poetry"], "has no category poetry; it has math, rag"),
    ],
)
def test_wrong_options_are_errors_before_a_model_is_loaded(arguments: list[str], message: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "qualitative" / "test.jsonl", ROWS)
    result = CliRunner().invoke(app, ["speed-bench", "--data", str(tmp_path), "--model", "no-such-model", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
