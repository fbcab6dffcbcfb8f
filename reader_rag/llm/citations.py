"""Citations: maps spans of an answer to passages, files and characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, TextNode

from reader_rag.engine.outputs import CopiedSpan, Passage
from reader_rag.errors import ConfigError
from reader_rag.llm.context_hooks import CONTEXT_ID
from reader_rag.util.source_title import source_title

if TYPE_CHECKING:
    from llama_index.core.base.response.schema import RESPONSE_TYPE
    from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse

DEFAULT_MIN_WORDS = 3
MATCHED_TOKENS = 8
"""Least tokens of a span that is found by comparing texts."""

# Scripts that are written without spaces count by characters, everything else by words and marks.
_TOKEN = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|\w+|[^\w\s]")

CitationKind = Literal["copied", "matched"]


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
        document_start: Start in the document's text (of that page, slide, sheet, chapter or message); None if the node
            has no character span. Line ends count as one character and a byte order mark as none, as in the text of
            `Path.read_text`.
        document_end: End in the document's text; None if the node has no character span.
        kind: "copied": recorded while the answer was decoded. "matched": found afterwards by comparing texts; it has
            at least 8 tokens (words, punctuation marks, or characters of scripts without spaces) and is in one
            passage only.
        title: The passage's source in words: see `source_title`.
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
    kind: CitationKind = "copied"
    title: str = ""


@dataclass(frozen=True)
class CitedCall:
    """One call of the LLM, as far as citations need it.

    Attributes:
        text: The call's answer.
        copied: The spans of `text` that were copied from a passage.
        passages: The passages of the call.
    """

    text: str
    copied: tuple[CopiedSpan, ...]
    passages: tuple[Passage, ...]


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
    response: RESPONSE_TYPE | AgentChatResponse | StreamingAgentChatResponse | ChatResponse | CompletionResponse,
    nodes: Iterable[NodeWithScore | BaseNode | str] | None = None,
    *,
    min_words: int = DEFAULT_MIN_WORDS,
) -> list[Citation]:
    """Find the file and characters that the spans of an answer were copied from.

    Args:
        response: The response of a query engine, a chat engine or an LLM; a stream after it was read.
        nodes: The passages; for texts, those of `ReaderLLM.with_sources` in their order. None takes the response's
            `source_nodes`. The response of an LLM has none: its citations then have the passage's id as `node_id`, and
            neither file nor document.
        min_words: Least words of a copied citation; shorter spans occur by chance.

    Returns:
        Citations in the answer's order: those of `response.metadata` where `ReaderLLM` recorded them, those of
        `additional_kwargs["copied"]` of a response of `ReaderLLM`, else those found by comparing texts ("matched").

    Raises:
        ConfigError: The response is a stream that was not read, or of another type.
    """
    if isinstance(response, (ChatResponse, CompletionResponse)):
        return _cite_call(response, nodes, min_words)
    if not hasattr(response, "source_nodes"):
        raise ConfigError(f"cite takes the response of an engine or an LLM, not a {type(response).__name__}")
    metadata = getattr(response, "metadata", None) or {}
    if nodes is None and "citations" in metadata:
        return list(metadata["citations"])
    text = next((found for name in ("response_txt", "response") if (found := getattr(response, name, None))), None)
    if text is None and hasattr(response, "response_gen") and not hasattr(response, "is_dummy_stream"):
        raise ConfigError("the stream was not read yet; read it to its end and call cite then")
    answer = text if isinstance(text, str) else "" if text is None else str(response)  # an object: its JSON
    return match_text(answer, _sources(response.source_nodes if nodes is None else nodes))


def _cite_call(
    response: ChatResponse | CompletionResponse,
    nodes: Iterable[NodeWithScore | BaseNode | str] | None,
    min_words: int,
) -> list[Citation]:
    text = response.text if isinstance(response, CompletionResponse) else response.message.content or ""
    copied = response.additional_kwargs.get("copied")
    if nodes is not None:
        sources = _sources(nodes)
        return match_text(text, sources) if copied is None else cite_spans(copied, text, None, sources, min_words)
    if copied is None:
        raise ConfigError("this response does not say what was copied; pass the passages: cite(response, nodes)")
    spans = [_span(span) for span in copied]
    return [
        Citation(
            text=text[span.text_start : span.text_end],
            text_start=span.text_start,
            text_end=span.text_end,
            node_id=span.passage_id,
            node_start=span.passage_start,
            node_end=span.passage_end,
        )
        for span in spans
        if len(text[span.text_start : span.text_end].split()) >= min_words
    ]


def cite_spans(
    copied: Iterable[CopiedSpan | Mapping[str, Any]],
    answer: str,
    context: str | None,
    nodes: Sequence[NodeWithScore],
    min_words: int = DEFAULT_MIN_WORDS,
) -> list[Citation]:
    """Find the file and characters of spans that an LLM reports as copied.

    Args:
        copied: Spans as the LLM reports them, objects or dictionaries; their passage is a node (by its id) or the whole
            `context`.
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
    for span in _joined([_span(given) for given in copied], answer, texts):
        for location in locations.get(span.passage_id, ()):
            citation = _citation(span, location, answer)
            if citation is not None and len(citation.text.split()) >= min_words:
                citations.append(citation)
    return citations


