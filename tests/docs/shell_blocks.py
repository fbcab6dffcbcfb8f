"""Runs shell blocks in a real bash, in which programs only note how they are called."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from doc_blocks import ROOT
from packaging.requirements import Requirement
from typer.core import TyperGroup

from reader_rag.cli.main import app

NOTED = ("reader-rag", "pip", "make", "python", "curl", "vllm", "uvicorn")
"""Programs of the documentation; .ci/run and .venv/bin/ are noted too."""
REAL = ("cat", "mkdir", "cp", "rm")
"""Programs that blocks really run."""

_NOTE = '#!/bin/bash\nprintf "%s\\0" $(($# + 1)) "${0##*/}" "$@" >> "$NOTES"\n'
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # newer typer has a click of its own
_EXTRAS = re.compile(r"^(?:\.|reader-rag)?\[([^\]]+)\]$")


@dataclass(frozen=True)
class Noted:
    """A call of a program: its name, and its arguments after expansion."""

    program: str
    arguments: tuple[str, ...]


def noted(code: str, folder: Path) -> list[Noted]:
    """Run a block in a folder; the calls that it makes of the documentation's programs, in order.

    Args:
        code: The block.
        folder: Working folder and home.

    Raises:
        AssertionError: The block has an error, or calls a program that is not known here.
    """
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    for name in NOTED:
        (tools / name).write_text(_NOTE)
        (tools / name).chmod(0o755)
    for name in REAL:
        link, target = tools / name, shutil.which(name)
        if not link.exists() and target is not None:
            link.symlink_to(target)
    for own in (".ci/run", ".venv/bin/python", ".venv/bin/pre-commit"):
        (folder / own).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tools / "make", folder / own)
    (folder / ".venv/bin/activate").touch()
    notes = folder / ".notes"
    notes.write_bytes(b"")
    done = subprocess.run(
        [bash, "-eo", "pipefail", "-c", f"{code}\nwait"],
        cwd=folder,
        env={"PATH": str(tools), "HOME": str(folder), "NOTES": str(notes), "JOB": "job", "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found, words = [], notes.read_text().split("\0")[:-1]
    while words:
        count = int(words[0])
        found.append(Noted(words[1], tuple(words[2 : 1 + count])))
        words = words[1 + count :]
    return found


def parsed(arguments: tuple[str, ...]) -> str:
    """Parse a command line of `reader-rag` with the program's own parser; the name of its command.

    Args:
        arguments: What follows `reader-rag`.

    Raises:
        AssertionError: The program would refuse it.
    """
    command: Any = typer.main.get_command(app)
    rest, parent, names = list(arguments), None, list[str]()
    try:
        while True:
            context = command.make_context(names[-1] if names else "reader-rag", rest, parent=parent)
            if not isinstance(command, TyperGroup):
                return " ".join(names)
            name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            names.append(str(name))
            command, parent = found, context
    except (_UsageError, typer.Exit) as error:
        raise AssertionError(f"reader-rag {' '.join(arguments)}: {error}") from error


def check(call: Noted, folder: Path) -> None:
    """Check a call as far as that is possible without running it.

    Args:
        call: The call.
        folder: The block's working folder, in which a script may have been written.
    """
    match call.program:
        case "reader-rag":
            parsed(call.arguments)
        case "pip":
            _check_pip(call.arguments)
        case "make":
            _check_make(call.arguments)
        case "python":
            script = call.arguments[0]
            assert script == "-m" or (folder / script).is_file() or (ROOT / script).is_file(), f"there is no {script}"
        case "vllm":
            _check_vllm(call.arguments)
        case "run":
            assert os.access(ROOT / ".ci" / "run", os.X_OK)
        case _:
            assert call.arguments, f"{call.program} without arguments"


def _check_pip(arguments: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command, *rest = arguments
    assert command == "install"
    for argument in rest:
        extras = _EXTRAS.match(argument)
        if extras:
            assert set(extras[1].split(",")) <= set(project["optional-dependencies"]), argument
        elif not argument.startswith(("-", "http", ".")):
            Requirement(argument)


def _check_make(arguments: tuple[str, ...]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        assert re.search(rf"^{re.escape(name)}{' *[?:]?=' if is_variable else ':'}", makefile, re.MULTILINE), argument


def _check_vllm(arguments: tuple[str, ...]) -> None:
    assert arguments[0] == "serve"
    for option, value in itertools.pairwise(arguments):
        if option in ("--speculative-config", "--additional-config"):
            json.loads(value)
