"""The pages of `bench report`: one with all results, and blocks in other pages that hold a table of it.

A block begins with `<!-- figures: NAME -->` and ends with `<!-- end of figures -->`; NAME is a section, a view of one,
or "overview". What stands between is written by `update_page`, and compared by `stale_blocks`. So a figure in such a
block is one of `report.json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reader_rag.bench.figures.tables import TABLES, VIEWS, drafters, overview, plotted_speeds, reliability, searched
from reader_rag.errors import ConfigError, MissingDependencyError
from reader_rag.util.files import atomic_path

PAGE_FILE = "README.md"
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", flags=re.DOTALL)
_OVERVIEW = "overview"
_PLOTS = {"tree-size": ("reliability",)}
"""Plots of a section where they are not of its name."""


def section_markdown(report: Mapping[str, Any], name: str, *, heading: bool = False) -> str:
    """A section's tables, with the commands, the machine and what failed.

    Args:
        report: As `read_report` returns it.
        name: Name of the section, or of a view of one.
        heading: Begin with the section's heading and sentence.
    """
    source, make_table = VIEWS[name] if name in VIEWS else (name, TABLES[name])
    section = report["sections"][source]
    parts: dict[str, dict[str, Any]] = section["parts"]
    lines = [f"## {section['title']}\n\n{section['about']}\n"] if heading else []
    table = make_table(parts)
    if table:
        lines.append(table)
    lines.append("<!-- types-only -->\n```bash\n" + "\n".join(part["command"] for part in parts.values()) + "\n```\n")
    notes = (
        note for part in parts.values() if isinstance(part["report"], dict) for note in part["report"].get("notes", ())
    )
    lines += [f"Note: {note}.\n" for note in dict.fromkeys(notes)]
    lines += [f"Failed: {label}: {part['error']}.\n" for label, part in parts.items() if part["error"] is not None]
    lines.append(_measured(report, parts))
    return "\n".join(lines)


def _measured(report: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Where and when the parts were measured."""
    found = dict.fromkeys((part["version"], part["commit"], part["date"], part["processor"]) for part in parts.values())
    runs = []
    for version, commit, date, processor in found:
        at = f" at commit {commit}" if commit else ""
        runs.append(f"reader-rag {version}{at}, {date}, {processor}")
    asks = any(mark in part["command"] for part in parts.values() for mark in (" --prompts ", ".jsonl"))
    return f"Measured with {'; '.join(runs)}{'; prompts: ' + report['prompts'] if asks else ''}.\n"


def block_markdown(report: Mapping[str, Any], name: str) -> str | None:
    """What stands in a block.

    Args:
        report: As `read_report` returns it.
        name: Name of the block.

    Returns:
        The Markdown; None if the report has no result for it.
    """
    source = "speed" if name == _OVERVIEW else VIEWS[name][0] if name in VIEWS else name
    section = report["sections"].get(source)
    if section is None or all(part["report"] is None for part in section["parts"].values()):
        return None
    if name == _OVERVIEW:
        return f"{overview(section['parts'])}\n{_measured(report, section['parts'])}"
    return section_markdown(report, name)


def _blocks(text: str, report: Mapping[str, Any], page: str, use: Callable[[str, str, str], str]) -> str:
    """Replace the content of each block that the report has results for by what `use` returns."""

    def replace(match: re.Match[str]) -> str:
        name = match[2]
        if name not in (_OVERVIEW, *TABLES, *VIEWS):
            known = ", ".join((_OVERVIEW, *TABLES, *VIEWS))
            raise ConfigError(f"{page}: there are no figures {name}: name one of {known}")
        made = block_markdown(report, name)
        old = match[0][len(match[1]) : -len(match[3])]
        return match[1] + (old if made is None else use(name, old, made)) + match[3]

    return _BLOCK.sub(replace, text)


def stale_blocks(text: str, report: Mapping[str, Any], page: str) -> tuple[list[str], list[str]]:
    """Compare the blocks of a page with a report.

    Args:
        text: The page.
        report: As `read_report` returns it.
        page: Name of the page, for errors.

    Returns:
        Names of the blocks that were compared, and of those that differ. Blocks without a result in the report are
        not compared.
    """
    compared: list[str] = []
    stale: list[str] = []

    def compare(name: str, old: str, made: str) -> str:
        compared.append(name)
        if old != made:
            stale.append(name)
        return old

    _blocks(text, report, page, compare)
    return compared, stale


