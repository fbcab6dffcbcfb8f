"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from reader_rag.errors import PromptError
from reader_rag.sampling.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length"]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two token sequences differ, be it that one of them has ended; None if they are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((at for at, (a, b) in pairs if a != b), None if len(one) == len(other) else shorter)


@dataclass(frozen=True)
class Passage:
    """A retrieved text whose spans the answer may repeat.

    Attributes:
        id: What provenance calls it, e.g. a LlamaIndex node id.
        text: The text itself; where the prompt contains it verbatim, the prompt's own tokens are used.
    """

    id: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it.

    Attributes:
        token_ids: int token ids, special tokens included.
        text: The text they were made from; empty if only ids are known.
        offsets: For each token its (start, end) characters in `text`; None where the tokenizer cannot tell.
    """

    token_ids: Sequence[int]
    text: str = ""
    offsets: Sequence[tuple[int, int]] | None = None

    @classmethod
    def unpadded(cls, input_ids: Any, attention_mask: Any) -> list[Prompt]:
        """The prompts of a batch that a tokenizer padded, on either side.

        Args:
            input_ids: [batch, length] token ids: a tensor, an array or nested lists.
            attention_mask: [batch, length], 0 where a token is padding.

        Returns:
            One prompt a row, without its padding; no texts.

        Raises:
            PromptError: The two differ in shape, or are no batch.
        """
        ids, mask = np.asarray(input_ids), np.asarray(attention_mask)
        if ids.ndim != 2 or ids.shape != mask.shape:
            raise PromptError(
                f"a padded batch has ids and a mask of one shape [batch, length], not {ids.shape} and {mask.shape}"
            )
        return [cls(tuple(row[kept].tolist())) for row, kept in zip(ids, mask != 0, strict=True)]


@dataclass(frozen=True)
class CopiedSpan:
    """A stretch of the answer that was copied verbatim from a passage.

    Attributes:
        passage_id: `Passage.id` of the source.
        passage_start: First character in the passage's text.
        passage_end: One past the last character in the passage's text.
        text_start: First character in the answer.
        text_end: One past the last character in the answer.
    """

    passage_id: str
    passage_start: int
    passage_end: int
    text_start: int
    text_end: int


@dataclass(frozen=True)
class Chunk:
    """What one step of a stream adds.

    Attributes:
        text: New text; empty while half a character or a possible stop string is held back.
        token_ids: Tokens this step emitted.
        finish_reason: None until the last chunk; then "stop" (end-of-sequence token, stop string or stopping criterion)
            or "length".
        logprobs: With `SamplingParams.logprobs`: of each of these tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Stats:
    """Counts and times of one generation.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Emitted tokens.
        steps: Forward passes after the prefill, each emitting one token or more.
        drafted: Drafted nodes over all steps.
        accepted: Drafted nodes that were accepted.
        accepted_by_source: The same by source name ("context", "passage", "datastore", "successor", "external").
        queue_s: Seconds that the request waited for a place among others.
        ttft_s: Seconds from then to the first token, less the measurement of step costs that an engine makes once.
        decode_s: Seconds of its steps from the first token to the last (time the consumer took is left out). Answers
            that are decoded together share steps, and each counts all of their time.
        draft_s: Seconds of `decode_s` spent making drafts.
        cache_bytes: Bytes held for keys and values.
        reused_tokens: Tokens of the prompt that were not read, because a text before began with them.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    queue_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    cache_bytes: int = 0
    reused_tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens emitted per verify step (MAT); plain decoding: 1.0. The prefill's token is not counted."""
        return (self.completion_tokens - 1) / self.steps if self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed, (tokens - 1) / seconds after the first token; 0.0 for answers of one token."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All counts, times and the two ratios as a JSON-ready dict."""
        return asdict(self) | {"tokens_per_step": self.tokens_per_step, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: The answer, without special tokens and (unless asked for) without the stop string that ended it.
        token_ids: Emitted tokens, the end-of-sequence token included when it was emitted.
        finish_reason: "stop" or "length".
        stats: Counts and times.
        copied: Which spans were copied from which passage, in the answer's order, not overlapping.
        logprobs: With `SamplingParams.logprobs`: of each token.
        margins: With `record_margins`: per token the best logit less the second best.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    copied: tuple[CopiedSpan, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()
