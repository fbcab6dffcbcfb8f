"""ReaderLLM: the engine as an ordinary LlamaIndex LLM, for query engines, chat engines and plain calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

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
    LogProb,
    MessageRole,
)
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.schema import BaseNode, NodeWithScore

from reader_rag.config import (
    BatchConfig,
    DatastoreConfig,
    DraftConfig,
    Exactness,
    Forward,
    SamplingParams,
    checked_tenant,
)
from reader_rag.config.grammar import Grammar
from reader_rag.engine.outputs import Generation, Passage, Prompt
from reader_rag.errors import ConfigError, PromptError
from reader_rag.llm.context_hooks import ContextHooks, passages_from
from reader_rag.llm.instrumentation import atraced, told, traced
from reader_rag.llm.messages import join_system, template_message
from reader_rag.llm.structured import StructuredOutput
from reader_rag.model.registry import DEFAULT_MODEL
from reader_rag.sampling.logprobs import TokenLogprobs

if TYPE_CHECKING:
    from typing import TypeAlias

    from transformers import PreTrainedTokenizerBase

    from reader_rag.engine.engine import Engine
    from reader_rag.engine.reader_stream import GenerationStream
    from reader_rag.engine.sequence import StoppingCriterion
    from reader_rag.engine.stream import ScheduledStream
    from reader_rag.sampling.sampler import Processor

    _Stream: TypeAlias = ScheduledStream | GenerationStream

# Settings that an engine was made with; they cannot be given again for an engine that exists.
_ENGINE_SETTINGS = frozenset(
    {"model", "dtype", "device", "exactness", "forward", "prefix_bytes", "trust_remote_code", "batch"}
    | {"datastore", "recall"}
)

# What LlamaIndex's own parts pass to any LLM and what means nothing to a local one: HTTP headers
# (DocumentContextExtractor).
_IGNORED_ARGUMENTS = frozenset({"extra_headers"})

# What a call takes from this LLM's fields unless it says otherwise, and what only a call can ask for.
_SETTINGS = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed"}
    | {"repetition_penalty", "presence_penalty", "frequency_penalty"}
)
_ONLY_OF_A_CALL = frozenset(
    {"no_repeat_ngram", "min_tokens", "bad_words", "suppress_tokens", "include_stop", "logprobs"}
)

ResponseT = TypeVar("ResponseT", ChatResponse, CompletionResponse)
_Respond = Callable[[str, str | None, Sequence[TokenLogprobs], Generation | None], ResponseT]


class _CallArguments(BaseModel):
    """Arguments of one call; None takes what the LLM was made with."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram: int | None = None
    min_tokens: int | None = None
    bad_words: tuple[str, ...] | None = None
    suppress_tokens: tuple[int, ...] | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    include_stop: bool | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None
    logits_processor: list[Any] | None = None
    stopping_criteria: list[Any] | None = None
    speculate: bool | None = None
    max_nodes: int | None = None
    tenant: str | None = None
    recall: bool | None = None


@dataclass(frozen=True)
class _Call:
    """What one call asks of the engine, the prompt aside."""

    generation: SamplingParams
    draft: DraftConfig
    passages: tuple[Passage, ...]
    tenant: str
    recall: bool
    logits_processor: Sequence[Processor]
    stopping_criteria: Sequence[StoppingCriterion]


