"""`reader-rag bench datastore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from reader_rag.bench import options
from reader_rag.bench.output import print_report, print_table, progress


def datastore(
    tokens: Annotated[str, typer.Option(help="Sizes in tokens, comma-separated.")] = "1e6,1e7",
    vocabulary_bits: Annotated[
        int, typer.Option(min=16, max=17, help="Bits of a token id. 17: derived from the default model's 16-bit ids.")
    ] = 16,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps text and datastores for the next run.", show_default="a temporary one"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the time of a search by size: a .svg or .png file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure datastores of several sizes.

    Builds them from text on this machine; reports building, bytes, opening and searching.
    """
    sizes = options.numbers("--tokens", tokens, least=1000)
    import tempfile

    from reader_rag.bench.datastore.measurements import installed_text, measure_datastore, widened

    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        text = installed_text(max(sizes) + max(sizes) // 50 + 100_000, place, progress())
        available = int(len(text.tokens) * 0.99)
        if vocabulary_bits == 17:
            text = widened(text)
        vocabulary = 1 << 17 if vocabulary_bits == 17 else 49_152
        rows = measure_datastore(text, sizes, vocabulary, place, progress())
    if plot is not None:
        from reader_rag.bench.plots import plot_datastore

        plot_datastore(rows, plot)
    report = {"vocabulary_bits": vocabulary_bits, "vocabulary": vocabulary, "text_tokens": available, "rows": rows}
    print_report(report, as_json, _show)
    if available < max(sizes):
        typer.echo(f"There are only {available} tokens of text on this machine; larger sizes have as many.", err=True)


def _show(report: dict[str, Any]) -> None:
    columns = [_measured(row) for row in report["rows"]]
    print_table(
        f"datastores of a vocabulary of {report['vocabulary']} tokens",
        ["", *(f"{row['tokens'] / 1e6:g} M tokens" for row in report["rows"])],
        ([name, *(column[name] for column in columns)] for name in columns[0]),
    )


def _measured(row: dict[str, Any]) -> dict[str, float | None]:
    """A column of the table: what is shown of one size, by name."""
    return {
        "documents": row["documents"],
        "bytes a token": row["bytes_per_token"],
        "sorted, million tokens/s": row["sorted_tokens_per_s"] / 1e6,
        "opened, ms": row["open_ms"],
        "resident when opened, MB": row["resident_mb_opened"],
        **{f"resident after {count} searches, MB": row[f"resident_mb_searched_{count}"] for count in (100, 4000)},
        **{
            f"{kind} text, {part.replace('_', ' ')}": row["queries"][kind][part]
            for kind in ("new", "copied")
            for part in ("us_p50", "us_p99", "draft_us_p50", "draft_us_p99", "longest_p50")
        },
        "segments before merging": row["as_built"]["segments"],
        "new text in those, us p50": row["as_built"]["us_p50"],
        "new text in those, us p99": row["as_built"]["us_p99"],
    }
