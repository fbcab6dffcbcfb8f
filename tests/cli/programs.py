"""Runs programs in the tests."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner, Result

from reader_rag.cli.main import app


def run(*arguments: str | Path, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)


def assert_one_line_error(result: Result, *words: str, status: int = 1) -> None:
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def printed(show: Callable[[Console], None], **console: Any) -> str:
    page = io.StringIO()
    show(Console(file=page, width=100, highlight=False, **console))
    return page.getvalue()
