"""The command line itself: help, version, wrong arguments, errors."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from programs import assert_one_line_error, run

from reader_rag import __version__
from reader_rag.cli.display.terminal import quiet_libraries
from reader_rag.cli.loading import ModelOptions
from reader_rag.errors import ReaderWarning

ESCAPE = "\x1b"


COMMANDS = ["ingest", "ask", "chat", "demo", "models list", "models get", "verify", "bench generate"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_of_the_command(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert f"Example: reader-rag {command}" in text
    assert ESCAPE not in result.output


def test_help_of_the_whole_names_every_command() -> None:
    text = run("--help").stdout
    assert all(re.search(rf"\b{command.split()[0]}\b", text) for command in COMMANDS)


def test_the_version_is_told() -> None:
    assert run("--version").stdout == f"reader-rag {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["ask"], "question"),
        (["ask", "Why?"], "--store"),
        (["ask", "Why?", "--store", "s", "--top-k", "0"], "--top-k"),
        (["ask", "Why?", "--store", "s", "--max-tokens", "many"], "--max-tokens"),
        (["ask", "Why?", "--stor", "s"], "--stor"),
        (["sing"], "sing"),
        (["--sing"], "--sing"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments: list[str], word: str) -> None:
    assert_one_line_error(run(*arguments), word, "--help", status=2)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(place: int, word_embedding: None, tmp_path: Path) -> None:
    arguments = ["ask", "Why?", "--store", str(tmp_path / "none")]
    arguments.insert(place, "--debug")
    result = run(*arguments)
    assert type(result.exception).__name__ == "StoreNotFoundError"
    assert result.stderr == ""


def test_an_unexpected_error_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: ModelOptions) -> None:
        raise RuntimeError("the disk\nis upside down")

    monkeypatch.setattr(ModelOptions, "load_embedding", fail)
    result = run("ask", "Why?", "--store", tmp_path)
    assert_one_line_error(result, "unexpected RuntimeError: the disk is upside down", "--debug")


@pytest.mark.parametrize("command", [["ingest", "."], ["ask", "Why?"], ["chat"]])
def test_exactly_one_store_is_named(command: list[str], tmp_path: Path) -> None:
    both = ["--store", str(tmp_path), "--vector-store", "qdrant://localhost/birds"]
    for options in ([], both):
        assert_one_line_error(run(*command, *options), "--store FOLDER or --vector-store URL", status=2)


@pytest.mark.parametrize("command", [["ingest", "."], ["ask", "Why?"], ["chat"], ["demo"]])
@pytest.mark.parametrize("name", ["two\nlines", f"{ESCAPE}[31m", "x" * 300])
def test_a_name_that_no_tenant_can_have_is_one_line(command: list[str], name: str, tmp_path: Path) -> None:
    result = run(*command, "--store", tmp_path / "store", "--tenant", name)
    assert_one_line_error(result, "--tenant", "a tenant's name", status=2)
    assert ESCAPE not in result.stderr
    assert not (tmp_path / "store").exists()


def test_what_is_told_of_a_model_is_one_line_and_other_warnings_are_held_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        quiet_libraries()
        warnings.warn("a library's", UserWarning, stacklevel=1)
        warnings.warn("decoded without\ndrafts", ReaderWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: decoded without drafts\n"
