"""Pydantic objects from `ReaderLLM`: LlamaIndex's structured predictions under a grammar of the class's JSON schema.

LlamaIndex describes the schema in the prompt and does not constrain the answer. `StructuredOutput` uses the same
description, so that the model knows what the fields mean, and a grammar, so that the answer is valid JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictInProgressEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import process_streaming_objects

from reader_rag.config.grammar import Grammar
from reader_rag.errors import ConfigError, IncompleteAnswerError
from reader_rag.llm.context_hooks import ContextHooks

if TYPE_CHECKING:
    from llama_index.core.prompts import BasePromptTemplate, PromptTemplate

OutputT = TypeVar("OutputT", bound=BaseModel)

_dispatcher = get_dispatcher(__name__)


class _InWords(PydanticOutputParser):  # type: ignore[type-arg]
    """Adds the schema to the prompt. Braces are not escaped, because the prompt is formatted already."""

    def format(self, query: str) -> str:
        return f"{query}\n{self.get_format_string(escape_json=False)}"


class StructuredOutput(ContextHooks):
    """The structured predictions of a LlamaIndex LLM whose `chat` takes a `grammar`.

    The spans are made here, because no method of the base class is called.
    """

    @_dispatcher.span
    def structured_predict(
        self,
        output_cls: type[OutputT],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> OutputT:
        """Answer a prompt with an object of a Pydantic class.

        Args:
            output_cls: The class.
            prompt: The template; the schema is added to its messages.
            llm_kwargs: Arguments of `chat` for this call, such as `max_tokens`.
            prompt_args: Arguments of the template.

        Returns:
            The object.

        Raises:
            ConfigError: No grammar can be made of the class's schema.
            IncompleteAnswerError: The answer ended before the object was complete.
            pydantic.ValidationError: The answer fails a check of the class that its schema cannot express.
        """
        llm, messages, arguments = self._prepare(output_cls, prompt, llm_kwargs, prompt_args)
        output = _object(output_cls, llm.chat(messages, **arguments))
        _dispatcher.event(LLMStructuredPredictEndEvent(output=output))
        return output

    @_dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[OutputT],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> OutputT:
        """`structured_predict` without blocking the event loop; the same arguments, result and errors."""
        llm, messages, arguments = self._prepare(output_cls, prompt, llm_kwargs, prompt_args)
        output = _object(output_cls, await llm.achat(messages, **arguments))
        _dispatcher.event(LLMStructuredPredictEndEvent(output=output))
        return output

    @_dispatcher.span
    def stream_structured_predict(
        self,
        output_cls: type[OutputT],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Answer a prompt with an object of a Pydantic class, streamed; arguments and errors of `structured_predict`.

        Yields:
            The partial object after each step: an object of LlamaIndex's variant of the class with optional fields
            until it is valid. The last one is the whole object.
        """
        llm, messages, arguments = self._prepare(output_cls, prompt, llm_kwargs, prompt_args)
        partial = _Partial(output_cls)
        # The stream is closed with this generator, so that its request ends and its cache is freed.
        with closing(llm.stream_chat(messages, **arguments)) as responses:
            for response in responses:
                yield partial.read(response)
        output = partial.whole()
        yield output
        _dispatcher.event(LLMStructuredPredictEndEvent(output=output))

    @_dispatcher.span
    async def astream_structured_predict(
        self,
        output_cls: type[OutputT],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """`stream_structured_predict` without blocking the event loop; the same arguments, objects and errors."""

        async def objects() -> AsyncGenerator[Any, None]:
            llm, messages, arguments = self._prepare(output_cls, prompt, llm_kwargs, prompt_args)
            partial = _Partial(output_cls)
            stream = await llm.astream_chat(messages, **arguments)
            async with aclosing(stream) as responses:
                async for response in responses:
                    yield partial.read(response)
            output = partial.whole()
            yield output
            _dispatcher.event(LLMStructuredPredictEndEvent(output=output))

        return objects()

    def _prepare(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[Self, list[ChatMessage], dict[str, Any]]:
        """Report the start of a call, and prepare it.

        Args:
            output_cls: The class of the object.
            prompt: The template.
            llm_kwargs: Arguments of `chat` for this call.
            prompt_args: What the template is filled with.

        Returns:
            The LLM that carries the call's retrieved text; the prompt's messages with the schema in words, and the
            system prompt before them; and the arguments of its chat.
        """
        _dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        if llm_kwargs and llm_kwargs.get("grammar") is not None:
            raise ConfigError("the class is the grammar of a structured prediction; leave grammar out of llm_kwargs")
        arguments = {**(llm_kwargs or {}), "grammar": Grammar.json_schema(output_cls)}
        # LlamaIndex stores the parser in the template, where it would describe this class to other calls.
        own = prompt.model_copy(update={"output_parser": None})
        messages = [message.model_copy(deep=True) for message in own.format_messages(llm=self, **prompt_args)]
        messages = self._extend_messages(_InWords(output_cls).format_messages(messages))
        return self._for_call(prompt, prompt_args), messages, arguments


class _Partial:
    """The partial object of a streamed answer.

    Args:
        output_cls: Class of the whole object.
    """

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._output_cls = output_cls
        self._objects: list[Any] | None = None
        self._last = ChatResponse(message=ChatMessage(role="assistant", content=""))

    def read(self, response: ChatResponse) -> Any:
        """The partial object after one more response.

        Args:
            response: The response, with the text so far.
        """
        self._last = response
        output = process_streaming_objects(response, self._output_cls, cur_objects=self._objects)
        self._objects = [output]
        _dispatcher.event(LLMStructuredPredictInProgressEvent(output=output))
        return output

    def whole(self) -> BaseModel:
        """The object after the last response; raises the errors of `StructuredOutput.structured_predict`."""
        return _object(self._output_cls, self._last)


def _object(output_cls: type[OutputT], response: ChatResponse) -> OutputT:
    text, name = response.message.content or "", output_cls.__name__
    cut = (response.raw or {}).get("finish_reason") == "length"
    try:
        output = output_cls.model_validate_json(text)
    except ValidationError as error:
        if error.errors()[0]["type"] != "json_invalid":
            raise  # complete JSON that fails a check which a schema cannot express
        remedy = "raise max_tokens" if cut else "a stop string ended it; take it out of stop"
        raise IncompleteAnswerError(f"the answer ended before its {name} was complete; {remedy}") from error
    if cut and text[-1:].isdigit():  # a number is the only valid JSON that can continue
        raise IncompleteAnswerError(f"the answer may have ended within a number of its {name}; raise max_tokens")
    return output
