"""Results as text, for terminals and pipes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from reader_rag.cli.display.terminal import clean, messages, print_warning
from reader_rag.util.one_line import one_line
from reader_rag.util.source_title import source_title

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore

    from reader_rag.cli.answering.recorder import LLMCall
    from reader_rag.llm.citations import Citation
    from reader_rag.llm.comparison import Comparison, Difference
    from reader_rag.model.registry import ModelStatus
    from reader_rag.rag.ingest import IngestReport

_COPIED = "bold black on bright_yellow"
_CONTEXT_CHARACTERS = 80  # shown before and after a copied span
_OPENING_CHARACTERS = 240  # shown of a passage that nothing was copied from
_MOST_CITATIONS = 12
_WHITE_SPACE = re.compile(r"\s+")

_Span = tuple[int, int]


def streamed(console: Console) -> Callable[[str], None]:
    """A function that prints an answer piece by piece."""

    def show(piece: str) -> None:
        console.print(Text(clean(piece)), end="", soft_wrap=True)

    return show


def show_ingest(
    console: Console, report: IngestReport, store: str | Path, say: Callable[[str], str] = lambda text: text
) -> None:
    """Print the counts of an ingestion, and on standard error the files that were skipped, with reasons.

    Args:
        console: The counts are printed to it.
        report: What was ingested.
        store: Folder or URL of the store.
        say: Applied to each reason.
    """
    counts = {
        "added": report.added,
        "updated": report.updated,
        "unchanged": report.unchanged,
        "removed": report.removed,
    }
    files = ", ".join(f"{len(paths)} {name}" for name, paths in counts.items() if paths) or "no file"
    console.print(
        Text(clean(f"{files}; {report.chunks} passages embedded, {report.total_chunks} in {store}")), soft_wrap=True
    )
    if not report.skipped:
        return
    print_warning(f"{len(report.skipped)} skipped:")
    for skipped in report.skipped:
        messages().print(Text(clean(say(f"  {skipped}"))), soft_wrap=True)


def show_sources(console: Console, nodes: Sequence[NodeWithScore], citations: Sequence[Citation] = ()) -> None:
    """Print passages with file and score; copied spans are highlighted, or in « » where there are no colours."""
    console.print(Text("Sources", style="bold"))
    for number, node in enumerate(nodes, start=1):
        text = node.node.get_content()
        spans = sorted({(c.node_start, c.node_end) for c in citations if c.node_id == node.node.node_id})
        heading = Text(f"[{number}] ")
        heading.append_text(_source(node.node.metadata.get("file_path"), source_title(node.node.metadata)))
        score = "" if node.score is None else f"score {node.score:.2f}"
        start, end = getattr(node.node, "start_char_idx", None), getattr(node.node, "end_char_idx", None)
        place = "" if start is None else f"characters {start}-{end}"
        heading.append(f" ({', '.join(filter(None, (score, place)))})", style="dim")
        console.print(heading, soft_wrap=True)
        console.print(Padding(_excerpt(clean(text), spans, marks=console.color_system is None), (0, 0, 0, 4)))


def show_citations(console: Console, citations: Sequence[Citation]) -> None:
    """Print the copied spans of an answer with their files and characters."""
    if not citations:
        return
    console.print(Text("Copied word for word", style="bold"))
    places = Counter((c.file_path, c.title, c.document_start, c.document_end, c.text) for c in citations)
    for (file_path, title, start, end, text), times in list(places.items())[:_MOST_CITATIONS]:
        line = Text("  ")
        line.append(f'"{_shortened(one_line(clean(text)))}"', style=_COPIED if console.color_system else "")
        line.append(" - ")
        line.append_text(_source(file_path, title))
        line.append("" if start is None else f", characters {start}-{end}")
        line.append("" if times == 1 else f", {times} times")
        console.print(line, soft_wrap=True)
    if len(places) > _MOST_CITATIONS:
        console.print(Text(f"  and {len(places) - _MOST_CITATIONS} more"))


def show_stats(console: Console, call: LLMCall) -> None:
    """Print counts and speed of one answer."""
    console.print(Text("; ".join(_counts(call.metrics)), style="dim"), soft_wrap=True)
    if call.finish_reason == "length":
        console.print(Text("The answer was cut off at --max-tokens.", style="dim"))


def _counts(m: Mapping[str, Any]) -> Iterator[str]:
    """Counts and times of an answer; a server reports fewer than an engine."""
    if "completion_tokens" in m:
        passes = f" in {m['steps'] + 1} forward passes" if "steps" in m else ""
        yield f"{m['completion_tokens']} tokens{passes}"
    if "tokens_per_step" in m:
        yield f"{m['tokens_per_step']:.2f} tokens per step"
    if "tokens_per_s" in m:
        yield f"{m['tokens_per_s']:.1f} tokens/s"
    if "prompt_tokens" in m:
        known = f", {m['reused_tokens']} of them cached," if m.get("reused_tokens") else ""
        read = f" processed in {m['ttft_s']:.1f} s" if "ttft_s" in m else ""
        yield f"prompt of {m['prompt_tokens']} tokens{known}{read}"
    elif "ttft_s" in m:
        yield f"first word after {m['ttft_s']:.1f} s"
    if "drafted" in m:
        yield f"{m['accepted']} of {m['drafted']} drafted tokens accepted"


def show_comparison(console: Console, result: Comparison) -> None:
    """Print the two methods as a table, and their ratio in a sentence."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    for heading in ("tokens/s", "tokens per step", "identical"):
        table.add_column(heading, justify="right")
    for name, method, same in (
        ("plain decoding", result.plain, ""),
        ("reader", result.reader, "yes" if result.identical else "no"),
    ):
        table.add_row(name, f"{method.tokens_per_s:.1f}", f"{method.tokens_per_step:.2f}", same)
    console.print(table)
    times = "once" if result.rounds == 1 else f"{result.rounds} times; speeds are medians"
    speed = f"{result.ratio:.1f} times the speed of plain decoding, " if result.ratio else ""
    console.print(
        Text(f"{speed}{result.reader.tokens} tokens, {result.dtype}, each way run {times}."),
        soft_wrap=True,
    )
    if result.difference is not None:
        console.print(Text(clean(_explain(result.difference, result.dtype))), soft_wrap=True)


