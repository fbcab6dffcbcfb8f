"""Results as text."""

from __future__ import annotations

import re
from typing import Any

from birds import HERON
from llama_index.core.schema import NodeWithScore, TextNode
from programs import printed

from reader_rag.cli.display.show import show_citations, show_sources
from reader_rag.engine.outputs import CopiedSpan
from reader_rag.llm.citations import cite_spans

ESCAPE = "\x1b"


def _copied_from_heron() -> tuple[list[NodeWithScore], Any]:
    answer = "It stands still in shallow water, of course."
    node = TextNode(id_="h", text=HERON, metadata={"file_path": "/d/heron.txt"}, start_char_idx=500)
    nodes = [NodeWithScore(node=node, score=0.5)]
    copied = "stands still in shallow water"
    start, text_start = HERON.index(copied), answer.index(copied)
    span = CopiedSpan("h", start, start + len(copied), text_start, text_start + len(copied))
    return nodes, cite_spans([span], answer, None, nodes)


def test_copied_spans_are_marked_in_the_passage_and_linked_to_file_and_characters() -> None:
    nodes, citations = _copied_from_heron()
    piped = printed(lambda console: show_sources(console, nodes, citations))
    assert "The heron «stands still in shallow water» and spears fish" in piped
    listed = printed(lambda console: show_citations(console, citations))
    assert '"stands still in shallow water" - heron.txt, characters 510-539' in listed


def test_a_terminal_gets_colour_instead_of_marks() -> None:
    nodes, citations = _copied_from_heron()
    shown = printed(
        lambda console: show_sources(console, nodes, citations), force_terminal=True, color_system="standard"
    )
    assert "«" not in shown
    assert re.search(re.escape(ESCAPE) + r"\[[\d;]+mstands still in shallow water" + re.escape(ESCAPE), shown)


def test_documents_cannot_steer_the_terminal() -> None:
    nasty = f"red {ESCAPE}[31m text\x07 with\x9b codes"
    node = TextNode(text=nasty, metadata={"file_path": f"/d/{ESCAPE}]0;x.txt"})
    shown = printed(lambda console: show_sources(console, [NodeWithScore(node=node, score=1.0)]))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert "red  [31m text  with  codes".replace("  ", " ") in " ".join(shown.split())


def test_sources_without_a_file_show_their_metadata() -> None:
    def shown(**metadata: Any) -> str:
        node = NodeWithScore(node=TextNode(text=HERON, metadata=metadata), score=0.5)
        return printed(lambda console: show_sources(console, [node]))

    assert "[1] author: Ann, year: 2019 (score 0.50)" in shown(author="Ann", year=2019)
    assert "[1] prices.xlsx, sheet Europe, rows 2-9 (score" in shown(
        file_name="prices.xlsx", sheet="Europe", rows="2-9"
    )
    assert "[1] (no file) (score" in shown()
