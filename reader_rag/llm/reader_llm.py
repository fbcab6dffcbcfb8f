"""ReaderLLM: the engine as an ordinary LlamaIndex LLM, for query engines, chat engines and plain calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import ConfigDict, ValidationError
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.schema import BaseNode, NodeWithScore

from reader_rag.config import DraftConfig, EngineConfig, checked_tenant
from reader_rag.config.grammar import grammars_available
from reader_rag.config.setting import settings_of, unknown_argument
from reader_rag.config.threads import threads_configured
from reader_rag.engine.outputs import Passage
from reader_rag.errors import ConfigError, ReaderWarning
from reader_rag.llm.calls import LLMCalls
from reader_rag.llm.context_hooks import passages_from
from reader_rag.llm.responses import Responses, afinish, aresponses, finish, responses
from reader_rag.llm.settings import (
    ENGINE_SETTINGS,
    settings_of_engine,
)
from reader_rag.llm.synthesis_citations import register

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from reader_rag.draft.source import SourceFactory
    from reader_rag.engine.engine import Engine


class ReaderLLM(LLMCalls):
    """A local LLM whose drafts are copied from prompt and passages and verified by the model itself.

    One engine serves any number of calls from threads and event loops: calls that run at the same time are decoded
    together. Copies (`with_sources`, `for_tenant`, `plain`, `model_copy`) share the engine.

    Fields, which are also the arguments of the constructor: `model`, `context_window`, `max_nodes`, and every field of
    `LoadConfig`, `EngineConfig` (but `draft`), `SamplingParams` (but those of benchmarks) and `ToolConfig`, with their
    meaning and range; and LlamaIndex's own, such as `system_prompt`, which is put first in chats that do not begin with
    a system message, and in `complete`.

    Args:
        model: Alias ("smollm2-135m"), hub id or local folder.
        engine: An engine to share; then no setting of an engine can be given.
        draft_sources: Make sources of drafts (`reader_rag.draft.source`) that every request has besides the built-in
            ones; an `engine` has its own.
        settings: Fields.

    Example:
        >>> llm = ReaderLLM(max_tokens=128)
        >>> print(llm.with_sources(nodes).complete(question))

    Raises:
        ConfigError: A setting is unknown, out of its range, or contradicts another.
        ModelError: The model cannot be found or used.
        DatastoreError: The datastore cannot be used.
    """

    model_config = ConfigDict(extra="forbid")

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: Engine | None = None,
        draft_sources: Sequence[SourceFactory] = (),
        **settings: Any,
    ) -> None:
        if model is not None:
            settings["model"] = model
        if not isinstance(settings.get("model", ""), (str, Path)):
            raise ConfigError(
                "model is an alias, a hub id or a folder; pass a loaded model to ReaderLLM.from_model(model, tokenizer)"
            )
        if engine is not None:
            if draft_sources:
                raise ConfigError("draft_sources belong to the engine: give them to Engine or Engine.load")
            settings = settings_of_engine(engine, settings)
        if isinstance(settings.get("stop"), str):
            settings["stop"] = (settings["stop"],)
        given = {name: value for name, value in settings.items() if value is not None}
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self).model_fields)) from error
        if self.query_wrapper_prompt is not None:
            raise ConfigError("query_wrapper_prompt is deprecated in LlamaIndex; use completion_to_prompt")
        self._draft = DraftConfig() if engine is None else engine.config.draft
        self._asked({})  # refuses bad settings before a model is loaded
        _ = self._tool_limits
        self._engine = engine if engine is not None else self._load(draft_sources)
        if engine is None and not threads_configured():
            warnings.warn(
                "OpenMP's wait policy is not set, which can slow decoding down beside other computing threads: "
                "call reader_rag.configure_threads() before torch is imported",
                ReaderWarning,
                stacklevel=2,
            )
        self._check_window()
        self._responses = Responses(self.model, self._engine.tokenizer)
        register()
        self._openers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reader-llm")

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> Self:
        """Wrap an engine that exists already.

        Args:
            engine: The engine; it may serve other callers as well.
            settings: Fields of this class except those that an engine is loaded with.

        Raises:
            ConfigError: A setting belongs to the engine, is unknown or out of its range.
        """
        return cls(engine=engine, **settings)

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Self:
        """Wrap a model that `transformers` has loaded, with a quantisation or adapters of its own too.

        Args:
            model: The model; it stays where it is, in its type.
            tokenizer: Its tokenizer.
            settings: Fields of this class except those of `LoadConfig`, and `draft_sources`.

        Raises:
            ConfigError: A setting is of loading, unknown or out of its range.
            UnsupportedModelError: The model cannot be decoded rightly.

        Example:
            >>> model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config, device_map="cuda")
            >>> llm = ReaderLLM.from_model(model, AutoTokenizer.from_pretrained(name), max_tokens=128)
        """
        from reader_rag.engine.engine import Engine

        names = settings_of(EngineConfig).keys() & settings.keys()
        decoding = {name: settings.pop(name) for name in sorted(names | ({"draft_sources"} & settings.keys()))}
        draft = DraftConfig()
        if settings.get("max_nodes") is not None:
            draft = replace(draft, max_nodes=settings["max_nodes"])
        return cls(engine=Engine(model, tokenizer, EngineConfig(draft=draft), **decoding), **settings)

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialised form."""
        return "reader_llm"

    @property
    def engine(self) -> Engine:
        """The engine that this LLM and its copies share."""
        return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, answer length and kind of the model, as LlamaIndex asks for them."""
        return LLMMetadata(
            context_window=self._window,
            num_output=self.max_tokens,
            is_chat_model=self._has_template,
            is_function_calling_model=grammars_available(),
            model_name=self.model,
        )

    def with_sources(self, nodes: Iterable[NodeWithScore | BaseNode | Passage | str]) -> Self:
        """A light copy whose calls also search these texts for drafts, and name them in `copied`.

        Args:
            nodes: Retrieved nodes or plain texts, the most relevant first; they replace sources bound before.

        Returns:
            A copy that shares the engine. This LLM and calls that are running keep what they have.

        Raises:
            ConfigError: A source is no node, passage or string.
        """
        copy = self.model_copy()
        copy._sources = passages_from(nodes)
        return copy

    @property
    def tenant(self) -> str:
        """The tenant of calls that name none."""
        return self._tenant

    def for_tenant(self, tenant: str) -> Self:
        """A light copy bound to a tenant: nothing of its texts is used for another tenant's answers.

        Args:
            tenant: Name of the tenant; a call's own argument `tenant` takes its place.

        Returns:
            A copy that shares the engine. This LLM and calls that are running keep what they have.

        Raises:
            ConfigError: It is no valid name.
        """
        copy = self.model_copy()
        copy._tenant = checked_tenant(tenant)
        return copy

    def plain(self) -> Self:
        """A light copy that decodes without drafts on the same engine: the reference for comparisons."""
        return self.model_copy(update={"speculate": False})

    def _with_context(self, passage: Passage | None) -> Self:
        copy = self.model_copy()
        copy._context = passage
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # A deep copy would copy the weights, and cannot copy the engine's lock; settings are immutable values.
        return self.model_copy()

    # -- endpoints --

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat.

        Args:
            messages: Text messages, tool calls and their results; `system_prompt` is put first unless they begin with a
                system message.
            kwargs: `tools` (LlamaIndex tools, or OpenAI's form), `tool_choice` ("auto", "required", "none" or the name
                of a tool) and `allow_parallel_tool_calls`. And, in place of the LLM's own settings: every field of
                `SamplingParams` (but those of benchmarks), `max_nodes`, and of `RequestOptions` `tenant`, `recall`,
                `logits_processor`, `stopping_criteria` and `prediction`. None takes the LLM's own.

        Returns:
            The answer; usage in `raw["usage"]`, figures of drafting and copied spans in `additional_kwargs`. Tool calls
            are `ToolCallBlock`s of its message.

        Raises:
            ConfigError: An argument is unknown or out of its range, or a message is not text.
            IncompleteAnswerError: `max_tokens` ended the answer within a tool call.
            PromptError: Nothing was asked, or more than the context window holds.
        """
        call = self._chat_call(messages, kwargs)
        answer: ChatResponse = finish(self._open_chat(messages, call), call.respond)
        return answer

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat step by step, arguments and errors as in `chat`. Closing the generator ends the request."""
        call = self._chat_call(messages, kwargs)
        return responses(self._open_chat(messages, call), call.respond)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat without blocking the event loop, arguments and errors as in `chat`."""
        call = self._chat_call(messages, kwargs)
        answer: ChatResponse = await afinish(await self._on_thread(self._open_chat, messages, call), call.respond)
        return answer

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a chat step by step without blocking the event loop, arguments and errors as in `chat`."""
        call = self._chat_call(messages, kwargs)
        return aresponses(await self._on_thread(self._open_chat, messages, call), call.respond)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt.

        Args:
            prompt: The text. If the model has a chat template it becomes one user message, after `system_prompt`.
            formatted: True takes the text as it is: no template, no system prompt.
            kwargs: For this call, as in `chat`.

        Returns:
            The answer; usage in `raw["usage"]`, figures of drafting and copied spans in `additional_kwargs`.

        Raises:
            ConfigError: An argument is unknown or out of its range.
            PromptError: The prompt is empty or longer than the context window.
        """
        call = self._completion_call(prompt, kwargs)
        answer: CompletionResponse = finish(self._open_completion(prompt, call, formatted), call.respond)
        return answer

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt step by step, arguments and errors as in `complete`. Closing it ends the request."""
        call = self._completion_call(prompt, kwargs)
        return responses(self._open_completion(prompt, call, formatted), call.respond)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt without blocking the event loop, arguments and errors as in `complete`."""
        call = self._completion_call(prompt, kwargs)
        stream = await self._on_thread(self._open_completion, prompt, call, formatted)
        answer: CompletionResponse = await afinish(stream, call.respond)
        return answer

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt step by step without blocking the event loop, arguments and errors as in `complete`."""
        call = self._completion_call(prompt, kwargs)
        stream = await self._on_thread(self._open_completion, prompt, call, formatted)
        return aresponses(stream, call.respond)

    # -- loading --

    def _load(self, draft_sources: Sequence[SourceFactory]) -> Engine:
        from reader_rag.engine.engine import Engine

        settings = {name: getattr(self, name) for name in ENGINE_SETTINGS}
        config = EngineConfig(draft=replace(self._draft, max_nodes=self.max_nodes))
        return Engine.load(self.model, config, draft_sources=draft_sources, **settings)

    def _check_window(self) -> None:
        if self.context_window is not None and not isinstance(self.context_window, Integral):
            raise ConfigError(f"context_window must be an integer or None, not {type(self.context_window).__name__}")
        if not 0 < self._window <= self._engine.context_window:
            raise ConfigError(f"context_window must be 1..{self._engine.context_window} here, not {self._window}")
        if self.max_tokens >= self._window:
            raise ConfigError(
                f"max_tokens ({self.max_tokens}) leaves no room for a prompt in the context window "
                f"({self._window} tokens); lower it"
            )


_FROM_MODEL = "load the model with transformers and pass it to ReaderLLM.from_model(model, tokenizer)"
_OTHER_NAMES = {
    "num_output": "the length of answers is max_tokens",
    "max_new_tokens": "the length of answers is max_tokens",
    "generate_kwargs": "pass its entries one by one, such as temperature=0.7, top_p=0.9",
    "model_name": "the model is named by model",
    "model_kwargs": _FROM_MODEL,
    "quantization_config": f'quantization="int8" is built in; for others {_FROM_MODEL}',
    "tokenizer": _FROM_MODEL,
    "tokenizer_name": f"the tokenizer comes with the model; for another one {_FROM_MODEL}",
    "tokenizer_kwargs": f"the tokenizer comes with the model; for another one {_FROM_MODEL}",
    "device_map": 'the device is named by device: "auto", "cpu", "cuda" or "cuda:N"',
    "stopping_ids": "pass stop strings (stop=...), or a stopping_criteria with a call",
    "is_chat_model": "it is a chat model if its tokenizer has a chat template",
}
"""Names of arguments in LlamaIndex's other local LLMs, and what to do here."""


def _explain(error: ValidationError, known: Iterable[str]) -> str:
    """One line for the first thing that pydantic found wrong."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "extra_forbidden":
        hint = _OTHER_NAMES.get(name)
        return unknown_argument(name, known) if hint is None else f"unknown argument {name!r}; {hint}"
    return f"{name}: {first['msg']}, not {first['input']!r}"
