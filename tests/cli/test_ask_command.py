"""`reader-rag ask`: answers, sources, counts, comparisons, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from birds import HERON
from costs_stub import EverythingPays
from programs import assert_one_line_error, run
from word_embedding import WordEmbedding

from reader_rag.cli.answering import answers as answers_module
from reader_rag.cli.answering.answers import AskResult, ask_store
from reader_rag.cli.loading import ModelOptions
from reader_rag.engine.engine import Engine
from reader_rag.llm import ReaderLLM
from reader_rag.rag import NOTHING_FOUND
from reader_rag.rag.stores.sqlite_file import FILE_NAME

ESCAPE = "\x1b"


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
    assert run("ingest", docs, *store).exit_code == 0
    assert run("ask", "heron?", *store, "--max-tokens", "2").exit_code == 0
    assert run("chat", *store, "--max-tokens", "2", typed="heron?\nowl?\n").exit_code == 0
    assert tenants == [options[-1] if options else ""] * 3


def test_ask_prints_answer_sources_and_counts(store: Path) -> None:
    result = run("ask", "Is the heron in shallow water?", "--store", store, "--max-tokens", "8")
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
    answer = json.loads(run("ask", "An owl", "--store", store, "--json", "--top-k", "1", "--max-tokens", "2").stdout)
    assert [Path(source["file"]).name for source in answer["sources"]] == ["owl.txt"]


def test_ask_retrieves_by_words_with_alpha_0(store: Path) -> None:
    arguments = ("--store", store, "--json", "--max-tokens", "2", "--alpha", "0")
    answer = json.loads(run("ask", "Heron?", *arguments).stdout)
    assert [Path(source["file"]).name for source in answer["sources"]] == ["heron.txt"]
    assert run("ask", "Heron?", "--store", store, "--alpha", "2").exit_code == 2


def test_ask_json_is_one_object_that_says_everything(store: Path) -> None:
    result = run("ask", "Is the heron in shallow water?", "--store", store, "--json", "--compare", "--max-tokens", "9")
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
    lines = run("ask", "Where is the heron?", "--store", store, "--compare", "--max-tokens", "9").stdout.splitlines()
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
    monkeypatch.setattr(tiny_engine.context.costs, "current", EverythingPays())
    question, length = "Is the heron in shallow water?", ("--max-tokens", "40")
    demo = ("demo", "--workdir", tmp_path, "--question", question, *length)
    assert run(*demo).exit_code == 0
    if command == "ask":
        assert run("ask", question, "--store", tmp_path / "store", "--top-k", "2", "--compare", *length).exit_code == 0
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
        assert run("ask", "heron?", "--store", store, "--max-tokens", "2", *options).exit_code == 0
    assert asked == ["auto", "float32", "bfloat16"]


def test_nothing_retrieved_is_said_plainly_and_no_model_is_loaded(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelOptions, "load_llm")
    result = run("ask", "zebra", "--store", store, "--cutoff", "0.9")
    assert (result.exit_code, result.stdout) == (0, NOTHING_FOUND + "\n")
    report = json.loads(run("ask", "zebra", "--store", store, "--cutoff", "0.9", "--json").stdout)
    assert (report["answer"], report["sources"]) == (NOTHING_FOUND, [])


@pytest.mark.parametrize("options", [[], ["--json"], ["--compare"]])
def test_an_empty_question_is_one_line(options: list[str], tmp_path: Path) -> None:
    assert_one_line_error(run("ask", " \n", "--store", tmp_path, *options), "the question is empty")


def test_a_question_longer_than_the_context_is_one_line(store: Path) -> None:
    assert_one_line_error(run("ask", "why " * 3000, "--store", store, "--json"), "context", "tokens")


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path, word_embedding: None) -> None:
    assert_one_line_error(run("ask", "Why?", "--store", tmp_path / "none"), "no store", "ingest")
    assert not (tmp_path / "none").exists()


def test_a_store_of_another_embedding_is_one_line(store: Path, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (store / FILE_NAME).read_bytes()
    monkeypatch.setattr(ModelOptions, "load_embedding", lambda self: WordEmbedding(model_name="wide", buckets=128))
    assert_one_line_error(run("ask", "Why?", "--store", store), "embedding")
    assert_one_line_error(run("ingest", docs, "--store", store), "embedding")
    assert (store / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_a_truncated_store_is_one_line(store: Path, kept: float) -> None:
    file = store / FILE_NAME
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    assert_one_line_error(run("ask", "Why?", "--store", store), str(store))


def test_a_foreign_file_in_place_of_the_store_is_one_line(tmp_path: Path, word_embedding: None) -> None:
    (tmp_path / FILE_NAME).write_text("dear diary\n" * 1000)
    assert_one_line_error(run("ask", "Why?", "--store", tmp_path), str(tmp_path))


def test_an_unknown_model_is_one_line_that_names_ways_to_get_one(
    docs: Path, tmp_path: Path, word_embedding: None
) -> None:
    assert run("ingest", docs, "--store", tmp_path / "s").exit_code == 0
    result = run("ask", "heron?", "--store", tmp_path / "s", "--model", "nobody/nothing")
    assert_one_line_error(result, "nobody/nothing", "reader-rag models get")


def test_a_real_answer_cites_its_file_and_equals_plain_decoding(real_store: Path, real_llm: None) -> None:
    question = "Quote the sentence about the heron."
    result = run("ask", question, "--store", real_store, "--json", "--compare", "--max-tokens", "24", "--top-k", "2")
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
