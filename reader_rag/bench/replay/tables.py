"""Tables of `bench replay`, `bench recall` and `bench drafting` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from reader_rag.bench.output import print_table


def show_replay(report: Mapping[str, Any]) -> None:
    """Print a report of `bench replay`."""
    profile = f", profile {report['profile']}" if report["profile"] else ", no profile"
    columns = {
        "answers": "prompts",
        "tokens/step": "mat",
        "drafted/step": "drafted_per_step",
        "us/draft p50": "us_per_draft_p50",
        "p99": "us_per_draft_p99",
    }
    print_table(
        f"{report['nodes']} nodes, {' + '.join(report['sources'])}{profile}",
        ("category", *columns),
        ((category, *(row[cell] for cell in columns.values())) for category, row in report["categories"].items()),
    )
    if report["reliability"]["mean_gap"] is not None:
        typer.echo(f"predicted and observed acceptance differ by {report['reliability']['mean_gap']} on average")
    for key, title in (("peers", "tokens per step of others"), ("ablation", "tokens per step with parts off")):
        if key in report:
            _show_rows(title, report[key])
    for name, rows in report.get("simulated_drafters", {}).items():
        columns = next(iter(rows.values()))
        print_table(
            f"tokens in the time of a step, with a drafter {name}",
            ("category", *columns),
            ((category, *(f"{row[column]:.3f}" for column in columns)) for category, row in rows.items()),
        )
    for note in report["notes"]:
        typer.echo(note)


def show_recall(report: Mapping[str, Any]) -> None:
    """Print a report of `bench recall`."""
    typer.echo(f"{report['documents']} answers of {report['tokens']} tokens in the datastore")
    for category, row in report["categories"].items():
        typer.echo(
            f"{category}: {row['with']['mat']:.3f} tokens per step with them, {row['without']['mat']:.3f} without "
            f"({row['ratio']:.2f} times); {row['with']['us_per_draft_p50']} us a draft; an oracle's copies: "
            f"{row['oracle']['with']:.3f} and {row['oracle']['without']:.3f} ({row['oracle']['ratio']:.2f} times)"
        )


def show_drafting(report: Mapping[str, Any]) -> None:
    """Print a report of `bench drafting`."""
    for size, row in report["drafts"].items():
        typer.echo(
            f"draft of up to {size} nodes: {row['us_p50']} us median, {row['us_p99']} us 99th percentile; "
            f"within a replay: {row['us_in_replay_p50']} and {row['us_in_replay_p99']}"
        )
    for name, value in report.items():
        if name != "drafts":
            typer.echo(f"{name}: {value}")


def _show_rows(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of one number for each name and category."""
    categories = list(dict.fromkeys(category for row in rows.values() for category in row))

    def cell(row: Mapping[str, Any], category: str) -> str | None:
        value = row.get(category)
        value = value["mat"] if isinstance(value, dict) else value
        return None if value is None else f"{value:.2f}"

    table = ((name, *(cell(row, category) for category in categories)) for name, row in rows.items())
    print_table(title, ("", *categories), table)
