"""Reading prompts and traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from reader_rag.bench.inputs import BenchPrompt, Trace, read_prompts, read_traces
from reader_rag.errors import ConfigError


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": 1, "category": "rag", "turns": ["one", "more"]}\n'
        "\n"
        '{"id": 2, "category": "qa", "turns": ["two"]}\n'
        '{"id": 3, "category": "rag", "turns": ["three"]}\n'
    )
    return path


def test_first_turns_are_read_by_category(prompts: Path) -> None:
    assert read_prompts(prompts, ["rag"]) == [BenchPrompt("1", "rag", "one"), BenchPrompt("3", "rag", "three")]


def test_the_limit_is_for_each_category(prompts: Path) -> None:
    assert [p.id for p in read_prompts(prompts, limit=1)] == ["2", "1"]


def test_an_unknown_category_is_named_with_those_there_are(prompts: Path) -> None:
    with pytest.raises(ConfigError, match="has no category math; it has qa, rag"):
        read_prompts(prompts, ["math"])


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": 1, "category": "rag", "turns": ["one"]}\nnot json\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl, line 2: not a JSON object with id, category and turns"):
        read_prompts(path)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.jsonl"):
        read_prompts(tmp_path / "none.jsonl")


def test_traces_keep_prompt_and_output(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text('{"id": 7, "category": "rag", "model": "m", "prompt": [1, 2], "output": [3]}\n')
    assert read_traces(path) == [Trace("7", "rag", (1, 2), (3,))]
