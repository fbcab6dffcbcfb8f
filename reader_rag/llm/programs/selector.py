"""A selector that can only choose what there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.bridge.pydantic import BaseModel, Field, create_model
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle
from llama_index.core.tools.types import ToolMetadata

from reader_rag.errors import ConfigError

_PROMPT = PromptTemplate(
    "Here are {num_choices} choices, by their numbers:\n{context_list}\n"
    "Select what answers this question best, and say why: {query_str}"
)
_MOST_REASON = 160
"""Most characters of a reason: a small model does not always end it by itself."""


class GrammarSelector(BaseSelector):
    """LlamaIndex's selector; with `ReaderLLM` it never fails, because its grammar has the numbers of the choices.

    Args:
        llm: A `ReaderLLM`; other LLMs answer with their own `structured_predict`.
        multiple: Whether several choices may be selected.
        prompt: Replaces the built-in prompt; a template with `{num_choices}`, `{context_list}` and `{query_str}`.

    Example:
        >>> RouterQueryEngine(GrammarSelector(llm), query_engine_tools=tools, llm=llm)
    """

    def __init__(self, llm: LLM, *, multiple: bool = False, prompt: PromptTemplate | None = None) -> None:
        self._llm, self._multiple = llm, multiple
        self._prompt: Any = prompt or _PROMPT

    def _get_prompts(self) -> dict[str, Any]:
        return {"prompt": self._prompt}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._prompt = prompts.get("prompt", self._prompt)

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        selection = self._llm.structured_predict(self._class(len(choices)), self._prompt, **_asked(choices, query))
        return _result(selection)

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        selected = self._class(len(choices))
        return _result(await self._llm.astructured_predict(selected, self._prompt, **_asked(choices, query)))

    def _class(self, count: int) -> type[BaseModel]:
        """The class of answers that select among so many choices."""
        if not count:
            raise ConfigError("there is nothing to select from; pass at least one choice")
        number: Any = Literal[tuple(range(1, count + 1))]
        numbers = Annotated[list[number], Field(min_length=1, max_length=count if self._multiple else 1)]
        reason = Annotated[str, Field(max_length=_MOST_REASON)]
        return create_model("Selection", choices=(numbers, ...), reason=(reason, ...))


def _asked(choices: Sequence[ToolMetadata], query: QueryBundle) -> dict[str, Any]:
    described = (" ".join((choice.description or "").split()) for choice in choices)
    text = "\n".join(f"({number}) {line}" for number, line in enumerate(described, start=1))
    return {"num_choices": len(choices), "context_list": text, "query_str": query.query_str}


def _result(selection: Any) -> SelectorResult:
    numbers = dict.fromkeys(selection.choices)  # each once, in their order
    return SelectorResult(selections=[SingleSelection(index=number - 1, reason=selection.reason) for number in numbers])
