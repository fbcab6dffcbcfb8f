"""LlamaIndex's compact-and-refine synthesis, measured with the LLM's own tokenizer."""

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

from reader_rag.errors import PromptError
from reader_rag.rag.prompts import NOTHING_FOUND
from reader_rag.rag.surroundings import Surroundings


@dataclass(frozen=True)
class PromptBudget:
    """How much text fits into one call of an LLM.

    Attributes:
        context_window: Tokens of prompt and answer together.
        num_output: Tokens kept free for the answer.
        encode: Text to token ids, without special tokens.
        template_tokens: What the chat template adds to any conversation, its default system prompt included.
        message_tokens: What it adds around each further message.
    """

    context_window: int
    num_output: int
    encode: Callable[[str], list[Any]]
    template_tokens: int = 0
    message_tokens: int = 0

    @classmethod
    def of(cls, llm: LLM) -> PromptBudget:
        """The budget of an LLM; one without a `tokenizer` attribute is measured with LlamaIndex's default tokenizer."""
        tokenizer = getattr(llm, "tokenizer", None)
        if tokenizer is None:
            return cls(llm.metadata.context_window, _room_for_answer(llm), get_tokenizer())

        def encode(text: str) -> list[Any]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        return cls(llm.metadata.context_window, _room_for_answer(llm), encode, *_template_tokens(tokenizer))


class _OwnTokenCounter(TokenCounter):
    """LlamaIndex measures chat messages with an OpenAI tokenizer whatever it is given; this one does not."""

    def __init__(self, budget: PromptBudget) -> None:
        super().__init__(tokenizer=budget.encode)
        self._message_tokens = budget.message_tokens

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        return sum(len(self.tokenizer(message.content or "")) + self._message_tokens for message in messages)


class OwnPromptHelper(PromptHelper):
    """LlamaIndex's prompt helper, counting as the LLM does and naming the question when it is what does not fit."""

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
        return self.context_window - num_prompt_tokens - self.num_output  # below 0 is judged below

    def _get_available_chunk_size(self, prompt: BasePromptTemplate, *args: Any, **kwargs: Any) -> int:
        room: int = super()._get_available_chunk_size(prompt, *args, **kwargs)
        if room < _LEAST_CONTEXT_TOKENS:
            raise PromptError(
                "the question (with instructions and conversation) leaves no room for passages in the model's context "
                f"of {self._model_window} tokens, {self.num_output} of them kept for the answer: "
                "shorten it, or ask for fewer tokens"
            )
        return room


_LEAST_CONTEXT_TOKENS = 32


class GroundedSynthesizer(CompactAndRefine):
    """LlamaIndex's synthesizer with our token counting; without passages it says so and does not call the LLM.

    An LLM with `with_sources` (`ReaderLLM`) drafts each answer from all retrieved passages, whether or not the prompt
    of the call holds them, and from what `surroundings` finds around them.
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
            # Not used for text, but left out it would set LlamaIndex's global tokenizer.
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
        """See `BaseSynthesizer.synthesize`."""
        return super(GroundedSynthesizer, self._knowing(nodes)).synthesize(query, nodes, *args, **kwargs)

    async def asynthesize(
        self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any
    ) -> RESPONSE_TYPE:
        """See `BaseSynthesizer.asynthesize`."""
        knowing = await asyncio.to_thread(self._knowing, nodes)
        return await super(GroundedSynthesizer, knowing).asynthesize(query, nodes, *args, **kwargs)

    def _knowing(self, nodes: Sequence[NodeWithScore]) -> GroundedSynthesizer:
        """One for a single call, whose LLM searches these passages and their surroundings for drafts."""
        bind = getattr(self._llm, "with_sources", None)
        if bind is None or not nodes:
            return self
        around = self._surroundings.of(nodes) if self._surroundings is not None else []
        one = copy.copy(self)
        one._llm = bind([*nodes, *around])
        # Made in the base's constructor as a method of `self`, which would call the LLM that knows no passages.
        one._program_factory = one._default_program_factory
        return one


def make_synthesizer(
    llm: LLM,
    qa_template: BasePromptTemplate,
    refine_template: BasePromptTemplate,
    *,
    streaming: bool,
    surroundings: Surroundings | None = None,
) -> GroundedSynthesizer:
    """The synthesizer of query and chat engines."""
    return GroundedSynthesizer(llm, qa_template, refine_template, streaming=streaming, surroundings=surroundings)


def _room_for_answer(llm: LLM) -> int:
    # LlamaIndex's "unknown" is -1; its default of 256 is meant then.
    return llm.metadata.num_output if llm.metadata.num_output > 0 else 256


def _template_tokens(tokenizer: Any) -> tuple[int, int]:
    """What the chat template adds once, and what it adds for each message."""
    if not getattr(tokenizer, "chat_template", None):
        return 0, 0

    def size(*roles: str) -> int:
        messages = [{"role": role, "content": ""} for role in roles]
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    one, three = size("user"), size("user", "assistant", "user")
    return one, -(-(three - one) // 2)
