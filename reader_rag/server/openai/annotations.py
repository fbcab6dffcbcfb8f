"""Citations of an answer as OpenAI's annotations: spans of the content, each with the address of its source."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from reader_rag.engine.outputs import CopiedSpan
from reader_rag.llm.citations import Citation, cite_spans, match_text
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.server.documents.text import DocumentText, citation_url, document_id, document_text
from reader_rag.server.openai.responses import Annotation, RetrievedPassage, UrlCitation
from reader_rag.server.openai.retrieval import Question, Retrieved, condensed, retrieve
from reader_rag.server.openai.schemas import ChatRequest, ReaderOptions
from reader_rag.server.service import Service
from reader_rag.util.source_title import source_title

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+.!|<>~-])")
_MOST_QUOTED = 120


@dataclass(frozen=True)
class Cited:
    """The sources of an answer.

    Attributes:
        annotations: The spans that were copied from documents, in the answer's order.
        passages: The passages that were retrieved.
        footer: The sources as Markdown; "" where nothing was copied, or no footer is wanted.
    """

    annotations: list[Annotation]
    passages: list[RetrievedPassage]
    footer: str


class Sources:
    """What was retrieved for one question, and how answers cite it.

    Args:
        store: The store of the caller's tenant.
        found: What was retrieved.
        base_url: The service's own address.
        with_footer: Whether the sources are written under the answer, too.
    """

    def __init__(self, store: DocumentStore, found: Retrieved, base_url: str, with_footer: bool) -> None:
        self.found = found
        self._store = store
        self._base_url = base_url
        self._with_footer = with_footer

    @classmethod
    async def find(
        cls,
        service: Service,
        tenant: str,
        request: ChatRequest,
        question: Question,
        base_url: str,
        complete: Callable[[str, int], Awaitable[str]],
    ) -> Sources:
        """Retrieve passages for the question of a chat.

        Args:
            service: The service; it has a store.
            tenant: The tenant whose documents are searched.
            request: The chat.
            question: Its question.
            base_url: The service's own address.
            complete: Continues a prompt with the model, by at most a number of tokens.

        Raises:
            ApiError: A document that the request names does not exist.
            ReaderError: The question cannot be condensed, or the store cannot be read.
        """
        options = request.reader or ReaderOptions()
        searched = question.text if options.condense is False else await condensed(question, complete)
        found = await asyncio.to_thread(retrieve, service, tenant, options, searched)
        assert service.store is not None
        with_footer = service.config.markdown_footer if options.footer is None else options.footer
        return cls(service.store.for_tenant(tenant), found, base_url, with_footer)

    def cite(self, text: str, copied: Iterable[CopiedSpan] | None) -> Cited:
        """The sources of an answer. It reads the store: not for event loops.

        Args:
            text: The answer.
            copied: The spans that were copied; None: they are not known, and found by comparing texts.
        """
        nodes = [*self.found.nodes, *(NodeWithScore(node=node) for node in self.found.around)]
        citations = match_text(text, nodes) if copied is None else cite_spans(copied, text, None, nodes)
        by_id = {source.node.node_id: source.node for source in nodes}
        texts = self._texts(
            [*(by_id[citation.node_id] for citation in citations), *(source.node for source in self.found.nodes)]
        )
        annotations, quotes = [], []
        for citation in citations:
            node = by_id[citation.node_id]
            url = self._url(node, texts, citation)
            if url is not None:
                annotations.append(_annotation(citation, _title(node), url))
                quotes.append((_title(node), url, citation.text))
        taken = {citation.node_id for citation in citations}
        passages = [self._passage(source, texts, taken) for source in self.found.nodes]
        written = footer(quotes) if self._with_footer else ""
        return Cited(annotations, [passage for passage in passages if passage is not None], written)

    def _texts(self, nodes: Sequence[BaseNode]) -> dict[str, DocumentText]:
        """The texts of the nodes' documents as they are now, by the store's ids."""
        ids = dict.fromkeys(node.ref_doc_id for node in nodes if node.ref_doc_id)
        return {id_: document_text(self._store.get_nodes(doc_ids=[id_])) for id_ in ids}

    def _url(self, node: BaseNode, texts: dict[str, DocumentText], citation: Citation) -> str | None:
        """The address of a citation; None where the document has changed since, or has other characters there."""
        if node.ref_doc_id is None:
            return None
        document = texts[node.ref_doc_id]
        span = document.span(node.node_id, citation.node_start, citation.node_end)
        if span is None or document.text[slice(*span)] != citation.text:
            return None
        return citation_url(self._base_url, document_id(node.ref_doc_id), document.version, *span)

    def _passage(
        self, source: NodeWithScore, texts: dict[str, DocumentText], copied: set[str]
    ) -> RetrievedPassage | None:
        node = source.node
        if node.ref_doc_id is None:
            return None
        document = texts[node.ref_doc_id]
        span = document.span(node.node_id, 0, len(node.get_content(metadata_mode=MetadataMode.NONE)))
        if span is None:
            return None
        id_ = document_id(node.ref_doc_id)
        return RetrievedPassage(
            document_id=id_,
            title=_title(node),
            url=citation_url(self._base_url, id_, document.version, *span),
            score=source.score,
            page=next((page.number for page in document.pages if page.start <= span[0] < page.end), None),
            copied=node.node_id in copied,
        )


def footer(quotes: Sequence[tuple[str, str, str]]) -> str:
    """Sources as Markdown, for clients that drop annotations; "" if there are none.

    Args:
        quotes: Title, address and copied text of each citation.
    """
    if not quotes:
        return ""
    lines = []
    for number, (title, url, text) in enumerate(quotes, start=1):
        line = " ".join(text.split())
        quoted = line if len(line) <= _MOST_QUOTED else f"{line[:_MOST_QUOTED].rstrip()} …"
        lines.append(f"{number}. [{_escaped(title)}]({url}): “{_escaped(quoted)}”")
    return "\n\nSources:\n\n" + "\n".join(lines)


def _title(node: BaseNode) -> str:
    return source_title(node.metadata) or node.ref_doc_id or "document"


def _escaped(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _annotation(citation: Citation, title: str, url: str) -> Annotation:
    return Annotation(
        type="url_citation",  # named, for chunks have no fields that are not set
        url_citation=UrlCitation(start_index=citation.text_start, end_index=citation.text_end, title=title, url=url),
    )
