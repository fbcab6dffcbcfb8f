"""`reader-rag chat`."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run
from rich.console import Console

from reader_rag.cli import chat as chat_module
from reader_rag.engine.engine import Engine
from reader_rag.rag import NOTHING_FOUND

ESCAPE = "\x1b"


def test_chat_answers_and_obeys_its_commands(store: Path) -> None:
    typed = "/stats\n/sources\nWhere is the heron?\n/sources\n/stats\n/reset\n/sources\n/help\n/quit\nnot read\n"
    result = run("chat", "--store", store, "--max-tokens", "5", typed=typed)
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
    assert run("chat", "--store", store, typed="").exit_code == 0


def test_chat_goes_on_after_a_mistake(store: Path) -> None:
    typed = f"/sing\n{'why ' * 3000}\nWhere is the heron?\n/stats\n"
    result = run("chat", "--store", store, "--max-tokens", "5", typed=typed)
    assert result.exit_code == 0
    unknown, too_long = result.stderr.splitlines()
    assert unknown.startswith("error: there is no command /sing; use /sources, /stats, /reset, /help, /quit")
    assert "context" in too_long
    assert "5 tokens in" in result.stdout


def test_chat_says_when_nothing_was_found(store: Path) -> None:
    result = run("chat", "--store", store, "--cutoff", "0.9", typed="zebra\n/sources\n")
    assert result.stdout == NOTHING_FOUND + "\nNo passage was found for the last message.\n"


def test_chat_remembers_what_was_said(store: Path, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    stream = tiny_engine.submit

    def note(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        prompts.append(prompt.text)
        return stream(prompt, *args, **kwargs)

    monkeypatch.setattr(tiny_engine, "submit", note)
    run("chat", "--store", store, "--max-tokens", "2", typed="first heron\nsecond heron\n/reset\nthird heron\n")
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
        result = run("chat", "--store", store, "--max-tokens", "200", typed="heron?\n/stats\n/sources\n")
    assert result.exit_code == 0
    assert " [stopped]" in result.stdout
    assert "There is no finished answer yet." in result.stdout
    assert "[1] heron.txt" in result.stdout
    assert signal.getsignal(signal.SIGINT) is before


def test_a_real_chat(real_store: Path, real_llm: None) -> None:
    result = run("chat", "--store", real_store, "--max-tokens", "24", typed="When does the owl hunt?\n/sources\n")
    assert result.exit_code == 0
    assert re.search(r"\[1\] owl\.txt", result.stdout)
    assert result.stderr == ""
