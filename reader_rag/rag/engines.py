"""Retriever, query engine and chat engine over a document store, built of LlamaIndex's own components.

LlamaIndex's global `Settings` are neither changed nor read: models, tokenizer and prompts are passed as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.indices.base import BaseIndex
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import VectorIndexRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters, VectorStoreQueryMode

from reader_rag.errors import ConfigError, PromptError
from reader_rag.llm import ReaderLLM
from reader_rag.rag.chat_engine import GroundedChatEngine
from reader_rag.rag.prompts import CHAT_CONTEXT, CHAT_REFINE, CHAT_SYSTEM, NOTHING_FOUND, QA_PROMPT, REFINE_PROMPT
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.rag.stores.location import open_store
from reader_rag.rag.surroundings import MOST_CHARACTERS, Surroundings
from reader_rag.rag.synthesis import GroundedSynthesizer, PromptBudget

__all__ = ["NOTHING_FOUND", "make_chat_engine", "make_query_engine", "make_retriever", "open_store"]

DEFAULT_TOP_K = 4
_HISTORY_SHARE = 0.3  # share of the context window; passages and the answer need the rest


class QuestionRetriever(VectorIndexRetriever):
    """LlamaIndex's retriever; it refuses an empty question and returns equal texts once."""

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
    alpha: float | None = None,
    documents: Sequence[str] | None = None,
) -> BaseRetriever:
    """Make a retriever of the passages most similar to a question; an empty question raises `PromptError`.

    Args:
        store: The store to search.
        embed_model: The embedding model that the store was made with.
        top_k: Most passages; fewer are returned where several have the same text.
        cutoff: Least cosine similarity of a passage; None takes the store's `similarity_cutoff`.
        filters: Conditions on the passages' metadata, e.g. `file_name`.
        tenant: The tenant whose documents are searched; None: the store's own tenant.
        alpha: Hybrid retrieval, by vectors and words (BM25): the weight of the vectors, 0 (words only) to 1. None: by
            vectors only.
        documents: Paths of the documents to search (`DocumentRecord.path`); None: all.

    Raises:
        ConfigError: `top_k` is below 1, the cutoff outside -1..1, `alpha` outside 0..1 or the store without hybrid
            retrieval, or the tenant's name invalid.
    """
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, not {top_k}")
    if cutoff is not None and not -1.0 <= cutoff <= 1.0:
        raise ConfigError(f"cutoff is a cosine similarity, -1..1, not {cutoff}")
    if alpha is not None and not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"alpha is the weight of the vectors in hybrid retrieval, 0..1, not {alpha}")
    store = _for_tenant(store, tenant)
    mode = VectorStoreQueryMode.DEFAULT if alpha is None else VectorStoreQueryMode.HYBRID
    if mode not in store.modes:
        raise ConfigError(f"{store.class_name()} has no hybrid retrieval: leave out alpha, or use a FaissStore")
    # LlamaIndex would take the splitter, which this index never uses, from the global settings.
    index = VectorStoreIndex.from_vector_store(
        store, embed_model=embed_model, transformations=[SentenceSplitter(tokenizer=str.split)]
    )
    return QuestionRetriever(
        index,
        similarity_top_k=top_k,
        vector_store_query_mode=mode,
        alpha=alpha,
        filters=filters,
        doc_ids=None if documents is None else list(documents),
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
    alpha: float | None = None,
) -> RetrieverQueryEngine:
    """Make a query engine that answers from retrieved passages, or with `NOTHING_FOUND` where none is retrieved.

    Args:
        store: The store to search.
        llm: Any LlamaIndex LLM. Prompts are measured with its `tokenizer` attribute, if it has one.
        embed_model: The embedding model that the store was made with.
        top_k: Most passages.
        cutoff: Least cosine similarity of a passage; None takes the store's `similarity_cutoff`.
        streaming: Whether `query` returns a response whose `response_gen` yields text while it is generated.
        filters: Conditions on the passages' metadata.
        prompt: Replaces the built-in prompt; a template with `{context_str}` and `{query_str}`.
        beyond: Most characters of the surrounding passages that are indexed for drafts and not put into the prompt: the
            rest of the retrieved passages' documents, nearest first; 0: none.
        tenant: The tenant whose documents are searched and whose calls a `ReaderLLM` makes; None: the store's own
            tenant, or that of an LLM from `for_tenant` where the store has none.
        alpha: Hybrid retrieval, by vectors and words (BM25): the weight of the vectors, 0 (words only) to 1. None: by
            vectors only.

    Raises:
        ConfigError: A setting or the tenant's name is invalid, or store and LLM have different tenants and `tenant` is
            None. Queries raise `PromptError` for an empty or too long question.
    """
    store, llm = _for_tenant(store, tenant), _llm_for_tenant(llm, store, tenant)
    synthesizer = GroundedSynthesizer(
        llm, prompt or QA_PROMPT, REFINE_PROMPT, streaming=streaming, surroundings=Surroundings(store, beyond)
    )
    return RetrieverQueryEngine(make_retriever(store, embed_model, top_k, cutoff, filters, alpha=alpha), synthesizer)


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
    alpha: float | None = None,
) -> GroundedChatEngine:
    """Make a chat engine that answers each message from the passages retrieved for it and the conversation so far.

    Args:
        store: The store to search.
        llm: Any LlamaIndex LLM. Prompts are measured with its `tokenizer` attribute, if it has one.
        embed_model: The embedding model that the store was made with.
        top_k: Most passages per message.
        cutoff: Least cosine similarity of a passage; None takes the store's `similarity_cutoff`.
        filters: Conditions on the passages' metadata.
        memory: Memory of the conversation; None keeps the most recent messages that fit in 30% of the context window.
        chat_history: Initial messages; only without `memory`.
        system_prompt: Instructions for the LLM.
        beyond: Most characters of the surrounding passages that are indexed for drafts and not put into the prompt.
        tenant: The tenant whose documents are searched and whose calls a `ReaderLLM` makes; None: the store's own
            tenant, or that of an LLM from `for_tenant` where the store has none. An LLM that `memory` calls
            is not bound to it.
        alpha: Hybrid retrieval, by vectors and words (BM25): the weight of the vectors, 0 (words only) to 1. None: by
            vectors only.

    Raises:
        ConfigError: A setting or the tenant's name is invalid, store and LLM have different tenants and `tenant` is
            None, or both `memory` and `chat_history` are given.
    """
    if memory is not None and chat_history:
        raise ConfigError("give memory or chat_history, not both")
    store, llm = _for_tenant(store, tenant), _llm_for_tenant(llm, store, tenant)
    budget = PromptBudget.of(llm)
    return GroundedChatEngine(
        retriever=make_retriever(store, embed_model, top_k, cutoff, filters, alpha=alpha),
        llm=llm,
        memory=memory or _recent_messages(budget, chat_history),
        prefix_messages=[ChatMessage(content=system_prompt, role=llm.metadata.system_role)],
        context_template=PromptTemplate(CHAT_CONTEXT),
        context_refine_template=PromptTemplate(CHAT_REFINE),
        surroundings=Surroundings(store, beyond),
        callback_manager=llm.callback_manager,
    )


def _for_tenant(store: DocumentStore, tenant: str | None) -> DocumentStore:
    if not isinstance(store, DocumentStore):
        kind = type(store).__name__
        remedy = "index.vector_store, if that is one, or use index.as_query_engine(llm=llm)"
        if not isinstance(store, BaseIndex):
            remedy = "FaissStore.open(folder)"
        raise ConfigError(f"this takes a DocumentStore such as FaissStore, not a {kind}: pass {remedy}")
    return store if tenant is None else store.for_tenant(tenant)


def _llm_for_tenant(llm: LLM, store: DocumentStore, tenant: str | None) -> LLM:
    """The LLM bound to the tenant, so that its caches and draft state of the tenant's documents serve no other."""
    if isinstance(llm, StructuredLLM):
        return llm.model_copy(update={"llm": _llm_for_tenant(llm.llm, store, tenant)})
    if not isinstance(llm, ReaderLLM):
        return llm
    if tenant is None and llm.tenant and store.tenant and llm.tenant != store.tenant:
        raise ConfigError(
            f"the store is bound to the tenant {store.tenant!r} and the LLM to {llm.tenant!r}: "
            "pass the tenant of the question (tenant=...)"
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
        raise PromptError("the question is empty; write a question")
