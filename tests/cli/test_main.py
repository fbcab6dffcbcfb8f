"""The command line itself: help, version, wrong arguments, errors."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from programs import assert_one_line_error, run

from reader_rag import __version__
from reader_rag.cli.display.errors import in_flags
from reader_rag.cli.display.terminal import quiet_libraries
from reader_rag.cli.loading import ModelOptions
from reader_rag.errors import ModelError, ReaderWarning
from reader_rag.rag.stores.faiss_store import FaissStore

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
def test_debug_shows_the_traceback_wherever_it_stands(place: int, tmp_path: Path) -> None:
    arguments = ["ask", "Why?", "--store", str(tmp_path / "none")]
    arguments.insert(place, "--debug")
    result = run(*arguments)
    assert type(result.exception).__name__ == "StoreNotFoundError"
    assert result.stderr == ""


def test_an_unexpected_error_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: ModelOptions) -> None:
        raise RuntimeError("the disk\nis upside down")

    monkeypatch.setattr(ModelOptions, "load_embedding", fail)
    result = run("ingest", tmp_path, "--store", tmp_path / "store")
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


@pytest.mark.parametrize("command", [["ask", "Why?"], ["chat"]])
def test_a_missing_store_is_told_before_anything_is_loaded(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelOptions, *_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(ModelOptions, "load_embedding", fail)
    monkeypatch.setattr(ModelOptions, "load_llm", fail)
    none = tmp_path / "no store"
    told = f"there is no store at {none}; ingest documents into it first (reader-rag ingest PATH --store '{none}')"
    assert_one_line_error(run(*command, "--store", none), told)
    url = f"qdrant://{tmp_path}/none/birds"
    assert_one_line_error(run(*command, "--vector-store", url), "no store at", f"ingest PATH --vector-store {url}")


@pytest.mark.parametrize("command", [["ask", "Why?"], ["chat"]])
def test_a_missing_datastore_is_told_before_anything_is_loaded(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelOptions, *_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(ModelOptions, "load_embedding", fail)
    monkeypatch.setattr(ModelOptions, "load_llm", fail)
    none = tmp_path / "no store"
    FaissStore(tmp_path / "store").close()
    told = f"no datastore at {none}: add documents to it first (reader-rag datastore build PATH --datastore '{none}')"
    assert_one_line_error(run(*command, "--store", tmp_path / "store", "--datastore", none), told)


def test_a_missing_store_is_told_without_torch(tmp_path: Path) -> None:
    code = """
        import sys
        from reader_rag.cli.main import main
        try:
            main()
        except SystemExit as ended:
            heavy = {"torch", "transformers", "sentence_transformers", "faiss", "llama_index"} & set(sys.modules)
            print(ended.code, sorted(heavy))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), "ask", "Why?", "--store", str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "1 []\n"
    assert result.stderr.startswith("error: there is no store at")


def test_a_missing_datastore_is_told_by_benchmarks_too(tmp_path: Path) -> None:
    result = run("bench", "replay", tmp_path / "traces", "--datastore", tmp_path / "none")
    assert_one_line_error(result, "no datastore at", "reader-rag datastore build PATH --datastore")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("load it with quantization='int8'", "load it with --quantization int8"),
        ('quantization="none" and dtype="bfloat16"', '--quantization none and dtype="bfloat16"'),
        ("pass trust_remote_code=True if you trust it", "pass --trust-remote-code if you trust it"),
        ("use that model (embed_model=) or another", "use that model (--embed-model) or another"),
        ("open it with read_only=True", "open it with read_only=True"),
        ("top_k=5 is too many", "-k 5 is too many"),
        ("https://host/?quantization=1", "https://host/?quantization=1"),
    ],
)
def test_arguments_of_the_library_are_told_as_flags(text: str, told: str) -> None:
    names = ("quantization", "trust_remote_code", "embed_model")
    flags = {name: f"--{name.replace('_', '-')}" for name in names} | {"top_k": "-k"}
    assert in_flags(text, flags) == told


def test_an_error_of_the_library_is_told_with_the_flags_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: ModelOptions) -> None:
        raise ModelError("load it with quantization='int8' or follow_links=True")

    monkeypatch.setattr(ModelOptions, "load_embedding", fail)
    result = run("ingest", tmp_path, "--store", tmp_path / "store")
    assert_one_line_error(result, "error: load it with quantization='int8' or --follow-links")


def test_what_is_told_of_a_model_is_one_line_and_other_warnings_are_held_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        quiet_libraries()
        warnings.warn("a library's", UserWarning, stacklevel=1)
        warnings.warn("decoded without\ndrafts", ReaderWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: decoded without drafts\n"
