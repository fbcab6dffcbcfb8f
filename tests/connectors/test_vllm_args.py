"""`reader-rag vllm-args`: the command that it prints, and its errors. No vLLM is needed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from reader_rag.cli.main import app
from reader_rag.datastore import Datastore
from reader_rag.draft.step_table import StepTable
from reader_rag.engine.datastore_lookup import open_datastore
from reader_rag.model import loading as models

MODEL = "org/a-model"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["vllm-args", "--model", MODEL, *map(str, arguments)])


def words(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return shlex.split(result.stdout)


def refused(result: Result) -> str:
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(autouse=True)
def tiny_vocabulary(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The model has the tiny tokenizer."""
    monkeypatch.setattr(models, "load_tokenizer", lambda *_, **__: (tiny_tokenizer, len(tiny_tokenizer)))


@pytest.fixture
def drafts(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """A datastore of the tiny tokenizer, in a folder whose name must be quoted."""
    folder = tmp_path / "my drafts"
    with open_datastore(folder, tiny_tokenizer, len(tiny_tokenizer), read_only=False) as store:
        store.add("a", [1, 2, 3], namespace="texts/a")
    return folder


def test_the_command_starts_a_server_with_the_proposer() -> None:
    line = words(run("-k", "12"))
    assert line[:4] == ["vllm", "serve", MODEL, "--speculative-config"]
    assert json.loads(line[4]) == {
        "method": "custom_class",
        "model": "reader_rag.connectors.vllm.ReaderProposer",
        "num_speculative_tokens": 12,
    }
    assert len(line) == 5


def test_the_settings_are_quoted_for_the_shell(drafts: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    StepTable((1,), (0, 8), ((0.01, 0.02),)).write(costs)
    line = words(run("--datastore", drafts, "--namespace", "texts/a", "--costs", costs, "--keep-answers"))
    assert line[5] == "--additional-config"
    assert json.loads(line[6]) == {
        "reader_rag": {
            "datastore": str(drafts),
            "costs": str(costs),
            "namespaces": ["texts/a"],
            "keep_answers": True,
        }
    }


def test_paths_are_absolute(drafts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drafts.parent)
    assert json.loads(words(run("--datastore", drafts.name))[6]) == {"reader_rag": {"datastore": str(drafts)}}


def test_the_proposer_accepts_every_printed_setting() -> None:
    from reader_rag.connectors.vllm import ProposerSettings
    from reader_rag.connectors.vllm_args import additional_config

    held = ProposerSettings.from_vllm(additional_config("/drafts", "/costs.json", ["texts/a"], keep_answers=True))
    assert (held.datastore, held.costs, held.namespaces, held.keep_answers) == (
        "/drafts",
        "/costs.json",
        ("texts/a",),
        True,
    )


def test_a_datastore_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "no datastore at" in refused(run("--datastore", tmp_path / "none"))


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with Datastore.open(tmp_path / "other", vocabulary=49_152, tokenizer="sha256:another") as store:
        store.add("a", [1, 2, 3])
    assert "tokenizer" in refused(run("--datastore", tmp_path / "other"))


def test_a_namespace_that_is_not_there_is_refused(drafts: Path) -> None:
    assert "no namespace texts/b" in refused(run("--datastore", drafts, "--namespace", "texts/b"))


def test_a_namespace_without_a_datastore_is_refused() -> None:
    assert "--datastore" in refused(run("--namespace", "texts/a"))


def test_a_cost_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text("{}")
    assert "does not hold step costs" in refused(run("--costs", tmp_path / "costs.json"))


def test_a_model_folder_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["vllm-args", "--model", "./no-such-folder"])
    assert "no-such-folder" in refused(result)
