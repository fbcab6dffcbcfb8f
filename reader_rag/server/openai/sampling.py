"""From a request's fields to the arguments of a call of `ReaderLLM`."""

from __future__ import annotations

from typing import Any

from reader_rag.config import Grammar
from reader_rag.server.openai.messages import text_of
from reader_rag.server.openai.schemas import ChatRequest, CompletionRequest, NamedTool, ResponseFormat, Sampling

_SAME_NAME = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram",
    "min_tokens",
    "bad_words",
    "suppress_tokens",
    "include_stop",
    "speculate",
)
SEEDS = 1 << 64
"""Number of seeds: larger and negative ones are reduced modulo it."""


def call_arguments(request: Sampling) -> dict[str, Any]:
    """The arguments of a call that chats and completions share.

    Args:
        request: The request.
    """
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    if request.seed is not None:
        given["seed"] = request.seed % SEEDS  # OpenAI's may be negative
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias:
        given["logit_bias"] = {int(token): float(bias) for token, bias in request.logit_bias.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def chat_arguments(request: ChatRequest) -> dict[str, Any]:
    """The arguments of `ReaderLLM.prepare_chat`.

    Args:
        request: The request.

    Raises:
        ApiError: The prediction is not text.
        ConfigError: The schema of the answer is none.
    """
    given = call_arguments(request)
    if request.max_completion_tokens is not None:
        given["max_tokens"] = request.max_completion_tokens
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    given["grammar"] = _grammar(request.response_format)
    if request.prediction is not None:
        given["prediction"] = text_of(request.prediction.content, "prediction.content")
    if request.tools:
        choice = request.tool_choice
        given["tools"] = [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in request.tools
        ]
        given["tool_choice"] = choice.function.name if isinstance(choice, NamedTool) else choice
        given["allow_parallel_tool_calls"] = request.parallel_tool_calls is not False
    return given


def completion_arguments(request: CompletionRequest) -> dict[str, Any]:
    """The arguments of `ReaderLLM.prepare_completion`.

    Args:
        request: The request.
    """
    return call_arguments(request) | {"logprobs": request.logprobs}


def _grammar(form: ResponseFormat | None) -> Grammar | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar.json_schema({"type": "object"})
    assert form.json_schema is not None  # the request was checked
    assert form.json_schema.schema_ is not None
    return Grammar.json_schema(form.json_schema.schema_)
