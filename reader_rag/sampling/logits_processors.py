"""Logits processors of an answer: those of `transformers`, OpenAI's penalties, and the caller's own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from reader_rag.config import SamplingParams
from reader_rag.errors import CallbackError, ConfigError
from reader_rag.sampling.nucleus import TopP
from reader_rag.sampling.sampler import Processor


class LogitBias(LogitsProcessor):
    """Adds a number to the scores of some tokens, as OpenAI's `logit_bias` does.

    Args:
        bias: Numbers by token id.
        device: Of the scores.
    """

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self._tokens = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Add the numbers to the scores; arguments and result of a `Processor`."""
        return scores.index_add(1, self._tokens, self._bias[None].expand(len(scores), -1))


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
        """Subtract the penalties from the scores; arguments and result of a `Processor`."""
        answer = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def make_processors(
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_tokens: int,
    eos_ids: Sequence[int],
    device: torch.device,
    given: Sequence[Processor] = (),
    last: Sequence[Processor] = (),
) -> list[Processor]:
    """All logits processors of one answer: `logit_bias`, then the others in the order of `transformers`' `generate`.

    Args:
        params: The sampling parameters.
        tokenizer: Turns `bad_words` into tokens.
        prompt_tokens: Tokens of the prompt.
        eos_ids: Tokens that end an answer.
        device: Of the scores.
        given: The caller's own processors; they come after penalties and bans and before temperature and the like.
        last: Constraints that nothing may undo; they come right after `given`.
    """
    made: list[Any] = []
    if params.logit_bias:
        made.append(LogitBias(params.logit_bias, device))
    if params.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        made.append(OpenAIPenalties(params.presence_penalty, params.frequency_penalty, prompt_tokens))
    if params.no_repeat_ngram:
        made.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram))
    if params.bad_words:
        made.append(NoBadWordsLogitsProcessor(_bad_words(params.bad_words, tokenizer), list(eos_ids) or None))
    if params.min_tokens and eos_ids:
        ends = torch.tensor(list(eos_ids), device=device)
        made.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, params.min_tokens, ends, device=str(device)))
    if params.suppress_tokens:
        made.append(SuppressTokensLogitsProcessor(list(params.suppress_tokens), device=str(device)))
    made += given
    made += last
    if params.temperature > 0.0:
        made += _warpers(params)
    return made


def _warpers(params: SamplingParams) -> list[Any]:
    warpers: list[Any] = []
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopP(float(params.top_p)))
    if params.min_p:
        warpers.append(MinPLogitsWarper(float(params.min_p)))
    if params.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(float(params.typical_p)))
    return warpers


def _bad_words(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens of each word, as the first of a text and after a space."""
    spelled = []
    for word in words:
        for text in (word, f" {word}"):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            if not tokens:
                raise ConfigError(f"the bad word {word!r} has no tokens in this model's vocabulary; leave it out")
            if tokens not in spelled:
                spelled.append(tokens)
    return spelled


def copy_processors(processors: Sequence[Any], criteria: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Deep copies for one answer, so that no state of a processor reaches another answer.

    Objects that several of them share are shared by the copies too. Models, tokenizers and plain functions are not
    copied.

    Args:
        processors: Logits processors.
        criteria: Stopping criteria.

    Raises:
        ConfigError: One of them cannot be called with token ids and scores, or cannot be copied.
    """
    given = (
        list(_checked_callables(processors, "logits_processor")),
        list(_checked_callables(criteria, "stopping_criteria")),
    )
    memo: dict[int, Any] = {}
    _find_shared(given, memo, set())
    try:
        copied: tuple[list[Any], list[Any]] = copy.deepcopy(given, memo)
    except Exception as cause:
        raise ConfigError(
            "a logits processor or a stopping criterion cannot be copied, and what it remembers of one answer must not "
            f"reach another; give it a __deepcopy__ ({cause})"
        ) from cause
    return copied


def any_met(criteria: Sequence[Callable[[torch.Tensor, None], Any]], token_ids: torch.Tensor) -> bool:
    """Whether a stopping criterion is met. All are called, as in `transformers`: one that counts must not miss any.

    Args:
        criteria: Stopping criteria.
        token_ids: [1, length], prompt and answer.

    Raises:
        CallbackError: A criterion returned something else than whether to stop.
    """
    met = False
    for criterion in criteria:
        result = criterion(token_ids, None)
        try:
            met |= bool(torch.as_tensor(result).all())
        except (TypeError, ValueError, RuntimeError) as cause:
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise CallbackError(
                f"the stopping criterion {name} must return True or False, or a tensor of them, not {result!r:.40}"
            ) from cause
    return met


def _checked_callables(objects: Any, kind: str) -> Sequence[Any]:
    if not isinstance(objects, (list, tuple)):
        raise ConfigError(f"{kind} must be a list, not {type(objects).__name__}")
    for held in objects:
        if isinstance(held, type) or not callable(held):
            raise ConfigError(f"{kind} must be callable with token ids and scores; {held!r} is not")
        try:
            inspect.signature(held).bind(None, None)
        except TypeError as cause:
            raise ConfigError(f"{kind}: {held!r} must be callable with token ids and scores ({cause})") from cause
        except ValueError:  # a builtin that does not say what it takes
            continue
    return objects


def _find_shared(held: Any, memo: dict[int, Any], visited: set[int]) -> None:
    """Put models and tokenizers that `held` refers to, at any depth, into the memo of `copy.deepcopy`, as themselves.

    `copy.deepcopy` has no hook that leaves out objects of a class, and pickling with a `persistent_id`, which has one,
    refuses lambdas and local functions.
    """
    if id(held) in visited or isinstance(held, (str, bytes, int, float, torch.Tensor)):
        return
    visited.add(id(held))
    if isinstance(held, (PreTrainedModel, PreTrainedTokenizerBase)):
        memo[id(held)] = held
        return
    if isinstance(held, Mapping):
        parts: Iterable[Any] = held.values()
    elif isinstance(held, (list, tuple, set, frozenset)):
        parts = held
    elif inspect.ismethod(held):
        parts = (held.__self__,)
    else:
        parts = () if isinstance(held, type) else getattr(held, "__dict__", {}).values()
    for part in parts:
        _find_shared(part, memo, visited)
