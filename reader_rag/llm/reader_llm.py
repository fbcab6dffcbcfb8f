"""ReaderLLM: the engine as an ordinary LlamaIndex LLM, for query engines, chat engines and plain calls."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import ConfigDict, PrivateAttr, ValidationError
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.schema import BaseNode, NodeWithScore

from reader_rag.config import DraftConfig, EngineConfig, SamplingParams, checked_tenant
from reader_rag.config.setting import unknown_argument
from reader_rag.config.threads import threads_configured
from reader_rag.engine.outputs import Passage, Prompt
from reader_rag.errors import ConfigError, PromptError, ReaderWarning
from reader_rag.llm.context_hooks import passages_from
from reader_rag.llm.messages import join_system, template_message
from reader_rag.llm.responses import Respond, Responses, ResponseT, afinish, aresponses, finish, responses
from reader_rag.llm.settings import (
    CALL_ARGUMENTS,
    ENGINE_SETTINGS,
    IGNORED_ARGUMENTS,
    SAMPLING_SETTINGS,
    LLMSettings,
    settings_of_engine,
)
from reader_rag.llm.structured import StructuredOutput
from reader_rag.llm.synthesis_citations import Synthesis, current_synthesis, register

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reader_rag.engine.engine import Engine
    from reader_rag.engine.outputs import Generation
    from reader_rag.engine.request import RequestOptions
    from reader_rag.engine.stream import GenerationStream
    from reader_rag.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class _Call:
    """What one call asks of the engine, besides the prompt."""

    params: SamplingParams
    passages: tuple[Passage, ...]
    options: RequestOptions
    synthesis: Synthesis | None


class ReaderLLM(StructuredOutput, LLMSettings):
    """A local LLM whose drafts are copied from prompt and passages and verified by the model itself.

    One engine serves any number of calls from threads and event loops: calls that run at the same time are decoded
    together. Copies (`with_sources`, `for_tenant`, `plain`, `model_copy`) share the engine.

    Fields, which are also the arguments of the constructor: `model`, `context_window`, `max_nodes`, and every field of
    `LoadConfig`, `EngineConfig` (but `draft`) and `SamplingParams` (but those of benchmarks), with their meaning and
    range; and LlamaIndex's own, such as `system_prompt`, which is put first in chats that do not begin with a system
    message, and in `complete`.

    Args:
        model: Alias ("smollm2-135m"), hub id or local folder.
        engine: An engine to share; then no setting of an engine can be given.
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

    _engine: Engine = PrivateAttr()
    _openers: ThreadPoolExecutor = PrivateAttr()
    _responses: Responses = PrivateAttr()
    _draft: DraftConfig = PrivateAttr(default=DraftConfig())
    _sources: tuple[Passage, ...] = PrivateAttr(default=())
    _context: Passage | None = PrivateAttr(default=None)
    _tenant: str = PrivateAttr(default="")  # no field: LlamaIndex writes fields into traces

    def __init__(self, model: str | None = None, *, engine: Engine | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        if engine is not None:
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
        self._call({})  # refuses bad settings before a model is loaded
        self._engine = engine if engine is not None else self._load()
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
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialised form."""
        return "reader_llm"

    @property
    def engine(self) -> Engine:
        """The engine that this LLM and its copies share."""
        return self._engine

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, e.g. for `PromptHelper(tokenizer=llm.tokenizer.encode)`."""
        return self._engine.tokenizer

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, answer length and kind of the model, as LlamaIndex asks for them."""
        return LLMMetadata(
            context_window=self._window,
            num_output=self.max_tokens,
            is_chat_model=self._has_template,
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
            messages: Text messages; `system_prompt` is put first unless they begin with a system message.
            kwargs: For this call, in place of the LLM's own settings: every field of `SamplingParams` (but those of
                benchmarks), `max_nodes`, and of `RequestOptions` `tenant`, `recall`, `logits_processor` and
                `stopping_criteria`. None takes the LLM's own.

        Returns:
            The answer; usage in `raw["usage"]`, figures of drafting and copied spans in `additional_kwargs`.

        Raises:
            ConfigError: An argument is unknown or out of its range, or a message is not text.
            PromptError: Nothing was asked, or more than the context window holds.
        """
        call = self._call(kwargs)
        return finish(self._open_chat(messages, call), _recorded(call, self._responses.chat))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat step by step, arguments and errors as in `chat`. Closing the generator ends the request."""
        call = self._call(kwargs)
        return responses(self._open_chat(messages, call), _recorded(call, self._responses.chat))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat without blocking the event loop, arguments and errors as in `chat`."""
        call = self._call(kwargs)
        stream = await self._on_thread(self._open_chat, messages, call)
        return await afinish(stream, _recorded(call, self._responses.chat))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a chat step by step without blocking the event loop, arguments and errors as in `chat`."""
        call = self._call(kwargs)
        stream = await self._on_thread(self._open_chat, messages, call)
        return aresponses(stream, _recorded(call, self._responses.chat))

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
        call = self._call(kwargs)
        return finish(self._open_completion(prompt, call, formatted), _recorded(call, self._responses.completion))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt step by step, arguments and errors as in `complete`. Closing it ends the request."""
        call = self._call(kwargs)
        return responses(self._open_completion(prompt, call, formatted), _recorded(call, self._responses.completion))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt without blocking the event loop, arguments and errors as in `complete`."""
        call = self._call(kwargs)
        stream = await self._on_thread(self._open_completion, prompt, call, formatted)
        return await afinish(stream, _recorded(call, self._responses.completion))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt step by step without blocking the event loop, arguments and errors as in `complete`."""
        call = self._call(kwargs)
        stream = await self._on_thread(self._open_completion, prompt, call, formatted)
        return aresponses(stream, _recorded(call, self._responses.completion))

    # -- from a call to a stream --

    def _load(self) -> Engine:
        from reader_rag.engine.engine import Engine

        settings = {name: getattr(self, name) for name in ENGINE_SETTINGS}
        return Engine.load(self.model, EngineConfig(draft=replace(self._draft, max_nodes=self.max_nodes)), **settings)

    @property
    def _window(self) -> int:
        return self._engine.context_window if self.context_window is None else int(self.context_window)

    def _check_window(self) -> None:
        if not 0 < self._window <= self._engine.context_window:
            raise ConfigError(f"context_window must be 1..{self._engine.context_window} here, not {self._window}")
        if self.max_tokens >= self._window:
            raise ConfigError(
                f"max_tokens ({self.max_tokens}) leaves no room for a prompt in the context window "
                f"({self._window} tokens); lower it"
            )

    @property
    def _has_template(self) -> bool:
        return bool(self._engine.tokenizer.chat_template)

    def _call(self, kwargs: dict[str, Any]) -> _Call:
        """What a call asks for: its own arguments, else this LLM's settings."""
        given = {name: value for name, value in kwargs.items() if name not in IGNORED_ARGUMENTS and value is not None}
        for name in given:
            if name not in CALL_ARGUMENTS:
                raise ConfigError(unknown_argument(name, CALL_ARGUMENTS))
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        settings = {name: given.get(name, getattr(self, name)) for name in SAMPLING_SETTINGS}
        settings["speculate"] = self._speculates(given.get("speculate"), given.get("max_nodes"))
        params = SamplingParams(**settings)
        options: RequestOptions = {
            "draft": replace(self._draft, max_nodes=given.get("max_nodes", self.max_nodes)),
            "tenant": given.get("tenant", self._tenant),
            "recall": given.get("recall", True),
            "logits_processor": given.get("logits_processor", ()),
            "stopping_criteria": given.get("stopping_criteria", ()),
        }
        return _Call(params, self._passages(), options, current_synthesis())

    def _passages(self) -> tuple[Passage, ...]:
        """The passages of a call, each once: a context that consists of the bound sources is left out."""
        if self._context is None:
            return self._sources
        rest = self._context.text
        for source in self._sources:
            rest = rest.replace(source.text.strip(), "")
        return (*self._sources, self._context) if rest.strip() else self._sources

    def _speculates(self, speculate: Any, max_nodes: Any) -> Any:
        """Whether a call drafts.

        Args:
            speculate: The call's argument; None: not given.
            max_nodes: The call's argument; None: not given.
        """
        limit = self.max_nodes if max_nodes is None else max_nodes
        if speculate is True and limit == 0:
            raise ConfigError("speculate=True asks for drafts and max_nodes=0 turns them off; change one of them")
        if speculate is False and max_nodes:
            raise ConfigError(f"speculate=False turns drafts off and max_nodes={max_nodes} limits them; give one only")
        if speculate is not None:
            return speculate
        return self.speculate if max_nodes is None and self.max_nodes else limit != 0

    def _open_chat(self, messages: Sequence[ChatMessage], call: _Call) -> GenerationStream:
        if not messages:
            raise PromptError("there is no message to answer; pass at least one")
        if self.system_prompt and messages[0].role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
            messages = [ChatMessage(role=MessageRole.SYSTEM, content=self.system_prompt), *messages]
        dicts = [template_message(message) for message in messages]
        if self._has_template and self.messages_to_prompt is generic_messages_to_prompt:
            return self._open(self._engine.encode_chat(join_system(dicts, self.tokenizer)), call)
        assert self.messages_to_prompt is not None  # LLM sets it
        return self._open(self._encode(self.messages_to_prompt(messages)), call)

    def _open_completion(self, prompt: str, call: _Call, formatted: bool) -> GenerationStream:
        if not prompt.strip():
            raise PromptError("the prompt is empty; write a question")
        if formatted:
            return self._open(self._encode(prompt), call)
        if self._has_template and self.completion_to_prompt is default_completion_to_prompt:
            return self._open_chat([ChatMessage(role=MessageRole.USER, content=prompt)], call)
        assert self.completion_to_prompt is not None  # LLM sets it
        return self._open(self._encode(self._extend_prompt(self.completion_to_prompt(prompt))), call)

    def _encode(self, text: str) -> Prompt:
        """Token ids of formatted text; a BOS that the text spells out is not put before it a second time."""
        prompt = self._engine.encode(text)
        bos = self._engine.tokenizer.bos_token_id
        if bos is None or list(prompt.token_ids[:2]) != [bos, bos]:
            return prompt
        offsets = None if prompt.offsets is None else prompt.offsets[1:]
        return replace(prompt, token_ids=prompt.token_ids[1:], offsets=offsets)

    def _open(self, prompt: Prompt, call: _Call) -> GenerationStream:
        params = call.params
        if self.context_window is not None:
            room = self.context_window - len(prompt.token_ids)
            if room < 1:
                raise PromptError(
                    f"the prompt has {len(prompt.token_ids)} tokens and context_window is {self.context_window}; "
                    "shorten the prompt or raise context_window"
                )
            params = replace(params, max_tokens=min(params.max_tokens, room))
        return self._engine.submit(prompt, params, call.passages, **call.options)

    async def _on_thread(
        self, open_call: Callable[..., GenerationStream], asked: Any, call: _Call, *more: Any
    ) -> GenerationStream:
        """Open a call without blocking the event loop; not on its own threads, which may all wait for answers."""
        return await asyncio.get_running_loop().run_in_executor(self._openers, open_call, asked, call, *more)


def _recorded(call: _Call, respond: Respond[ResponseT]) -> Respond[ResponseT]:
    """`respond`, which also records the finished answer for the synthesis that the call belongs to."""
    synthesis = call.synthesis
    if synthesis is None:
        return respond

    def recorded(text: str, delta: str | None, logprobs: Sequence[TokenLogprobs], done: Generation | None) -> ResponseT:
        if done is not None:
            synthesis.add(done, call.passages)
        return respond(text, delta, logprobs, done)

    return recorded


def _explain(error: ValidationError, known: Iterable[str]) -> str:
    """One line for the first thing that pydantic found wrong."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "extra_forbidden":
        return unknown_argument(name, known)
    return f"{name}: {first['msg']}, not {first['input']!r}"
