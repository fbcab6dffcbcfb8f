"""Runs the commands of `bench report`, each in a process of its own, and keeps their reports in one file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

import reader_rag
from reader_rag.bench.figures.parts import Part, Section
from reader_rag.bench.figures.plan import Absent
from reader_rag.errors import ConfigError
from reader_rag.util.cpu import cpu_features, cpu_name
from reader_rag.util.files import atomic_path

REPORT_FILE = "report.json"
_FORMAT = 1
_PACKAGES = ("torch", "transformers", "numba", "numpy", "xllamacpp", "arctic-inference", "vllm")
"""Packages whose versions decide the figures."""
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512vnni", "avx512bf16", "amx-int8", "neon", "dotprod", "i8mm")


@dataclass(frozen=True)
class Finished:
    """The outcome of a command.

    Attributes:
        seconds: Seconds that it ran.
        report: Its JSON report; None: it printed none.
        error: Why it failed, in a line; None: it did not.
    """

    seconds: float
    report: Any = None
    error: str | None = None


Runner = Callable[[Part, float], Finished]
"""Runs a part within so many seconds."""


def run_command(part: Part, seconds: float) -> Finished:
    """Run a part as a process of this Python.

    Args:
        part: The command.
        seconds: It is ended, with the processes that it started, when it runs longer.
    """
    command = [sys.executable, "-m", "reader_rag.cli.main", *map(str, part.arguments)]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            process.communicate()
            return Finished(time.monotonic() - started, None, f"ended after its {seconds / 60:.1f} minutes")
        except BaseException:  # Ctrl-C leaves nothing running
            _kill(process.pid)
            raise
    taken = time.monotonic() - started
    report, problem = (None, None) if not part.has_report else _json_of(out)
    error = None
    if process.returncode:
        error = f"exit status {process.returncode}: {_last_line(err)}"
    elif problem is not None:
        error = problem
    return Finished(taken, report, error)


def _kill(pid: int) -> None:
    """End a process and those it started."""
    try:
        parent = psutil.Process(pid)
        for process in (*parent.children(recursive=True), parent):
            process.kill()
    except psutil.NoSuchProcess:
        return


def _json_of(out: bytes) -> tuple[Any, str | None]:
    try:
        return json.loads(out), None
    except ValueError as cause:
        return None, f"it printed no JSON report ({cause})"


def _last_line(err: bytes) -> str:
    lines = err.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip().removeprefix("error: ") if lines else "it gave no reason"


def run_sections(
    sections: Sequence[Section],
    report: dict[str, Any],
    folder: Path,
    tell: Callable[[str], None],
    run: Runner = run_command,
) -> list[str]:
    """Run sections one after the other; a part that fails does not stop the others.

    Args:
        sections: What to run.
        report: Gets the outcome of each part; sections of earlier runs stay in it. See `new_report`.
        folder: `report.json` is written there after each part, so that an interrupted run keeps what is finished.
        tell: Called with a line about each part.
        run: Runs a part.

    Returns:
        A line for each part that failed.
    """
    about = {key: report[key] for key in ("version", "commit", "date", "processor")}
    failed, spared = [], 0.0
    for section in sections:
        rows: dict[str, Any] = {}
        report["sections"][section.name] = {"title": section.title, "about": section.about, "parts": rows}
        for part in section.parts:
            allowed = 60 * part.minutes + spared
            done = run(part, allowed)
            spared = max(allowed - done.seconds, 0.0)
            rows[part.label] = {
                **about,
                "command": part.command,
                "seconds": round(done.seconds, 1),
                "error": done.error,
                "report": done.report,
            }
            save_report(report, folder)
            if done.error is not None:
                failed.append(f"{section.name}, {part.label}: {done.error}")
            tell(
                f"{section.name}, {part.label}: {done.seconds:.0f} s{'' if done.error is None else ' - ' + done.error}"
            )
    return failed


def new_report(absent: Sequence[Absent], prompts: str) -> dict[str, Any]:
    """A report without sections: machine, versions and commit.

    Args:
        absent: Peers that are left out.
        prompts: What the prompts are.
    """
    return {
        "format": _FORMAT,
        "version": reader_rag.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": cpu_name(),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in cpu_features()],
        "cores": psutil.cpu_count(logical=True),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "prompts": prompts,
        "absent": [asdict(one) for one in absent],
        "sections": {},
    }


def keep_results(report: dict[str, Any], before: dict[str, Any], names: Iterable[str] | None = None) -> None:
    """Keep results of an earlier run, which name their own commit, date and processor, in a new report.

    Args:
        report: A new report; see `new_report`. Packages that have results are not absent any more.
        before: As `read_report` returns it.
        names: Sections to keep; None: all.
    """
    wanted = set(before["sections"]) if names is None else set(names)
    report["sections"] = {name: section for name, section in before["sections"].items() if name in wanted}
    if names is None:
        report["packages"] = before["packages"] | report["packages"]
        missing = {one["package"] for one in before["absent"]}
        report["absent"] = [one for one in report["absent"] if one["package"] in missing]
    report["absent"] = [one for one in report["absent"] if one["package"] not in report["sections"]]


def set_beside(report: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Put the speeds of another run beside those of a report, which shows how much they differ from run to run.

    Args:
        report: Its section "speed" gets them.
        before: As `read_report` returns it.
    """
    others = before["sections"].get("speed", {"parts": {}})["parts"]
    for label, part in report["sections"].get("speed", {"parts": {}})["parts"].items():
        other = others.get(label, {"report": None})
        if part["report"] is not None and other["report"] is not None:
            speeds = {name: row["decode_tokens_per_s"] for name, row in other["report"]["methods"].items()}
            part["before"] = {name: other[name] for name in ("commit", "date", "processor")} | {"speeds": speeds}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source that runs, with "+" if files were changed since; None: it is no checkout of git."""
    package = Path(reader_rag.__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != package.parent or _git(package, "ls-files", "__init__.py") == "":
        return None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{_git(package, 'rev-parse', '--short=10', 'HEAD')}{'+' if changed else ''}"


def _git(folder: Path, *arguments: str) -> str | None:
    """What a git command prints; None if it fails, or there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def save_report(report: dict[str, Any], folder: Path) -> None:
    """Write `report.json`.

    Args:
        report: The report.
        folder: Its folder.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / REPORT_FILE) as partial:
            partial.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as cause:
        raise ConfigError(f"cannot write {folder / REPORT_FILE}: {cause.strerror or cause}") from cause


def read_report(folder: Path) -> dict[str, Any]:
    """Read `report.json`.

    Args:
        folder: Its folder.

    Raises:
        ConfigError: There is none, or it is of another form.
    """
    path = folder / REPORT_FILE
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["format"] != _FORMAT:
            raise ValueError(f"it has the form {report['format']}, and this version reads {_FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise ConfigError(f"cannot read {path} ({cause}): write it with reader-rag bench report --out") from cause
    assert isinstance(report, dict)
    return report
