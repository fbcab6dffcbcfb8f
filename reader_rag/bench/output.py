"""What the benchmark commands print: progress while they run, then a report as JSON or as tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import typer


def progress() -> Callable[[str], None]:
    """A function that prints a line about the work in progress to standard error, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return lambda _: None
    return lambda text: console.print(f"[dim]{text}[/dim]", highlight=False)


def print_report(report: Mapping[str, Any], as_json: bool, show: Callable[[Any], None]) -> None:
    """Print the outcome of a benchmark.

    Args:
        report: The outcome; values are what JSON takes.
        as_json: Print one JSON object, indented by a space.
        show: Prints the report for people; called if `as_json` is false.
    """
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        show(report)


def ratio_line(name: str, ratio: Mapping[str, float | None]) -> str | None:
    """A ratio of speeds in a sentence.

    Args:
        name: What is compared, e.g. "reader/plain".
        ratio: A row of `summary_of_ratios`.

    Returns:
        The sentence; None if nothing was measured.
    """
    if ratio["median"] is None:
        return None
    return (
        f"{name}: {ratio['total']:.2f} times over all tokens (median {ratio['median']:.2f}, from {ratio['min']:.2f} to "
        f"{ratio['max']:.2f})"
    )
