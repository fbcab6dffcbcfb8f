"""An LLM behind an OpenAI-compatible HTTP server, such as vLLM: LlamaIndex's `OpenAILike`, mended for programs.

`ServerLLM.connect` asks the server what it serves. Prompts are measured with the server's own tokenizer where it lends
it, streams end on the server when they are closed here, and every failure is one `ReaderError` that says what to do.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.bridge.pydantic import Field, PrivateAttr, ValidationError
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW

from reader_rag.errors import (
    BusyError,
    ConfigError,
    MissingDependencyError,
    ModelNotFoundError,
    PromptError,
    ReaderError,
    ServerError,
)
from reader_rag.util.one_line import one_line

try:
    import httpx
    import openai
    from llama_index.llms.openai_like import OpenAILike
except ImportError as cause:
    raise MissingDependencyError(
        "an LLM server is reached by llama-index-llms-openai-like: pip install 'reader-rag[openai]'"
    ) from cause

DEFAULT_TIMEOUT_S = 120.0
_CONNECT_S = 5.0
_RETRIES = 2  # of requests that were not answered at all, or with 408, 409, 429 or 5xx; the SDK waits in between
_NO_KEY = "none"  # the SDK wants one; a server that wants none does not look at it
_ESTIMATE_SHARE = 0.8  # of the context window that is used where tokens are counted with another model's tokenizer
_MOST_SAID = 300  # characters of a server's message that are passed on
_MOST_KEPT_COUNTS = 1 << 16

ResponseT = TypeVar("ResponseT", ChatResponse, CompletionResponse)

_opened: ContextVar[list[httpx.Response] | None] = ContextVar("opened", default=None)


class ServerLLM(OpenAILike):
    """A model on an OpenAI-compatible server as a LlamaIndex LLM; made by `connect`.

    The last response of a call has `raw` with `model`, `usage` (None if the server tells none) and `finish_reason`, as
    `ReaderLLM`'s, and in `additional_kwargs` what is known of a remote answer: `ttft_s` and `tokens_per_s` as measured
    here, the network included, and of `prompt_tokens`, `completion_tokens` and `reused_tokens` what the server tells.

    Example:
        >>> llm = ServerLLM.connect("http://localhost:8000/v1")
        >>> make_query_engine(store, llm, embed_model).query("Who wrote the report?")
    """

    tokenizer: Any = Field(default=None, exclude=True)  # a `ServerTokenizer` or None; not a value to save

    _server: _Server = PrivateAttr()

    @classmethod
    def connect(
        cls,
        url: str,
        model: str | None = None,
        *,
        key: str | None = None,
        max_tokens: int = 256,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        context_window: int | None = None,
        **settings: Any,
    ) -> Self:
        """Ask a server what it serves, and make the LLM.

        Args:
            url: The API's address, e.g. "http://localhost:8000/v1".
            model: The server's name of the model; None takes the only one it has.
            key: The API key; None sends none that means anything.
            max_tokens: Most tokens of an answer.
            timeout_s: Seconds without a word from the server after which a call fails.
            context_window: Most tokens of prompt and answer together; None takes what the server tells, or else
                LlamaIndex's default.
            settings: More fields of `OpenAILike`, e.g. `temperature`, 0 (greedy) unless given.

        Raises:
            ConfigError: The address or a setting makes no sense.
            ModelNotFoundError: The server has no such model, or several and none is named.
            ServerError: The server cannot be reached or used.
            BusyError: It has too much to do.
        """
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, not {timeout_s}")
        server = _Server(url, key, timeout_s)
        windows = server.models()
        model = _choose(model, list(windows), server)
        tokenizer = ServerTokenizer.of(server, model)
        window = context_window or windows[model] or DEFAULT_CONTEXT_WINDOW
        if tokenizer is None:
            window = int(_ESTIMATE_SHARE * window)
        if max_tokens >= window:
            raise ConfigError(
                f"max_tokens ({max_tokens}) leaves no room for a prompt in the context window ({window} tokens) that "
                f"{model!r} has on {server}; lower it"
            )
        fields: dict[str, Any] = {
            "temperature": 0.0,
            "is_chat_model": tokenizer is None or tokenizer.chat_template,
            **settings,
            "model": model,
            "api_base": server.url,
            "api_key": _NO_KEY,  # the real one stands in the clients: fields are shown and saved
            "max_retries": 0,  # the clients do that
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

    def _get_client(self) -> openai.OpenAI:
        return self._server.client

    def _get_aclient(self) -> openai.AsyncOpenAI:
        return self._server.async_client

    # LlamaIndex's callbacks and traces wrap the methods below, so that what they report is what is returned here.

    def _chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        tally = _Tally(self.model)
        with self._server.explained():
            response: ChatResponse = super()._chat(messages, **kwargs)
            return tally.told(response)

    def _complete(self, prompt: str, **kwargs: Any) -> CompletionResponse:
        tally = _Tally(self.model)
        with self._server.explained():
            response: CompletionResponse = super()._complete(prompt, **kwargs)
            return tally.told(response)

    def _stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        return self._parts(super()._stream_chat(messages, **kwargs))

    def _stream_complete(self, prompt: str, **kwargs: Any) -> Generator[CompletionResponse, None, None]:
        return self._parts(super()._stream_complete(prompt, **kwargs))

    async def _achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        tally = _Tally(self.model)
        with self._server.explained():
            response: ChatResponse = await super()._achat(messages, **kwargs)
            return tally.told(response)

    async def _acomplete(self, prompt: str, **kwargs: Any) -> CompletionResponse:
        tally = _Tally(self.model)
        with self._server.explained():
            response: CompletionResponse = await super()._acomplete(prompt, **kwargs)
            return tally.told(response)

    async def _astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        return self._aparts(await super()._astream_chat(messages, **kwargs))

    async def _astream_complete(self, prompt: str, **kwargs: Any) -> AsyncGenerator[CompletionResponse, None]:
        return self._aparts(await super()._astream_complete(prompt, **kwargs))

    def _parts(self, parts: Generator[ResponseT, None, None]) -> Generator[ResponseT, None, None]:
        """A stream's responses and a last one with the report."""
        tally, last = _Tally(self.model), None
        opened: list[httpx.Response] = []
        try:
            while True:
                with self._server.explained(), _noting(opened):
                    part = next(parts, None)
                if part is None:
                    break
                last = tally.see(part)
                yield part
        finally:
            parts.close()
            for response in opened:  # closing the generator does not: the SDK's stream lies in a reference cycle
                response.close()
        yield tally.ended(last, self._server)

    async def _aparts(self, parts: AsyncGenerator[ResponseT, None]) -> AsyncGenerator[ResponseT, None]:
        """As `_parts`."""
        tally, last = _Tally(self.model), None
        opened: list[httpx.Response] = []
        try:
            while True:
                with self._server.explained(), _noting(opened):
                    part = await anext(parts, None)
                if part is None:
                    break
                last = tally.see(part)
                yield part
        finally:
            await parts.aclose()
            for response in opened:
                await response.aclose()
        yield tally.ended(last, self._server)


