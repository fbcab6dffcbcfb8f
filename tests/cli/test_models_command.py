"""`reader-rag models`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from programs import assert_one_line_error, run

from reader_rag.model.registry import list_models


def test_models_list_shows_what_is_here() -> None:
    result = run("models", "list")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["smollm2-135m", "llm", "SmolLM2-135M-Instruct"] in [row[:3] for row in rows]
    assert ["minilm", "embedding", "all-MiniLM-L6-v2"] in [row[:3] for row in rows]


@pytest.mark.parametrize("width", ["20", "200"])
def test_models_list_shows_whole_paths_at_any_width(
    width: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / ("a long name " * 12) / "model"
    [first, *others] = list_models()
    statuses = [replace(first, present=True, place=place), *others]
    monkeypatch.setattr("reader_rag.model.registry.list_models", lambda: statuses)
    monkeypatch.setenv("COLUMNS", width)
    lines = run("models", "list").stdout.splitlines()
    assert len(lines) == len(statuses) + 1
    assert lines[1].endswith(str(place))
    assert lines[1].index(str(place)) == lines[0].index("place")


def test_models_get_prints_the_folder(tmp_path: Path) -> None:
    assert run("models", "get", tmp_path).stdout.strip() == str(tmp_path)
    assert_one_line_error(run("models", "get", "nobody/nothing"), "nobody/nothing")
