"""HTTP transport of `ServerLLM`: the clients of an OpenAI-compatible server, its models, and its errors.

Every failure becomes one `ReaderError` of one line, with the server's own message shortened and in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeGuard

import httpx
import openai
from reader_rag.connectors.openai_transport import BoundedAsyncClient, BoundedClient, BoundExceededError, TimeBudget

from reader_rag.errors import BusyError, ConfigError, ModelNotFoundError, PromptError, ReaderError, ServerError
from reader_rag.util.one_line import one_line

NO_KEY = "none"  # the SDK requires a key; a server without keys ignores it

_CONNECT_S = 5.0
_RETRIES = 2  # of requests without an answer, or with 408, 409, 429 or 5xx; the SDK waits in between
_LONGEST_MESSAGE = 300  # characters of a server's message that are passed on
_MOST_COUNT = 1 << 40  # of tokens; larger numbers overflow where they are computed with
# What the SDK, LlamaIndex and the JSON parser raise on answers of another form, of another encoding or nested too deep.
_UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class RefusedError(ServerError):
    """The server refuses the request: status 4xx."""


class UnreadableError(ServerError):
    """The server's answer does not follow the protocol."""


class Server:
    """An API's address, the clients that call it, and the translation of its errors.

    Args:
        url: Address of the API, e.g. "http://localhost:8000/v1".
        key: API key; None sends a placeholder.
        timeout_s: Most seconds between two pieces of an answer.
        total_timeout_s: Most seconds of one call, its retries included.

    Raises:
        ConfigError: The address is invalid.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float, total_timeout_s: float) -> None:
        self.url = _checked_url(url)
        self._has_key = bool(key)
        self._timeout_s = timeout_s
        self._total_timeout_s = total_timeout_s
        timeout = self._timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))
        self._api: dict[str, Any] = {
            "api_key": key or NO_KEY,
            "base_url": self.url,
            "max_retries": _RETRIES,
            "timeout": timeout,
            # By default the SDK sends these from environment variables that are meant for OpenAI's own servers.
            "default_headers": {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()},
        }

    @cached_property
    def client(self) -> openai.OpenAI:
        """The blocking client."""
        return openai.OpenAI(**self._api, http_client=BoundedClient(self._timeout))

    @cached_property
    def async_client(self) -> openai.AsyncOpenAI:
        """The client for event loops."""
        return openai.AsyncOpenAI(**self._api, http_client=BoundedAsyncClient(self._timeout))

    def __str__(self) -> str:
        return f"the server at {self.url}"

    def models(self) -> dict[str, int | None]:
        """The models by name, with the context window in tokens, None where the server does not report it."""
        with self.call():
            answer = json.loads(self.client.get("/models", cast_to=httpx.Response).content)
        try:
            cards = {str(card["id"]): card for card in answer["data"] or []}
            # An adapter has the window of its base model.
            base = {name: cards.get(str(card.get("parent")), card) for name, card in cards.items()}
            windows = {
                name: card.get("max_model_len") or base[name].get("max_model_len") for name, card in cards.items()
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise UnreadableError(f"{self} returns no list of models: does the address end in /v1?") from error
        return {name: window if is_count(window) and window else None for name, window in windows.items()}

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call an endpoint outside the API's prefix.

        Args:
            path: Path of the endpoint, e.g. "/tokenize".
            body: The request as JSON.

        Returns:
            The answer, parsed from JSON.
        """
        url = self.url.removesuffix("/v1") + path
        with self.call():
            return json.loads(self.client.post(url, body=body, cast_to=httpx.Response).content)

    def budget(self) -> TimeBudget:
        """The time that a new call may spend."""
        return TimeBudget(self._total_timeout_s)

    @contextmanager
    def call(self, budget: TimeBudget | None = None) -> Iterator[None]:
        """Bound the time of the requests that are made inside, and translate what fails into `ReaderError`s.

        Args:
            budget: The time of a call that is made in several pieces; None: a whole call is made inside.
        """
        try:
            with (budget or self.budget()).spending():
                yield
        except ReaderError:
            raise
        except (openai.OpenAIError, httpx.HTTPError) as error:
            raise self._translated(error) from error
        except _UNREADABLE as error:  # the SDK or LlamaIndex fails on the answer
            raise UnreadableError(
                f"{self} answers, but not as an OpenAI-compatible API does: does the address end in /v1?"
            ) from error

    def interrupted(self, reason: str) -> ServerError:
        """The error of an answer without an end.

        Args:
            reason: What was missing or failed.
        """
        return ServerError(f"{self} broke off the answer ({reason}): send the question again, or see the server's log")

    def _translated(self, error: Exception) -> ReaderError:
        if isinstance(error, BoundExceededError):
            return ServerError(f"{self} {error}")
        if isinstance(error, openai.APIStatusError):
            return self._translated_status(error)
        cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else error
        if isinstance(cause, httpx.ConnectTimeout):
            return ServerError(f"{self} does not answer: check the address, and that the server runs")
        if isinstance(cause, httpx.TimeoutException):
            return ServerError(
                f"{self} sent nothing for {self._timeout_s:g} s: it may be overloaded; try again later, or raise the "
                "timeout (timeout_s)"
            )
        if isinstance(cause, httpx.ConnectError):
            return ServerError(f"{self} cannot be reached ({cause}): check the address, and that the server runs")
        if isinstance(cause, httpx.HTTPError):
            return self.interrupted(str(cause))
        return ServerError(f"{self} failed ({_message_of(error)}): see its log")

    def _translated_status(self, error: openai.APIStatusError) -> ReaderError:
        status, message = error.status_code, _message_of(error)
        if status in (401, 403):
            key = "does not accept the API key" if self._has_key else "requires an API key"
            return ServerError(f"{self} {key}: pass the right one as key (programs read READER_RAG_ENGINE_KEY)")
        if status in (429, 503):
            return BusyError(f"{self} is overloaded ({message}): try again later")
        if status >= 500:
            return ServerError(f"{self} failed ({status}: {message}): see its log")
        if status == 404 and error.request.url.path.endswith("/models"):
            return ServerError(f"{self} has no OpenAI-compatible API there (404): does the address end in /v1?")
        if status == 404 and "model" in message.lower() and str(error.request.url).startswith(self.url):
            return ModelNotFoundError(f"{self} no longer has the model ({message}): choose another")
        if _is_too_long(error, message):
            return PromptError(
                f"the prompt is too long for {self} ({message}): retrieve fewer passages or lower max_tokens"
            )
        return RefusedError(f"{self} refuses the request ({status}: {message})")


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value in a server's answer is a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_COUNT


def _checked_url(url: str) -> str:
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:  # TypeError: no string
        raise ConfigError(
            f"{url!r} is not the address of a server ({error}); an example is http://localhost:8000/v1"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.host or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the address of a server; an example is http://localhost:8000/v1")
    if parts.userinfo:
        raise ConfigError(
            "a server's address has no password in it; pass the API key as key (programs read READER_RAG_ENGINE_KEY)"
        )
    return url.rstrip("/")


def _message_of(error: Exception) -> str:
    """The server's own message in an error, as one short line."""
    body = getattr(error, "body", None)
    message: Any = ""
    if isinstance(body, dict):
        message = next((body[name] for name in ("message", "detail", "error") if body.get(name)), "")
    if not message and isinstance(error, openai.APIStatusError):
        message = error.response.reason_phrase
    text = one_line(str(message or error))
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."


def _is_too_long(error: openai.APIStatusError, message: str) -> bool:
    """Whether the prompt is too long: OpenAI reports it by a code, vLLM and others in the message."""
    return error.code == "context_length_exceeded" or (
        error.status_code in (400, 413, 422) and "context" in message.lower() and "token" in message.lower()
    )