def cite_calls(answer: str, calls: Sequence[CitedCall], nodes: Sequence[NodeWithScore]) -> list[Citation]:
    """The citations of an answer that a synthesizer made of one or several calls.

    Args:
        answer: The answer's text.
        calls: The calls, in the order in which they ended. One whose text is not in the answer is passed over.
        nodes: The retrieved nodes.

    Returns:
        Citations in the answer's order. Where the calls did not have the nodes as passages of their own
        (`with_sources`), what was not recorded is matched.
    """
    ids = {source.node.node_id for source in nodes}
    citations: list[Citation] = []
    for call, shift in _placed(answer, calls):
        context = next((passage.text for passage in call.passages if passage.id == CONTEXT_ID), "")
        for found in cite_spans(call.copied, call.text, context, nodes):
            start, end = found.text_start + shift, found.text_end + shift
            if not any(start < other.text_end and other.text_start < end for other in citations):
                citations.append(replace(found, text_start=start, text_end=end))
    if not any(passage.id in ids for call in calls for passage in call.passages):
        taken = [(citation.text_start, citation.text_end) for citation in citations]
        citations += match_text(answer, nodes, taken)
    return sorted(citations, key=lambda citation: citation.text_start)


def match_text(answer: str, nodes: Sequence[NodeWithScore], taken: Iterable[tuple[int, int]] = ()) -> list[Citation]:
    """Find spans of an answer that are in one passage verbatim, by comparing texts.

    Args:
        answer: The answer's text.
        nodes: The passages.
        taken: (start, end) in characters of the answer that have a citation already.

    Returns:
        Citations of the kind "matched", in the answer's order: the longest spans, of at least 8 tokens, that exactly
        one passage has.
    """
    sources = {source.node.node_id: source for source in nodes}
    texts = {id_: source.node.get_content(metadata_mode=MetadataMode.NONE) for id_, source in sources.items()}
    citations = []
    for start, end in _free(len(answer), taken):
        tokens = [found.span() for found in _TOKEN.finditer(answer, start, end)]
        first = 0
        while first + MATCHED_TOKENS <= len(tokens):
            begin = tokens[first][0]
            matches = [
                (*_longest(answer, begin, [token[1] for token in tokens[first:]], text), id_)
                for id_, text in texts.items()
            ]
            count = max((match[0] for match in matches), default=0)
            best = [match for match in matches if match[0] == count]
            if count >= MATCHED_TOKENS and len(best) == 1:
                length, position, id_ = best[0]
                text_end = tokens[first + length - 1][1]
                span = CopiedSpan(id_, position, position + text_end - begin, begin, text_end)
                citation = _citation(span, _Location(sources[id_], texts[id_]), answer)
                assert citation is not None
                citations.append(replace(citation, kind="matched"))
            first += count if count >= MATCHED_TOKENS else 1
    return citations


def _longest(answer: str, begin: int, ends: Sequence[int], text: str) -> tuple[int, int]:
    """The most tokens of an answer from `begin` on that are in a text verbatim, and where; (0, -1) if under 8 are.

    Args:
        answer: The answer.
        begin: Start of the first token, in characters.
        ends: Ends of the first and the following tokens.
        text: The text to search.
    """
    most, where = 0, -1
    least = answer[begin : ends[MATCHED_TOKENS - 1]]
    position = text.find(least)
    while position >= 0:
        count = MATCHED_TOKENS
        while count < len(ends) and text.startswith(answer[begin : ends[count]], position):
            count += 1
        if count > most:
            most, where = count, position
        position = text.find(least, position + 1)
    return most, where


def _free(length: int, taken: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stretches of 0..length that lie between those taken."""
    free, position = [], 0
    for start, end in sorted(taken):
        free.append((position, start))
        position = max(position, end)
    return [(start, end) for start, end in [*free, (position, length)] if start < end]


def _placed(answer: str, calls: Sequence[CitedCall]) -> list[tuple[CitedCall, int]]:
    """The calls whose texts are in an answer, each with the characters before its own text.

    Calls that made the whole answer come alone, the last one first: a refined answer often is the one before it.
    """
    whole = [call for call in reversed(calls) if call.text.strip() and call.text.strip() == answer.strip()]
    if whole:
        lead = len(answer) - len(answer.lstrip())
        return [(call, lead - (len(call.text) - len(call.text.lstrip()))) for call in whole]
    placed: list[tuple[CitedCall, int]] = []
    taken: list[tuple[int, int]] = []
    for call in calls:
        text = call.text.strip()
        position = answer.find(text) if text else -1
        while position >= 0 and any(start < position + len(text) and position < end for start, end in taken):
            position = answer.find(text, position + 1)
        if position >= 0:
            taken.append((position, position + len(text)))
            placed.append((call, position - call.text.find(text)))
    return placed


def _sources(nodes: Iterable[NodeWithScore | BaseNode | str]) -> list[NodeWithScore]:
    """Passages as nodes with scores; texts get the ids of `ReaderLLM.with_sources`."""
    sources = []
    for number, node in enumerate(nodes, start=1):
        given = TextNode(id_=f"source-{number}", text=node) if isinstance(node, str) else node
        sources.append(given if isinstance(given, NodeWithScore) else NodeWithScore(node=given))
    return sources


def _span(given: CopiedSpan | Mapping[str, Any]) -> CopiedSpan:
    return given if isinstance(given, CopiedSpan) else CopiedSpan(**given)


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
        title=source_title(node.metadata),
    )