class ServerTokenizer:
    """Counts tokens as the server does, by vLLM's `/tokenize`; stands where LlamaIndex wants a tokenizer.

    Args:
        server: Lends it.
        model: Whose tokenizer.
    """

    def __init__(self, server: _Server, model: str) -> None:
        self._server = server
        self._model = model
        self._encoded = lru_cache(_MOST_KEPT_COUNTS)(self._encode)

    @classmethod
    def of(cls, server: _Server, model: str) -> ServerTokenizer | None:
        """The model's tokenizer; None where the server lends none."""
        tokenizer = cls(server, model)
        try:
            return tokenizer if tokenizer.encode("a b") else None
        except ReaderError as error:
            if isinstance(error, _UnreadableError) or isinstance(error.__cause__, openai.APIStatusError):
                return None
            raise

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        return list(self._encoded(text, add_special_tokens))

    @cached_property
    def chat_template(self) -> bool:
        """Whether the model has a template for conversations."""
        try:
            return bool(self.apply_chat_template([{"role": "user", "content": "a"}]))
        except _RefusedError:
            return False

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True, **_: Any
    ) -> list[int]:
        """A conversation's token ids, the template's own included."""
        return self._tokens({"messages": list(conversation), "add_generation_prompt": add_generation_prompt})

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokens({"prompt": text, "add_special_tokens": add_special_tokens}))

    def _tokens(self, asked: Mapping[str, Any]) -> list[int]:
        answer = self._server.post("/tokenize", {"model": self._model, **asked})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or answer.get("count") != len(tokens):
            raise _UnreadableError(f"{self._server} does not count tokens as vLLM does")
        return tokens


class _RefusedError(ServerError):
    """The server does not take the request as it is: 4xx."""


class _UnreadableError(ServerError):
    """The server's answer is not what the protocol says."""


