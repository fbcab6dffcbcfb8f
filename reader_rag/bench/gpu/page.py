"""The Markdown page of `bench gpu`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reader_rag.bench.figures.tables import markdown_table
from reader_rag.bench.gpu.steps import StepTime

_WAYS = ("dynamic", "called", "replayed")
_NOT_A_GPU = (
    "**This is not a GPU.** Steps are called, not recorded, and the times say nothing about one: the page shows that "
    "the command runs."
)


def page_of(report: Mapping[str, Any], steps: Sequence[StepTime], answers: Mapping[str, Mapping[str, Any]]) -> str:
    """A page of everything that was measured.

    Args:
        report: "machine", as `bench.report.machine` has it, "is_gpu", "memory_bytes" by name, and "graphs": recorded
            and refused ones.
        steps: Times of steps.
        answers: Reports of `bench generate` by title, or "refused": why there is none.
    """
    parts = ["# One GPU, measured", ""]
    if not report["is_gpu"]:
        parts += [_NOT_A_GPU, ""]
    machine = ((name, str(value).replace("|", "/")) for name, value in report["machine"].items())
    parts += ["## Machine", "", markdown_table(("what", "value"), machine)]
    parts += [
        "## Steps",
        "",
        "Median milliseconds of a step, up to the best tokens on the host. dynamic: every pass has the shape it needs. "
        "called: passes of few shapes. replayed: these as CUDA graphs.",
        "",
        _step_table(steps),
    ]
    for title, one in answers.items():
        parts += [f"## {title}", "", _answer_table(one)]
    parts += ["## Memory", "", markdown_table(("what", "MiB"), _mebibytes(report["memory_bytes"]))]
    parts += ["## Graphs", "", markdown_table(("what", "number"), report["graphs"].items())]
    return "\n".join(parts)


def _step_table(steps: Sequence[StepTime]) -> str:
    shapes = dict.fromkeys((one.rows, one.width, one.context) for one in steps)
    by_shape = {(one.way, one.rows, one.width, one.context): one.ms for one in steps}
    rows = []
    for shape in shapes:
        times = [by_shape.get((way, *shape)) for way in _WAYS]
        rows.append((*shape, *("-" if ms is None else f"{ms:.2f}" for ms in times)))
    return markdown_table(("sequences", "positions of each", "behind", *_WAYS), rows)


def _answer_table(report: Mapping[str, Any]) -> str:
    if "refused" in report:
        return f"Refused: {report['refused']}\n"
    rows = [
        (method, f"{run['decode_tokens_per_s']:.1f}", str(run["mat"]), str(run["ms_per_step"]))
        for method, run in report["methods"].items()
    ]
    table = markdown_table(("method", "tokens/s of decoding", "tokens/step", "ms/step"), rows)
    ratio = report["ratios"].get("reader/plain")
    if ratio is not None and ratio["total"] is not None:
        table += f"\nreader/plain: {ratio['total']:.2f} times over {report['prompts']} prompts.\n"
    return table


def _mebibytes(sizes: Mapping[str, int]) -> Iterable[tuple[str, str]]:
    return ((name, f"{size / 2**20:.1f}") for name, size in sizes.items())
