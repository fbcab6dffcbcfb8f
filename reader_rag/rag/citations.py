"""Citations: maps the copied spans of an answer to passages, files and characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from reader_rag.engine.outputs import CopiedSpan
from reader_rag.llm.context_hooks import CONTEXT_ID

DEFAULT_MIN_WORDS = 3


@dataclass(frozen=True)
class Citation:
    """A span of the answer that is in a passage verbatim. Offsets are in characters, the end is exclusive.

    Attributes:
        text: The span's text.
        text_start: Start in the answer.
        text_end: End in the answer.
        node_id: Id of the passage's node.
        node_start: Start in the node's text.
        node_end: End in the node's text.
        file_path: The document's file; None if the node's metadata has none.
        page: Label of the page, for formats with pages.
        document_start: Start in the document's text (of that page); None if the node has no character span. Line ends
            count as one character and a byte order mark as none, as in the text of `Path.read_text`.
        document_end: End in the document's text; None if the node has no character span.
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
class _Location:
    """Where a node's text is in a passage that the LLM got.

    Attributes:
        source: The node.
        text: The node's text, or the part of it that is in the passage.
        node_start: Start of `text` in the node's text, in characters.
        passage_start: Start of `text` in the passage, in characters.
    """

    source: NodeWithScore
    text: str
    node_start: int = 0
    passage_start: int = 0


def cite(
    copied: Sequence[CopiedSpan],
    answer: str,
    context: str | None,
    nodes: Sequence[NodeWithScore],
    *,
    min_words: int = DEFAULT_MIN_WORDS,
) -> list[Citation]:
    """Find the file and characters that the spans of an answer were copied from.

    Args:
        copied: Spans as the LLM reports them; their passage is a node (by its id) or the whole `context`.
        answer: The answer's text.
        context: The text of all passages in the prompt (`context_str`); None takes `context_of(nodes)`.
        nodes: The retrieved nodes.
        min_words: Least words of a citation; shorter spans occur by chance.

    Returns:
        Citations in the answer's order. Each `text` equals the node's text at its span; a reported span for which that
        does not hold is left out.
    """
    whole = [_Location(source, source.node.get_content(metadata_mode=MetadataMode.NONE)) for source in nodes]
    texts = {location.source.node.node_id: location.text for location in whole}
    texts.setdefault(CONTEXT_ID, context_of(nodes) if context is None else context)
    locations = {CONTEXT_ID: _in_context(texts[CONTEXT_ID], whole)}
    locations |= {location.source.node.node_id: [location] for location in whole}
    citations = []
    for span in _joined(copied, answer, texts):
        for location in locations.get(span.passage_id, ()):
            citation = _citation(span, location, answer)
            if citation is not None and len(citation.text.split()) >= min_words:
                citations.append(citation)
    return citations


def context_of(nodes: Sequence[NodeWithScore]) -> str:
    """The nodes' texts as LlamaIndex's compact synthesis joins them into one prompt (`context_str`).

    Args:
        nodes: The retrieved nodes, in the order of the prompt.
    """
    texts = (source.node.get_content(metadata_mode=MetadataMode.LLM).strip() for source in nodes)
    return "\n\n".join(text for text in texts if text)


def _in_context(context: str, whole: Sequence[_Location]) -> list[_Location]:
    """Locate the nodes in the context, in which LlamaIndex joins their stripped texts in order."""
    located = []
    position = 0
    for location in whole:
        text = location.text.strip()
        found = context.find(text, position) if text else -1
        if found >= 0:
            located.append(_Location(location.source, text, location.text.find(text), found))
            position = found + len(text)
    return located


def _joined(copied: Sequence[CopiedSpan], answer: str, texts: Mapping[str, str]) -> list[CopiedSpan]:
    """The spans in the answer's order, with neighbours joined where the text between them is the passage's too.

    (Every decode step ends with a token that was not drafted, and so not copied.)
    """
    joined: list[CopiedSpan] = []
    for span in sorted(copied, key=lambda s: s.text_start):
        if joined and joined[-1].passage_id == span.passage_id:
            last = joined[-1]
            between = answer[last.text_end : span.text_start]
            aligned = span.text_start - last.text_end == span.passage_start - last.passage_end >= 0
            if aligned and between == texts.get(span.passage_id, "")[last.passage_end : span.passage_start]:
                joined[-1] = replace(last, passage_end=span.passage_end, text_end=span.text_end)
                continue
        joined.append(span)
    return joined


def _citation(span: CopiedSpan, location: _Location, answer: str) -> Citation | None:
    """The part of a span that is in one node; None if they do not overlap, or their texts differ."""
    start = max(span.passage_start, location.passage_start)
    end = min(span.passage_end, location.passage_start + len(location.text))
    if start >= end:
        return None
    text_start = span.text_start + start - span.passage_start
    node_start = start - location.passage_start
    text = location.text[node_start : end - location.passage_start]
    if answer[text_start : text_start + len(text)] != text:
        return None
    lead = len(text) - len(text.lstrip())
    text = text.strip()
    text_start += lead
    node_start += location.node_start + lead
    node = location.source.node
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
