"""Output of the benchmark commands: progress while they run, then a report as JSON or as tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer


def progress() -> Callable[[str], None]:
    """A function that prints a line about the work in progress to standard error, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return lambda _: None
    return lambda text: console.print(f"[dim]{text}[/dim]", highlight=False)


def json_bytes(report: Any, indent: int | None = None) -> bytes:
    """A report as JSON in UTF-8, with its text as it is, whatever the encoding of standard output.

    Args:
        report: Values that JSON takes. Lone surrogates, as in names of files that are not valid UTF-8, are escaped.
        indent: Spaces to indent by; None: one line.
    """
    return json.dumps(report, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")


def print_report(report: Mapping[str, Any], as_json: bool, show: Callable[[Any], None]) -> None:
    """Print the report of a benchmark.

    Args:
        report: The report, with values that JSON takes.
        as_json: Print one JSON object, indented by a space.
        show: Prints the report as tables; called if `as_json` is false.
    """
    if as_json:
        typer.echo(json_bytes(report, indent=1))
    else:
        show(report)


def print_table(
    title: str | None,
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    to_error: bool = False,
    compact: bool = False,
) -> None:
    """Print a table.

    Args:
        title: Title above the table; None: no title.
        headings: One for each column; columns after the first are aligned right.
        rows: A cell for each column: text, a number, or None for what was not measured.
        to_error: Print to standard error.
        compact: Two spaces between columns in place of lines.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    if compact:
        table.title_justify, table.box = "left", box.SIMPLE_HEAD
        table.show_edge, table.pad_edge, table.collapse_padding = False, False, True
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(_cell, row))
    Console(stderr=to_error).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def ratio_line(name: str, ratio: Mapping[str, float | None]) -> str | None:
    """A ratio of speeds in a sentence.

    Args:
        name: What is compared, e.g. "reader/plain".
        ratio: What `speed_ratios` returns.

    Returns:
        The sentence; None if nothing was measured.
    """
    if ratio["median"] is None:
        return None
    return (
        f"{name}: {ratio['total']:.2f} times over all tokens (median {ratio['median']:.2f}, from {ratio['min']:.2f} to "
        f"{ratio['max']:.2f})"
    )


def weights_type(machine: Mapping[str, Any]) -> str:
    """The type of the weights, in words.

    Args:
        machine: "machine" of a report.

    Returns:
        E.g. "bfloat16"; "int8 (bfloat16)" for quantised weights, with the type of the others.
    """
    dtype, quantization = str(machine["dtype"]), machine["quantization"]
    return dtype if quantization == "none" else f"{quantization} ({dtype})"