def pages_of(path: Path) -> list[Path]:
    """The pages to update.

    Args:
        path: A page; or a folder, of which the Markdown files with blocks are taken.

    Raises:
        ConfigError: The folder has no page with a block.
    """
    if not path.is_dir():
        return [path]
    found = sorted(page for page in path.rglob("*.md") if _BLOCK.search(page.read_text(encoding="utf-8")))
    if not found:
        raise ConfigError(f"no page in {path} has a block of figures")
    return found


def update_page(path: Path, report: Mapping[str, Any]) -> list[str]:
    """Write the results of a report into the blocks of a page.

    Args:
        path: The page.
        report: As `read_report` returns it.

    Returns:
        Names of the blocks that were written.

    Raises:
        ConfigError: The page cannot be read or written, has no block, or one of an unknown name.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {path}: {cause}") from cause
    if _BLOCK.search(text) is None:
        raise ConfigError(
            f"{path} has no block of figures: write <!-- figures: overview --> and <!-- end of figures -->"
        )
    written: list[str] = []

    def write(name: str, _: str, made: str) -> str:
        written.append(name)
        return made

    _write(path, _blocks(text, report, str(path), write))
    return written


def write_page(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the page with all results, and its plots.

    Args:
        report: As `read_report` returns it.
        folder: Gets README.md, and SVG files if matplotlib is installed.

    Returns:
        Names of the plots.

    Raises:
        ConfigError: A file cannot be written.
    """
    plots = _write_plots(report, folder)
    lines = [
        "# Report of all benchmarks",
        "",
        f"Written by `reader-rag bench report`. {_machine(report)}",
        "",
        *(f"- {one['package']}: {one['what']} left out ({one['reason']})" for one in report["absent"]),
        "",
    ]
    for name in report["sections"]:
        lines.append(section_markdown(report, name, heading=True))
        lines += [f"![{plot}]({plot}.svg)\n" for plot in _PLOTS.get(name, (name,)) if f"{plot}.svg" in plots]
    _write(folder / PAGE_FILE, "\n".join(lines).rstrip() + "\n")
    return plots


def _machine(report: Mapping[str, Any]) -> str:
    sets = f" ({', '.join(report['instruction_sets'])})" if report["instruction_sets"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    machine = f"{report['processor']}{sets}, {report['cores']} cores, {report['memory_gb']:.0f} GB, {report['system']}"
    return (
        f"Last run on {report['date']}: {machine}, Python {report['python']}, {packages}. Ratios are those of all "
        "tokens or seconds, with the least and greatest of a prompt in brackets."
    )


def _write_plots(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what has results; nothing where matplotlib is missing, which the report names."""
    from reader_rag.bench.plots import plot_bars, plot_datastore, plot_reliability

    parts = {name: section["parts"] for name, section in report["sections"].items()}
    drawn: dict[str, Callable[[Path], None]] = {}
    if speeds := plotted_speeds(parts.get("speed", {})):
        drawn["speed"] = lambda path: plot_bars(speeds, "decoding tokens/s", path)
    if steps := drafters(parts.get("tokens-per-step", {})):
        drawn["tokens-per-step"] = lambda path: plot_bars(steps, "tokens per step", path)
    if bins := reliability(parts.get("tokens-per-step", {})):
        drawn["reliability"] = lambda path: plot_reliability(bins, path)
    if sizes := searched(parts.get("datastore", {})):
        drawn["datastore"] = lambda path: plot_datastore(sizes, path)
    try:
        for name, draw in drawn.items():
            draw(folder / f"{name}.svg")
    except MissingDependencyError:  # listed as an absent package
        return []
    return [f"{name}.svg" for name in drawn]


def _write(path: Path, text: str) -> None:
    try:
        with atomic_path(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise ConfigError(f"cannot write {path}: {cause.strerror or cause}") from cause
