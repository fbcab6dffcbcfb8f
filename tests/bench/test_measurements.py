"""`bench datastore` builds datastores of made-up text and reports what each cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from reader_rag.bench.datastore import measurements, texts
from reader_rag.cli.main import app


@pytest.fixture(autouse=True)
def _little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    text = measurements.Texts(random.integers(0, 500, 9000).astype(np.int32), np.arange(1, 301) * 30)
    monkeypatch.setattr(measurements, "installed_text", lambda *_: text)
    monkeypatch.setattr(measurements, "_QUERIES", 20)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.parametrize("bits", [16, pytest.param(17, marks=pytest.mark.slow)])
def test_each_size_is_built_and_searched(tmp_path: Path, bits: int) -> None:
    arguments = ["bench", "datastore", "--tokens", "2000,6e3", "--vocabulary-bits", str(bits), "--json"]
    result = CliRunner().invoke(app, [*arguments, "--folder", str(tmp_path / "f")], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert report["text_tokens"] == 8910
    assert [row["tokens"] for row in report["rows"]] == [2000, 6000]
    for row in report["rows"]:
        assert row["documents"] == -(-row["tokens"] // 30)
        assert row["token_bytes"] == {16: 2, 17: 3}[bits]
        assert row["segments"] == 1
        assert row["queries"]["copied"]["longest_p50"] >= 10
        assert 0 < row["queries"]["new"]["us_p50"] <= row["queries"]["new"]["us_p99"]
        assert 0 < row["queries"]["new"]["draft_us_p50"] <= row["queries"]["new"]["draft_us_p99"]


def test_a_table_and_a_plot_come_out_and_a_lack_of_text_is_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "p" / "cost.svg"
    command = ["bench", "datastore", "--tokens", "1e4", "--plot", str(plot)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "bytes a token" in result.stdout
    assert "only 8910 tokens of text" in result.stderr
    assert plot.read_text().startswith("<?xml")


def test_nonsense_is_refused() -> None:
    assert CliRunner().invoke(app, ["bench", "datastore", "--tokens", "many"]).exit_code != 0


def test_text_is_found_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_SYSTEM", ())
    name, text = next(texts.texts())
    assert Path(name).is_file()
    assert len(text.encode()) >= 1000
