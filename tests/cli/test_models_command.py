"""`reader-rag models`."""

from __future__ import annotations

from pathlib import Path

from programs import assert_one_line_error, run


def test_models_list_shows_what_is_here() -> None:
    result = run("models", "list")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["smollm2-135m", "llm", "SmolLM2-135M-Instruct"] in [row[:3] for row in rows]
    assert ["minilm", "embedding", "all-MiniLM-L6-v2"] in [row[:3] for row in rows]


def test_models_get_prints_the_folder(tmp_path: Path) -> None:
    assert run("models", "get", tmp_path).stdout.strip() == str(tmp_path)
    assert_one_line_error(run("models", "get", "nobody/nothing"), "nobody/nothing")
