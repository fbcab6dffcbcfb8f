"""One question to a store: retrieve, answer, and if asked, compare with plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from reader_rag.cli.answers import Answer, answer, compare_answer
from reader_rag.cli.display.comparison import Comparison
from reader_rag.cli.display.show import show_citations, show_comparison, show_sources, show_stats, streamed
from reader_rag.cli.display.terminal import clean, status
from reader_rag.cli.loading import ModelOptions
from reader_rag.errors import ConfigError, PromptError
from reader_rag.llm import ReaderLLM
from reader_rag.rag.embedding import LocalEmbedding
from reader_rag.rag.engines import NOTHING_FOUND, make_retriever, open_store


@dataclass(frozen=True)
class Request:
    """What came of a question.

    Attributes:
        question: The question.
        answer: None where nothing was retrieved.
        comparison: None unless it was asked for.
        model: Name of the LLM; None where nobody was asked and none was named.
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


def ask(
    question: str,
    place: str | Path,
    models: ModelOptions,
    *,
    top_k: int,
    cutoff: float | None,
    max_tokens: int,
    compare: bool,
    tenant: str = "",
    console: Console | None,
    embed_model: LocalEmbedding | None = None,
) -> Request:
    """Answer a question from a store.

    Args:
        question: The question.
        place: The store's folder, or its URL.
        models: Which models; with `compare`, "auto" as `dtype` means float32.
        top_k: Most passages.
        cutoff: Least similarity of a passage; None takes any.
        max_tokens: Most tokens of the answer.
        compare: Decode the same prompt with and without drafts afterwards; not where a server answers.
        tenant: Whose documents are searched.
        console: Where the answer is shown as it comes, and what belongs to it; None shows nothing.
        embed_model: The embedding model, if it is loaded already.

    Raises:
        ReaderError: The question is empty or too long, or store, models or server cannot be used.
    """
    if not question.strip():
        raise PromptError("the question is empty; ask something")
    if compare and models.engine is not None:
        raise ConfigError("--compare decodes here with and without drafts, which a server does not: leave out --engine")
    if compare and models.dtype == "auto":
        models = replace(models, dtype="float32")
    embed_model = embed_model or models.load_embedding()
    with open_store(place, embed_model, tenant) as store:
        nodes = make_retriever(store, embed_model, top_k, cutoff).retrieve(question)
        if not nodes:
            if console is not None:
                console.print(NOTHING_FOUND)
            return Request(question, None, None, models.named_model)
        llm = models.load_llm(max_tokens)
        show_piece = (lambda piece: None) if console is None else streamed(console)
        given = answer(question, nodes, store=store, llm=llm, embed_model=embed_model, on_text=show_piece)
    if console is not None:
        _show(console, given)
    comparison = None
    if compare:
        with status("comparing with plain decoding"):
            assert isinstance(llm, ReaderLLM)  # else it was refused above
            comparison = compare_answer(given, llm.for_tenant(tenant))
        if console is not None:
            console.print()
            show_comparison(console, comparison)
    return Request(question, given, comparison, models.named_model or llm.model)


def _show(console: Console, given: Answer) -> None:
    console.print("\n" if clean(given.text).strip() else Text("(the model gave an empty answer)"))
    show_sources(console, given.nodes, given.citations or ())
    if given.citations:
        console.print()
        show_citations(console, given.citations)
    console.print()
    show_stats(console, given.call)
