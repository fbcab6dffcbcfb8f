"""From a request to the prompts that are decoded: which model, which documents, which arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import BaseNode, NodeWithScore

from reader_rag.errors import ConfigError, ContextLengthError, PromptError
from reader_rag.llm import ReaderLLM
from reader_rag.llm.calls import PreparedCall
from reader_rag.rag.prompts import NOTHING_FOUND
from reader_rag.server.access import Caller
from reader_rag.server.errors import ApiError
from reader_rag.server.openai.annotations import Sources
from reader_rag.server.openai.messages import chat_messages
from reader_rag.server.openai.retrieval import Question, fit
from reader_rag.server.openai.sampling import SEEDS, chat_arguments
from reader_rag.server.openai.schemas import ChatRequest
from reader_rag.server.service import Service


@dataclass(frozen=True)
class Prepared:
    """A chat up to where it is decoded.

    Attributes:
        llm: The LLM of the caller's tenant.
        call: What is decoded; None: no passage was found, and `NOTHING_FOUND` is the answer.
        sources: What was retrieved; None: the request asks the model itself.
        notes: What the answer's reader should know.
    """

    llm: ReaderLLM
    call: PreparedCall | None
    sources: Sources | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def required_call(self) -> PreparedCall:
        """What is decoded.

        Raises:
            PromptError: No passage was found.
        """
        if self.call is None:
            raise PromptError(NOTHING_FOUND)
        return self.call


async def prepare(service: Service, caller: Caller, request: ChatRequest, base_url: str) -> Prepared:
    """Prepare a chat: find passages, if its model answers from documents, and make the prompt.

    Args:
        service: The service; its LLM is a `ReaderLLM`.
        caller: Who asks.
        request: The request.
        base_url: The service's own address, for the addresses of sources.

    Raises:
        ApiError: There is no such model or document, or a message is not text.
        ReaderError: The request cannot be answered.
    """
    assert isinstance(service.llm, ReaderLLM)
    check_model(service, request)
    llm = service.llm.for_tenant(caller.tenant)
    messages, arguments = chat_messages(request.messages), chat_arguments(request)
    if request.model != service.docs_model:
        return Prepared(llm, await asyncio.to_thread(llm.prepare_chat, messages, **arguments))
    question = Question.of(messages)
    complete = partial(_complete, llm)
    sources = await Sources.find(service, caller.tenant, request, question, base_url, complete)
    found = sources.found
    if not found.nodes:
        return Prepared(llm, None, sources)
    call, notes = await asyncio.to_thread(_grounded_call, llm, question, found.nodes, found.around, arguments)
    return Prepared(llm, call, sources, notes)


def check_model(service: Service, request: ChatRequest) -> None:
    """Check that a request names a model that there is, and options that this model has.

    Args:
        service: The service.
        request: The request.

    Raises:
        ApiError: It does not.
    """
    known_model(service, request.model)
    if request.reader is not None and request.model != service.docs_model:
        raise ApiError(400, "reader has options of answers from documents; ask the model NAME+docs", param="reader")


def known_model(service: Service, model: str) -> None:
    """Check that there is a model.

    Args:
        service: The service.
        model: Its name.

    Raises:
        ApiError: There is none.
    """
    if model not in service.models:
        known = " and ".join(service.models)
        raise ApiError(404, f"there is no model of that name; there are {known}", code="model_not_found", param="model")


def choices(call: PreparedCall, count: int | None) -> list[PreparedCall]:
    """A call for each of the answers that a request asks for, with seeds of their own.

    Args:
        call: The first one.
        count: How many.
    """
    seed = call.params.seed
    return [
        call if not number or seed is None else replace(call, params=replace(call.params, seed=(seed + number) % SEEDS))
        for number in range(count or 1)
    ]


def _grounded_call(
    llm: ReaderLLM,
    question: Question,
    nodes: Sequence[NodeWithScore],
    around: Sequence[BaseNode],
    arguments: dict[str, Any],
) -> tuple[PreparedCall, list[str]]:
    """The call for a question with passages, and notes about what had no room in its prompt.

    Raises:
        ContextLengthError: The question with one passage has no room.
    """
    bound = llm.with_sources([*nodes, *around])
    window = llm.metadata.context_window
    asked = arguments.get("max_tokens")
    answer = min(llm.max_tokens if asked is None else asked, window // 2)

    def make(messages: list[ChatMessage]) -> PreparedCall | None:
        try:
            call = bound.prepare_chat(messages, **arguments)
        except ContextLengthError:
            return None
        return call if len(call.prompt.token_ids) + answer <= window else None

    return fit(question, nodes, window, make)


async def _complete(llm: ReaderLLM, prompt: str, max_tokens: int) -> str:
    """The answer to a prompt of the service's own; "" where it has no room. Cancelling it ends the request."""
    messages = [ChatMessage(role="user", content=prompt)]
    settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "recall": False}
    try:
        call = await asyncio.to_thread(llm.prepare_chat, messages, **settings)
    except (ContextLengthError, ConfigError):  # or a penalty of the LLM's that fits no short answer
        return ""
    with closing(await asyncio.to_thread(llm.submit, call)) as stream:
        async for _ in stream:
            pass
        return stream.result.text
