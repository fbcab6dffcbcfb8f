"""Retriever, query engine and chat engine over a document store, made of LlamaIndex's own parts.

LlamaIndex's global `Settings` are neither changed nor relied on: models, tokenizer and prompts are passed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import VectorIndexRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from reader_rag.errors import ConfigError, PromptError
from reader_rag.llm import ReaderLLM
from reader_rag.rag.chat_engine import GroundedChatEngine
from reader_rag.rag.prompts import CHAT_CONTEXT, CHAT_REFINE, CHAT_SYSTEM, NOTHING_FOUND, QA_PROMPT, REFINE_PROMPT
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.rag.stores.location import open_store
from reader_rag.rag.surroundings import MOST_CHARACTERS, Surroundings
from reader_rag.rag.synthesis import PromptBudget, make_synthesizer

__all__ = ["NOTHING_FOUND", "make_chat_engine", "make_query_engine", "make_retriever", "open_store"]

DEFAULT_TOP_K = 4
_HISTORY_SHARE = 0.3  # of the context window; passages and the answer need the rest


class QuestionRetriever(VectorIndexRetriever):
    """LlamaIndex's retriever, which refuses an empty question and brings a text that several files share once."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        _require_question(query_bundle)
        return _distinct(super()._retrieve(query_bundle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        _require_question(query_bundle)
        return _distinct(await super()._aretrieve(query_bundle))


def make_retriever(
    store: DocumentStore,
    embed_model: BaseEmbedding,
    top_k: int = DEFAULT_TOP_K,
    cutoff: float | None = None,
    filters: MetadataFilters | None = None,
    tenant: str | None = None,
) -> BaseRetriever:
    """A retriever of the passages nearest to a question; an empty question raises `PromptError`.

    Args:
        store: Where to look.
        embed_model: The model that the store was made with.
        top_k: Most passages; fewer come where several of them have the same text.
        cutoff: Least cosine similarity of a passage; None takes the store's own (none unless set).
        filters: Conditions on the passages' metadata, e.g. `file_name`.
        tenant: Whose documents are searched, and no others; None: those of the store's own tenant, "" unless it was
            opened for another.

    Raises:
        ConfigError: `top_k` below 1, a cutoff outside -1..1, or a name that no tenant can have.
    """
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, not {top_k}")
    if cutoff is not None and not -1.0 <= cutoff <= 1.0:
        raise ConfigError(f"cutoff is a cosine similarity, -1..1, not {cutoff}")
    # LlamaIndex would take the splitter, which this index never uses, from the global settings.
    index = VectorStoreIndex.from_vector_store(
        _of(store, tenant), embed_model=embed_model, transformations=[SentenceSplitter(tokenizer=str.split)]
    )
    return QuestionRetriever(
        index,
        similarity_top_k=top_k,
        filters=filters,
        embed_model=embed_model,
        vector_store_kwargs={} if cutoff is None else {"similarity_cutoff": cutoff},
    )


def make_query_engine(
    store: DocumentStore,
    llm: LLM,
    embed_model: BaseEmbedding,
    *,
    top_k: int = DEFAULT_TOP_K,
    cutoff: float | None = None,
    streaming: bool = False,
    filters: MetadataFilters | None = None,
    prompt: BasePromptTemplate | None = None,
    beyond: int = MOST_CHARACTERS,
    tenant: str | None = None,
) -> RetrieverQueryEngine:
    """A query engine that answers from the store's passages, or with `NOTHING_FOUND` where there are none.

    Args:
        store: Where to look.
        llm: Who answers: any LlamaIndex LLM. With a `tokenizer` attribute, prompts are measured with it.
        embed_model: The model that the store was made with.
        top_k: Most passages.
        cutoff: Least cosine similarity of a passage.
        streaming: `query` returns a response whose `response_gen` yields text as it is made.
        filters: Conditions on the passages' metadata.
        prompt: Takes the place of the built-in prompt; with `{context_str}` and `{query_str}`.
        beyond: Most characters of the passages' own documents that are searched for drafts besides the prompt (which
            does not grow by them); 0: none.
        tenant: Whose documents are searched, and on whose behalf a `ReaderLLM` is called; None: the store's own
            tenant, and that of an LLM from `for_tenant` where the store has none.

    Raises:
        ConfigError: As `make_retriever`, or store and LLM are for two tenants and none is named. Queries raise
            `PromptError` for an empty or too long question.
    """
    store, llm = _of(store, tenant), _speaking(llm, store, tenant)
    around = Surroundings(store, beyond)
    synthesizer = make_synthesizer(llm, prompt or QA_PROMPT, REFINE_PROMPT, streaming=streaming, surroundings=around)
    return RetrieverQueryEngine(make_retriever(store, embed_model, top_k, cutoff, filters), synthesizer)


def make_chat_engine(
    store: DocumentStore,
    llm: LLM,
    embed_model: BaseEmbedding,
    *,
    top_k: int = DEFAULT_TOP_K,
    cutoff: float | None = None,
    filters: MetadataFilters | None = None,
    memory: BaseMemory | None = None,
    chat_history: Sequence[ChatMessage] = (),
    system_prompt: str = CHAT_SYSTEM,
    beyond: int = MOST_CHARACTERS,
    tenant: str | None = None,
) -> GroundedChatEngine:
    """A chat engine: each message is answered from the passages found for it, with the conversation so far in view.

    Args:
        store: Where to look.
        llm: Who answers.
        embed_model: The model that the store was made with.
        top_k: Most passages per message.
        cutoff: Least cosine similarity of a passage.
        filters: Conditions on the passages' metadata.
        memory: Keeps the conversation; None keeps as many recent messages as fit in 30% of the context window.
        chat_history: Earlier messages to begin with; only without `memory`.
        system_prompt: How the LLM is to behave.
        beyond: As in `make_query_engine`.
        tenant: As in `make_query_engine`. A memory of yours that calls an LLM calls it as you made it.

    Raises:
        ConfigError: As `make_query_engine`, or both `memory` and `chat_history`.
    """
    if memory is not None and chat_history:
        raise ConfigError("give memory or chat_history, not both")
    store, llm = _of(store, tenant), _speaking(llm, store, tenant)
    budget = PromptBudget.of(llm)
    return GroundedChatEngine(
        retriever=make_retriever(store, embed_model, top_k, cutoff, filters),
        llm=llm,
        memory=memory or _recent_messages(budget, chat_history),
        prefix_messages=[ChatMessage(content=system_prompt, role=llm.metadata.system_role)],
        context_template=PromptTemplate(CHAT_CONTEXT),
        context_refine_template=PromptTemplate(CHAT_REFINE),
        surroundings=Surroundings(store, beyond),
        callback_manager=llm.callback_manager,
    )


def _of(store: DocumentStore, tenant: str | None) -> DocumentStore:
    return store if tenant is None else store.for_tenant(tenant)


def _speaking(llm: LLM, store: DocumentStore, tenant: str | None) -> LLM:
    """The LLM, called on behalf of whoever is asked for: what it keeps of a tenant's documents serves nobody else."""
    if isinstance(llm, StructuredLLM):
        return llm.model_copy(update={"llm": _speaking(llm.llm, store, tenant)})
    if not isinstance(llm, ReaderLLM):
        return llm
    if tenant is None and llm.tenant and store.tenant and llm.tenant != store.tenant:
        raise ConfigError(
            f"the store is for the tenant {store.tenant!r} and the LLM for {llm.tenant!r}: name the one that asks "
            "(tenant=...)"
        )
    return llm.for_tenant((store.tenant or llm.tenant) if tenant is None else tenant)


def _recent_messages(budget: PromptBudget, history: Sequence[ChatMessage]) -> BaseMemory:
    memory = ChatMemoryBuffer.from_defaults(
        token_limit=max(1, int(_HISTORY_SHARE * budget.context_window)), tokenizer_fn=budget.encode
    )
    for message in history:
        memory.put(message)
    return memory


def _distinct(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    first = {node.get_content(): node for node in reversed(nodes)}
    return [node for node in nodes if first[node.get_content()] is node]


def _require_question(query: QueryBundle) -> None:
    if not query.query_str.strip():
        raise PromptError("the question is empty; ask something")
