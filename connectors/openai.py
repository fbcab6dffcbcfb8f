"""An LLM on an OpenAI-compatible HTTP server, such as vLLM: LlamaIndex's `OpenAILike` with exact token counts.

`ServerLLM.connect` asks the server which models it serves. Prompts are measured with the server's own tokenizer where
it offers one, closing a stream here ends it on the server, and every failure is one `ReaderError`.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, TextBlock
from llama_index.core.bridge.pydantic import Field, PrivateAttr, ValidationError
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW

from reader_rag.errors import ConfigError, MissingDependencyError, ModelNotFoundError, ReaderError
from reader_rag.util.encodable import encodable

try:
    import httpx
    import openai
    from llama_index.llms.openai_like import OpenAILike
    from reader_rag.connectors.openai_server import NO_KEY, RefusedError, Server, UnreadableError, is_count
    from reader_rag.connectors.openai_transport import recorded_responses
except ImportError as cause:
    raise MissingDependencyError(
        "an LLM server needs llama-index-llms-openai-like: pip install 'reader-rag[openai]'"
    ) from cause

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_TOTAL_TIMEOUT_S = 1800.0
_ESTIMATE_SHARE = 0.8  # share of the context window in use where tokens are counted with another model's tokenizer
_CACHED_COUNTS = 1 << 16
_LISTED_MODELS = 20

ResponseT = TypeVar("ResponseT", ChatResponse, CompletionResponse)


class ServerLLM(OpenAILike):
    """A model on an OpenAI-compatible server as a LlamaIndex LLM; made by `connect`.

    The last response of a call has in `raw` the `model`, `usage` (None if the server does not report it) and
    `finish_reason`, like `ReaderLLM`'s. Its `additional_kwargs` hold `ttft_s` and `tokens_per_s`, measured here
    with the network included, and those of `prompt_tokens`, `completion_tokens` and `reused_tokens` that the server
    reports.

    Example:
        >>> llm = ServerLLM.connect("http://localhost:8000/v1")
        >>> make_query_engine(store, llm, embed_model).query("Who wrote the report?")
    """

    tokenizer: Any = Field(default=None, exclude=True)  # a `ServerTokenizer` or None; excluded from serialisation

    _server: Server = PrivateAttr()

    @classmethod
    def connect(
        cls,
        url: str,
        model: str | None = None,
        *,
        key: str | None = None,
        max_tokens: int = 256,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        total_timeout_s: float = DEFAULT_TOTAL_TIMEOUT_S,
        context_window: int | None = None,
        **settings: Any,
    ) -> Self:
        """Ask a server which models it serves, and make the LLM.

        Args:
            url: Address of the API, e.g. "http://localhost:8000/v1".
            model: The server's name of the model; None takes its only one.
            key: API key; None sends a placeholder.
            max_tokens: Most tokens of an answer.
            timeout_s: Seconds without data from the server after which a call fails.
            total_timeout_s: Seconds after which a call fails although data comes, its retries included. The time in
                which the caller does not read a stream is not counted.
            context_window: Most tokens of prompt and answer together; None takes what the server reports, or else
                LlamaIndex's default.
            settings: Other fields of `OpenAILike`, e.g. `temperature`, 0 (greedy) by default.

        Raises:
            ConfigError: The address or a setting is invalid.
            ModelNotFoundError: The server does not have the model, or has several and none is named.
            ServerError: The server cannot be reached or used.
            BusyError: The server is overloaded.
        """
        for name, seconds in (("timeout_s", timeout_s), ("total_timeout_s", total_timeout_s)):
            if not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
                raise ConfigError(f"{name} must be a number of seconds above 0, not {seconds!r}")
        server = Server(url, key, timeout_s, total_timeout_s)
        windows = server.models()
        model = _select_model(model, list(windows), server)
        tokenizer = ServerTokenizer.of(server, model)
        window = context_window or windows[model] or DEFAULT_CONTEXT_WINDOW
        if tokenizer is None:
            window = int(_ESTIMATE_SHARE * window)
        if max_tokens >= window:
            raise ConfigError(
                f"max_tokens ({max_tokens}) leaves no room for a prompt in the context window ({window} tokens) that "
                f"{model!r} has on {server}; lower max_tokens"
            )
        fields: dict[str, Any] = {
            "temperature": 0.0,
            "is_chat_model": tokenizer is None or tokenizer.chat_template,
            **settings,
            "model": model,
            "api_base": server.url,
            "api_key": NO_KEY,  # fields are shown and serialised; only the clients have the key
            "max_retries": 0,  # the clients retry
            "timeout": timeout_s,
            "max_tokens": max_tokens,
            "context_window": window,
            "tokenizer": tokenizer,
            "additional_kwargs": {"stream_options": {"include_usage": True}} | settings.get("additional_kwargs", {}),
        }
        try:
            llm = cls(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{first['loc'][0]}: {first['msg']}, not {first['input']!r}") from error
        llm._server = server
        return llm

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialised form."""
        return "server_llm"

    @property
    def server(self) -> Server:
        """The server, for calls that LlamaIndex has no place for."""
        return self._server

    def _get_client(self) -> openai.OpenAI:
        return self._server.client

    def _get_aclient(self) -> openai.AsyncOpenAI:
        return self._server.async_client

    # LlamaIndex's callbacks and spans wrap the methods below, so they see the responses as returned here.

    def _chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        with self._server.call():
            response: ChatResponse = super()._chat(messages, **kwargs)
            return _CallReport(self.model).added_to(response)

    def _complete(self, prompt: str, **kwargs: Any) -> CompletionResponse:
        with self._server.call():
            response: CompletionResponse = super()._complete(prompt, **kwargs)
            return _CallReport(self.model).added_to(response)

    def _stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        return self._reported(super()._stream_chat(messages, **kwargs))

    def _stream_complete(self, prompt: str, **kwargs: Any) -> Generator[CompletionResponse, None, None]:
        return self._reported(super()._stream_complete(prompt, **kwargs))

    async def _achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        with self._server.call():
            response: ChatResponse = await super()._achat(messages, **kwargs)
            return _CallReport(self.model).added_to(response)

    async def _acomplete(self, prompt: str, **kwargs: Any) -> CompletionResponse:
        with self._server.call():
            response: CompletionResponse = await super()._acomplete(prompt, **kwargs)
            return _CallReport(self.model).added_to(response)

    async def _astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        return self._areported(await super()._astream_chat(messages, **kwargs))

    async def _astream_complete(self, prompt: str, **kwargs: Any) -> AsyncGenerator[CompletionResponse, None]:
        return self._areported(await super()._astream_complete(prompt, **kwargs))

    def _reported(self, parts: Generator[ResponseT, None, None]) -> Generator[ResponseT, None, None]:
        """A stream's responses, and a last one with the report; closing it closes the connection."""
        report, last, budget = _CallReport(self.model), None, self._server.budget()
        opened: list[httpx.Response] = []
        try:
            while True:
                with self._server.call(budget), recorded_responses(opened):
                    part = next(parts, None)
                    last = last if part is None else report.observe(part)
                if part is None:
                    break
                yield part
        finally:
            parts.close()
            for response in opened:
                response.close()
        with self._server.call():
            end = report.end_of_stream(last, self._server)
        yield end

    async def _areported(self, parts: AsyncGenerator[ResponseT, None]) -> AsyncGenerator[ResponseT, None]:
        """`_reported` for event loops."""
        report, last, budget = _CallReport(self.model), None, self._server.budget()
        opened: list[httpx.Response] = []
        try:
            while True:
                with self._server.call(budget), recorded_responses(opened):
                    part = await anext(parts, None)
                    last = last if part is None else report.observe(part)
                if part is None:
                    break
                yield part
        finally:
            await parts.aclose()
            for response in opened:
                await response.aclose()
        with self._server.call():
            end = report.end_of_stream(last, self._server)
        yield end


