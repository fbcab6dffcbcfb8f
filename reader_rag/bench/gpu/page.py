"""The Markdown page of `bench gpu`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reader_rag.bench.figures.tables import markdown_table
from reader_rag.bench.gpu.generate import GenerateTime
from reader_rag.bench.gpu.steps import StepTime

_WAYS = ("dynamic", "called", "replayed")
_NOT_A_GPU = (
    "**Not measured yet on a GPU.** This machine has none: steps are called, not recorded, and the times say nothing "
    "about one; the page shows that the command runs. On a machine with one, this command measures it:"
)


def page_of(
    report: Mapping[str, Any],
    steps: Mapping[str, Sequence[StepTime] | str],
    generate: Sequence[GenerateTime],
    answers: Mapping[str, Mapping[str, Any]],
) -> str:
    """A page of everything that was measured.

    Args:
        report: "machine", as `bench.report.machine` has it, "is_gpu", "command" for a machine with a GPU,
            "memory_bytes" by name, "graphs": recorded and refused ones, and "attention": what was chosen for long
            contexts, as `LongContexts.chosen` has it.
        steps: Times of steps by type of weights, or why there are none.
        generate: Times of steps of `generate` of `transformers`.
        answers: Reports of `bench generate` by title, with "drafts": their kind; or "refused": why there is none.
    """
    parts = ["# One GPU, measured" if report["is_gpu"] else "# One GPU, not measured yet", ""]
    if not report["is_gpu"]:
        parts += [_NOT_A_GPU, "", "```bash", report["command"], "```", ""]
    machine = ((name, str(value).replace("|", "/")) for name, value in report["machine"].items())
    parts += ["## Machine", "", markdown_table(("what", "value"), machine)]
    parts += [
        "## Steps",
        "",
        "Median milliseconds of a step, up to the best tokens on the host. dynamic: every pass has the shape it needs. "
        "called: passes of few shapes. replayed: these as CUDA graphs.",
        "",
        *(part for weights, times in steps.items() for part in _steps_of(weights, times)),
        "## `generate` of transformers",
        "",
        "Mean milliseconds of a step with one token of each sequence, the same model in its own type of weights.",
        "",
        _generate_table(generate),
    ]
    for title, one in answers.items():
        parts += [f"## {title}", "", _answer_table(one)]
    parts += ["## Memory", "", markdown_table(("what", "MiB"), _mebibytes(report["memory_bytes"]))]
    parts += ["## Graphs", "", markdown_table(("what", "number"), report["graphs"].items())]
    parts += ["## Attention behind long contexts", "", _attention_table(report["attention"])]
    return "\n".join(parts)


def _steps_of(weights: str, times: Sequence[StepTime] | str) -> list[str]:
    table = f"Refused: {times}\n" if isinstance(times, str) else _step_table(times)
    return [f"### Weights in {weights}", "", table]


def _generate_table(times: Sequence[GenerateTime]) -> str:
    rows = [
        (one.rows, one.context, one.way, f"failed: {one.why}" if one.ms is None else f"{one.ms:.2f}") for one in times
    ]
    return markdown_table(("sequences", "behind", "cache", "ms"), rows)


def _attention_table(chosen: Mapping[tuple[int, int, int, int], bool] | None) -> str:
    """Where attention in two calls measured cheaper than in one."""
    if chosen is None:
        return "This model's attention runs in one call.\n"
    if not chosen:
        return "No pass was behind a context that is long enough for two calls.\n"
    rows = ((*shape, "two" if two else "one") for shape, two in sorted(chosen.items()))
    return markdown_table(
        ("rows", "positions of each", "past, at least", "columns behind it", "cheaper in calls"), rows
    )


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
    table = "" if "drafts" not in report else f"Drafts: {report['drafts']}.\n\n"
    table += markdown_table(("method", "tokens/s of decoding", "tokens/step", "ms/step"), rows)
    ratio = report["ratios"].get("reader/plain")
    if ratio is not None and ratio["total"] is not None:
        table += f"\nreader/plain: {ratio['total']:.2f} times over {report['prompts']} prompts.\n"
    return table


def _mebibytes(sizes: Mapping[str, int]) -> Iterable[tuple[str, str]]:
    return ((name, f"{size / 2**20:.1f}") for name, size in sizes.items())
