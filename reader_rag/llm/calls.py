"""From the arguments of a call of `ReaderLLM` to a stream of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms.llm import default_completion_to_prompt

from reader_rag.config import DraftConfig, SamplingParams, ToolConfig
from reader_rag.config.setting import unknown_argument
from reader_rag.engine.outputs import Passage, Prompt
from reader_rag.errors import ConfigError, ContextLengthError, PromptError
from reader_rag.llm.function_calling import TOOL_ARGUMENTS, FunctionCalling, ToolResponses, tool_request
from reader_rag.llm.messages import answered_calls, as_text, described_grammar, join_system, template_messages
from reader_rag.llm.responses import Respond, Responses, ResponseT
from reader_rag.llm.settings import CALL_ARGUMENTS, IGNORED_ARGUMENTS, SAMPLING_SETTINGS, TOOL_SETTINGS, LLMSettings
from reader_rag.llm.synthesis_citations import current_synthesis
from reader_rag.llm.tool_formats import ToolFormat, ToolRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reader_rag.engine.engine import Engine
    from reader_rag.engine.outputs import Generation
    from reader_rag.engine.request import RequestOptions
    from reader_rag.engine.stream import GenerationStream
    from reader_rag.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Call:
    """What one call asks of the engine besides the prompt, and how its responses are made.

    Attributes:
        params: Sampling parameters.
        passages: Texts that the answer may repeat.
        options: The other options of a request.
        respond: Makes its responses.
        tools: The tools that the prompt describes and the answer may call; None: no tools.
    """

    params: SamplingParams
    passages: tuple[Passage, ...]
    options: RequestOptions
    respond: Respond[Any]
    tools: ToolRequest | None = None


@dataclass(frozen=True)
class PreparedCall:
    """A call up to where it is submitted to an engine: what `Engine.submit` takes, and the tools.

    Attributes:
        prompt: The prompt's tokens, text and character offsets.
        params: Sampling parameters.
        passages: Texts that the answer may repeat.
        options: The other options of the request.
        tools: The tools that the answer may call, which find the calls in its text; None: no tools.
    """

    prompt: Prompt
    params: SamplingParams
    passages: tuple[Passage, ...]
    options: RequestOptions
    tools: ToolRequest | None = None


class LLMCalls(FunctionCalling, LLMSettings):
    """What `ReaderLLM` is built on: its state, and the way from the arguments of a call to a stream."""

    _engine: Engine = PrivateAttr()
    _openers: ThreadPoolExecutor = PrivateAttr()
    _responses: Responses = PrivateAttr()
    _draft: DraftConfig = PrivateAttr(default=DraftConfig())
    _sources: tuple[Passage, ...] = PrivateAttr(default=())
    _context: Passage | None = PrivateAttr(default=None)
    _tenant: str = PrivateAttr(default="")  # no field: LlamaIndex writes fields into traces

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, e.g. for `PromptHelper(tokenizer=llm.tokenizer.encode)`."""
        return self._engine.tokenizer

    @property
    def _tool_format(self) -> ToolFormat:
        """How the model writes tool calls; prompts that are not made by its chat template have the JSON form."""
        own = self._has_template and self.messages_to_prompt is generic_messages_to_prompt
        return ToolFormat.of(self.tokenizer) if own else ToolFormat("json", native=False)

    @property
    def _tool_limits(self) -> ToolConfig:
        """When answers with tools stop calling them."""
        return ToolConfig(**{name: getattr(self, name) for name in TOOL_SETTINGS})

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Call:
        """What a chat asks for, with the grammar of its tools."""
        given = {name: kwargs[name] for name in TOOL_ARGUMENTS if name in kwargs}
        others = {name: value for name, value in kwargs.items() if name not in TOOL_ARGUMENTS}
        if others.get("grammar") is None:
            others["grammar"] = described_grammar(message.content for message in messages)
        call = self._call(others, self._responses.chat)
        tools = tool_request(self._tool_format, given)
        if tools is None:
            return call
        if call.params.grammar is not None:
            raise ConfigError("the tools are the grammar of a chat with tools; leave grammar or tools out")
        if not tools.required and self._tool_limits.reached(answered_calls(messages), trained=tools.format.native):
            tools = replace(tools, withheld=True)
        respond = ToolResponses(tools, messages, call.respond)
        return replace(call, params=replace(call.params, grammar=tools.grammar), tools=tools, respond=respond)

    def _completion_call(self, prompt: str, kwargs: dict[str, Any]) -> Call:
        if kwargs.get("grammar") is None:
            kwargs = {**kwargs, "grammar": described_grammar([prompt])}
        return self._call(kwargs, self._responses.completion)

    @property
    def _window(self) -> int:
        return self._engine.context_window if self.context_window is None else int(self.context_window)

    @property
    def _has_template(self) -> bool:
        return bool(self._engine.tokenizer.chat_template)

    def _call(self, kwargs: dict[str, Any], respond: Respond[Any]) -> Call:
        params, options = self._asked(kwargs)
        passages = self._passages()
        return Call(params, passages, options, _recorded(passages, respond))

    def _asked(self, kwargs: dict[str, Any]) -> tuple[SamplingParams, RequestOptions]:
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
            "prediction": given.get("prediction", ""),
        }
        return params, options

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
        if not isinstance(self.speculate, bool):
            return self.speculate  # which `SamplingParams` refuses
        limit = self.max_nodes if max_nodes is None else max_nodes
        if speculate is True and limit == 0:
            raise ConfigError("speculate=True asks for drafts and max_nodes=0 turns them off; change one of them")
        if speculate is False and max_nodes:
            raise ConfigError(f"speculate=False turns drafts off and max_nodes={max_nodes} limits them; give one only")
        if speculate is not None:
            return speculate
        return self.speculate if max_nodes is None and self.max_nodes else limit != 0

    def prepare_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> PreparedCall:
        """Prepare a chat for `submit`, for programs that read the engine's own stream of chunks.

        Args:
            messages: The messages.
            kwargs: Arguments of `chat`.

        Raises:
            ConfigError: An argument is unknown or out of its range, or a message is not text.
            PromptError: Nothing was asked, or more than the context window holds.
        """
        call = self._chat_call(messages, kwargs)
        return self._prepared(self._chat_prompt(messages, call), call)

    def prepare_completion(self, prompt: str | Sequence[int], **kwargs: Any) -> PreparedCall:
        """Prepare the continuation of a text, without chat template, for `submit`.

        Args:
            prompt: The text, or its token ids.
            kwargs: Arguments of `complete`.

        Raises:
            ConfigError: An argument is unknown or out of its range.
            PromptError: The prompt is empty or longer than the context window.
        """
        call = self._completion_call(prompt if isinstance(prompt, str) else "", kwargs)
        if not isinstance(prompt, str):
            return self._prepared(Prompt(tuple(prompt)), call)
        if not prompt.strip():
            raise PromptError("the prompt is empty; write a question")
        return self._prepared(self._encode(prompt), call)

    def submit(self, call: PreparedCall) -> GenerationStream:
        """Queue a prepared call; returns at once.

        Args:
            call: From `prepare_chat` or `prepare_completion`.

        Returns:
            An iterator over the answer's chunks, for a thread or an event loop; errors are those of `Engine.submit`.
        """
        return self._engine.submit(call.prompt, call.params, call.passages, **call.options)

    def _open_chat(self, messages: Sequence[ChatMessage], call: Call) -> GenerationStream:
        return self.submit(self._prepared(self._chat_prompt(messages, call), call))

    def _chat_prompt(self, messages: Sequence[ChatMessage], call: Call) -> Prompt:
        if not messages:
            raise PromptError("there is no message to answer; pass at least one")
        if self.system_prompt and messages[0].role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
            messages = [ChatMessage(role=MessageRole.SYSTEM, content=self.system_prompt), *messages]
        form = self._tool_format
        shown = () if call.tools is None else call.tools.shown
        if not form.native:
            messages = as_text(messages, shown)
        dicts = template_messages(messages)
        if self._has_template and self.messages_to_prompt is generic_messages_to_prompt:
            joined = join_system(dicts, self.tokenizer)
            described = {"tools": shown} if form.native and shown else {}
            return self._engine.encode_chat(joined, **described)
        assert self.messages_to_prompt is not None  # LLM sets it
        return self._encode(self.messages_to_prompt(messages))

    def _open_completion(self, prompt: str, call: Call, formatted: bool) -> GenerationStream:
        if not isinstance(prompt, str):
            raise PromptError(f"a prompt must be a string, not {type(prompt).__name__}")
        if not prompt.strip():
            raise PromptError("the prompt is empty; write a question")
        if formatted:
            return self.submit(self._prepared(self._encode(prompt), call))
        if self._has_template and self.completion_to_prompt is default_completion_to_prompt:
            return self._open_chat([ChatMessage(role=MessageRole.USER, content=prompt)], call)
        assert self.completion_to_prompt is not None  # LLM sets it
        return self.submit(self._prepared(self._encode(self._extend_prompt(self.completion_to_prompt(prompt))), call))

    def _encode(self, text: str) -> Prompt:
        """Token ids of formatted text; a BOS that the text spells out is not put before it a second time."""
        prompt = self._engine.encode(text)
        bos = self._engine.tokenizer.bos_token_id
        if bos is None or list(prompt.token_ids[:2]) != [bos, bos]:
            return prompt
        offsets = None if prompt.offsets is None else prompt.offsets[1:]
        return replace(prompt, token_ids=prompt.token_ids[1:], offsets=offsets)

    def _prepared(self, prompt: Prompt, call: Call) -> PreparedCall:
        params = call.params
        if self.context_window is not None:
            room = self.context_window - len(prompt.token_ids)
            if room < 1:
                raise ContextLengthError(
                    f"the prompt has {len(prompt.token_ids)} tokens and context_window is {self.context_window}; "
                    "shorten the prompt or raise context_window"
                )
            params = replace(params, max_tokens=min(params.max_tokens, room))
        return PreparedCall(prompt, params, call.passages, call.options, call.tools)

    async def _on_thread(
        self, open_call: Callable[..., GenerationStream], asked: Any, call: Call, *more: Any
    ) -> GenerationStream:
        """Open a call without blocking the event loop; not on its own threads, which may all wait for answers."""
        return await asyncio.get_running_loop().run_in_executor(self._openers, open_call, asked, call, *more)


def _recorded(passages: tuple[Passage, ...], respond: Respond[ResponseT]) -> Respond[ResponseT]:
    """`respond`, which also records the finished answer for the synthesis that the running call belongs to."""
    synthesis = current_synthesis()
    if synthesis is None:
        return respond

    def recorded(text: str, delta: str | None, logprobs: Sequence[TokenLogprobs], done: Generation | None) -> ResponseT:
        if done is not None:
            synthesis.add(done, passages)
        return respond(text, delta, logprobs, done)

    return recorded
