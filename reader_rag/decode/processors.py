"""What changes a token's scores before it is chosen, by the processors of `transformers` and two of OpenAI's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from reader_rag.config import GenerationConfig
from reader_rag.decode.select import Processor
from reader_rag.errors import ConfigError


class OpenAIPenalties(LogitsProcessor):
    """`logit -= frequency * count + presence * (count > 0)`, counting the answer's tokens, not the prompt's.

    The formula of OpenAI's API reference ("Frequency and presence penalties").

    Args:
        presence: -2 to 2.
        frequency: -2 to 2.
        prompt_tokens: Tokens before the answer.
    """

    def __init__(self, presence: float, frequency: float, prompt_tokens: int) -> None:
        self._presence = presence
        self._frequency = frequency
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `Processor`."""
        answer = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def make_processors(
    generation: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_tokens: int,
    eos_ids: Sequence[int],
    device: torch.device,
    given: Sequence[Processor] = (),
    last: Sequence[Processor] = (),
) -> list[Processor]:
    """Everything that changes the scores of one answer, in the order of `transformers`' `generate`.

    Args:
        generation: The settings.
        tokenizer: Turns `bad_words` into tokens.
        prompt_tokens: Tokens of the prompt.
        eos_ids: Tokens that end an answer.
        device: Of the scores.
        given: The caller's own processors; they come after penalties and bans and before temperature and the like.
        last: Constraints that nothing may undo; they come right after `given`.
    """
    g = generation
    made: list[Any] = []
    if g.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(g.repetition_penalty))
    if g.presence_penalty or g.frequency_penalty:
        made.append(OpenAIPenalties(g.presence_penalty, g.frequency_penalty, prompt_tokens))
    if g.no_repeat_ngram:
        made.append(NoRepeatNGramLogitsProcessor(g.no_repeat_ngram))
    if g.bad_words:
        made.append(NoBadWordsLogitsProcessor(_bad_words(g.bad_words, tokenizer), list(eos_ids) or None))
    if g.min_tokens and eos_ids:
        ends = torch.tensor(list(eos_ids), device=device)
        made.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, g.min_tokens, ends, device=str(device)))
    if g.suppress_tokens:
        made.append(SuppressTokensLogitsProcessor(list(g.suppress_tokens), device=str(device)))
    made += given
    made += last
    if g.temperature > 0.0:
        made += _warpers(g)
    return made


def _warpers(g: GenerationConfig) -> list[Any]:
    warpers: list[Any] = []
    if g.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(g.temperature))
    if g.top_k:
        warpers.append(TopKLogitsWarper(g.top_k))
    if g.top_p < 1.0:
        warpers.append(TopPLogitsWarper(g.top_p))
    if g.min_p:
        warpers.append(MinPLogitsWarper(g.min_p))
    if g.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(g.typical_p))
    return warpers


def _bad_words(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens of each word, at the beginning of a text and behind a space."""
    spelled = []
    for word in words:
        for text in (word, f" {word}"):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            if not tokens:
                raise ConfigError(f"the bad word {word!r} has no tokens in this model's vocabulary")
            if tokens not in spelled:
                spelled.append(tokens)
    return spelled


def private(objects: Sequence[Any], kind: str) -> list[Any]:
    """Copies for one answer, so that what a processor remembers of one answer never reaches another.

    Models, tokenizers and functions that an object refers to are shared, not copied.

    Args:
        objects: Logits processors or stopping criteria.
        kind: What messages call them.

    Raises:
        ConfigError: One of them cannot be called or copied.
    """
    copies = []
    for held in objects:
        if not callable(held):
            raise ConfigError(f"{kind} must be callable with token ids and scores; {held!r} is not")
        if inspect.isroutine(held):
            copies.append(held)
            continue
        shared = {
            id(value): value
            for value in getattr(held, "__dict__", {}).values()
            if isinstance(value, (torch.nn.Module, PreTrainedTokenizerBase)) or inspect.isroutine(value)
        }
        try:
            copies.append(copy.deepcopy(held, shared))
        except Exception as cause:
            raise ConfigError(
                f"{kind}: {type(held).__name__} cannot be copied, and what it remembers of one answer must not reach "
                f"another ({cause}); give it a __deepcopy__, or pass a function"
            ) from cause
    return copies
