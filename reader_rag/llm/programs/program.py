"""A Pydantic program over structured predictions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, Generic, Self, TypeVar

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.types import BasePydanticProgram

from reader_rag.errors import ConfigError

OutputT = TypeVar("OutputT", bound=BaseModel)


class GrammarProgram(BasePydanticProgram[OutputT], Generic[OutputT]):
    """`LLMTextCompletionProgram`, whose answers always parse with `ReaderLLM`: they follow the grammar of their class.

    Args:
        output_cls: Class of the objects.
        prompt: The template; the schema is added to its messages.
        llm: A `ReaderLLM`; other LLMs answer with their own `structured_predict`.
    """

    def __init__(self, output_cls: type[OutputT], prompt: BasePromptTemplate, llm: LLM) -> None:
        self._output_cls, self._prompt, self._llm = output_cls, prompt, llm

    @classmethod
    def from_defaults(
        cls,
        output_cls: type[OutputT],
        prompt_template_str: str | None = None,
        prompt: BasePromptTemplate | None = None,
        *,
        llm: LLM,
    ) -> Self:
        """Make a program of a template or its text.

        Args:
            output_cls: Class of the objects.
            prompt_template_str: Text of the template.
            prompt: The template, in place of the text.
            llm: The LLM.

        Raises:
            ConfigError: Both or none of text and template are given.
        """
        if (prompt is None) == (prompt_template_str is None):
            raise ConfigError("give prompt_template_str or prompt")
        return cls(output_cls, prompt or PromptTemplate(prompt_template_str or ""), llm)

    @property
    def output_cls(self) -> type[OutputT]:
        """Class of the objects."""
        return self._output_cls

    def __call__(self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> OutputT:
        """The object for the arguments of the template; `llm_kwargs` are arguments of the LLM's call."""
        output: OutputT = self._llm.structured_predict(self._output_cls, self._prompt, llm_kwargs, **kwargs)
        return output

    async def acall(self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> OutputT:
        """The call without blocking the event loop."""
        output: OutputT = await self._llm.astructured_predict(self._output_cls, self._prompt, llm_kwargs, **kwargs)
        return output

    def stream_call(
        self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Generator[Any, None, None]:
        """The partial objects while they grow, and the whole one."""
        return self._llm.stream_structured_predict(self._output_cls, self._prompt, llm_kwargs, **kwargs)

    async def astream_call(
        self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """`stream_call` without blocking the event loop."""
        return await self._llm.astream_structured_predict(self._output_cls, self._prompt, llm_kwargs, **kwargs)
