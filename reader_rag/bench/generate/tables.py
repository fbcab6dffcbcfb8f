"""The reports of `bench generate`, as tables that fit a terminal of 60 columns, and of `bench speed-bench`."""

from __future__ import annotations

from typing import Any

import typer

from reader_rag.bench.output import print_table, weights_type

_TABLES = {
    "speed": {
        "prompt\ntokens/s": "prompt_tokens_per_s",
        "decoding\ntokens/s": "decode_tokens_per_s",
        "tokens\na step": "mat",
        "ms\na step": "ms_per_step",
    },
    "whole questions (prompt and answer)": {
        "first\ntoken s": "ttft_s",
        "question\ns": "question_s",
        "all\ns": "questions_total_s",
        "tokens": "tokens",
    },
    "memory": {"cache\nMB": "cache_mb", "peak\nMB": "peak_mb"},
}
"""Title, headings and fields of a method's row; seconds of one prompt are medians."""
_RATIOS = {"median": "median", "least": "min", "most": "max", "total": "total"}


def show_report(report: dict[str, Any]) -> None:
    """Print the report of `bench generate`.

    Args:
        report: As `make_report` makes it.
    """
    machine = report["machine"]
    at_once = f", {report['batch']} at once" if report["batch"] > 1 else ""
    held = weights_type(machine)
    typer.echo(f"{machine['model']}, {held}, {machine['device']}, {report['prompts']} prompts{at_once}")
    if about := report.get("llama_cpp"):
        typer.echo(f"llama.cpp: {about['file']} ({about['type']}), xllamacpp {about['version']} ({about['system']})")
    for title, columns in _TABLES.items():
        rows = [
            (name, *(_rounded(row[field]) for field in columns.values())) for name, row in report["variants"].items()
        ]
        _print(title, ("method", *columns), [row for row in rows if any(row[1:])])
    rows = []
    for name, ratio in report["ratios"].items():
        other = report["methods"][name.removeprefix("reader/")]["variant"]
        for what, found in (("decoding", ratio), ("questions", ratio["questions"])):
            if found["median"] is not None:
                rows.append((other, what, *(_rounded(found[field]) for field in _RATIOS.values())))
    if rows:
        _print("reader: so many times as fast", ("as", "in", *_RATIOS), rows)
    if "identical" in report:
        typer.echo()
        same = report["identical"]
        differing = f"; different: {', '.join(same['different'])}" if same["different"] else ""
        typer.echo(f"reader = plain: {same['compared'] - len(same['different'])} of {same['compared']}{differing}")


def show_categories(report: dict[str, Any]) -> None:
    """Print the report of `bench speed-bench`: for each method its speed and tokens per step, by category.

    Args:
        report: By split, "left_out" and by category the report of `bench generate`.
    """
    for split, found in report["splits"].items():
        rows = []
        for category, one in found["categories"].items():
            for name, row in one["methods"].items():
                ratio = one["ratios"].get(f"reader/{name}", {})
                figures = (row["decode_tokens_per_s"], row["mat"], row["ttft_s"], row["question_s"], ratio.get("total"))
                rows.append((category, one["prompts"], row["variant"], *map(_rounded, figures)))
        headings = ("category", "prompts", "method", "decoding\ntokens/s", "tokens\na step", "first\ntoken s")
        _print(split, (*headings, "question\ns", "reader\ntimes"), rows)
        same = [one["identical"] for one in found["categories"].values() if "identical" in one]
        if same:
            compared = sum(one["compared"] for one in same)
            different = sum(len(one["different"]) for one in same)
            typer.echo(f"reader = plain: {compared - different} of {compared}")
        if found["left_out"]:
            typer.echo(f"{found['left_out']} prompts are longer than the model's context window and left out")


def _print(title: str, headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    typer.echo()
    print_table(title, headings, rows, compact=True)


def _rounded(value: float | None) -> str | None:
    """A number of about three digits."""
    if value is None or isinstance(value, int):
        return None if value is None else str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