def _explain(difference: Difference, dtype: str) -> str:
    if dtype == "float32":
        why = "In float32 this should not happen: please report it."
    else:
        instead = "leave out --quantization" if dtype == "int8" else "use --dtype float32"
        why = f"Passes over several tokens round differently in {dtype}: {instead} or use --exactness strict."
    return (
        f"First difference at token {difference.position + 1}: plain {difference.plain!r}, reader "
        f"{difference.reader!r}. The two best logits of plain decoding were {difference.margin:.4f} apart there. {why}"
    )


def show_models(console: Console, statuses: Sequence[ModelStatus]) -> None:
    """Print the aliases, and which models are installed: a line each, however wide, so that paths stay whole."""
    rows = [("name", "kind", "model", "installed", "size", "place")]
    for status in statuses:
        alias = status.alias
        size = f"{status.size_bytes / 1e6:.0f} MB" if status.present else ""
        here = "yes" if status.present else "no"
        rows.append((alias.name, alias.task, alias.title, here, size, str(status.place or "")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        console.print(Text(clean(line), style="" if number else "bold"), soft_wrap=True)


def _source(path: Any, title: str) -> Text:
    """The title of a source, a link to its file where it has one."""
    text = Text(clean(title) or "(no file)")
    if path is not None and Path(str(path)).is_absolute():
        text.stylize(Style(link=Path(str(path)).as_uri()))
    return text


def _shortened(text: str, most: int = 120) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half].rstrip()} ... {text[-half:].lstrip()}"


def _excerpt(text: str, spans: Sequence[_Span], *, marks: bool) -> Text:
    """The parts of a passage around its copied spans, or its first characters; white space is collapsed."""
    spans = _merged(spans)
    around = [(_word_start(text, s - _CONTEXT_CHARACTERS), _word_end(text, e + _CONTEXT_CHARACTERS)) for s, e in spans]
    windows = _merged(around) or [(0, _word_end(text, _OPENING_CHARACTERS))]
    excerpt = Text()
    for start, end in windows:
        excerpt.append("... " if text[:start].strip() else "")
        position = start
        for span_start, span_end in (span for span in spans if start <= span[0] < end):
            excerpt.append(_collapsed(text[position:span_start]), style="dim")
            copied = _collapsed(text[span_start:span_end])
            excerpt.append(f"«{copied}»" if marks else copied, style=_COPIED)
            position = span_end
        excerpt.append(_collapsed(text[position:end]), style="dim")
        excerpt.append(" " if (start, end) != windows[-1] else " ..." if text[end:].strip() else "")
    return excerpt


def _word_start(text: str, position: int) -> int:
    """The nearest start of a word at or before a position, or 0."""
    while position > 0 and not text[position - 1].isspace():
        position -= 1
    return max(0, position)


def _word_end(text: str, position: int) -> int:
    """The nearest end of a word at or after a position, or the text's length."""
    while position < len(text) and not text[position].isspace():
        position += 1
    return min(len(text), position)


def _merged(spans: Sequence[_Span]) -> list[_Span]:
    """Sorted spans; overlapping and adjacent ones are joined."""
    merged: list[_Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _collapsed(text: str) -> str:
    return _WHITE_SPACE.sub(" ", text)
