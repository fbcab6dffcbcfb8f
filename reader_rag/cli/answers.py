"""From a question to an answer with its passages, citations, counts and comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from reader_rag.cli.display.comparison import Comparison, compare
from reader_rag.cli.recorder import CallRecorder, LLMCall
from reader_rag.config import SamplingParams
from reader_rag.engine.outputs import Passage
from reader_rag.llm import ReaderLLM
from reader_rag.llm.context_hooks import CONTEXT_ID
from reader_rag.rag.citations import Citation, cite, context_of
from reader_rag.rag.embedding import SizedEmbedding
from reader_rag.rag.engines import make_query_engine
from reader_rag.rag.stores.contract import DocumentStore

LLMT = TypeVar("LLMT", bound=LLM)


@dataclass(frozen=True)
class Answer:
    """An answer and where it came from.

    Attributes:
        question: What was asked.
        text: What the LLM said.
        nodes: The passages it was given, nearest first.
        citations: Which stretches of `text` were copied word for word from which passage; None if nobody watched.
        call: The LLM call that gave it.
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
    """A light copy of an LLM, and what will keep the copy's last call."""
    recorder = CallRecorder()
    return llm.model_copy(update={"callback_manager": CallbackManager([recorder])}), recorder


def source_dict(node: NodeWithScore) -> dict[str, Any]:
    """A passage, JSON-ready: file, score, text and the characters it takes in its document."""
    return {
        "file": node.node.metadata.get("file_path"),
        "page": node.node.metadata.get("page_label"),
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
        store: Where they came from; the answer is made on behalf of its tenant.
        llm: Who answers.
        embed_model: The store's embedding model.
        on_text: Given the answer's text piece by piece, as it is made.

    Raises:
        PromptError: Question and passages do not fit the model's context.
        ServerError: A server that answers failed.
    """
    listening, recorder = recorded(llm)
    engine = make_query_engine(store, listening, embed_model, streaming=True)
    response = engine.synthesize(QueryBundle(question), list(nodes))
    assert isinstance(response, StreamingResponse)
    with closing(response.response_gen) as pieces:
        for piece in pieces:
            on_text(piece)
    call = recorder.last
    assert call is not None
    return Answer(question, call.answer, tuple(nodes), citations_of(call, nodes), call)


def citations_of(call: LLMCall, nodes: Sequence[NodeWithScore]) -> tuple[Citation, ...] | None:
    """Which stretches of a call's answer were copied from which passage; None if nobody watched."""
    return None if call.copied is None else tuple(cite(call.copied, call.answer, None, nodes))


def compare_answer(given: Answer, llm: ReaderLLM) -> Comparison:
    """Decode an answer's prompt again, with and without drafts, on behalf of the LLM's tenant."""
    engine, call = llm.engine, given.call
    chat = [{"role": message.role.value, "content": message.content or ""} for message in call.messages]
    prompt = engine.encode_chat(chat) if chat else engine.encode(call.prompt)
    context = Passage(CONTEXT_ID, context_of(given.nodes))  # as the LLM's own hook had it
    return compare(engine, prompt, SamplingParams(max_tokens=llm.max_tokens), [context], llm.tenant)
