"""Answers a question for a command: retrieval, answer, citations, statistics and comparison with plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from rich.console import Console
from rich.text import Text

from reader_rag.cli.answering.recorder import CallRecorder, LLMCall
from reader_rag.cli.display.show import show_citations, show_comparison, show_sources, show_stats, streamed
from reader_rag.cli.display.terminal import clean, status
from reader_rag.cli.loading import ModelOptions
from reader_rag.cli.options import QuestionOptions
from reader_rag.config import SamplingParams
from reader_rag.llm import ReaderLLM
from reader_rag.llm.citations import Citation, cite_spans
from reader_rag.llm.comparison import Comparison, compare
from reader_rag.llm.context_hooks import passages_from
from reader_rag.rag.embedding import LocalEmbedding, SizedEmbedding
from reader_rag.rag.engines import NOTHING_FOUND, make_query_engine, make_retriever, open_store
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.util.source_title import source_title

LLMT = TypeVar("LLMT", bound=LLM)


@dataclass(frozen=True)
class Answer:
    """An answer and its sources.

    Attributes:
        question: The question.
        text: The answer.
        nodes: The passages in the LLM's prompt, most similar first.
        citations: The spans of `text` that were copied from a passage; None if the LLM does not record them, as on a
            server.
        call: The LLM call that generated the answer.
    """

    question: str
    text: str
    nodes: tuple[NodeWithScore, ...]
    citations: tuple[Citation, ...] | None
    call: LLMCall

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "question": self.question,
            "answer": self.text,
            "finish_reason": self.call.finish_reason,
            "sources": [source_dict(node) for node in self.nodes],
            "citations": None if self.citations is None else [asdict(citation) for citation in self.citations],
            "stats": self.call.metrics,
        }


def recorded(llm: LLMT) -> tuple[LLMT, CallRecorder]:
    """A shallow copy of an LLM, and the recorder that keeps the copy's last call.

    Args:
        llm: The LLM; it is not changed.
    """
    recorder = CallRecorder()
    return llm.model_copy(update={"callback_manager": CallbackManager([recorder])}), recorder


def source_dict(node: NodeWithScore) -> dict[str, Any]:
    """A passage, JSON-ready: file, page, title, metadata, score, text, first and last character in the document."""
    return {
        "file": node.node.metadata.get("file_path"),
        "page": node.node.metadata.get("page_label"),
        "title": source_title(node.node.metadata),
        "metadata": {name: value for name, value in node.node.metadata.items() if name != "file_path"},
        "score": node.score,
        "node_id": node.node.node_id,
        "start": getattr(node.node, "start_char_idx", None),
        "end": getattr(node.node, "end_char_idx", None),
        "text": node.node.get_content(metadata_mode=MetadataMode.NONE),
    }


def answer(
    question: str,
    nodes: Sequence[NodeWithScore],
    *,
    store: DocumentStore,
    llm: LLM,
    embed_model: SizedEmbedding,
    on_text: Callable[[str], None],
) -> Answer:
    """Answer a question from passages that were retrieved for it.

    Args:
        question: The question.
        nodes: The passages, at least one.
        store: The store of the passages; the request has its tenant.
        llm: The LLM that answers.
        embed_model: The store's embedding model.
        on_text: Called with each piece of the answer's text as it is generated.

    Raises:
        PromptError: Question and passages do not fit the model's context.
        ServerError: The server that answers failed.
    """
    recorded_llm, recorder = recorded(llm)
    engine = make_query_engine(store, recorded_llm, embed_model, streaming=True)
    response = engine.synthesize(QueryBundle(question), list(nodes))
    assert isinstance(response, StreamingResponse)
    with closing(response.response_gen) as pieces:
        for piece in pieces:
            on_text(piece)
    call = recorder.last
    assert call is not None
    return Answer(question, call.answer, tuple(nodes), citations_of(call, nodes), call)


def citations_of(call: LLMCall, nodes: Sequence[NodeWithScore]) -> tuple[Citation, ...] | None:
    """The citations of a call's answer; None if the LLM does not record copies.

    Args:
        call: The LLM call.
        nodes: The passages in its prompt.
    """
    return None if call.copied is None else tuple(cite_spans(call.copied, call.answer, None, nodes))


def compare_answer(given: Answer, llm: ReaderLLM) -> Comparison:
    """Decode an answer's prompt again, with and without drafts.

    Args:
        given: The answer. The compared runs use no draft state, cached prefix or datastore.
        llm: The LLM that generated it.
    """
    engine, call = llm.engine, given.call
    chat = [{"role": message.role.value, "content": message.content or ""} for message in call.messages]
    prompt = engine.encode_chat(chat) if chat else engine.encode(call.prompt)
    return compare(engine, prompt, SamplingParams(max_tokens=llm.max_tokens), passages_from(given.nodes))


@dataclass(frozen=True)
class AskResult:
    """The result of a question to a store.

    Attributes:
        question: The question.
        answer: The answer; None if nothing was retrieved.
        comparison: The comparison with plain decoding, if there is one.
        model: Name of the LLM; None if no LLM was called and none was named.
    """

    question: str
    answer: Answer | None
    comparison: Comparison | None
    model: str | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        nothing = {
            "question": self.question,
            "answer": NOTHING_FOUND,
            "finish_reason": "stop",
            "sources": [],
            "citations": [],
            "stats": {},
        }
        report = nothing if self.answer is None else self.answer.to_dict()
        compared = None if self.comparison is None else self.comparison.to_dict()
        return {"model": self.model, **report, "comparison": compared}


def ask_store(
    question: str,
    place: str | Path,
    models: ModelOptions,
    answering: QuestionOptions,
    *,
    compare: bool,
    console: Console | None,
    embed_model: LocalEmbedding | None = None,
) -> AskResult:
    """Answer a question from a store: retrieve, answer, and compare with plain decoding if wanted.

    Args:
        question: The question.
        place: The store's folder or URL.
        models: The models; with `compare`, those of `ModelOptions.exact`.
        answering: What is retrieved, and how long the answer may be.
        compare: Decode the same prompt with and without drafts afterwards; not possible with a server.
        console: Shows the answer while it is generated, then its sources and counts; None shows nothing.
        embed_model: The embedding model, if it is loaded already.

    Raises:
        ReaderError: The question is too long, or store, models or server cannot be used.
    """
    if compare:
        models = models.exact()
    embed_model = embed_model or models.load_embedding()
    with open_store(place, embed_model, answering.tenant) as store:
        retriever = make_retriever(store, embed_model, answering.top_k, answering.cutoff, alpha=answering.alpha)
        nodes = retriever.retrieve(question)
        if not nodes:
            if console is not None:
                console.print(NOTHING_FOUND)
            return AskResult(question, None, None, models.named_model)
        llm = models.load_llm(answering.max_tokens)
        show_piece = (lambda piece: None) if console is None else streamed(console)
        given = answer(question, nodes, store=store, llm=llm, embed_model=embed_model, on_text=show_piece)
    if console is not None:
        _show(console, given)
    comparison = None
    if compare:
        with status("comparing with plain decoding"):
            assert isinstance(llm, ReaderLLM)  # a server was refused above
            comparison = compare_answer(given, llm)
        if console is not None:
            console.print()
            show_comparison(console, comparison)
    return AskResult(question, given, comparison, models.named_model or llm.model)


def _show(console: Console, given: Answer) -> None:
    console.print("\n" if clean(given.text).strip() else Text("(the model gave an empty answer)"))
    show_sources(console, given.nodes, given.citations or ())
    if given.citations:
        console.print()
        show_citations(console, given.citations)
    console.print()
    show_stats(console, given.call)