class ServerTokenizer:
    """Counts tokens on the server, by vLLM's `/tokenize`; takes the place of a tokenizer in LlamaIndex.

    Args:
        server: The server.
        model: The server's name of the model.
    """

    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self._model = model
        self._encoded = lru_cache(_CACHED_COUNTS)(self._encode)

    @classmethod
    def of(cls, server: Server, model: str) -> ServerTokenizer | None:
        """The model's tokenizer.

        Args:
            server: The server.
            model: The server's name of the model.

        Returns:
            The tokenizer; None where the server has no `/tokenize` like vLLM's.
        """
        tokenizer = cls(server, model)
        try:
            return tokenizer if tokenizer.encode("a b") else None
        except ReaderError as error:
            if isinstance(error, UnreadableError) or isinstance(error.__cause__, openai.APIStatusError):
                return None
            raise

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text.

        Args:
            text: The text.
            add_special_tokens: Whether to add the tokenizer's special tokens.

        Returns:
            Its token ids.
        """
        return list(self._encoded(text, add_special_tokens))

    @cached_property
    def chat_template(self) -> bool:
        """Whether the model has a chat template."""
        try:
            return bool(self.apply_chat_template([{"role": "user", "content": "a"}]))
        except RefusedError:
            return False

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True, **_: Any
    ) -> list[int]:
        """Encode a conversation.

        Args:
            conversation: Messages with `role` and `content`.
            add_generation_prompt: Whether to end with the start of the assistant's message.

        Returns:
            Its token ids, those of the template included.
        """
        return self._tokens({"messages": list(conversation), "add_generation_prompt": add_generation_prompt})

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokens({"prompt": text, "add_special_tokens": add_special_tokens}))

    def _tokens(self, request: Mapping[str, Any]) -> list[int]:
        answer = self._server.post("/tokenize", {"model": self._model, **request})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or answer.get("count") != len(tokens):
            raise UnreadableError(f"{self._server} does not count tokens as vLLM does; connect to it again")
        return tokens


class _CallReport:
    """Token counts and times of one call, as far as the client can know them.

    Args:
        model: Name of the model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._start = time.perf_counter()
        self._first = self._latest = 0.0
        self._finish_reason: str | None = None
        self._usage: Any = None

    def observe(self, part: ResponseT) -> ResponseT:
        """Record the time and the report of a part of a stream, and return the part."""
        _make_encodable(part)
        if part.delta or part.additional_kwargs.get("thinking_delta"):
            self._latest = time.perf_counter()
            self._first = self._first or self._latest
        self._read(part.raw)
        return part

    def end_of_stream(self, last: ResponseT | None, server: Server) -> ResponseT:
        """The response that ends a stream: without new text, with the report.

        Raises:
            ServerError: The stream has no end.
        """
        if last is None or self._finish_reason is None:
            raise server.interrupted("the answer has no end")
        return last.model_copy(update={"delta": "", "logprobs": None} | self._fields())

    def added_to(self, response: ResponseT) -> ResponseT:
        """A whole answer with its report."""
        _make_encodable(response)
        self._read(response.raw)
        return response.model_copy(update=self._fields())

    def _read(self, raw: Any) -> None:
        for choice in raw.choices:
            self._finish_reason = encodable(str(choice.finish_reason or "")) or self._finish_reason
        self._usage = raw.usage or self._usage

    def _fields(self) -> dict[str, Any]:
        usage = {} if self._usage is None else self._usage.model_dump(exclude_none=True, warnings=False)
        raw = {
            "model": self._model,
            "usage": None if self._usage is None else usage,
            "finish_reason": self._finish_reason,
        }
        known: dict[str, Any] = {
            name: usage[name] for name in ("prompt_tokens", "completion_tokens") if is_count(usage.get(name))
        }
        completion = known.get("completion_tokens", 0)
        reused = usage.get("prompt_tokens_details", {}).get("cached_tokens")
        if is_count(reused):
            known["reused_tokens"] = reused
        if self._first:
            known["ttft_s"] = self._first - self._start
        if self._latest > self._first and completion > 1:
            known["tokens_per_s"] = (completion - 1) / (self._latest - self._first)
        return {"raw": raw, "additional_kwargs": known}


def _make_encodable(response: ChatResponse | CompletionResponse) -> None:
    """Replace broken characters: a server's JSON may hold lone surrogates."""
    response.delta = response.delta and encodable(response.delta)
    if isinstance(response, CompletionResponse):
        response.text = encodable(response.text)
    else:
        for block in response.message.blocks:
            if isinstance(block, TextBlock):
                block.text = encodable(block.text)


def _select_model(model: str | None, known: Sequence[str], server: Server) -> str:
    names = ", ".join(known[:_LISTED_MODELS]) + (" ..." if len(known) > _LISTED_MODELS else "")
    if not known:
        raise ModelNotFoundError(f"{server} has no model; load one there")
    if model is None and len(known) > 1:
        raise ModelNotFoundError(f"{server} has several models; pass one of them as model: {names}")
    if model is not None and model not in known:
        raise ModelNotFoundError(f"{server} has no model {model!r}; pass one that it has: {names}")
    return model or known[0]
