"""Answers from documents: passages for the last question, and a prompt that has room for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilter, MetadataFilters

from reader_rag.errors import ContextLengthError
from reader_rag.llm.citations import context_of
from reader_rag.rag.engines import DEFAULT_TOP_K, make_retriever
from reader_rag.rag.prompts import CHAT_CONTEXT, CHAT_SYSTEM, CONDENSE
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.rag.surroundings import Surroundings
from reader_rag.server.documents.text import document_id
from reader_rag.server.errors import ApiError, unknown_document
from reader_rag.server.openai.schemas import ReaderOptions
from reader_rag.server.service import Service

MadeT = TypeVar("MadeT")

_SYSTEM = (MessageRole.SYSTEM, MessageRole.DEVELOPER)
_CONDENSED_MESSAGES = 6
_CONDENSED_CHARACTERS = 1000
_CONDENSED_TOKENS = 64


@dataclass(frozen=True)
class Question:
    """A chat as its parts.

    Attributes:
        system: Text of its system messages.
        turns: What was said before the last question, a list of messages for each question.
        last: The last question, and what follows it: tool calls and their results.
    """

    system: str
    turns: tuple[tuple[ChatMessage, ...], ...]
    last: tuple[ChatMessage, ...]

    @classmethod
    def of(cls, messages: Sequence[ChatMessage]) -> Question:
        """Split the messages of a chat.

        Args:
            messages: The messages.

        Raises:
            ApiError: None of them is a question.
        """
        system = "\n\n".join(message.content or "" for message in messages if message.role in _SYSTEM)
        turns: list[list[ChatMessage]] = []
        for message in messages:
            if message.role in _SYSTEM:
                continue
            if message.role == MessageRole.USER or not turns:
                turns.append([])
            turns[-1].append(message)
        if not turns or turns[-1][0].role != MessageRole.USER or not (turns[-1][0].content or "").strip():
            raise ApiError(
                400, "the last question is empty: documents are searched for a message of the user", param="messages"
            )
        return cls(system, tuple(tuple(turn) for turn in turns[:-1]), tuple(turns[-1]))

    @property
    def text(self) -> str:
        """The text of the last question."""
        return self.last[0].content or ""

    @property
    def history(self) -> list[ChatMessage]:
        """What the user and the assistant said before."""
        return [message for turn in self.turns for message in turn if message.role != MessageRole.TOOL]

    def messages(self, nodes: Sequence[NodeWithScore], dropped: int) -> list[ChatMessage]:
        """The messages with passages.

        Args:
            nodes: The passages.
            dropped: How many of the oldest turns are left out.
        """
        instructions = CHAT_CONTEXT.format(context_str=context_of(nodes)) + CHAT_SYSTEM
        if self.system:
            instructions += f"\n\n{self.system}"
        kept = [message for turn in self.turns[dropped:] for message in turn]
        return [ChatMessage(role=MessageRole.SYSTEM, content=instructions), *kept, *self.last]


@dataclass(frozen=True)
class Retrieved:
    """What was found for a question.

    Attributes:
        question: What was searched for.
        nodes: The passages, the most similar first.
        around: The passages around them in their documents.
    """

    question: str
    nodes: tuple[NodeWithScore, ...]
    around: tuple[BaseNode, ...]


async def condensed(question: Question, complete: Callable[[str, int], Awaitable[str]]) -> str:
    """What to search for: the last question, and behind it the question as the model rewrites it with the history.

    Both are searched for, because small models lose words of a question when they rewrite it.

    Args:
        question: The chat.
        complete: Continues a prompt with the model, by at most a number of tokens.
    """
    said = []
    for message in question.history[-_CONDENSED_MESSAGES:]:
        text = (message.content or "")[:_CONDENSED_CHARACTERS]
        if text:
            said.append(f"{'User' if message.role == MessageRole.USER else 'Assistant'}: {text}")
    if not said:
        return question.text
    prompt = CONDENSE.format(chat_history="\n".join(said), question=question.text)
    answer = (await complete(prompt, _CONDENSED_TOKENS)).strip()
    first = answer.splitlines()[0].strip() if answer else ""
    return question.text if not first or first == question.text else f"{question.text}\n{first}"


def retrieve(service: Service, tenant: str, options: ReaderOptions, question: str) -> Retrieved:
    """Search a tenant's documents.

    Args:
        service: The service.
        tenant: The tenant.
        options: What the request says about the search.
        question: What to search for.

    Raises:
        ApiError: A document that the request names does not exist.
        StoreError: The store cannot be read.
    """
    assert service.store is not None
    assert service.embedding is not None
    store = service.store.for_tenant(tenant)
    retriever = make_retriever(
        store,
        service.embedding,
        options.top_k or DEFAULT_TOP_K,
        filters=_filters(options),
        documents=_documents(store, options),
    )
    nodes = tuple(retriever.retrieve(question))
    return Retrieved(question, nodes, tuple(Surroundings(store).of(nodes)))


def fit(
    question: Question,
    nodes: Sequence[NodeWithScore],
    window: int,
    make: Callable[[list[ChatMessage]], MadeT | None],
) -> tuple[MadeT, list[str]]:
    """Make the prompt of a question, without the oldest turns and then the least similar passages that have no room.

    Args:
        question: The chat.
        nodes: The passages, the most similar first.
        window: The model's context, in tokens.
        make: Makes the prompt of messages; None: it has no room.

    Returns:
        What `make` made, and notes about what was left out.

    Raises:
        ContextLengthError: The question with one passage has no room.
    """
    made, dropped = _first(len(question.turns), lambda count: make(question.messages(nodes, count)))
    notes = [_left_out(dropped, "oldest turn", "of the conversation")] if dropped else []
    if made is None:
        turns = len(question.turns)
        made, dropped = _first(
            len(nodes) - 1, lambda count: make(question.messages(nodes[: len(nodes) - count], turns))
        )
        notes = [_left_out(turns, "oldest turn", "of the conversation")] if turns else []
        notes += [_left_out(dropped, "least similar passage", "that was found")] if dropped else []
    if made is None:
        raise ContextLengthError(
            f"the question and one passage leave no room for an answer in the model's context of {window} tokens: "
            "shorten the question, or lower max_tokens"
        )
    return made, notes


def _first(most: int, make: Callable[[int], MadeT | None]) -> tuple[MadeT | None, int]:
    """The least number in 0..most for which something is made, by bisection; None if there is none."""
    made = make(0)
    if made is not None or most <= 0:
        return made, 0
    best = make(most)
    if best is None:
        return None, most
    low, high = 0, most  # nothing is made for `low`, something for `high`
    while high - low > 1:
        middle = (low + high) // 2
        made = make(middle)
        if made is None:
            low = middle
        else:
            best, high = made, middle
    return best, high


def _left_out(count: int, what: str, more: str) -> str:
    return f"the {count} {what}s {more} were left out" if count > 1 else f"the {what} {more} was left out"


def _filters(options: ReaderOptions) -> MetadataFilters | None:
    if not options.filters:
        return None
    return MetadataFilters(
        filters=[
            MetadataFilter(
                key=key, value=value, operator=FilterOperator.IN if isinstance(value, list) else FilterOperator.EQ
            )
            for key, value in options.filters.items()
        ]
    )


def _documents(store: DocumentStore, options: ReaderOptions) -> list[str] | None:
    if options.documents is None:
        return None
    known = {document_id(record.path): record.path for record in store.documents()}
    for id_ in options.documents:
        if id_ not in known:
            raise unknown_document("reader.documents")
    return [known[id_] for id_ in options.documents]
