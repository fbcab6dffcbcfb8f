"""`ask` and `chat` with `--engine`: an OpenAI-compatible server answers."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_server import CHAT, Handler, Script, interrupted, silent
from typer.testing import CliRunner, Result
from word_embedding import WordEmbedding

from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.main import app


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files about birds; the programs embed by counting words."""
    monkeypatch.setattr(ModelOptions, "load_embedding", lambda self: WordEmbedding(model_name="words"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "heron.txt").write_text("The heron stands still in shallow water.\n")
    (tmp_path / "docs" / "owl.txt").write_text("The owl hunts at night.\n")
    assert run("ingest", tmp_path / "docs", "--store", tmp_path / "store").exit_code == 0
    return tmp_path / "store"


def run(*arguments: str | Path, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)


def refused(result: Result, *words: str, status: int = 1) -> None:
    assert result.exit_code == status, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert [word for word in words if word not in result.stderr] == []


def test_ask_shows_the_servers_answer_with_sources_and_counts(script: Script, store: Path, url: str) -> None:
    script.pause_s = 0.01
    result = run("ask", "Is the heron in shallow water?", "--store", store, "--engine", url)
    assert (result.exit_code, result.stderr) == (0, "")
    said, _, rest = result.stdout.partition("Sources\n")
    assert said.strip() == "The heron stands still."
    assert re.search(r"\[1\] heron\.txt \(score 0\.\d\d, characters 0-40\)", rest)
    assert re.search(r"\n5 tokens; \d+\.\d tokens/s; prompt of 40 tokens processed in \d+\.\d s\n", rest)
    assert "Copied word for word" not in rest
    assert "drafted" not in rest
    (body,) = script.bodies(CHAT)
    assert "The heron stands still in shallow water." in str(body["messages"])


def test_ask_json_keeps_its_fields_and_omits_unknown_counts(script: Script, store: Path, url: str) -> None:
    script.finish_reason = "length"
    report = json.loads(run("ask", "heron?", "--store", store, "--engine", url, "--json", "--max-tokens", "5").stdout)
    assert list(report) == [
        "model",
        "question",
        "answer",
        "finish_reason",
        "sources",
        "citations",
        "stats",
        "comparison",
    ]
    assert (report["model"], report["answer"], report["finish_reason"]) == (
        "bird",
        "The heron stands still.",
        "length",
    )
    assert Path(report["sources"][0]["file"]).name == "heron.txt"
    assert (report["citations"], report["comparison"]) == (None, None)
    assert set(report["stats"]) <= {"prompt_tokens", "completion_tokens", "ttft_s", "tokens_per_s"}
    assert report["stats"]["completion_tokens"] == 5


def test_a_truncated_answer_is_reported(script: Script, store: Path, url: str) -> None:
    script.finish_reason = "length"
    script.usage = None
    text = run("ask", "heron?", "--store", store, "--engine", url).stdout
    assert re.search(r"\nfirst word after \d+\.\d s\nThe answer was cut off at --max-tokens", text)


def test_the_commands_take_key_and_timeout(
    script: Script, store: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READER_RAG_ENGINE_KEY", "k-42")
    script.replies[CHAT] = silent
    refused(
        run("ask", "heron?", "--store", store, "--engine", url, "--engine-timeout", "0.2"), "sent nothing for 0.2 s"
    )
    script.left.set()
    assert script.asked[-1].headers["authorization"] == "Bearer k-42"


def test_without_passages_the_server_is_not_called(script: Script, store: Path, url: str) -> None:
    arguments = ("--store", store, "--engine", url, "--cutoff", "0.9")
    assert json.loads(run("ask", "zebra", *arguments, "--json").stdout)["model"] is None
    assert script.asked == []


def test_an_unknown_model_lists_the_available_ones(script: Script, store: Path, url: str) -> None:
    result = run("ask", "heron?", "--store", store, "--engine", url, "--model", "smollm2-135m")
    refused(result, "has no model 'smollm2-135m'; pass one that it has: bird")


def test_an_interrupted_stream_ends_ask_with_one_line(script: Script, store: Path, url: str) -> None:
    script.replies[CHAT] = interrupted
    result = run("ask", "heron?", "--store", store, "--engine", url)
    refused(result, "broke off")
    assert result.stdout.startswith("The heron ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "float32"], ["leave out --dtype"]),
        (["--exactness", "strict"], ["leave out --exactness"]),
        (["--datastore", "d", "--keep-answers"], ["leave out --datastore and --keep-answers"]),
        (["--keep-answers"], ["name its folder (--datastore)"]),
        (["--engine-timeout", "0"], ["--engine-timeout"]),
    ],
)
@pytest.mark.parametrize("command", [["ask", "heron?"], ["chat"]])
def test_options_of_a_local_model_are_refused_before_anything_is_loaded(
    command: list[str], options: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ModelOptions, "load_embedding")
    result = run(*command, "--store", "s", "--engine", "http://localhost/v1", *options)
    refused(result, *words, status=2 if "--engine-timeout" in options else 1)


def test_compare_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelOptions, "load_embedding")
    refused(run("ask", "heron?", "--store", "s", "--engine", "http://localhost/v1", "--compare"), "leave out --engine")


@pytest.mark.parametrize("command", [["ask", "heron?"], ["chat"]])
def test_answers_without_a_datastore_are_refused_before_anything_is_loaded(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ModelOptions, "load_embedding")
    refused(run(*command, "--store", "s", "--keep-answers"), "name its folder (--datastore)")


def test_chat_answers_and_shows_sources_and_counts(script: Script, store: Path, url: str) -> None:
    typed = "Is the heron in water?\n/sources\n/stats\nAnd then?\n"
    result = run("chat", "--store", store, "--engine", url, typed=typed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("The heron stands still.\nSources\n[1] heron.txt")
    assert re.search(r"\n5 tokens;.* prompt of 40 tokens", result.stdout)
    said = [(m["role"], m["content"]) for m in script.bodies(CHAT)[-1]["messages"][1:]]
    assert said == [("user", "Is the heron in water?"), ("assistant", "The heron stands still."), ("user", "And then?")]


def test_chat_continues_after_a_failure(script: Script, store: Path, url: str) -> None:
    def once(handler: Handler) -> None:
        del script.replies[CHAT]
        interrupted(handler)

    script.replies[CHAT] = once
    result = run("chat", "--store", store, "--engine", url, typed="heron?\n/stats\nheron?\n")
    assert result.exit_code == 0
    assert re.fullmatch(r"error: the server at .* broke off the answer \(.*\): .*\n", result.stderr)
    assert "There is no finished answer yet." in result.stdout
    assert result.stdout.endswith("The heron stands still.\n")


def pressing(after: int) -> Callable[[Handler], None]:
    """Says some words, then Ctrl-C is pressed while the next is waited for."""

    def say(handler: Handler) -> None:
        handler.start_stream()
        for _ in range(after):
            handler.send_piece("word ")
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.005)
            handler.send_chunk(": still here\n\n")

    return say


@pytest.mark.parametrize("words", [0, 2])
def test_ctrl_c_ends_the_answer_here_and_on_the_server(script: Script, store: Path, url: str, words: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        script.replies[CHAT] = pressing(words)
        result = run("chat", "--store", store, "--engine", url, typed="heron?\n/stats\n/sources\n")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("word " * words + "\n[stopped]\nThere is no finished answer yet.\n")
    assert script.left.wait(3)