class ReaderLLM(ContextHooks, StructuredOutput, CustomLLM):
    """A local LLM whose drafts are copied from prompt and passages and verified by the model itself.

    One engine serves any number of calls from threads and event loops: calls that run at the same time are decoded
    together. Copies (`with_sources`, `for_tenant`, `plain`, `model_copy`) share the engine.

    Attributes:
        model: Alias ("smollm2-135m"), hub id or local folder.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: "auto", "cpu", "cuda" or "cuda:N".
        exactness: "fast", or "strict" for the bits of plain decoding in 16-bit types.
        forward: "auto", or "torch" to have the model's own `forward` called where compiled loops would be faster.
        prefix_bytes: Most bytes of keys and values kept for prompts that begin like a text before; 0 keeps none, None
            takes what `Engine` takes.
        trust_remote_code: Run code that comes with the model.
        batch: How many calls are decoded together; None takes what suits the device.
        datastore: Folder of texts and earlier answers that drafts are searched in; None: there is none.
        recall: What is looked up there, and whether answers are kept; None takes `DatastoreConfig()`.
        max_nodes: Most drafted tokens per step; 0 decodes plainly.
        speculate: False decodes plainly.
        max_tokens: Most tokens of an answer.
        temperature: 0 is greedy; above 0 samples.
        top_p: Sample among the fewest tokens whose probabilities sum to at least this.
        top_k: Sample among the k most probable tokens; 0 takes all.
        min_p: See `SamplingParams`, here and below.
        typical_p: Also a way to leave out improbable tokens.
        seed: Key of the sampling noise; None draws one per call.
        repetition_penalty: As in `transformers`; 1 is off.
        presence_penalty: As in OpenAI's API; 0 is off.
        frequency_penalty: As in OpenAI's API; 0 is off.
        stop: Strings that end the answer.
        context_window: Most tokens of prompt and answer together; None takes the model's own.
        system_prompt: Put first in chats that do not begin with a system message, and in `complete`.

    Example:
        >>> llm = ReaderLLM(max_tokens=128)
        >>> print(llm.with_sources(nodes).complete(question))

    Raises:
        ConfigError: A setting is unknown, out of its range, or contradicts another.
        ModelError: The model cannot be found or used.
        DatastoreError: The datastore cannot be used.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = Field(default=DEFAULT_MODEL, frozen=True)
    dtype: str = Field(default="auto", frozen=True)
    device: str = Field(default="auto", frozen=True)
    exactness: Exactness = Field(default="fast", frozen=True)
    forward: Forward = Field(default="auto", frozen=True)
    prefix_bytes: int | None = Field(default=None, ge=0, frozen=True)
    trust_remote_code: bool = Field(default=False, frozen=True)
    batch: BatchConfig | None = Field(default=None, frozen=True)
    datastore: Path | None = Field(default=None, frozen=True)
    recall: DatastoreConfig | None = Field(default=None, frozen=True)
    max_nodes: int = DraftConfig().max_nodes
    speculate: bool = True
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    context_window: int | None = Field(default=None, frozen=True)

    _engine: Engine = PrivateAttr()
    _openers: ThreadPoolExecutor = PrivateAttr()
    _draft: DraftConfig = PrivateAttr(default=DraftConfig())
    _sources: tuple[Passage, ...] = PrivateAttr(default=())
    _context: Passage | None = PrivateAttr(default=None)
    _tenant: str = PrivateAttr(default="")  # no field: LlamaIndex writes fields into traces

    def __init__(self, model: str | None = None, *, engine: Engine | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        if engine is not None:
            settings = _settings_of(engine, settings)
        if isinstance(settings.get("stop"), str):
            settings["stop"] = (settings["stop"],)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self).model_fields)) from error
        if self.query_wrapper_prompt is not None:
            raise ConfigError("query_wrapper_prompt is deprecated in LlamaIndex; use completion_to_prompt")
        self._draft = DraftConfig() if engine is None else engine.draft
        self._call({})  # refuses bad settings before a model is loaded
        self._engine = engine if engine is not None else self._load()
        self._check_window()
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
            nodes: Retrieved nodes or plain texts, in order of preference; they replace sources bound before.

        Returns:
            A copy that shares the engine. This LLM and calls that are running keep what they have.

        Raises:
            ConfigError: Something else than nodes, passages or strings.
        """
        copy = self.model_copy()
        copy._sources = passages_from(nodes)
        return copy

    @property
    def tenant(self) -> str:
        """On whose behalf calls are made that name no tenant themselves."""
        return self._tenant

    def for_tenant(self, tenant: str) -> Self:
        """A light copy whose calls are made on a tenant's behalf: nothing of its texts is used for another's answers.

        Args:
            tenant: Whose calls they are; a call's own argument `tenant` takes its place.

        Returns:
            A copy that shares the engine. This LLM and calls that are running keep what they have.

        Raises:
            ConfigError: No tenant can have that name.
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
            kwargs: For this call: `max_nodes`, `tenant`, `recall`, and what `SamplingParams` and `Engine.stream`
                take: `max_tokens, temperature, top_p, top_k, min_p, typical_p, seed, repetition_penalty,
                presence_penalty, frequency_penalty, no_repeat_ngram, min_tokens, bad_words, suppress_tokens, stop,
                include_stop, logprobs, grammar, logits_processor, stopping_criteria, speculate`.

        Returns:
            The answer; usage in `raw["usage"]`, draft metrics and copied spans in `additional_kwargs`.

        Raises:
            ConfigError: An argument is unknown or out of its range, or a message is not text.
            PromptError: Nothing was asked, or more than the context window holds.
        """
        generation = _finish(self._open_chat(messages, self._call(kwargs)))
        return self._chat_response(generation.text, None, generation.logprobs, generation)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat step by step; see `chat`. Closing the generator ends the generation."""
        return _responses(self._open_chat(messages, self._call(kwargs)), self._chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat without blocking the event loop; see `chat`."""
        stream = await self._on_thread(self._open_chat, messages, self._call(kwargs))
        generation = await self._afinish(stream)
        return self._chat_response(generation.text, None, generation.logprobs, generation)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a chat step by step without blocking the event loop; see `chat`."""
        stream = await self._on_thread(self._open_chat, messages, self._call(kwargs))
        return self._aresponses(stream, self._chat_response)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt.

        Args:
            prompt: The text. If the model has a chat template it becomes one user message, after `system_prompt`.
            formatted: True takes the text as it is: no template, no system prompt.
            kwargs: As in `chat`.

        Returns:
            The answer; usage in `raw["usage"]`, draft metrics and copied spans in `additional_kwargs`.

        Raises:
            ConfigError: An argument is unknown or out of its range.
            PromptError: The prompt is empty or longer than the context window.
        """
        generation = _finish(self._open_completion(prompt, formatted, self._call(kwargs)))
        return self._completion_response(generation.text, None, generation.logprobs, generation)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt step by step; see `complete`. Closing the generator ends the generation."""
        return _responses(self._open_completion(prompt, formatted, self._call(kwargs)), self._completion_response)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt without blocking the event loop; see `complete`."""
        stream = await self._on_thread(self._open_completion, prompt, formatted, self._call(kwargs))
        generation = await self._afinish(stream)
        return self._completion_response(generation.text, None, generation.logprobs, generation)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt step by step without blocking the event loop; see `complete`."""
        stream = await self._on_thread(self._open_completion, prompt, formatted, self._call(kwargs))
        return self._aresponses(stream, self._completion_response)

    # -- from a call to a stream --

    def _load(self) -> Engine:
        from reader_rag.engine.engine import Engine

        return Engine.load(
            self.model,
            dtype=self.dtype,
            device=self.device,
            draft=replace(self._draft, max_nodes=self.max_nodes),
            exactness=self.exactness,
            forward=self.forward,
            prefix_bytes=self.prefix_bytes,
            trust_remote_code=self.trust_remote_code,
            batch=self.batch,
            datastore=self.datastore,
            recall=self.recall,
        )

    @property
    def _window(self) -> int:
        return self._engine.context_window if self.context_window is None else self.context_window

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
        """Settle what a call asks for: its own arguments, else this LLM's settings."""
        given = {name: value for name, value in kwargs.items() if name not in _IGNORED_ARGUMENTS}
        try:
            arguments = _CallArguments(**given)
        except ValidationError as error:
            raise ConfigError(_explain(error, _CallArguments.model_fields)) from error
        own = arguments.model_dump(exclude_none=True)
        stop = own.get("stop", self.stop)
        settings = {name: getattr(self, name) for name in _SETTINGS} | {n: own[n] for n in _SETTINGS & own.keys()}
        settings |= {name: own[name] for name in _ONLY_OF_A_CALL & own.keys()}
        settings["grammar"] = arguments.grammar
        settings["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        generation = SamplingParams(**settings, speculate=self._speculates(arguments))
        draft = replace(self._draft, max_nodes=own.get("max_nodes", self.max_nodes))
        context = () if self._context is None else (self._context,)
        return _Call(
            generation,
            draft,
            (*self._sources, *context),
            own.get("tenant", self._tenant),
            arguments.recall is not False,
            arguments.logits_processor or (),
            arguments.stopping_criteria or (),
        )

    def _speculates(self, arguments: _CallArguments) -> bool:
        speculate, max_nodes = arguments.speculate, arguments.max_nodes
        limit = self.max_nodes if max_nodes is None else max_nodes
        if speculate and limit == 0:
            raise ConfigError("speculate=True asks for drafts and max_nodes=0 turns them off; change one of them")
        if speculate is False and max_nodes:
            raise ConfigError(f"speculate=False turns drafts off and max_nodes={max_nodes} limits them; give one only")
        if speculate is not None:
            return speculate
        return (self.speculate or max_nodes is not None) and limit > 0

    def _open_chat(self, messages: Sequence[ChatMessage], call: _Call) -> _Stream:
        if not messages:
            raise PromptError("there is no message to answer; pass at least one")
        if self.system_prompt and messages[0].role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
            messages = [ChatMessage(role=MessageRole.SYSTEM, content=self.system_prompt), *messages]
        dicts = [template_message(message) for message in messages]
        if self._has_template and self.messages_to_prompt is generic_messages_to_prompt:
            return self._open(self._engine.encode_chat(join_system(dicts, self.tokenizer)), call)
        assert self.messages_to_prompt is not None  # LLM sets it
        return self._open(self._encode(self.messages_to_prompt(messages)), call)

    def _open_completion(self, prompt: str, formatted: bool, call: _Call) -> _Stream:
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

    def _open(self, prompt: Prompt, call: _Call) -> _Stream:
        generation = call.generation
        if self.context_window is not None:
            room = self.context_window - len(prompt.token_ids)
            if room < 1:
                raise PromptError(
                    f"the prompt has {len(prompt.token_ids)} tokens and context_window is {self.context_window}; "
                    "shorten the prompt or raise context_window"
                )
            generation = replace(generation, max_tokens=min(generation.max_tokens, room))
        return self._engine.submit(
            prompt,
            generation,
            call.passages,
            tenant=call.tenant,
            recall=call.recall,
            draft=call.draft,
            logits_processor=call.logits_processor,
            stopping_criteria=call.stopping_criteria,
        )

    # -- from a stream to responses --

    def _completion_response(
        self, text: str, delta: str | None, logprobs: Sequence[TokenLogprobs], done: Generation | None
    ) -> CompletionResponse:
        raw, metrics = self._report(done)
        held = self._logprobs(logprobs)
        return CompletionResponse(text=text, delta=delta, logprobs=held, raw=raw, additional_kwargs=metrics)

    def _chat_response(
        self, text: str, delta: str | None, logprobs: Sequence[TokenLogprobs], done: Generation | None
    ) -> ChatResponse:
        raw, metrics = self._report(done)
        message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
        held = self._logprobs(logprobs)
        return ChatResponse(message=message, delta=delta, logprobs=held, raw=raw, additional_kwargs=metrics)

    def _logprobs(self, held: Sequence[TokenLogprobs]) -> list[list[LogProb]] | None:
        """For each token a list: the token itself, then the most probable others."""
        if not held:
            return None

        def one(token: int, logprob: float) -> LogProb:
            text = str(self.tokenizer.decode([token]))
            return LogProb(token=text, logprob=logprob, bytes=list(text.encode()))

        return [
            [one(of.token_id, of.logprob), *(one(*other) for other in of.top if other[0] != of.token_id)] for of in held
        ]

    def _report(self, done: Generation | None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """`raw` and `additional_kwargs`; nothing to report before the last response."""
        if done is None:
            return None, {}
        prompt_tokens, completion_tokens = done.stats.prompt_tokens, done.stats.completion_tokens
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        raw = {"model": self.model, "usage": usage, "finish_reason": done.finish_reason}
        return raw, done.stats.to_dict() | {"copied": [asdict(span) for span in done.copied]}

    @atraced
    async def _aresponses(self, stream: _Stream, respond: _Respond[ResponseT]) -> AsyncGenerator[ResponseT, None]:
        text = ""
        with closing(stream):  # which never waits, not even for a step that is running
            async for chunk in stream:
                text += chunk.text
                done = stream.result if chunk.finish_reason is not None else None
                yield respond(text, chunk.text, chunk.logprobs, done)

    async def _on_thread(self, open_call: Callable[..., _Stream], asked: Any, *more: Any) -> _Stream:
        """Open a call without blocking the event loop; not on its own threads, which may all wait for answers."""
        return await asyncio.get_running_loop().run_in_executor(self._openers, open_call, asked, *more)

    async def _afinish(self, stream: _Stream) -> Generation:
        with closing(stream):
            async for _ in stream:
                pass
            return told(stream.result)


@traced
def _responses(stream: _Stream, respond: _Respond[ResponseT]) -> Generator[ResponseT, None, None]:
    text = ""
    with closing(stream):
        for chunk in stream:
            text += chunk.text
            done = stream.result if chunk.finish_reason is not None else None
            yield respond(text, chunk.text, chunk.logprobs, done)


def _finish(stream: _Stream) -> Generation:
    with closing(stream):
        for _ in stream:
            pass
        return told(stream.result)


def _settings_of(engine: Engine, settings: dict[str, Any]) -> dict[str, Any]:
    clash = sorted(_ENGINE_SETTINGS & settings.keys())
    if clash:
        raise ConfigError(f"{', '.join(clash)}: settled when the engine was loaded; leave out, or pass no engine")
    loaded = {
        "model": engine.name,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        "exactness": engine.exactness,
        "prefix_bytes": engine.prefix_bytes,
        "forward": engine.forward,
        "batch": engine.batch,
        "datastore": None if engine.recall is None else engine.recall.datastore.folder,
        "recall": None if engine.recall is None else engine.recall.config,
    }
    return {"max_nodes": engine.draft.max_nodes, **settings, **loaded}


def _explain(error: ValidationError, known: Iterable[str]) -> str:
    """One line for the first thing that pydantic found wrong."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] != "extra_forbidden":
        return f"{name}: {first['msg']}, not {first['input']!r}"
    near = get_close_matches(name, known, n=1)
    return f"unknown argument {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
