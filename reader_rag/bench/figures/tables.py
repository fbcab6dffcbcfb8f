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
_OWN = "reader-rag"
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
        found[_OWN] = own
        for name, row in report.get("peers", {}).items():
            found[name] = {category: cell["mat"] for category, cell in row.items()}
    return found


def reliability(parts: Parts) -> list[Mapping[str, float]]:
    """Predicted and observed acceptance, as `bench replay` counts them.

    Args:
        parts: Outcomes of the section "tokens-per-step".
    """
    return [row for _, report in _reports(parts) for row in report.get("reliability", {}).get("bins", ())]


def _by_category(title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each name, a column for each category."""
    categories = list(dict.fromkeys(category for row in rows.values() for category in row))
    return markdown_table(
        (title, *categories), ((name, *(row.get(category) for category in categories)) for name, row in rows.items())
    )


def _ablation(parts: Parts) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for _, report in _reports(parts):
        found |= {f"reader-rag {name}": row for name, row in report.get("ablation", {}).items() if name != "all"}
    return found


def _peers(parts: Parts) -> dict[str, dict[str, float]]:
    found = drafters(parts)
    return {f"**{_OWN}**": found.pop(_OWN), **found}


def _tokens_per_step(parts: Parts) -> str:
    return _by_category("drafter", _peers(parts) | _ablation(parts))


def _beside_peers(parts: Parts) -> str:
    return _by_category("drafter", _peers(parts))


def _with_parts_off(parts: Parts) -> str:
    return _by_category("parts", {f"**{_OWN}**": drafters(parts)[_OWN], **_ablation(parts)})


def _chains(parts: Parts) -> str:
    """The drafters that propose chains, as vLLM verifies them."""
    chains = {
        name: row
        for name, row in drafters(parts).items()
        if name.startswith(("reader chain", "vllm-")) or name == "suffix-decoding"
    }
    return _by_category("proposer", chains)


def _tree_size(parts: Parts) -> str:
    reports = _reports(parts)
    rows = {
        label: {category: row["mat"] for category, row in report["categories"].items()}
        | {"gap": report["reliability"]["mean_gap"]}
        for label, report in reports
    }
    return _by_category("tree of up to", rows)


def _drafting(parts: Parts) -> str:
    reports = [report for _, report in _reports(parts)]
    rows = [
        (f"{size} nodes", row["us_p50"], row["us_p99"], row["us_in_replay_p50"], row["us_in_replay_p99"])
        for report in reports
        for size, row in report["drafts"].items()
    ]
    headings = ("tree of up to", "median us", "99th percentile", "within a replay, median", "99th percentile")
    others = [
        (title, cell)
        for report in reports
        for key, value in report.items()
        if (title := _DRAFTING.get(key)) is not None
        for cell in (value["us_p50_one_thread"] if isinstance(value, dict) else value,)
    ]
    return f"{markdown_table(headings, rows)}\n{markdown_table(('besides', ''), others)}"


_DRAFTING = {
    "us_per_token_followed_p50": "following a token, us",
    "step_of_32_rows_of_4000_tokens": "a step of 32 rows of 4,000 tokens with a chain each, us",
    "step_of_256_rows_of_4000_tokens": "a step of 256 rows, us",
    "ms_to_index_32000": "indexing 32,000 tokens, ms",
    "index_bytes_per_token": "bytes a token of the index",
    "first_use_s": "first use in a new process, s",
}
"""Titles of the other figures of `bench drafting`."""


def _recall(parts: Parts) -> str:
    rows = [
        (label, category, row["with"]["mat"], row["without"]["mat"], row["ratio"], row["with"]["us_per_draft_p50"])
        for label, report in _reports(parts)
        for category, row in report["categories"].items()
    ]
    return markdown_table(("asked", "category", "with earlier answers", "without", "ratio", "us a draft"), rows)


def _int8(parts: Parts) -> str:
    rows = [
        (category, row["tokens"], f"{row['agreement']:.4f}", f"{row['mean_kl']:.5f}", _of(row))
        for _, report in _reports(parts)
        for category, row in (*report["categories"].items(), ("all", report["all"]))
    ]
    return markdown_table(("category", "tokens", "agree", "KL, nats", "answers that differ"), rows)


def _of(row: Mapping[str, Any]) -> str:
    return f"{len(row['different'])} of {row['answers']}"


def _datastore(parts: Parts) -> str:
    """A row for each figure, a column for each size."""
    columns = searched(parts)

    def times(row: Mapping[str, Any]) -> str:
        return f"{row['us_p50']:.0f}, {row['us_p99']:.0f}"

    rows: list[tuple[str, Callable[[Any], Any]]] = [
        ("search, new text: median, 99th percentile, us", lambda row: times(row["queries"]["new"])),
        ("search, copied text, us", lambda row: times(row["queries"]["copied"])),
        ("search before merging, us", lambda row: times(row["as_built"])),
        ("segments before merging", lambda row: row["as_built"]["segments"]),
        ("search and tree of 64 nodes, new text, median us", lambda row: row["queries"]["new"]["draft_us_p50"]),
        ("longest match in new text, median", lambda row: f"{row['queries']['new']['longest_p50']:.0f}"),
        ("bytes a token on the disk", lambda row: row["bytes_per_token"]),
        ("sorting, million tokens/s", lambda row: row["sorted_tokens_per_s"] / 1e6),
        ("opening, ms", lambda row: row["open_ms"]),
        ("resident when opened, MB", lambda row: row["resident_mb_opened"]),
        ("after 100 searches, MB", lambda row: row["resident_mb_searched_100"]),
        ("after 4,000 searches, MB", lambda row: row["resident_mb_searched_4000"]),
    ]
    headings = ("tokens", *(f"{column['tokens'] / 1e6:.3g} M" for column in columns))
    return markdown_table(headings, ((title, *map(value, columns)) for title, value in rows))


def searched(parts: Parts) -> list[Mapping[str, Any]]:
    """The rows of `bench datastore`, one for each size.

    Args:
        parts: Outcomes of the section "datastore".
    """
    return [row for _, report in _reports(parts) for row in report["rows"]]


def _cache(parts: Parts) -> str:
    rows = [
        (
            *(run["batch"], run["policy"], run["ms_per_step_p50"], run["ms_per_step_mean"], run["moved_bytes"] / 1e6),
            *(run["moves_per_entry"], run["rearrangements"], run["peak_bytes"] / 1e6),
        )
        for _, report in _reports(parts)
        for run in report["runs"]
    ]
    times = ("ms a step, median", "mean")
    return markdown_table(
        ("sequences", "policy", *times, "moved MB", "moves of an entry", "rearranged", "peak MB"), rows
    )


def _vllm(parts: Parts) -> str:
    rows = []
    for label, report in _reports(parts):
        for category, found in report["categories"].items():
            for name, row in found["methods"].items():
                ratio = found["ratios"].get(f"reader/{name}")
                rows.append(
                    (
                        *(label, f"{category} ({found['prompts']})", _VARIANTS.get(name, name)),
                        *(row["decode_tokens_per_s"], row["mat"], None if ratio is None else _spread(ratio)),
                    )
                )
    headings = ("at once", "prompts", "drafter", "tokens/s", "tokens a step", "reader-rag is so many times as fast")
    return markdown_table(headings, rows)


def _record(parts: Parts) -> str:
    return ""


def _repeated(parts: Parts) -> str:
    rows, runs = [], list[str]()
    for label, part in parts.items():
        if part["report"] is None or "before" not in part:
            continue
        before, methods = part["before"], part["report"]["methods"]
        runs.append(f"{before['commit']}, {before['date']}, {before['processor']}")
        for name, speed in before["speeds"].items():
            if name in methods:
                now = methods[name]["decode_tokens_per_s"]
                times = (methods["reader"]["decode_tokens_per_s"] / now, before["speeds"]["reader"] / speed)
                rows.append(
                    (label, _variant(name), now, speed, now / speed, *(times if name != "reader" else (None,) * 2))
                )
    headings = ("type", "method", "tokens/s", "in the other run", "ratio of both")
    table = markdown_table((*headings, "reader-rag to this method", "in the other run"), rows)
    return f"{table}\nThe other run: {'; '.join(dict.fromkeys(runs))}.\n" if rows else ""


TABLES: Mapping[str, Callable[[Parts], str]] = {
    "speed": _speed,
    "other-prompts": _other_prompts,
    "batches": _batches,
    "exactness": _exactness,
    "memory": _memory,
    "rounding": _exactness,
    "record": _record,
    "tokens-per-step": _tokens_per_step,
    "tree-size": _tree_size,
    "drafting": _drafting,
    "recall": _recall,
    "int8": _int8,
    "datastore": _datastore,
    "cache": _cache,
    "vllm": _vllm,
}
"""The tables of a section, by its name."""
VIEWS: Mapping[str, tuple[str, Callable[[Parts], str]]] = {
    "peers": ("tokens-per-step", _beside_peers),
    "ablation": ("tokens-per-step", _with_parts_off),
    "chains": ("tokens-per-step", _chains),
    "repeated": ("speed", _repeated),
}
"""Tables of a part of a section's figures: the section and the table, by the name of the block."""


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
