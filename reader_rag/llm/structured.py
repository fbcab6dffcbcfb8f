"""Pydantic objects from `ReaderLLM`: LlamaIndex's structured predictions, held to the class's JSON schema.

LlamaIndex asks a model in words for JSON and hopes for the best. `StructuredOutput` asks in the same words, so that the
model knows what the fields mean, and has every token chosen under the schema's grammar, so that the answer parses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from llama_index.core.llms import CustomLLM
    from llama_index.core.prompts import BasePromptTemplate, PromptTemplate

    _LLM = CustomLLM
else:
    _LLM = object  # as in `hooks`; the spans are made here, since nothing above is called

OutputT = TypeVar("OutputT", bound=BaseModel)

_dispatcher = get_dispatcher(__name__)


class _InWords(PydanticOutputParser):  # type: ignore[type-arg]
    """The schema for the model to read. Braces stay single: the prompt is formatted already."""

    def format(self, query: str) -> str:
        return f"{query}\n{self.get_format_string(escape_json=False)}"


class StructuredOutput(_LLM):
    """The structured predictions of a LlamaIndex LLM whose chats take a `grammar`."""

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
            prompt_args: What the template is filled with.

        Returns:
            The object.

        Raises:
            ConfigError: The class has a schema that no grammar can be made of.
            IncompleteAnswerError: The answer was cut off; raise `max_tokens`.
            pydantic.ValidationError: The class asks for more than its schema says, and the answer does not meet it.
        """
        _dispatcher.event(_started(output_cls, prompt, prompt_args))
        arguments = _arguments(output_cls, llm_kwargs)
        messages = self._structured_messages(output_cls, prompt, prompt_args)
        output = _object(output_cls, self.chat(messages, **arguments))
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
        """Answer a prompt with an object of a Pydantic class; see `structured_predict`."""
        _dispatcher.event(_started(output_cls, prompt, prompt_args))
        arguments = _arguments(output_cls, llm_kwargs)
        messages = self._structured_messages(output_cls, prompt, prompt_args)
        output = _object(output_cls, await self.achat(messages, **arguments))
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
        """Answer a prompt with an object of a Pydantic class, step by step.

        Args and errors are those of `structured_predict`.

        Yields:
            What there is of the object after every step, as LlamaIndex makes it: of a class of the same fields, all of
            them optional, until it is valid. The last one is the whole object.
        """
        _dispatcher.event(_started(output_cls, prompt, prompt_args))
        arguments = _arguments(output_cls, llm_kwargs)
        messages = self._structured_messages(output_cls, prompt, prompt_args)
        partial = _Partial(output_cls)
        # Closed with this generator: an answer that nobody reads on frees its cache.
        with closing(self.stream_chat(messages, **arguments)) as responses:
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
        """Answer a prompt with an object of a Pydantic class, step by step; see `stream_structured_predict`."""

        async def objects() -> AsyncGenerator[Any, None]:
            _dispatcher.event(_started(output_cls, prompt, prompt_args))
            arguments = _arguments(output_cls, llm_kwargs)
            messages = self._structured_messages(output_cls, prompt, prompt_args)
            partial = _Partial(output_cls)
            stream = await self.astream_chat(messages, **arguments)
            async with aclosing(stream) as responses:
                async for response in responses:
                    yield partial.read(response)
            output = partial.whole()
            yield output
            _dispatcher.event(LLMStructuredPredictEndEvent(output=output))

        return objects()

    def _structured_messages(
        self, output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]
    ) -> list[ChatMessage]:
        """The prompt's messages with the schema in words, and the system prompt before them."""
        # LlamaIndex leaves its parser behind in the template, where another call's would describe another class.
        own = prompt.model_copy(update={"output_parser": None})
        messages = [message.model_copy(deep=True) for message in own.format_messages(llm=self, **prompt_args)]
        return self._extend_messages(_InWords(output_cls).format_messages(messages))


class _Partial:
    """The object that an answer is becoming.

    Args:
        output_cls: Its class.
    """

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._output_cls = output_cls
        self._objects: list[Any] | None = None
        self._last = ChatResponse(message=ChatMessage(role="assistant", content=""))

    def read(self, response: ChatResponse) -> Any:
        """What there is after one more response."""
        self._last = response
        output = process_streaming_objects(response, self._output_cls, cur_objects=self._objects)
        self._objects = [output]
        _dispatcher.event(LLMStructuredPredictInProgressEvent(output=output))
        return output

    def whole(self) -> BaseModel:
        """The object, after the last response; errors as in `StructuredOutput.structured_predict`."""
        return _object(self._output_cls, self._last)


def _started(
    output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: dict[str, Any]
) -> LLMStructuredPredictStartEvent:
    return LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)


def _arguments(output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    if llm_kwargs and llm_kwargs.get("grammar") is not None:
        raise ConfigError("the class is the grammar of a structured prediction; leave grammar out of llm_kwargs")
    return {**(llm_kwargs or {}), "grammar": Grammar.json_schema(output_cls)}


def _object(output_cls: type[OutputT], response: ChatResponse) -> OutputT:
    text, name = response.message.content or "", output_cls.__name__
    cut = (response.raw or {}).get("finish_reason") == "length"
    try:
        output = output_cls.model_validate_json(text)
    except ValidationError as error:
        if error.errors()[0]["type"] != "json_invalid":
            raise  # whole, but the class asks for more than a schema can say
        remedy = "raise max_tokens" if cut else "a stop string ended it; take it out of stop"
        raise IncompleteAnswerError(f"the answer ended before its {name} was complete; {remedy}") from error
    if cut and text[-1:].isdigit():  # the only JSON that may go on where it is valid
        raise IncompleteAnswerError(f"the answer was cut off in a number of its {name}; raise max_tokens")
    return output
