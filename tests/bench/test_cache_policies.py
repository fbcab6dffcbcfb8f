"""`bench cache` drives both policies through the same steps and reports what each cost."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from reader_rag.cli.main import app

SMALL = ["bench", "cache", "--context", "40", "--tokens", "30", "--layers", "2", "--heads", "2", "--width", "4"]


def test_both_policies_take_the_same_steps_within_the_bound() -> None:
    result = CliRunner().invoke(app, [*SMALL, "--batch", "1,3", "--json"], catch_exceptions=False)
    runs = json.loads(result.stdout)["runs"]
    assert [(run["batch"], run["policy"]) for run in runs] == [
        (1, "offset"),
        (1, "column"),
        (3, "offset"),
        (3, "column"),
    ]
    for offset, column in (runs[:2], runs[2:]):
        assert offset["steps"] == column["steps"] > 0
        assert offset["rearrangements"] == 0 < column["rearrangements"]
    for run in runs:
        assert 0 < run["share_of_bound"] <= 1
        assert run["moves_per_entry"] > 0


def test_a_table_is_printed_and_nonsense_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(app, [*SMALL, "--batch", "2"], catch_exceptions=False)
    assert "moves/entry" in result.stdout
    assert "column" in result.stdout
    refused = CliRunner().invoke(app, [*SMALL, "--batch", "2,x"])
    assert refused.exit_code != 0
