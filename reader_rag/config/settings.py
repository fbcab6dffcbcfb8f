"""Settings as frozen dataclasses that validate themselves when made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from reader_rag.config.grammar import Grammar
from reader_rag.errors import ConfigError

Exactness = Literal["fast", "strict"]
Forward = Literal["auto", "torch"]

_LEAST_TEMPERATURE = 1e-4
_MOST_LOGPROBS = 100
_LONGEST_TENANT = 256


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def checked_tenant(tenant: str) -> str:
    """The name of a tenant, if it can be one.

    Args:
        tenant: Any text in one line; "" is whoever names no tenant. Names are compared character by character.

    Raises:
        ConfigError: It is no string, is too long, or holds control or invisible characters.
    """
    _require(isinstance(tenant, str), f"a tenant is named by a string, not by {type(tenant).__name__}")
    _require(
        len(tenant) <= _LONGEST_TENANT,
        f"a tenant's name has at most {_LONGEST_TENANT} characters, not {len(tenant)}: use a shorter one",
    )
    _require(tenant.isprintable(), f"a tenant's name cannot hold control or invisible characters: {tenant!r}")
    return tenant


@dataclass(frozen=True)
class DraftConfig:
    """How drafts are made.

    Attributes:
        max_nodes: Most drafted tokens in one tree; how many of them are verified is decided by what they cost on the
            machine at hand. 0 turns drafting off (plain decoding).
        max_depth: Longest path of a tree, in tokens.
        min_probability: A node enters the tree only if the estimated probability of its whole path is at least this.
        max_occurrences: Most places in the text that are followed at once; the longest-lived and then the most
            recent ones are kept.
        max_passage_tokens: Bound on text that is searched besides prompt and output; the oldest passage goes first.
        max_successors: Entries of the table of the model's own next tokens, 136 bytes each; 0 drafts without it.
        calibrates: Whether the estimates of drafts are corrected by how they fared.
    """

    max_nodes: int = 64
    max_depth: int = 40
    min_probability: float = 0.0001
    max_occurrences: int = 256
    max_passage_tokens: int = 65_536
    max_successors: int = 32_768
    calibrates: bool = True

    def __post_init__(self) -> None:
        _require(0 <= self.max_nodes <= 1024, f"max_nodes must be 0..1024, not {self.max_nodes}")
        _require(1 <= self.max_depth <= 256, f"max_depth must be 1..256, not {self.max_depth}")
        _require(0.0 <= self.min_probability < 1.0, f"min_probability must be in [0, 1), not {self.min_probability}")
        _require(1 <= self.max_occurrences <= 4096, f"max_occurrences must be 1..4096, not {self.max_occurrences}")
        _require(0 <= self.max_successors <= 1 << 24, f"max_successors must be 0..2**24, not {self.max_successors}")
        _require(self.max_passage_tokens >= 0, f"max_passage_tokens must not be negative: {self.max_passage_tokens}")


@dataclass(frozen=True)
class DatastoreConfig:
    """What is looked up in a datastore, and what is kept in it.

    Attributes:
        keeps_answers: Whether finished answers are kept, each tenant's for itself alone. The process then is the one
            that writes to the datastore.
        max_answer_tokens: Most tokens of each tenant's answers; those longest of no use go first.
        max_answer_age_s: Seconds after which an answer goes; None: it stays.
        max_places: Most places in answers, and in other texts, that one draft is made of.
        reach: Most tokens that are copied from a place at once.
        least_match: Tokens that must agree before a place in a text that the model has not written.
        least_match_of_answers: The same in an answer.
    """

    keeps_answers: bool = False
    max_answer_tokens: int = 4_000_000
    max_answer_age_s: float | None = None
    max_places: int = 8
    reach: int = 40
    least_match: int = 4
    least_match_of_answers: int = 3

    def __post_init__(self) -> None:
        _require(self.max_answer_tokens >= 1, f"max_answer_tokens must be at least 1, not {self.max_answer_tokens}")
        age = self.max_answer_age_s
        _require(age is None or age > 0, f"max_answer_age_s must be above 0, not {age}")
        _require(1 <= self.max_places <= 1024, f"max_places must be 1..1024, not {self.max_places}")
        _require(1 <= self.reach <= 256, f"reach must be 1..256, not {self.reach}")
        for name in ("least_match", "least_match_of_answers"):
            least = getattr(self, name)
            _require(1 <= least <= 64, f"{name} must be 1..64, not {least}")


@dataclass(frozen=True)
class BatchConfig:
    """How many requests are decoded together.

    Attributes:
        max_rows: Most answers in the making at once; None: 8 on the CPU, 32 elsewhere.
        max_cache_bytes: Most bytes of their keys and values, prompt and longest answer reserved for each; None: half of
            what is free when the first request comes, less what beginnings of texts may take.
        max_waiting: Most requests that wait for a place; a further one is refused with a `BusyError`.
        max_wait_s: Seconds after which a request that still waits ends with a `BusyError`; None: it waits.
    """

    max_rows: int | None = None
    max_cache_bytes: int | None = None
    max_waiting: int = 1024
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        _require(self.max_rows is None or self.max_rows >= 1, f"max_rows must be at least 1, not {self.max_rows}")
        _require(
            self.max_cache_bytes is None or self.max_cache_bytes >= 1,
            f"max_cache_bytes must be at least 1, not {self.max_cache_bytes}",
        )
        _require(self.max_waiting >= 1, f"max_waiting must be at least 1, not {self.max_waiting}")
        _require(self.max_wait_s is None or self.max_wait_s > 0, f"max_wait_s must be above 0, not {self.max_wait_s}")


@dataclass(frozen=True)
class SamplingParams:
    """What one call asks for.

    Tokens are chosen as `transformers` chooses them: first the processors (penalties and bans, in the order of
    `decode.processors`), then temperature, top-k, top-p, min-p and typical-p.

    Attributes:
        max_tokens: Most tokens to emit.
        stop: Strings that end the text; the text ends before the first of them.
        include_stop: Whether the stop string that ended the text is part of it.
        temperature: 0 takes the most probable token (greedy); above 0 samples.
        top_k: Sample among the k most probable tokens; 0 takes all.
        top_p: Sample among the fewest tokens whose probabilities sum to at least this.
        min_p: Sample among tokens at least this times as probable as the most probable one; 0 takes all.
        typical_p: Sample among the tokens closest to the expected surprise whose probabilities sum to at least this.
        seed: Key of the sampling noise. The same seed gives the same tokens, drafted or plain. None draws one.
        repetition_penalty: Divides (or multiplies, if negative) the logits of all tokens of prompt and answer; 1 is
            off. As in `transformers`.
        presence_penalty: Subtracted from the logit of each token that the answer contains, -2 to 2. As OpenAI defines
            it.
        frequency_penalty: The same, times how often the answer contains it.
        no_repeat_ngram: No sequence of so many tokens comes twice, the prompt's included; 0 is off.
        min_tokens: No end-of-sequence token comes before there are so many tokens (unless a processor of one's own
            brings it).
        bad_words: Words that do not come in the tokens that they are usually spelled in, alone or behind a space.
        suppress_tokens: Token ids that never come.
        grammar: What the answer must look like; see docs/grammar.md.
        ignore_eos: Go on after the end-of-sequence token (for benchmarks).
        speculate: False decodes plainly: the same engine, no drafts.
        logprobs: Report the log-probability of every token and of so many most probable ones; None: do not.
        record_margins: Keep, for every token, how far the best logit lay above the second best.
    """

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    grammar: Grammar | None = None
    ignore_eos: bool = False
    speculate: bool = True
    logprobs: int | None = None
    record_margins: bool = False

    def __post_init__(self) -> None:
        self._integer("max_tokens", "at least 1", lambda n: n >= 1)
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            _require(isinstance(texts, (tuple, list)), f"{name} must be a tuple of strings, not {texts!r}")
            _require(all(isinstance(s, str) and s for s in texts), f"{name} must not hold empty strings")
        self._number("temperature", "a number of at least 0", lambda x: x >= 0.0)
        _require(
            self.temperature == 0.0 or self.temperature >= _LEAST_TEMPERATURE,
            f"temperature {self.temperature} divides logits beyond float32; use 0 for greedy decoding",
        )
        self._integer("top_k", "at least 0 (0: all tokens)", lambda n: n >= 0)
        self._number("top_p", "in (0, 1]", lambda x: 0.0 < x <= 1.0)
        self._number("min_p", "in [0, 1] (0: all tokens)", lambda x: 0.0 <= x <= 1.0)
        self._number("typical_p", "in (0, 1]", lambda x: 0.0 < x <= 1.0)
        if self.seed is not None:
            self._integer("seed", "in 0..2**64-1", lambda n: 0 <= n < 2**64)
        self._number("repetition_penalty", "above 0 (1: off)", lambda x: x > 0.0)
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, "in [-2, 2] (0: off)", lambda x: -2.0 <= x <= 2.0)
        self._integer("no_repeat_ngram", "at least 0 (0: off)", lambda n: n >= 0)
        self._integer("min_tokens", f"in 0..max_tokens ({self.max_tokens})", lambda n: 0 <= n <= self.max_tokens)
        _require(
            isinstance(self.suppress_tokens, (tuple, list))
            and all(_is_integer(token) and token >= 0 for token in self.suppress_tokens),
            f"suppress_tokens must be a tuple of token ids, not {self.suppress_tokens!r}",
        )
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            f"grammar must be a Grammar, e.g. Grammar.json_schema(...), not {type(self.grammar).__name__}",
        )
        for name in ("ignore_eos", "min_tokens"):
            _require(
                self.grammar is None or not getattr(self, name),
                f"{name} goes on behind the end that a grammar sets; give one of them only",
            )
        if self.logprobs is not None:
            self._integer("logprobs", f"0..{_MOST_LOGPROBS} or None", lambda n: 0 <= n <= _MOST_LOGPROBS)

    def _integer(self, name: str, range_: str, fits: Callable[[int], bool]) -> None:
        value = getattr(self, name)
        _require(_is_integer(value) and fits(value), f"{name} must be {range_}, not {value!r}")

    def _number(self, name: str, range_: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        _require(right and fits(value), f"{name} must be {range_}, not {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
