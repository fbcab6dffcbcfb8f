"""What `bench report` runs: commands, sections of them, and what they measure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """One command of a section.

    Attributes:
        label: What it measures, e.g. "float32"; unique within the section.
        arguments: Arguments of `reader-rag`; files as paths.
        minutes: Its budget: it is ended when it runs longer, and what earlier parts left of theirs is used up.
        has_report: Whether it prints a JSON report.
        timed_runs: Number of runs that take `--seconds`, and so end in time with fewer prompts; 0: none does.
    """

    label: str
    arguments: tuple[str | Path, ...]
    minutes: float
    has_report: bool = True
    timed_runs: int = 0

    @property
    def command(self) -> str:
        """The command line, with files by their names."""
        return shlex.join(["reader-rag", *(one.name if isinstance(one, Path) else one for one in self.arguments)])


@dataclass(frozen=True)
class Section:
    """Figures of one subject, in one table.

    Attributes:
        name: Names the section in `--only`, in files, and in the marks of pages.
        title: Heading.
        about: A sentence on what the table shows.
        parts: The commands.
        replays: Whether it reads recorded answers, which the section "record" makes where none are given.
    """

    name: str
    title: str
    about: str
    parts: tuple[Part, ...]
    replays: bool = False


@dataclass(frozen=True)
class Inputs:
    """What is measured.

    Attributes:
        model: Alias, folder or hub id of the model; a path is shown by its name.
        prompts: Prompts file.
        categories: Its categories.
        traces: Recorded answers; None: recorded by the first section.
        top8: The target's best next tokens of the traces; None: those recorded with the traces.
        work: Folder of files that are made on the way.
        limit: Most prompts of a category in the timed sections.
        max_tokens: Most tokens of an answer in the timed sections.
        minutes: Budget of all sections.
        quick: Whether sizes are as small as can be, so that no figure means anything.
    """

    model: str | Path
    prompts: Path
    categories: tuple[str, ...]
    traces: Path | None
    top8: Path | None
    work: Path
    limit: int = 10
    max_tokens: int = 128
    minutes: float = 60.0
    quick: bool = False
