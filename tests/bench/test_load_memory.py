"""`bench load-memory`: anonymous memory while a model is loaded stays within what the loader promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reader_rag.bench.commands import app
from reader_rag.bench.load.memory import make_random_model, measure_loading
from reader_rag.errors import ModelError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MATRIX = 32_000 * 512 * 4 / 1e6
"""Megabytes of the embedding in float32; all of the model has 200 and more."""
INTERPRETER = 40.0
"""Megabytes of the interpreter, the allocator and activations of the calibration text, which are of any size here: the
models are small beside them."""


@pytest.mark.parametrize(
    ("tied", "dtype", "shard_bytes"),
    [
        pytest.param(True, "float32", 1 << 30, id="tied-one-file"),
        pytest.param(True, "bfloat16", 1 << 24, id="tied-sharded", marks=pytest.mark.slow),
        pytest.param(False, "float32", 1 << 24, id="untied-sharded", marks=pytest.mark.slow),
        pytest.param(False, "bfloat16", 1 << 30, id="untied-one-file", marks=pytest.mark.slow),
    ],
)
def test_loading_takes_the_final_size_and_at_most_two_matrices(
    tmp_path: Path, tied: bool, dtype: str, shard_bytes: int
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make_random_model(SHAPE | {"tie_word_embeddings": tied}, folder, dtype=dtype, shard_bytes=shard_bytes)
    assert (len(list(folder.glob("*.safetensors"))) == 1) == (shard_bytes == 1 << 30)
    for start in ("first", "second"):
        report = measure_loading(folder, tmp_path / "cache", quantization="int8")
        assert report["largest_mb"] == pytest.approx(MATRIX, abs=0.1), start
        assert report["peak_mb"] <= report["before_mb"] + report["tensors_mb"] + 2 * MATRIX + INTERPRETER, start
        assert report["tensors_mb"] < 75, start


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot load .*: cannot find the model .*the folder has no config.json"):
        measure_loading(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("arguments", [[], ["--model", "a", "--shape", "smollm2-135m"]])
def test_either_a_model_or_a_shape_is_measured(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["load-memory", *arguments])
    assert "give either --model NAME or --shape NAME" in str(result.exception)


def test_an_unknown_shape_is_refused() -> None:
    result = CliRunner().invoke(app, ["load-memory", "--shape", "13b"])
    assert "unknown shape '13b': use qwen2.5-0.5b or smollm2-135m" in str(result.exception)


def test_the_report_has_both_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from reader_rag.bench.load import memory

    row = {"before_mb": 1.0, "peak_mb": 9.0, "after_mb": 5.0, "tensors_mb": 4.0, "largest_mb": 1.0, "bound_mb": 7.0}
    monkeypatch.setattr(memory, "measure_loading", lambda *_, **__: row)
    result = CliRunner().invoke(app, ["load-memory", "--model", str(tmp_path), "--quantization", "int8", "--json"])
    assert result.exit_code == 1  # the peak lies above the bound
    assert json.loads(result.stdout)["starts"] == {"first": row, "second": row}
    assert CliRunner().invoke(app, ["load-memory", "--model", str(tmp_path)]).exit_code == 0
