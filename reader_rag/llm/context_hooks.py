"""Passes retrieved text from LlamaIndex's synthesizers to the draft index of `ReaderLLM`.

The synthesizers call the `predict` family of the LLM and pass the retrieved text as the prompt argument `context_str`
(`context_msg` when they refine). `ContextHooks` takes it from there and makes the call on a shallow copy of the LLM
that carries the text. Each call has a copy of its own, so nothing has to be reset, and a generator that is read later,
on another thread or in another task, keeps its text. (A `ContextVar` would leak from a generator into its consumer
between two items.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from reader_rag.engine.outputs import Passage
from reader_rag.errors import ConfigError

if TYPE_CHECKING:
    from llama_index.core.llms import CustomLLM
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.types import TokenAsyncGen, TokenGen

    _LLM = CustomLLM
else:
    # A plain class: LlamaIndex wraps methods of its own subclasses in tracing spans, and the methods that are
    # overridden here already have one.
    _LLM = object

CONTEXT_ID = "context"
"""`Passage.id` of the text that a synthesizer put into the prompt."""

_CONTEXT_ARGUMENTS = ("context_str", "context_msg")


def passages_from(sources: Iterable[NodeWithScore | BaseNode | Passage | str]) -> tuple[Passage, ...]:
    """Turn retrieved nodes or plain texts into passages, in their order.

    Args:
        sources: Nodes with scores as a retriever returns them, nodes, passages, or strings. A node's passage has its
            `node_id` as id and its text without metadata; the passage of a string that is the n-th source has the id
            `source-n`.

    Returns:
        The passages; sources without text are left out.

    Raises:
        ConfigError: A source has another type, or `sources` is one source instead of a sequence.
    """
    if isinstance(sources, (str, BaseNode, NodeWithScore, Passage)) or not isinstance(sources, Iterable):
        raise ConfigError(f"sources must be a sequence, not one {type(sources).__name__}; put it into a list")
    passages = (_passage_from(source, number) for number, source in enumerate(sources, start=1))
    return tuple(passage for passage in passages if passage.text)


def _passage_from(source: NodeWithScore | BaseNode | Passage | str, number: int) -> Passage:
    if isinstance(source, Passage):
        return source
    if isinstance(source, str):
        return Passage(id=f"source-{number}", text=source)
    node = source.node if isinstance(source, NodeWithScore) else source
    if not isinstance(node, BaseNode):
        raise ConfigError(f"source {number} is a {type(node).__name__}; pass nodes, passages or strings")
    return Passage(id=node.node_id, text=node.get_content(metadata_mode=MetadataMode.NONE))


def context_passage(prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Passage | None:
    """The retrieved text among the arguments of a prompt template.

    Args:
        prompt: The template; arguments set by `partial_format` count too.
        prompt_args: The arguments of this call.

    Returns:
        A passage with the id `context`; None if there is no retrieved text.
    """
    arguments = {**prompt.kwargs, **prompt_args}
    for name in _CONTEXT_ARGUMENTS:
        text = arguments.get(name)
        if isinstance(text, str) and text:
            return Passage(id=CONTEXT_ID, text=text)
    return None


class ContextHooks(_LLM):
    """`predict` and `stream` of a LlamaIndex LLM; each call runs on a copy that carries the call's retrieved text."""

    def _with_context(self, passage: Passage | None) -> Self:
        """A copy of this LLM for one call.

        Args:
            passage: The call's retrieved text; None if it has none.
        """
        raise NotImplementedError

    def _for_call(self, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Self:
        """The copy for a call that fills a prompt template with these arguments."""
        return self._with_context(context_passage(prompt, prompt_args))

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """`LLM.predict` on a copy that carries the retrieved text."""
        return super(ContextHooks, self._for_call(prompt, prompt_args)).predict(prompt, **prompt_args)

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """`LLM.apredict` on a copy that carries the retrieved text."""
        return await super(ContextHooks, self._for_call(prompt, prompt_args)).apredict(prompt, **prompt_args)

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        """`LLM.stream` on a copy that carries the retrieved text."""
        return super(ContextHooks, self._for_call(prompt, prompt_args)).stream(prompt, **prompt_args)

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        """`LLM.astream` on a copy that carries the retrieved text."""
        return await super(ContextHooks, self._for_call(prompt, prompt_args)).astream(prompt, **prompt_args)
