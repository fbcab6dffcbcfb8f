"""The results of `bench report` as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Parts = Mapping[str, Mapping[str, Any]]
"""Outcomes by label, as `run_sections` keeps them."""
_VARIANTS = {
    "plain": "plain",
    "reader": "**reader-rag**",
    "hf": "`transformers` `generate`",
    "hf-lookup": "its prompt lookup",
    "llama-cpp": "llama.cpp",
}
_NO_MARKUP = str.maketrans("", "", "*`")


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown.

    Args:
        headings: One for each column.
        rows: A cell for each column: text, a number, or None for what was not measured.
    """
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value).replace("|", "\\|")


def _spread(ratio: Mapping[str, float | None]) -> str | None:
    """A ratio with its spread over the prompts."""
    if ratio["median"] is None:
        return None
    return f"{ratio['total']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _same(report: Mapping[str, Any]) -> str | None:
    """How many answers are those of plain decoding."""
    if "identical" not in report:
        return None
    same = report["identical"]
    return f"{same['compared'] - len(same['different'])} of {same['compared']}"


def _reports(parts: Parts) -> list[tuple[str, Any]]:
    """Labels and reports of the parts that have one."""
    return [(label, part["report"]) for label, part in parts.items() if part["report"] is not None]


def _variant(name: str) -> str:
    method, _, setting = name.partition(" ")
    return _VARIANTS.get(method, method) + (f", {setting}" if setting else "")


def _gguf_type(report: Mapping[str, Any]) -> str:
    """How the file that llama.cpp read is quantised, e.g. "Q4_1"."""
    return str(report["llama_cpp"]["type"]).removeprefix("MOSTLY_")


def plotted_speeds(parts: Parts) -> dict[str, dict[str, float]]:
    """Decoding tokens a second by method, then by type of the weights.

    Args:
        parts: Outcomes of the section "speed".
    """
    speeds: dict[str, dict[str, float]] = {}
    for label, report in _reports(parts):
        for name, row in report["methods"].items():
            held = _gguf_type(report) if name == "llama-cpp" else label
            speeds.setdefault(_variant(name).translate(_NO_MARKUP), {})[held] = row["decode_tokens_per_s"]
    return speeds


def _generate_tables(parts: Parts, first: str) -> str:
    """Every variant of every report, then the ratios."""
    rows, ratios = [], []
    for label, report in _reports(parts):
        for name, row in report["variants"].items():
            figures = ("prompt_tokens_per_s", "decode_tokens_per_s", "mat", "ms_per_step", "ttft_s", "question_s")
            memory = (row["cache_mb"], row["peak_mb"])
            held = _gguf_type(report) if name.startswith("llama-cpp") else label
            rows.append((held, _variant(name), *(row[figure] for figure in figures), *memory))
        for name, ratio in report["ratios"].items():
            other = report["methods"][name.removeprefix("reader/")]["variant"]
            same = _same(report) if other == "plain" else None
            ratios.append((label, _variant(other), _spread(ratio), _spread(ratio["questions"]), same))
    speeds = ("prompt tokens/s", "decoding tokens/s", "tokens a step", "ms a step", "first token s", "question s")
    table = markdown_table((first, "method", *speeds, "cache MB", "peak MB"), rows)
    headings = (first, "reader-rag is so many times as fast as", "in decoding", "in whole questions", "the same tokens")
    return f"{table}\n{markdown_table(headings, ratios)}"


def _speed(parts: Parts) -> str:
    return _generate_tables(parts, "type")


def _other_prompts(parts: Parts) -> str:
    return _generate_tables(parts, "prompts")


def _batches(parts: Parts) -> str:
    rows = []
    for _, reports in _reports(parts):
        for report in reports:
            plain, reader = report["methods"]["plain"], report["methods"]["reader"]
            ratio = report["ratios"]["reader/plain"]
            rows.append(
                (
                    *(report["batch"], report["prompts"], plain["decode_tokens_per_s"], reader["decode_tokens_per_s"]),
                    *(_spread(ratio), _spread(ratio["questions"]), reader["mat"], _same(report)),
                )
            )
    headings = ("at once", "prompts", "plain tokens/s", "reader-rag tokens/s", "ratio in decoding")
    return markdown_table((*headings, "in whole questions", "tokens a sequence and step", "the same tokens"), rows)


