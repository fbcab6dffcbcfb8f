"""Shell blocks of README and docs: each command line is one that its program takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_blocks import Block, all_blocks
from shell_blocks import Noted, check, noted, parsed


@pytest.mark.parametrize(
    "block", [b for b in all_blocks() if b.language == "bash" and b.tag != "shown"], ids=lambda block: block.place
)
def test_command_lines_are_taken(block: Block, tmp_path: Path) -> None:
    for earlier in all_blocks():  # what the page says to save in a file is there
        if earlier.page == block.page and earlier.line < block.line and earlier.title:
            (tmp_path / earlier.title).write_text(earlier.text, encoding="utf-8")
    calls = noted(block.text, tmp_path)
    for call in calls:
        check(call, tmp_path)


def test_a_block_is_read_as_bash_reads_it(tmp_path: Path) -> None:
    code = "mkdir -p a  # a comment\ncat > a/b <<'END'\nx\nEND\nmake test\n"
    code += 'X=1 reader-rag ask "two words" \\\n  --store ~/s &\n'
    assert noted(code, tmp_path) == [
        Noted("make", ("test",)),
        Noted("reader-rag", ("ask", "two words", "--store", f"{tmp_path}/s")),
    ]
    assert (tmp_path / "a" / "b").read_text() == "x\n"


@pytest.mark.parametrize(
    "arguments", [("ask",), ("ask", "Why?", "--stor", "s"), ("ask", "Why?", "--top-k", "no"), ("sing",), ("bench", "x")]
)
def test_a_command_line_that_the_program_refuses_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match=r"^reader-rag "):
        parsed(arguments)


@pytest.mark.parametrize(
    "call",
    [
        Noted("pip", ("install", ".[no-such]")),
        Noted("pip", ("install", ".[nosuch]")),
        Noted("make", ("no-such-target",)),
        Noted("make", ("NO_SUCH=1",)),
        Noted("python", ("no_such.py",)),
        Noted("vllm", ("serve", "m", "--speculative-config", "{method}")),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(call: Noted, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(call, tmp_path)


def test_an_unknown_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not found"):
        noted("singsong\n", tmp_path)
