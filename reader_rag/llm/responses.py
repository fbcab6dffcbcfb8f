"""LlamaIndex responses from streams and finished answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LogProb, MessageRole

from reader_rag.llm.instrumentation import atraced, report_answer, traced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reader_rag.engine.outputs import Generation
    from reader_rag.engine.stream import GenerationStream
    from reader_rag.sampling.logprobs import TokenLogprobs

ResponseT = TypeVar("ResponseT", ChatResponse, CompletionResponse)
Respond = Callable[[str, str | None, "Sequence[TokenLogprobs]", "Generation | None"], ResponseT]
"""Makes a response of the text so far, its last piece (None for a whole answer), the log-probabilities of that piece's
tokens, and the finished answer (None before the last response)."""


class Responses:
    """Makes responses of one model's answers.

    Args:
        model: Name of the model.
        tokenizer: Its tokenizer, which spells the tokens of log-probabilities.
    """

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def completion(
        self, text: str, delta: str | None, logprobs: Sequence[TokenLogprobs], done: Generation | None
    ) -> CompletionResponse:
        """The response to a completion; see `Respond`."""
        raw, figures = self._report(done)
        return CompletionResponse(
            text=text, delta=delta, logprobs=self._logprobs(logprobs), raw=raw, additional_kwargs=figures
        )

    def chat(
        self, text: str, delta: str | None, logprobs: Sequence[TokenLogprobs], done: Generation | None
    ) -> ChatResponse:
        """The response to a chat; see `Respond`."""
        raw, figures = self._report(done)
        message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
        return ChatResponse(
            message=message, delta=delta, logprobs=self._logprobs(logprobs), raw=raw, additional_kwargs=figures
        )

    def _logprobs(self, token_logprobs: Sequence[TokenLogprobs]) -> list[list[LogProb]] | None:
        """For each token a list: the token itself, then the most probable others."""
        if not token_logprobs:
            return None

        def one(token_id: int, logprob: float) -> LogProb:
            text = str(self._tokenizer.decode([token_id]))
            return LogProb(token=text, logprob=logprob, bytes=list(text.encode()))

        return [
            [one(token.token_id, token.logprob), *(one(*other) for other in token.top if other[0] != token.token_id)]
            for token in token_logprobs
        ]

    def _report(self, done: Generation | None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """`raw` and `additional_kwargs`; empty before the last response."""
        if done is None:
            return None, {}
        prompt_tokens, completion_tokens = done.stats.prompt_tokens, done.stats.completion_tokens
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        raw = {"model": self._model, "usage": usage, "finish_reason": done.finish_reason}
        return raw, done.stats.to_dict() | {"copied": [asdict(span) for span in done.copied]}


def finish(stream: GenerationStream, respond: Respond[ResponseT]) -> ResponseT:
    """The response to a whole answer.

    Args:
        stream: The answer.
        respond: Makes the response.
    """
    with closing(stream):
        done = report_answer(stream.finish())
    return respond(done.text, None, done.logprobs, done)


async def afinish(stream: GenerationStream, respond: Respond[ResponseT]) -> ResponseT:
    """The response to a whole answer, without blocking the event loop.

    Args:
        stream: The answer.
        respond: Makes the response.
    """
    with closing(stream):
        async for _ in stream:
            pass
        done = report_answer(stream.result)
    return respond(done.text, None, done.logprobs, done)


@traced
def responses(stream: GenerationStream, respond: Respond[ResponseT]) -> Generator[ResponseT, None, None]:
    """A response for every chunk of an answer; closing the generator ends the request.

    Args:
        stream: The answer.
        respond: Makes the responses.
    """
    text = ""
    with closing(stream):
        for chunk in stream:
            text += chunk.text
            done = stream.result if chunk.finish_reason is not None else None
            yield respond(text, chunk.text, chunk.logprobs, done)


@atraced
async def aresponses(stream: GenerationStream, respond: Respond[ResponseT]) -> AsyncGenerator[ResponseT, None]:
    """A response for every chunk of an answer, without blocking the event loop; closing it ends the request.

    Args:
        stream: The answer.
        respond: Makes the responses.
    """
    text = ""
    with closing(stream):  # which never waits, not even for a step that is running
        async for chunk in stream:
            text += chunk.text
            done = stream.result if chunk.finish_reason is not None else None
            yield respond(text, chunk.text, chunk.logprobs, done)