def _exactness(parts: Parts) -> str:
    rows = []
    for label, report in _reports(parts):
        rows.append(
            (
                *(label, report["answers"], report["tokens"], report["drafted"], report["accepted"]),
                *(report["differing_tokens"], report["differing_bits"], "yes" if report["bits_must_agree"] else "no"),
            )
        )
    headings = ("type", "answers", "tokens", "drafted", "accepted", "tokens that differ", "logits that differ")
    return markdown_table((*headings, "bits must agree"), rows)


def _memory(parts: Parts) -> str:
    rows = [
        (label, start, *(row[f"{name}_mb"] for name in ("before", "peak", "after", "tensors")))
        for label, report in _reports(parts)
        for start, row in report["starts"].items()
    ]
    return markdown_table(("type", "start", "before MB", "peak MB", "after MB", "tensors MB"), rows)


def drafters(parts: Parts) -> dict[str, dict[str, float]]:
    """Tokens per step by drafter and category, this package's first.

    Args:
        parts: Outcomes of the section "tokens-per-step".
    """
    found: dict[str, dict[str, float]] = {}
    for _, report in _reports(parts):
        own = {category: row["mat"] for category, row in report["categories"].items()}
        found["reader-rag"] = own
        for name, row in report.get("peers", {}).items():
            found[name] = {category: cell["mat"] for category, cell in row.items()}
    return found


def _tokens_per_step(parts: Parts) -> str:
    found = drafters(parts)
    ablation: dict[str, dict[str, float]] = {}
    for _, report in _reports(parts):
        ablation |= {f"reader-rag {name}": row for name, row in report.get("ablation", {}).items() if name != "all"}
    categories = list(dict.fromkeys(category for row in found.values() for category in row))
    rows = [
        (f"**{name}**" if name == "reader-rag" else name, *(row.get(category) for category in categories))
        for name, row in (found | ablation).items()
    ]
    return markdown_table(("drafter", *categories), rows)


def _drafting(parts: Parts) -> str:
    rows = [
        (f"{size} nodes", row["us_p50"], row["us_p99"], row["us_in_replay_p50"], row["us_in_replay_p99"])
        for _, report in _reports(parts)
        for size, row in report["drafts"].items()
    ]
    headings = ("tree of up to", "median us", "99th percentile", "within a replay, median", "99th percentile")
    return markdown_table(headings, rows)


def _recall(parts: Parts) -> str:
    rows = [
        (category, row["with"]["mat"], row["without"]["mat"], row["ratio"], row["with"]["us_per_draft_p50"])
        for _, report in _reports(parts)
        for category, row in report["categories"].items()
    ]
    return markdown_table(("category", "with earlier answers", "without", "ratio", "us a draft"), rows)


def _vllm(parts: Parts) -> str:
    rows = [
        (label, name, row["decode_tokens_per_s"], row.get("mat"))
        for label, report in _reports(parts)
        for name, row in report["methods"].items()
    ]
    return markdown_table(("type", "drafter", "tokens/s", "tokens a step"), rows)


def _record(parts: Parts) -> str:
    return ""


TABLES: Mapping[str, Callable[[Parts], str]] = {
    "speed": _speed,
    "other-prompts": _other_prompts,
    "batches": _batches,
    "exactness": _exactness,
    "memory": _memory,
    "record": _record,
    "tokens-per-step": _tokens_per_step,
    "drafting": _drafting,
    "recall": _recall,
    "vllm": _vllm,
}
"""The tables of a section, by its name."""


def overview(parts: Parts) -> str:
    """The short table of speeds for README.

    Args:
        parts: Outcomes of the section "speed".
    """
    methods = [name for name in _VARIANTS if name != "reader"]
    shown = [name for name in methods if any(name in report["methods"] for _, report in _reports(parts))]
    rows = []
    for label, report in _reports(parts):
        found = report["methods"]
        speeds = (found[name]["decode_tokens_per_s"] if name in found else None for name in shown)
        ratio = report["ratios"].get("reader/hf") or report["ratios"]["reader/plain"]
        ours = found["reader"]["decode_tokens_per_s"]
        rows.append((label, report["prompts"], *speeds, f"**{_cell(ours)}**", _spread(ratio), _same(report)))
    types = {_gguf_type(report) for _, report in _reports(parts) if "llama_cpp" in report}
    titles = _VARIANTS | {"llama-cpp": f"llama.cpp ({', '.join(sorted(types))})"}
    headings = ("type", "prompts", *(titles[name] for name in shown), "reader-rag")
    return markdown_table((*headings, "times `generate`", "the same tokens as plain"), rows)
