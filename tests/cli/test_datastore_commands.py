"""`reader-rag datastore`: what the commands do, print and say about bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from birds import HERON, OWL, write_birds
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from reader_rag.bench.output import json_bytes
from reader_rag.cli.main import app
from reader_rag.datastore import Datastore, Searcher
from reader_rag.engine.datastore_lookup import answers_of, texts_of
from reader_rag.model import loading as models


def run(*arguments: str | Path, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["datastore", *map(str, arguments)], input=typed)


def report(result: Result, status: int = 0) -> Any:
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.fixture(autouse=True)
def tiny_vocabulary(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The model of the commands has the tiny tokenizer."""
    monkeypatch.setattr(models, "load_tokenizer", lambda *_, **__: (tiny_tokenizer, len(tiny_tokenizer)))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_birds(tmp_path / "texts")


@pytest.fixture
def drafts(tmp_path: Path) -> Path:
    return tmp_path / "drafts"


@pytest.fixture
def seen(drafts: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[..., bool]:
    """Whether a tenant's requests find a text."""

    def found(text: str, tenant: str = "") -> bool:
        tokens = tiny_tokenizer(text)["input_ids"][:20]
        with Datastore.inspect(drafts) as store:
            view: Searcher = store.searcher([answers_of(tenant), texts_of(tenant)])
            return view.count(tokens) > 0

    return found


def test_a_folder_is_built_and_built_again_where_it_changed(
    texts: Path, drafts: Path, seen: Callable[..., bool]
) -> None:
    first = report(run("build", texts, "--datastore", drafts, "--json"))
    assert (first["namespace"], first["changed"], first["documents"], first["skipped"]) == (texts_of(""), 2, 2, [])
    assert seen(HERON)
    assert seen(OWL)
    (texts / "owl.txt").write_text("The owl sleeps at noon, high up in an old tree.\n")
    again = run("build", texts, "--datastore", drafts)
    assert "1 of 2 files were new or changed; 2 documents" in again.stdout
    assert seen("The owl sleeps at noon, high")
    assert not seen(OWL)


def test_files_that_are_no_text_are_told_and_the_others_go_in(texts: Path, drafts: Path) -> None:
    (texts / "noise.bin").write_bytes(bytes(range(256)) * 4)
    result = run("build", texts, "--datastore", drafts)
    assert result.exit_code == 2
    assert "2 of 3 files" in result.stdout
    assert "noise.bin: binary" in result.stderr.replace("\n", "")


def test_tenants_and_shared_texts(texts: Path, drafts: Path, seen: Callable[..., bool]) -> None:
    run("build", texts / "heron.txt", "--datastore", drafts, "--tenant", "a")
    run("build", texts / "owl.txt", "--datastore", drafts, "--shared")
    assert [seen(HERON, tenant) for tenant in ("a", "b", "")] == [True, False, False]
    assert [seen(OWL, tenant) for tenant in ("a", "b", "")] == [True, True, True]
    held = report(run("stats", "--datastore", drafts, "--json"))["namespaces"]
    assert {name: row["shared"] for name, row in held.items()} == {texts_of("a"): False, "shared": True}
    refused(run("build", texts, "--datastore", drafts, "--shared", "--tenant", "a"), "leave out --tenant")


def test_single_texts_are_added_replaced_and_removed(drafts: Path, seen: Callable[..., bool]) -> None:
    report(run("add", "-", "--name", "note", "--datastore", drafts, "--json", typed=HERON))
    assert seen(HERON)
    replaced = report(run("add", "-", "--name", "note", "--datastore", drafts, "--json", typed=OWL))
    assert (replaced["changed"], replaced["documents"]) == (1, 1)
    assert not seen(HERON)
    assert report(run("remove", "note", "--datastore", drafts, "--json"))["removed"] == 1
    assert not seen(OWL)
    assert run("remove", "note", "--datastore", drafts).exit_code == 1


def test_a_file_is_removed_by_its_path_and_leaves_the_disk(
    texts: Path, drafts: Path, seen: Callable[..., bool], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    run("build", texts, "--datastore", drafts)
    encoded = b"".join(token.to_bytes(2, "little") for token in tiny_tokenizer(HERON)["input_ids"][:8])

    def on_disk() -> bool:
        return any(encoded in path.read_bytes() for path in drafts.rglob("*") if path.is_file())

    assert on_disk()
    assert report(run("remove", texts / "heron.txt", "--datastore", drafts, "--json"))["removed"] == 1
    assert not on_disk()
    assert not seen(HERON)
    assert seen(OWL)


def test_all_of_a_tenant_is_removed_and_nothing_else(texts: Path, drafts: Path, seen: Callable[..., bool]) -> None:
    for tenant in ("a", "b"):
        run("build", texts, "--datastore", drafts, "--tenant", tenant)
    assert report(run("remove", "--all", "--tenant", "a", "--datastore", drafts, "--json"))["removed"] == 1
    assert [seen(OWL, tenant) for tenant in ("a", "b")] == [False, True]


def test_stats_and_verify_print_tables_and_sentences(texts: Path, drafts: Path) -> None:
    run("build", texts, "--datastore", drafts)
    shown = run("stats", "--datastore", drafts)
    assert texts_of("") in shown.stdout
    whole = run("verify", "--datastore", drafts)
    assert (whole.exit_code, whole.stdout) == (0, "nothing is damaged\n")
    (segment,) = (path for path in drafts.rglob("*.seg*"))
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    segment.write_bytes(damaged)
    found = report(run("verify", "--datastore", drafts, "--json"), status=1)["damaged"]
    assert [row["file"] for row in found] == [segment.name]


def test_compacting_merges(texts: Path, drafts: Path) -> None:
    for file in sorted(texts.iterdir()):
        run("build", file, "--datastore", drafts)
    held = report(run("compact", "--full", "--datastore", drafts, "--json"))["namespaces"]
    assert held[texts_of("")]["segments"] == 1


@pytest.mark.parametrize("command", ["stats", "verify", "compact"])
def test_there_is_no_datastore(command: str, drafts: Path) -> None:
    refused(run(command, "--datastore", drafts), "no datastore at")
    assert not drafts.exists()


def test_bad_input_gets_one_line(texts: Path, drafts: Path) -> None:
    refused(run("build", texts / "gone.txt", "--datastore", drafts), "gone.txt")
    refused(run("add", texts / "heron.txt", texts / "owl.txt", "--name", "x", "--datastore", drafts), "--name")
    refused(run("remove", "--datastore", drafts), "--all")
    other = drafts.parent / "other"
    Datastore.open(other, vocabulary=7, tokenizer="another").close()
    refused(run("build", texts, "--datastore", other), "tokenizer")


def test_json_has_text_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "größe.txt").write_text("How large it is.")
    run("add", tmp_path / "größe.txt", "--datastore", tmp_path / "d", "--tenant", "Jürgen")
    result = run("stats", "--datastore", tmp_path / "d", "--json")
    assert list(json.loads(result.stdout)["namespaces"]) == ["texts/Jürgen"]
    assert "texts/Jürgen" in result.stdout


def test_json_is_utf_8_whatever_the_terminal_takes() -> None:
    assert json_bytes({"a": "ä\udcff"}) == '{"a": "ä\\udcff"}'.encode()
