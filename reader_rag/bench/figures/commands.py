"""`reader-rag bench report`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reader_rag.bench import options
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from reader_rag.bench.figures.parts import Inputs, Section
    from reader_rag.bench.figures.plan import Absent

_ANSWERS = 20
"""Local prompts of each category."""


def report(
    out: Annotated[Path, typer.Option("--out", help="Folder of report.json, README.md and plots.")],
    prompts: options.Prompts = None,
    traces: Annotated[
        Path | None,
        typer.Option(help="Recorded answers to count tokens per step on.", show_default="recorded on the way"),
    ] = None,
    top8: Annotated[
        Path | None, typer.Option("--top8", help="With --traces: npz file of the best next tokens.")
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts of a category in the timed sections.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=4, help="Most tokens of an answer.")] = 128,
    minutes: Annotated[float, typer.Option(min=0.1, help="Budget of all sections together.")] = 60.0,
    only: Annotated[str, typer.Option(help="Sections, comma-separated; the others stay as report.json has them.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Try all commands on a tiny random model: no figure of it means anything.")
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Run nothing: write tables and plots of report.json again.")
    ] = False,
    before: Annotated[
        Path | None, typer.Option(help="Folder of another report: its speeds stand beside these, as `repeated`.")
    ] = None,
    update: Annotated[
        list[Path] | None,
        typer.Option(
            "--update",
            help="Page whose blocks of figures are written again, or folder of such pages, e.g. README.md; repeatable.",
        ),
    ] = None,
) -> None:
    """Measure what README and docs quote.

    Writes tables, plots and JSON: speed beside transformers and llama.cpp, first tokens, whole questions, batches,
    exactness, memory, and tokens per step beside other drafters. Each section is one or more commands of reader-rag,
    which the report shows, each with a budget of minutes. A peer whose package is missing is named and left out. A
    section that fails is reported, and the others go on. Exit status: 1 if one failed.
    """
    from reader_rag.bench.figures.pages import pages_of, update_page, write_page
    from reader_rag.bench.figures.plan import APART, absent_peers, plan
    from reader_rag.bench.figures.run import (
        REPORT_FILE,
        keep_results,
        new_report,
        read_report,
        run_sections,
        save_report,
        set_beside,
    )

    failed: list[str] = []
    if render:
        found = read_report(out)
    else:
        if top8 is not None and traces is None:
            raise ConfigError("--top8 goes with --traces")
        with tempfile.TemporaryDirectory(prefix="reader-rag-report-") as folder:
            work = Path(folder)
            inputs, about = _inputs(work, prompts, traces, top8, (model, limit, max_tokens, minutes), quick=quick)
            absent = absent_peers(inputs.model)
            sections = _wanted(plan(inputs, absent), options.names(only))
            _tell_start(sections, absent)
            found = new_report(absent, about)
            if (out / REPORT_FILE).exists():
                keep_results(found, read_report(out), None if only else APART)
            failed = run_sections(sections, found, out, lambda line: typer.echo(line, err=True))
    if before is not None:
        set_beside(found, read_report(before))
        save_report(found, out)
    plots = write_page(found, out)
    typer.echo(f"{', '.join(('report.json', 'README.md', *plots))} in {out}")
    for page in (page for path in update or [] for page in pages_of(path)):
        typer.echo(f"{page}: wrote {', '.join(update_page(page, found)) or 'nothing'}")
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    if failed:
        raise typer.Exit(1)


def _inputs(
    work: Path,
    prompts: Path | None,
    traces: Path | None,
    top8: Path | None,
    settings: tuple[str, int, int, float],
    *,
    quick: bool,
) -> tuple[Inputs, str]:
    """What is measured, and what the report says of the prompts."""
    from reader_rag.bench.figures.inputs import chosen_prompts, quick_inputs
    from reader_rag.bench.figures.parts import Inputs

    if quick:
        return quick_inputs(work), "a trial on a random model, whose figures mean nothing"
    path, categories, about = chosen_prompts(prompts, _ANSWERS, work)
    for file in (traces, top8):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file}: there is no such file")
    model, limit, max_tokens, minutes = settings
    return Inputs(model, path, categories, traces, top8, work, limit, max_tokens, minutes), about


def _wanted(sections: list[Section], names: list[str]) -> list[Section]:
    """The sections that are named, all if none is."""
    known = [section.name for section in sections]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"--only: no section {', '.join(unknown)}; there are {', '.join(known)}")
    replays = any(section.replays for section in sections if section.name in names)
    if replays and "record" in known and "record" not in names:
        names = ["record", *names]
    return [section for section in sections if not names or section.name in names]


def _tell_start(sections: list[Section], absent: tuple[Absent, ...]) -> None:
    minutes: Any = sum(part.minutes for section in sections for part in section.parts)
    typer.echo(f"{', '.join(section.name for section in sections)}: at most {minutes:.0f} minutes", err=True)
    for one in absent:
        typer.echo(f"left out: {one.what} ({one.package}: {one.reason})", err=True)
