"""Inputs and outputs of the engine: prompts, passages, chunks, finished answers, their counts and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from reader_rag.draft.external.sources import SourceCounts
from reader_rag.errors import PromptError
from reader_rag.sampling.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length"]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two token sequences differ.

    Args:
        one: Token ids.
        other: Token ids.

    Returns:
        The index; the length of the shorter one if the other continues it; None if they are equal.
    """
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((at for at, (a, b) in pairs if a != b), None if len(one) == len(other) else shorter)


@dataclass(frozen=True)
class Passage:
    """A retrieved text whose spans the answer may repeat.

    Attributes:
        id: Name of the passage in `CopiedSpan.passage_id`, e.g. a LlamaIndex node id.
        text: The text. If the prompt contains it verbatim, its tokens in the prompt are marked, not indexed again.
    """

    id: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it.

    Attributes:
        token_ids: Token ids, special tokens included.
        text: The text that was tokenized; empty if only ids are known.
        offsets: For each token its (start, end) characters in `text`; None if the tokenizer does not report them.
    """

    token_ids: Sequence[int]
    text: str = ""
    offsets: Sequence[tuple[int, int]] | None = None

    @classmethod
    def unpadded(cls, input_ids: Any, attention_mask: Any) -> list[Prompt]:
        """The prompts of a padded batch, with padding on either side.

        Args:
            input_ids: [batch, length] token ids: a tensor, an array or nested lists.
            attention_mask: [batch, length], 0 where a token is padding.

        Returns:
            One prompt for each row, without padding and without `text`.

        Raises:
            PromptError: The arguments differ in shape, or do not have two dimensions.
        """
        ids, mask = np.asarray(input_ids), np.asarray(attention_mask)
        if ids.ndim != 2 or ids.shape != mask.shape:
            raise PromptError(
                f"input_ids and attention_mask must have one shape [batch, length], not {ids.shape} and {mask.shape}"
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
    """What one decode step adds to an answer.

    Attributes:
        text: New text; empty while an incomplete character or the possible start of a stop string is held back.
        token_ids: Tokens that the step emitted.
        finish_reason: None until the last chunk; then "stop" (end-of-sequence token, stop string or stopping criterion)
            or "length".
        logprobs: With `SamplingParams.logprobs`, the log-probabilities of each of these tokens; else empty.
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
        accepted_by_source: Accepted nodes by source ("context", "passage", "datastore", "successor", "external",
            "prediction").
        queue_s: Seconds from submission to admission to the batch.
        ttft_s: Seconds from admission to the first token, without the measurement of step costs that an engine makes
            once.
        decode_s: Seconds of the decode steps after the first token, without the time that the reader took. Sequences of
            a batch share steps, and each counts their whole time.
        draft_s: Seconds of `decode_s` spent proposing drafts.
        cache_bytes: Bytes of the KV cache.
        reused_tokens: Tokens of the prompt whose keys and values came from the prefix cache.
        prediction_accepted: Tokens of the request's prediction that were accepted as draft nodes, each counted once.
        prediction_rejected: The other tokens of the prediction.
        draft_sources: By draft source from outside, how often it was asked, and how its tokens fared.
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
    prediction_accepted: int = 0
    prediction_rejected: int = 0
    draft_sources: dict[str, SourceCounts] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens emitted per decode step (MAT); 1.0 without drafts. The token of the prefill is not counted."""
        return (self.completion_tokens - 1) / self.steps if self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed, (tokens - 1) / seconds after the first token; 0.0 for answers of one token."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All counts and times, `tokens_per_step` and `tokens_per_s`, as values that JSON takes."""
        return asdict(self) | {"tokens_per_step": self.tokens_per_step, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: The answer without special tokens, and without the stop string that ended it unless
            `SamplingParams.include_stop` is set.
        token_ids: Emitted tokens, with the end-of-sequence token if it was emitted.
        finish_reason: "stop" or "length".
        stats: Counts and times.
        copied: The spans that were copied from a passage, in the order of the answer, not overlapping.
        logprobs: With `SamplingParams.logprobs`, the log-probabilities of each token; else empty.
        margins: With `SamplingParams.record_margins`, the best logit less the second best at each token; else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    copied: tuple[CopiedSpan, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()
