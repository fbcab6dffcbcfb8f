"""Copied spans of an answer -> the passages and files they were copied from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from reader_rag.engine.outputs import CopiedSpan
from reader_rag.llm.context_hooks import CONTEXT_ID

DEFAULT_MIN_WORDS = 3


@dataclass(frozen=True)
class Citation:
    """A stretch of the answer that stands word for word in a passage.

    Attributes:
        text: The stretch.
        text_start: Its first character in the answer.
        text_end: One past its last character in the answer.
        node_id: The passage's node.
        node_start: First character in the node's text.
        node_end: One past the last character in the node's text.
        file_path: The document's file; None if the node does not name one.
        page: Label of the page, for formats with pages.
        document_start: First character in the document's text (of that page); None if the node does not say where in
            the document it lies. Line ends count as one character and a byte order mark as none, as `Path.read_text`
            has it.
        document_end: One past the last character in the document's text.
    """

    text: str
    text_start: int
    text_end: int
    node_id: str
    node_start: int
    node_end: int
    file_path: str | None = None
    page: str | None = None
    document_start: int | None = None
    document_end: int | None = None


@dataclass(frozen=True)
class _Place:
    """Where a node's text lies in the passage that the LLM was given."""

    source: NodeWithScore
    text: str
    node_start: int  # of `text` in the node's own text
    passage_start: int  # of `text` in the passage

    @property
    def passage_end(self) -> int:
        return self.passage_start + len(self.text)


def cite(
    copied: Sequence[CopiedSpan],
    answer: str,
    context: str | None,
    nodes: Sequence[NodeWithScore],
    *,
    min_words: int = DEFAULT_MIN_WORDS,
) -> list[Citation]:
    """Where an answer was copied from, file and characters.

    Args:
        copied: Spans as the LLM reports them; a passage is either a node (by its id) or the whole `context`.
        answer: The answer's text.
        context: The text with all passages that the LLM was given (`context_str`); None takes `context_of(nodes)`.
        nodes: The retrieved nodes.
        min_words: Shorter stretches are left out: two words are found everywhere.

    Returns:
        Citations in the answer's order. Each `text` equals the node's text at its span, character by character;
        a reported span for which that does not hold is left out.
    """
    if context is None:
        context = context_of(nodes)
    passages = {place.source.node.node_id: [place] for place in _whole_nodes(nodes)}
    in_context = _locate(context, nodes)
    citations = []
    for span in _joined(copied, answer, context, passages):
        places = passages.get(span.passage_id, in_context if span.passage_id == CONTEXT_ID else [])
        for place, start, end in _within(span, places):
            citation = _citation(span, place, start, end, answer)
            if citation is not None and len(citation.text.split()) >= min_words:
                citations.append(citation)
    return citations


def context_of(nodes: Sequence[NodeWithScore]) -> str:
    """The nodes' texts as LlamaIndex's compact synthesis puts them into one prompt (`context_str`)."""
    texts = (source.node.get_content(metadata_mode=MetadataMode.LLM).strip() for source in nodes)
    return "\n\n".join(text for text in texts if text)


def _whole_nodes(nodes: Sequence[NodeWithScore]) -> Iterator[_Place]:
    for source in nodes:
        yield _Place(source, source.node.get_content(metadata_mode=MetadataMode.NONE), 0, 0)


def _locate(context: str, nodes: Sequence[NodeWithScore]) -> list[_Place]:
    """Each node's text in the context; LlamaIndex joins the nodes' stripped contents in order."""
    places = []
    position = 0
    for whole in _whole_nodes(nodes):
        text = whole.text.strip()
        found = context.find(text, position) if text else -1
        if found < 0:
            continue
        places.append(replace(whole, text=text, node_start=whole.text.find(text), passage_start=found))
        position = found + len(text)
    return places


def _joined(
    copied: Sequence[CopiedSpan], answer: str, context: str, passages: dict[str, list[_Place]]
) -> list[CopiedSpan]:
    """Spans in the answer's order; those that only a token of the model's own, the same as the passage's, parts are
    one. (Every step of decoding ends with a token that was not drafted.)"""
    joined: list[CopiedSpan] = []
    for span in sorted(copied, key=lambda s: s.text_start):
        if joined and joined[-1].passage_id == span.passage_id:
            last = joined[-1]
            passage = passages[span.passage_id][0].text if span.passage_id in passages else context
            between = answer[last.text_end : span.text_start]
            aligned = span.text_start - last.text_end == span.passage_start - last.passage_end >= 0
            if aligned and between == passage[last.passage_end : span.passage_start]:
                joined[-1] = replace(last, passage_end=span.passage_end, text_end=span.text_end)
                continue
        joined.append(span)
    return joined


def _within(span: CopiedSpan, places: Sequence[_Place]) -> Iterator[tuple[_Place, int, int]]:
    """The parts of a span that lie in one node each, as passage offsets."""
    for place in places:
        start = max(span.passage_start, place.passage_start)
        end = min(span.passage_end, place.passage_end)
        if start < end:
            yield place, start, end


def _citation(span: CopiedSpan, place: _Place, start: int, end: int, answer: str) -> Citation | None:
    text_start = span.text_start + start - span.passage_start
    in_place = slice(start - place.passage_start, end - place.passage_start)
    text = place.text[in_place]
    if answer[text_start : text_start + len(text)] != text:
        return None
    lead = len(text) - len(text.lstrip())
    text = text.strip()
    text_start += lead
    node_start = place.node_start + in_place.start + lead
    node = place.source.node
    offset = node.start_char_idx if isinstance(node, TextNode) else None
    page = node.metadata.get("page_label")
    file_path = node.metadata.get("file_path")
    return Citation(
        text=text,
        text_start=text_start,
        text_end=text_start + len(text),
        node_id=node.node_id,
        node_start=node_start,
        node_end=node_start + len(text),
        file_path=None if file_path is None else str(file_path),
        page=None if page is None else str(page),
        document_start=None if offset is None else offset + node_start,
        document_end=None if offset is None else offset + node_start + len(text),
    )