class _Server:
    """Where an API is, the clients that ask it, and what its failures mean."""

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self.url = _checked(url)
        self._has_key = bool(key)
        self._timeout_s = timeout_s
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))
        self._http: dict[str, Any] = {"timeout": timeout, "follow_redirects": True}
        self._api: dict[str, Any] = {
            "api_key": key or _NO_KEY,
            "base_url": self.url,
            "max_retries": _RETRIES,
            "timeout": timeout,
            # Else taken from the environment, where they are meant for OpenAI.
            "default_headers": {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()},
        }

    @cached_property
    def client(self) -> openai.OpenAI:
        """Asks, and waits for the answer."""
        return openai.OpenAI(**self._api, http_client=_Client(**self._http))

    @cached_property
    def async_client(self) -> openai.AsyncOpenAI:
        """Asks within an event loop."""
        return openai.AsyncOpenAI(**self._api, http_client=_AsyncClient(**self._http))

    def __str__(self) -> str:
        return f"the server at {self.url}"

    def models(self) -> dict[str, int | None]:
        """The models by name, and the context window of each where the server tells it."""
        with self.explained():
            answer = _parsed(self.client.get("/models", cast_to=httpx.Response))
        try:
            cards = {str(card["id"]): card for card in answer["data"] or []}
            # An adapter has the window of the model it belongs to.
            whole = {name: cards.get(str(card.get("parent")), card) for name, card in cards.items()}
            windows = {
                name: card.get("max_model_len") or whole[name].get("max_model_len") for name, card in cards.items()
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise _UnreadableError(f"{self} gives no list of models: does the address end in /v1?") from error
        return {name: window if isinstance(window, int) and window > 0 else None for name, window in windows.items()}

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """What the server answers on a path beside the API."""
        with self.explained():
            return _parsed(self.client.post(self.url.removesuffix("/v1") + path, body=body, cast_to=httpx.Response))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What fails within is raised as a `ReaderError`."""
        try:
            yield
        except (openai.OpenAIError, httpx.HTTPError) as error:
            raise self._meaning(error) from error
        except (json.JSONDecodeError, AttributeError, IndexError, TypeError) as error:  # as the SDK trips over it
            raise _UnreadableError(
                f"{self} answers, but not as an OpenAI-compatible API does: does the address end in /v1?"
            ) from error

    def _meaning(self, error: Exception) -> ReaderError:
        if isinstance(error, openai.APIStatusError):
            return self._status(error)
        cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else error
        if isinstance(cause, httpx.ConnectTimeout):
            return ServerError(f"{self} does not answer: check the address, and that the server runs")
        if isinstance(cause, httpx.TimeoutException):
            return ServerError(
                f"{self} said nothing for {self._timeout_s:g} s: it may have too much to do; ask again later, or wait "
                "longer (timeout_s, --engine-timeout)"
            )
        if isinstance(cause, httpx.ConnectError):
            return ServerError(f"{self} cannot be reached ({cause}): check the address, and that the server runs")
        if isinstance(cause, httpx.HTTPError):
            return self.broken_off(str(cause))
        return ServerError(f"{self} failed ({_said(error)}): its log may say why")

    def broken_off(self, why: str) -> ServerError:
        """An answer has no end."""
        return ServerError(f"{self} broke off ({why}): ask again; its log may say why")

    def _status(self, error: openai.APIStatusError) -> ReaderError:
        status, said = error.status_code, _said(error)
        if status in (401, 403):
            key = "does not take the API key that it was given" if self._has_key else "wants an API key"
            return ServerError(f"{self} {key}: put the right one into READER_RAG_ENGINE_KEY (key=...)")
        if status in (429, 503):
            return BusyError(f"{self} has too much to do ({said}): ask again later")
        if status >= 500:
            return ServerError(f"{self} failed ({status}: {said}): its log may say why")
        if status == 404 and error.request.url.path.endswith("/models"):
            return ServerError(f"{self} has no OpenAI-compatible API there (404): does the address end in /v1?")
        if status == 404 and "model" in said.lower() and str(error.request.url).startswith(self.url):
            return ModelNotFoundError(f"{self} does not have the model any more ({said}): name another")
        if _is_too_long(error, said):
            return PromptError(f"{self} finds question and passages too long ({said}): take fewer passages or tokens")
        return _RefusedError(f"{self} refuses the request ({status}: {said})")


class _Tally:
    """Counts and times of one call, as far as they can be known from here."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._began = time.perf_counter()
        self._first = self._latest = 0.0
        self._finish_reason: str | None = None
        self._usage: Any = None

    def see(self, part: ResponseT) -> ResponseT:
        """Take note of a part of a stream."""
        if part.delta or part.additional_kwargs.get("thinking_delta"):
            self._latest = time.perf_counter()
            self._first = self._first or self._latest
        self._read(part.raw)
        return part

    def ended(self, last: ResponseT | None, server: _Server) -> ResponseT:
        """The response that ends a stream: no more text, and the report."""
        if last is None or self._finish_reason is None:
            raise server.broken_off("the answer has no end")
        return last.model_copy(update={"delta": "", "logprobs": None} | self._report())

    def told(self, response: ResponseT) -> ResponseT:
        """A whole answer with its report."""
        self._read(response.raw)
        return response.model_copy(update=self._report())

    def _read(self, raw: Any) -> None:
        for choice in raw.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
        self._usage = raw.usage or self._usage

    def _report(self) -> dict[str, Any]:
        usage = None if self._usage is None else self._usage.model_dump(exclude_none=True)
        raw = {"model": self._model, "usage": usage, "finish_reason": self._finish_reason}
        counts = {
            name: count for name, count in (usage or {}).items() if name in ("prompt_tokens", "completion_tokens")
        }
        reused = (usage or {}).get("prompt_tokens_details", {}).get("cached_tokens")
        known = counts if reused is None else counts | {"reused_tokens": reused}
        if self._first:
            known["ttft_s"] = self._first - self._began
        if self._latest > self._first and counts.get("completion_tokens", 0) > 1:
            known["tokens_per_s"] = (counts["completion_tokens"] - 1) / (self._latest - self._first)
        return {"raw": raw, "additional_kwargs": known}


class _Client(httpx.Client):
    """Notes what it opens. A server that is slow is not asked again: it would do the same once more."""

    def send(self, request: httpx.Request, **settings: Any) -> httpx.Response:
        """As httpx's own."""
        try:
            return _note(super().send(request, **settings))
        except httpx.ReadTimeout as error:  # which the SDK would retry; its own errors it lets through
            raise openai.APITimeoutError(request) from error


class _AsyncClient(httpx.AsyncClient):
    """As `_Client`."""

    async def send(self, request: httpx.Request, **settings: Any) -> httpx.Response:
        """As httpx's own."""
        try:
            return _note(await super().send(request, **settings))
        except httpx.ReadTimeout as error:
            raise openai.APITimeoutError(request) from error


def _note(response: httpx.Response) -> httpx.Response:
    opened = _opened.get()
    if opened is not None:
        opened.append(response)
    return response


@contextmanager
def _noting(opened: list[httpx.Response]) -> Iterator[None]:
    """What the clients open within is added to a list."""
    token = _opened.set(opened)
    try:
        yield
    finally:
        _opened.reset(token)


def _checked(url: str) -> str:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(
            f"{url!r} is no address of a server ({error}); it looks like http://localhost:8000/v1"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no address of a server; it looks like http://localhost:8000/v1")
    if parts.userinfo:
        raise ConfigError("a server's address has no password in it: put the API key into READER_RAG_ENGINE_KEY")
    return url.rstrip("/")


def _choose(model: str | None, known: Sequence[str], server: _Server) -> str:
    names = ", ".join(known)
    if not known:
        raise ModelNotFoundError(f"{server} has no model; load one there")
    if model is None and len(known) > 1:
        raise ModelNotFoundError(f"{server} has several models: name one (--model): {names}")
    if model is not None and model not in known:
        raise ModelNotFoundError(f"{server} has no model {model!r}; it has: {names}")
    return model or known[0]


def _parsed(response: httpx.Response) -> Any:
    return json.loads(response.content)


def _said(error: Exception) -> str:
    """What a server says of its failure, in one short line."""
    body = getattr(error, "body", None)
    said = (
        next((body[name] for name in ("message", "detail", "error") if body.get(name)), "")
        if isinstance(body, dict)
        else ""
    )
    if not said and isinstance(error, openai.APIStatusError):
        said = error.response.reason_phrase
    text = one_line(str(said or error))
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]} ..."


def _is_too_long(error: openai.APIStatusError, said: str) -> bool:
    """Whether it was the prompt: OpenAI says so by a code, vLLM and others in words."""
    return error.code == "context_length_exceeded" or (
        error.status_code in (400, 413, 422) and "context" in said.lower() and "token" in said.lower()
    )
