"""The answers of the OpenAI-compatible API."""

from __future__ import annotations

import time
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field

from reader_rag import __version__
from reader_rag.engine.outputs import Generation, Stats

FINGERPRINT = f"reader-rag-{__version__}"
FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    """Counts of tokens of the prompts by where they came from."""

    cached_tokens: int = Field(default=0, description="Tokens whose keys and values came from the prefix cache.")


class CompletionDetails(BaseModel):
    """Counts of tokens of the answers by where they came from."""

    accepted_prediction_tokens: int = Field(default=0, description="Tokens of the prediction that were accepted.")
    rejected_prediction_tokens: int = Field(default=0, description="The other tokens of the prediction.")
    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Counts of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = Field(default=0, description="Tokens of the answers.")
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails = CompletionDetails()

    @classmethod
    def of(cls, answers: list[Stats]) -> Usage:
        """The usage of the answers to one prompt, which counts once.

        Args:
            answers: Their counts.
        """
        prompt = max((stats.prompt_tokens for stats in answers), default=0)
        completion = sum(stats.completion_tokens for stats in answers)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=max((s.reused_tokens for s in answers), default=0)),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=sum(stats.prediction_accepted for stats in answers),
                rejected_prediction_tokens=sum(stats.prediction_rejected for stats in answers),
                reasoning_tokens=0,
            ),
        )

    def plus(self, other: Usage) -> Usage:
        """The usage of two prompts together.

        Args:
            other: The other usage.
        """
        mine, theirs = self.completion_tokens_details, other.completion_tokens_details
        cached = self.prompt_tokens_details.cached_tokens + other.prompt_tokens_details.cached_tokens
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            total_tokens=self.total_tokens + other.total_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=mine.accepted_prediction_tokens + theirs.accepted_prediction_tokens,
                rejected_prediction_tokens=mine.rejected_prediction_tokens + theirs.rejected_prediction_tokens,
                reasoning_tokens=0,
            ),
        )


class TopLogprob(BaseModel):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A token of the answer, with the most probable ones in its place."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class UrlCitation(BaseModel):
    """A span of the answer that was copied from a document. Indices are Unicode code points of the content."""

    start_index: int = Field(ge=0)
    end_index: int = Field(ge=0, description="Exclusive.")
    title: str
    url: str = Field(description="Opens the page at the span; names the version of the text that the span is in.")


class Annotation(BaseModel):
    """An annotation of the content."""

    type: Literal["url_citation"] = "url_citation"
    url_citation: UrlCitation


class RetrievedPassage(BaseModel):
    """A passage that was retrieved for the question."""

    document_id: str
    title: str
    url: str
    score: float | None = None
    page: int | None = None
    copied: bool = Field(description="Whether a citation of the answer lies in it.")


class ReaderFigures(BaseModel):
    """What OpenAI's format has no place for."""

    tokens_per_second: float = 0.0
    tokens_per_step: float = 1.0
    copied_tokens: int = Field(default=0, description="Accepted draft tokens that were copied from a text.")
    completion_tokens: int = 0
    steps: int = 0
    first_token_s: float = 0.0
    notes: list[str] = []
    question: str | None = Field(default=None, description="What was searched for.")
    passages: list[RetrievedPassage] = []

    @classmethod
    def of(cls, stats: Stats) -> ReaderFigures:
        """The figures of an answer.

        Args:
            stats: Its counts and times.
        """
        copied = ("context", "passage", "datastore", "prediction")
        return cls(
            tokens_per_second=stats.tokens_per_s,
            tokens_per_step=stats.tokens_per_step,
            copied_tokens=sum(stats.accepted_by_source.get(source, 0) for source in copied),
            completion_tokens=stats.completion_tokens,
            steps=stats.steps,
            first_token_s=stats.queue_s + stats.ttft_s,
        )


class CalledFunction(BaseModel):
    """The function of a tool call."""

    name: str
    arguments: str


class CalledTool(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The answer to a chat."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    annotations: list[Annotation] = []
    tool_calls: list[CalledTool] | None = None


class ChatChoice(BaseModel):
    """One answer to a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    reader: ReaderFigures | None = None


def _now() -> int:
    return int(time.time())


class ChatCompletion(BaseModel):
    """The answer of `POST /v1/chat/completions`."""

    id: str = Field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str = FINGERPRINT
    service_tier: str | None = None
    reader: ReaderFigures | None = Field(default=None, description="Figures of the first choice.")


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion."""

    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    text_offset: list[int] = []


class CompletionChoice(BaseModel):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    """The answer of `POST /v1/completions`, and a chunk of its stream."""

    id: str = Field(default_factory=lambda: f"cmpl-{uuid4().hex}")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str = FINGERPRINT
    reader: ReaderFigures | None = None


class Delta(BaseModel):
    """What a chunk of a stream adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    annotations: list[Annotation] | None = None


class ChunkChoice(BaseModel):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    reader: ReaderFigures | None = None


class ChatChunk(BaseModel):
    """A chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str = FINGERPRINT
    reader: ReaderFigures | None = None


class Model(BaseModel):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "reader-rag"
    max_model_len: int | None = Field(default=None, description="Most tokens of prompt and answer, as vLLM tells it.")


class ModelList(BaseModel):
    """The models of the service."""

    object: Literal["list"] = "list"
    data: list[Model]


def first_fields(kind: str, model: str) -> dict[str, Any]:
    """The fields that all chunks of an answer have.

    Args:
        kind: Its `object`.
        model: Name of the model.
    """
    return {
        "id": f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{uuid4().hex}",
        "object": kind,
        "created": _now(),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def finish_reason(done: Generation, calls: bool) -> FinishReason:
    """Why an answer ended, in OpenAI's words.

    Args:
        done: The answer.
        calls: Whether it ends with tool calls.
    """
    return "tool_calls" if calls and done.finish_reason == "stop" else done.finish_reason
