"""The same API where another OpenAI-compatible server decodes: retrieval and citations are made here.

Requests are passed on and answers passed back. Which spans were copied is not reported, so citations are found by
comparing texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import httpx
import openai
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai.utils import to_openai_message_dicts

from reader_rag.connectors.openai import ServerLLM
from reader_rag.connectors.openai_server import RefusedError
from reader_rag.connectors.openai_transport import TimeBudget, recorded_responses
from reader_rag.rag.prompts import NOTHING_FOUND
from reader_rag.rag.synthesis import PromptBudget
from reader_rag.server.access import Caller
from reader_rag.server.errors import ApiError
from reader_rag.server.event_stream import event_stream
from reader_rag.server.openai.annotations import Cited, Sources
from reader_rag.server.openai.answers import started, until_disconnected
from reader_rag.server.openai.messages import chat_messages
from reader_rag.server.openai.responses import ReaderFigures, first_fields
from reader_rag.server.openai.retrieval import Question, fit
from reader_rag.server.openai.schemas import ChatRequest, CompletionRequest
from reader_rag.server.service import Service

_OWN = {"reader", "speculate", "typical_p", "no_repeat_ngram"}
"""Fields that other servers do not know."""


class RemoteAnswer:
    """The answer to one request, which another server decodes.

    Args:
        service: The service; its LLM is a `ServerLLM`.
        body: The request.
        path: Path of the call at the other server.
    """

    def __init__(self, service: Service, body: ChatRequest | CompletionRequest, path: str) -> None:
        assert isinstance(service.llm, ServerLLM)
        self._service = service
        self._llm = service.llm
        self._server = service.llm.server
        self._body = body
        self._path = path
        self._request = body.model_dump(mode="json", exclude_unset=True, by_alias=True, exclude=_OWN)
        self._request["model"] = self._llm.model
        if not {"max_tokens", "max_completion_tokens"} & self._request.keys():
            self._request["max_tokens"] = self._llm.max_tokens
        self._sources: Sources | None = None
        self._notes: list[str] = []
        self._found = True

    async def ground(self, caller: Caller, base_url: str) -> None:
        """Find passages for a chat, and put them into its prompt.

        Args:
            caller: Who asks.
            base_url: The service's own address.

        Raises:
            ApiError: There is no such document, or no question.
            ReaderError: The request cannot be answered.
        """
        assert isinstance(self._body, ChatRequest)
        question = Question.of(chat_messages(self._body.messages))
        self._sources = await Sources.find(self._service, caller.tenant, self._body, question, base_url, self._complete)
        nodes = self._sources.found.nodes
        self._found = bool(nodes)
        if not self._found:
            return
        budget = await asyncio.to_thread(PromptBudget.of, self._llm)
        window = budget.context_window
        answer = min(self._request.get("max_completion_tokens") or self._request["max_tokens"], window // 2)

        def make(messages: list[ChatMessage]) -> list[ChatMessage] | None:
            used = sum(len(budget.encode(message.content or "")) + budget.message_tokens for message in messages)
            return messages if used + budget.template_tokens + answer <= window else None

        messages, self._notes = await asyncio.to_thread(fit, question, nodes, window, make)
        self._request["messages"] = to_openai_message_dicts(messages)

    async def response(self, request: Request) -> Response:
        """The answer, whole or as a stream of server-sent events.

        Args:
            request: The client's request.
        """
        if self._body.stream:
            return event_stream(await started(self.chunks()), self._service.config.grace)
        return JSONResponse(await until_disconnected(request, self.whole()))

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        if not self._found:
            return self._nothing_found()
        with _refusals(), self._server.call():
            answer: dict[str, Any] = await self._server.async_client.post(
                self._path,
                body=self._request,
                cast_to=dict[str, Any],
            )
        answer["model"] = self._body.model
        for choice in answer.get("choices", ()):
            message = choice.get("message")
            if message is not None and self._sources is not None:
                cited = await self._cite(message.get("content") or "")
                message["annotations"] = [each.model_dump() for each in cited.annotations]
                message["content"] = (message.get("content") or "") + cited.footer
                if not choice.get("index"):
                    answer["reader"] = self._figures(cited)
        return answer

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as chunks. Closing it closes the connection."""
        if not self._found:
            for chunk in self._nothing_found_chunks():
                yield chunk
            return
        texts: dict[int, str] = {}
        async with aclosing(self._parts()) as parts:
            async for chunk in parts:
                chunk["model"] = self._body.model
                for choice in chunk.get("choices") or ():
                    number = choice.get("index", 0)
                    delta = choice.get("delta") or {}
                    texts[number] = texts.get(number, "") + (delta.get("content") or "")
                    if choice.get("finish_reason") and self._sources is not None:
                        cited = await self._cite(texts[number])
                        delta["content"] = (delta.get("content") or "") + cited.footer
                        if cited.annotations:
                            delta["annotations"] = [each.model_dump() for each in cited.annotations]
                        choice["delta"], chunk["reader"] = delta, self._figures(cited)
                yield chunk

    async def _parts(self) -> AsyncGenerator[dict[str, Any], None]:
        budget = self._server.budget()
        opened: list[httpx.Response] = []
        stream: AsyncIterator[Any] | None = None
        try:
            with self._calling(budget, opened):
                stream = await self._server.async_client.post(
                    self._path,
                    body=self._request,
                    cast_to=object,
                    stream=True,
                    stream_cls=openai.AsyncStream[object],
                )
            while True:
                with self._calling(budget, opened):
                    part = await anext(stream, None)
                if part is None:
                    return
                if isinstance(part, dict):
                    yield part
        finally:
            for response in opened:
                await response.aclose()

    @contextmanager
    def _calling(self, budget: TimeBudget, opened: list[httpx.Response]) -> Iterator[None]:
        with _refusals(), self._server.call(budget), recorded_responses(opened):
            yield

    async def _complete(self, prompt: str, max_tokens: int) -> str:
        asked = [ChatMessage(role="user", content=prompt)]
        answer = await self._llm.achat(asked, max_tokens=max_tokens, temperature=0.0)
        return answer.message.content or ""

    async def _cite(self, text: str) -> Cited:
        assert self._sources is not None
        return await asyncio.to_thread(self._sources.cite, text, None)

    def _figures(self, cited: Cited) -> dict[str, Any]:
        """Passages and notes: how fast the other server decodes is not known."""
        assert self._sources is not None
        figures = ReaderFigures(notes=self._notes, question=self._sources.found.question, passages=cited.passages)
        return figures.model_dump(exclude_unset=True)

    def _nothing_found(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": NOTHING_FOUND}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return first_fields("chat.completion", self._body.model) | {"choices": [choice], "usage": _NO_USAGE}

    def _nothing_found_chunks(self) -> list[dict[str, Any]]:
        head = first_fields("chat.completion.chunk", self._body.model)
        delta = {"role": "assistant", "content": NOTHING_FOUND}
        last = [head | {"choices": [], "usage": _NO_USAGE}] if self._body.wants_usage else []
        return [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}, *last]


_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@contextmanager
def _refusals() -> Iterator[None]:
    """What the other server refuses is refused here."""
    try:
        yield
    except RefusedError as error:
        raise ApiError(400, str(error)) from error
