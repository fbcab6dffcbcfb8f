"""Consoles, progress, and text that is safe to print. Results go to standard output, all else to standard error."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from reader_rag.errors import ReaderWarning
from reader_rag.util.one_line import one_line

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_QUIET_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
_TALKATIVE = ("accelerate", "huggingface_hub", "sentence_transformers", "transformers")
_ERRORS_TWICE = ("milvus_lite", "pymilvus")  # log the errors that they raise, with tracebacks


def output() -> Console:
    """The console for results. It prints colours and control codes only if standard output is a terminal."""
    return Console(highlight=False)


def messages() -> Console:
    """The console for everything but results."""
    return Console(stderr=True, highlight=False)


def print_error(text: str) -> None:
    """Print an error as one line on standard error."""
    messages().print(Text.assemble(("error: ", "bold red"), clean(text)), soft_wrap=True)


def print_warning(text: str) -> None:
    """Print a warning as one line on standard error."""
    messages().print(Text.assemble(("warning: ", "bold yellow"), clean(text)), soft_wrap=True)


def clean(text: str) -> str:
    """Text of the same length with spaces for control characters, so that documents cannot control the terminal."""
    return _CONTROL.sub(" ", text)


def quiet_libraries() -> None:
    """Turn off progress bars, warnings and log lines of libraries. Call it before they are imported.

    Environment variables that the user has set are kept.
    """
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _ERRORS_TWICE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if logging.lastResort is not None:  # prints the records of all libraries that have no handler of their own
        logging.lastResort.setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", ReaderWarning)
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may have characters that the terminal's encoding lacks


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print_warning(one_line(str(message)))


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line during the context, on a terminal only.

    Args:
        text: The first text.

    Yields:
        A function that changes the text.
    """
    console = messages()
    if not _is_lively(console):
        yield lambda _: None
        return
    with console.status(Text(text)) as shown:
        yield lambda new: shown.update(Text(new))


@contextmanager
def ingest_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each stage of `ingest` during the context, on a terminal only.

    Yields:
        The argument `progress` of `ingest`.
    """
    with _progress(MofNCompleteColumn()) as progress:
        names = {"read": "reading files", "embed": "embedding chunks"}
        tasks = {stage: progress.add_task(name, visible=False) for stage, name in names.items()}

        def show(stage: str, done: int, total: int) -> None:
            progress.update(tasks[stage], completed=done, total=total, visible=total > 0)

        yield show


@contextmanager
def bytes_progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes during the context, on a terminal only.

    Args:
        text: Description of the work.
        total: Bytes in all.

    Yields:
        A function that takes the number of further bytes that are done.
    """
    with _progress(DownloadColumn()) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.advance(task, done)


def _progress(count: MofNCompleteColumn | DownloadColumn) -> Progress:
    """Progress bars with a column that counts what is done; nothing is shown where there is no terminal."""
    console = messages()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not _is_lively(console))


def _is_lively(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal
