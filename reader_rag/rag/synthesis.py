"""LlamaIndex's compact-and-refine synthesis with prompts measured by the LLM's own tokenizer."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.utilities.token_counting import TokenCounter
from llama_index.core.utils import get_tokenizer

from reader_rag.engine.text.template import bounded_template
from reader_rag.errors import PromptError
from reader_rag.rag.prompts import NOTHING_FOUND
from reader_rag.rag.surroundings import Surroundings


@dataclass(frozen=True)
class PromptBudget:
    """The tokens of one call of an LLM, and how to count them.

    Attributes:
        context_window: Most tokens of prompt and answer together.
        num_output: Tokens reserved for the answer.
        encode: Encodes a text to token ids without special tokens.
        template_tokens: Tokens that the chat template adds to any conversation, with its default system prompt.
        message_tokens: Tokens that the chat template adds for each further message.
    """

    context_window: int
    num_output: int
    encode: Callable[[str], list[Any]]
    template_tokens: int = 0
    message_tokens: int = 0

    @classmethod
    def of(cls, llm: LLM) -> PromptBudget:
        """The budget of an LLM.

        Args:
            llm: The LLM; without a `tokenizer` attribute LlamaIndex's default tokenizer counts.
        """
        tokenizer = getattr(llm, "tokenizer", None)
        if tokenizer is None:
            return cls(llm.metadata.context_window, _answer_tokens(llm), get_tokenizer())

        def encode(text: str) -> list[Any]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        return cls(llm.metadata.context_window, _answer_tokens(llm), encode, *_template_tokens(tokenizer))


class _OwnTokenCounter(TokenCounter):
    """Counts chat messages with the LLM's tokenizer; LlamaIndex's counter always uses an OpenAI tokenizer."""

    def __init__(self, budget: PromptBudget) -> None:
        super().__init__(tokenizer=budget.encode)
        self._message_tokens = budget.message_tokens

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        return sum(len(self.tokenizer(message.content or "")) + self._message_tokens for message in messages)


class OwnPromptHelper(PromptHelper):
    """LlamaIndex's prompt helper with the LLM's tokenizer; raises `PromptError` for a question that does not fit."""

    _model_window: int = PrivateAttr()

    def __init__(self, budget: PromptBudget) -> None:
        super().__init__(
            context_window=budget.context_window - budget.template_tokens,
            num_output=budget.num_output,
            tokenizer=budget.encode,
        )
        self._model_window = budget.context_window
        self._token_counter = _OwnTokenCounter(budget)

    def _get_available_context_size(self, num_prompt_tokens: int) -> int:
        return (
            self.context_window - num_prompt_tokens - self.num_output
        )  # `_get_available_chunk_size` checks negative values

    def _get_available_chunk_size(self, prompt: BasePromptTemplate, *args: Any, **kwargs: Any) -> int:
        room: int = super()._get_available_chunk_size(prompt, *args, **kwargs)
        if room < _LEAST_CONTEXT_TOKENS:
            raise PromptError(
                "the question (with instructions and conversation) leaves no room for passages in the model's context "
                f"of {self._model_window} tokens, {self.num_output} of them reserved for the answer: "
                "shorten it, or lower max_tokens"
            )
        return room


_LEAST_CONTEXT_TOKENS = 32


class GroundedSynthesizer(CompactAndRefine):
    """LlamaIndex's synthesizer with the LLM's own token counts; without passages it answers `NOTHING_FOUND`.

    All calls for one question get one list of passages for their drafts, through the LLM's `with_sources` (`ReaderLLM`
    has it): all retrieved passages, whether or not they fit into the prompt of the call, and those around them.

    Args:
        llm: The LLM.
        qa_template: Prompt with `{context_str}` and `{query_str}`.
        refine_template: Prompt with `{context_msg}`, `{query_str}` and `{existing_answer}`.
        streaming: Whether responses are streams.
        surroundings: Finds the passages around the retrieved ones; None: no others.
    """

    def __init__(
        self,
        llm: LLM,
        qa_template: BasePromptTemplate,
        refine_template: BasePromptTemplate,
        *,
        streaming: bool = False,
        surroundings: Surroundings | None = None,
    ) -> None:
        budget = PromptBudget.of(llm)
        super().__init__(
            llm=llm,
            prompt_helper=OwnPromptHelper(budget),
            # Not used for text, but the default would set LlamaIndex's global tokenizer.
            chat_prompt_helper=ChatPromptHelper(tokenizer=budget.encode),
            text_qa_template=qa_template,
            refine_template=refine_template,
            # A refine prompt repeats the answer so far.
            response_padding_size=budget.num_output,
            streaming=streaming,
        )
        self._empty_response = NOTHING_FOUND
        self._surroundings = surroundings

    def synthesize(self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> RESPONSE_TYPE:
        """Answer a query from passages; see `BaseSynthesizer.synthesize` for the arguments."""
        bound = self._for_passages(nodes)
        return _cited(super(GroundedSynthesizer, bound).synthesize(query, nodes, *args, **kwargs), nodes)

    async def asynthesize(
        self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any
    ) -> RESPONSE_TYPE:
        """Answer a query from passages; see `BaseSynthesizer.asynthesize` for the arguments."""
        bound = await asyncio.to_thread(self._for_passages, nodes)
        return _cited(await super(GroundedSynthesizer, bound).asynthesize(query, nodes, *args, **kwargs), nodes)

    def _for_passages(self, nodes: Sequence[NodeWithScore]) -> GroundedSynthesizer:
        """A copy for one question, whose LLM drafts from these passages and their surroundings."""
        bind = getattr(self._llm, "with_sources", None)
        if bind is None or not nodes:
            return self
        around = self._surroundings.of(nodes) if self._surroundings is not None else []
        bound = copy.copy(self)
        bound._llm = bind([*nodes, *around])
        # The base's constructor sets it to a bound method of `self`, which would call the LLM without passages.
        bound._program_factory = bound._default_program_factory
        return bound


def _cited(response: RESPONSE_TYPE, nodes: Sequence[NodeWithScore]) -> RESPONSE_TYPE:
    """The response, which has no citations where there were no passages."""
    if not nodes:
        response.metadata = {"citations": []}
    return response


def _answer_tokens(llm: LLM) -> int:
    # LlamaIndex reports an unknown number as -1; its default is 256.
    return llm.metadata.num_output if llm.metadata.num_output > 0 else 256


def _template_tokens(tokenizer: Any) -> tuple[int, int]:
    """Tokens that the chat template adds once, and for each message."""
    if not getattr(tokenizer, "chat_template", None):
        return 0, 0

    def size(*roles: str) -> int:
        messages = [{"role": role, "content": ""} for role in roles]
        apply = tokenizer.apply_chat_template
        return bounded_template(tokenizer, lambda: len(apply(messages, add_generation_prompt=True, return_dict=False)))

    one, three = size("user"), size("user", "assistant", "user")
    return one, -(-(three - one) // 2)
