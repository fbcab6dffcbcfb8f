"""`reader-rag ingest`, and stores that cannot be used."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from birds import HERON, OWL
from programs import assert_one_line_error, run

from reader_rag.rag import FaissStore


def test_ingest_says_what_it_did(docs: Path, tmp_path: Path, word_embedding: None) -> None:
    first = run("ingest", docs, "--store", tmp_path / "store")
    assert (first.exit_code, first.stdout) == (0, f"2 added; 2 passages embedded, 2 in {tmp_path / 'store'}\n")
    (docs / "owl.txt").write_text(OWL + "It sleeps by day.\n")
    (docs / "heron.txt").unlink()
    second = run("ingest", docs, "--store", tmp_path / "store")
    assert second.stdout == f"1 updated, 1 removed; 1 passages embedded, 1 in {tmp_path / 'store'}\n"


def test_bad_files_among_good_ones_are_listed_and_the_good_go_in(
    docs: Path, tmp_path: Path, word_embedding: None
) -> None:
    (docs / "picture.bin").write_bytes(b"\x89PNG\x00\x01\x02\x03")
    (docs / "nothing.txt").write_text("")
    (docs / "gone.txt").symlink_to(tmp_path / "nowhere")
    result = run("ingest", docs, "--store", tmp_path / "store")
    assert result.exit_code == 2
    assert result.stdout.startswith("2 added; 2 passages embedded")
    warning, *skipped = result.stderr.splitlines()
    assert warning == "warning: 3 skipped:"
    names = [re.match(r"  .*/(\w+\.\w+): \w+", line) for line in skipped]
    assert [match and match[1] for match in names] == ["gone.txt", "nothing.txt", "picture.bin"]


def test_names_that_are_not_valid_utf8_are_listed(docs: Path, tmp_path: Path, word_embedding: None) -> None:
    try:
        Path(os.fsdecode(os.fsencode(docs) + b"/caf\xe9\n.txt")).write_text("Gulls cry.")
    except OSError:
        pytest.skip("this file system has no such names")
    result = run("ingest", docs, "--store", tmp_path / "store")
    assert (result.exit_code, result.stdout[:8]) == (2, "2 added;")
    assert result.stderr.splitlines()[1:] == [f"  {docs}/caf\\xe9\\n.txt: the name is not valid UTF-8; rename it"]


def test_links_are_followed_with_an_option_only(docs: Path, tmp_path: Path, word_embedding: None) -> None:
    (tmp_path / "secret.txt").write_text("the password")
    (docs / "link.txt").symlink_to(tmp_path / "secret.txt")
    result = run("ingest", docs, "--store", tmp_path / "store")
    assert (result.exit_code, result.stdout[:8]) == (2, "2 added;")
    assert "--follow-links" in result.stderr
    result = run("ingest", docs, "--store", tmp_path / "store", "--follow-links")
    assert (result.exit_code, result.stdout[:8]) == (0, "1 added,")
    assert run("ingest", docs, "--store", tmp_path / "store", "--read-seconds", "0").exit_code == 1


def test_nothing_to_ingest_is_an_error(tmp_path: Path, word_embedding: None) -> None:
    (tmp_path / "empty").mkdir()
    assert_one_line_error(run("ingest", tmp_path / "empty", "--store", tmp_path / "store"), "empty")
    assert_one_line_error(run("ingest", tmp_path / "absent", "--store", tmp_path / "store"), "absent")


def test_a_full_disk_is_one_line_and_the_store_stays(docs: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FaissStore.__init__

    def on_a_full_disk(self: FaissStore, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self._file._database.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size for the least

    (docs / "many.txt").write_text("\n\n".join(f"Sentence {i} about birds. " * 20 for i in range(30)))
    with monkeypatch.context() as patch:
        patch.setattr(FaissStore, "__init__", on_a_full_disk)
        assert_one_line_error(run("ingest", docs, "--store", store), "full")
    answer = json.loads(run("ask", "Is the heron in shallow water?", "--store", store, "--json", "--top-k", "9").stdout)
    assert {Path(source["file"]).name for source in answer["sources"]} == {"heron.txt", "owl.txt"}


def test_tenants_of_a_store_do_not_see_one_another(docs: Path, tmp_path: Path, tiny_models: None) -> None:
    def ask(*options: str) -> set[str]:
        arguments = ("--store", tmp_path / "store", "--json", "--top-k", "9", "--max-tokens", "2")
        report = json.loads(run("ask", "heron or owl?", *arguments, *options).stdout)
        return {Path(source["file"]).name for source in report["sources"]}

    def ingest(*options: str) -> str:
        result = run("ingest", docs, "--store", tmp_path / "store", *options)
        assert result.exit_code == 0, result.output
        return result.stdout.partition(" in ")[0]

    assert ingest("--tenant", "ann") == "2 added; 2 passages embedded, 2"
    (docs / "heron.txt").unlink()
    assert ingest("--tenant", "bob") == "1 added; 1 passages embedded, 1"
    assert ask() == set()
    assert ingest() == "1 added; 1 passages embedded, 1"
    assert ask("--tenant", "ann") == {"heron.txt", "owl.txt"}
    assert ask("--tenant", "bob") == ask() == {"owl.txt"}
    assert ask("--tenant", "Ann") == set()
    (docs / "owl.txt").write_text(HERON)
    assert ingest("--tenant", "ann") == "1 updated, 1 removed; 1 passages embedded, 1"
    assert ingest("--tenant", "bob") == "1 updated; 1 passages embedded, 1"


@pytest.mark.parametrize("scheme", ["qdrant", "milvus"])
def test_a_vector_database_gives_the_answers_of_the_folder(
    scheme: str, docs: Path, tmp_path: Path, tiny_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(f"llama_index.vector_stores.{scheme}", reason=f"pip install 'reader-rag[{scheme}]'")
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    database = f"{scheme}://{tmp_path}/{scheme}.db/birds"
    places = [("--store", str(tmp_path / "store")), ("--vector-store", database)]

    def ingest() -> list[str]:
        return [run("ingest", docs, *place).stdout.partition(" in ")[0] for place in places]

    def ask(*options: str) -> list[Any]:
        asked = [run("ask", "Is the heron in water?", *place, "--json", "--max-tokens", "9") for place in places]
        reports = [json.loads(result.stdout) for result in asked]
        assert [result.stderr for result in asked] == ["", ""]
        for report in reports:
            del report["stats"]
            for source in report["sources"]:
                source["score"] = round(source["score"], 5)
        return reports

    assert ingest() == ["2 added; 2 passages embedded, 2"] * 2
    folder, there = ask()
    assert folder == there
    assert [Path(source["file"]).name for source in there["sources"]] == ["heron.txt", "owl.txt"]
    (docs / "owl.txt").write_text(OWL + "It sleeps by day.\n")
    (docs / "heron.txt").unlink()
    assert ingest() == ["1 updated, 1 removed; 1 passages embedded, 1"] * 2
    assert ingest() == ["1 unchanged; 0 passages embedded, 1"] * 2
    folder, there = ask()
    assert folder == there
    chats = [run("chat", *place, "--max-tokens", "5", typed="An owl?\n/sources\n") for place in places]
    assert chats[0].stdout == chats[1].stdout
    assert "owl.txt" in chats[1].stdout


def test_a_database_that_does_not_answer_is_one_line(docs: Path, word_embedding: None) -> None:
    pytest.importorskip("llama_index.vector_stores.qdrant", reason="pip install 'reader-rag[qdrant]'")
    for command in (["ingest", docs], ["ask", "Why?"], ["chat"]):
        result = run(*command, "--vector-store", "qdrant://127.0.0.1:1/birds")
        assert_one_line_error(result, "Qdrant does not answer at qdrant://127.0.0.1:1/birds", "check host and port")


def test_an_unknown_embedding_model_is_one_line(docs: Path, tmp_path: Path) -> None:
    result = run("ingest", docs, "--store", tmp_path / "s", "--embed-model", "nobody/nothing")
    assert_one_line_error(result, "nobody/nothing")
    assert not (tmp_path / "s").exists()
