"""The sampling parameters of a request."""

from __future__ import annotations

from dataclasses import dataclass

from reader_rag.config.grammar import Grammar
from reader_rag.config.setting import Settings, setting
from reader_rag.errors import ConfigError

_LEAST_TEMPERATURE = 1e-4
_MAX_LOGPROBS = 100


@dataclass(frozen=True)
class SamplingParams(Settings):
    """The sampling parameters of a request: length, stop strings, sampling, grammar, log-probabilities.

    Tokens are chosen as `transformers` chooses them: first the logits processors (biases, penalties and bans, in the
    order of `sampling.logits_processors`), then temperature, top-k, top-p, min-p and typical-p.
    """

    max_tokens: int = setting(256, "Most tokens to emit.", ge=1)
    stop: tuple[str, ...] = setting((), "Strings that end the text; it ends before the first of them.")
    include_stop: bool = setting(False, "Whether the stop string that ended the text is part of it.")
    temperature: float = setting(0.0, "0 takes the most probable token (greedy); above 0 samples.", ge=0.0)
    top_k: int = setting(0, "Sample among the k most probable tokens; 0 takes all.", ge=0, note="0: all tokens")
    top_p: float = setting(
        1.0, "Sample among the fewest tokens whose probabilities sum to at least this.", gt=0.0, le=1.0
    )
    min_p: float = setting(
        0.0,
        "Sample among tokens whose probability is at least this fraction of the most probable token's; 0 takes all.",
        ge=0.0,
        le=1.0,
        note="0: all tokens",
    )
    typical_p: float = setting(
        1.0,
        "Sample among the tokens closest to the expected information content whose probabilities sum to at least this.",
        gt=0.0,
        le=1.0,
    )
    seed: int | None = setting(
        None,
        "Key of the sampling noise: the same seed gives the same tokens, drafted or plain. None draws one per request.",
        ge=0,
        le=2**64 - 1,
    )
    repetition_penalty: float = setting(
        1.0,
        "Divides the positive and multiplies the negative logits of all tokens of prompt and answer, as in "
        "transformers; 1 is off.",
        gt=0.0,
        note="1: off",
    )
    presence_penalty: float = setting(
        0.0,
        "Subtracted from the logit of each token that the answer contains, as OpenAI defines it.",
        ge=-2.0,
        le=2.0,
        note="0: off",
    )
    frequency_penalty: float = setting(
        0.0,
        "Subtracted from a token's logit once for each time that the answer contains it, as OpenAI defines it.",
        ge=-2.0,
        le=2.0,
        note="0: off",
    )
    no_repeat_ngram: int = setting(
        0, "No n-gram of this many tokens occurs twice, the prompt's included; 0 is off.", ge=0, note="0: off"
    )
    min_tokens: int = setting(
        0, "No end-of-sequence token comes before this many tokens, unless a logits processor of yours forces it.", ge=0
    )
    bad_words: tuple[str, ...] = setting((), "Words that do not occur in their usual tokens, alone or after a space.")
    logit_bias: dict[int, float] | None = setting(
        None,
        "Added to the logits of these token ids, before penalties, as OpenAI defines it: -100 bans a token.",
        ge=-100.0,
        le=100.0,
    )
    suppress_tokens: tuple[int, ...] = setting((), "Token ids that do not occur.", ge=0)
    grammar: Grammar | None = setting(None, "The grammar of the answer; see docs/grammar.md.")
    ignore_eos: bool = setting(False, "Whether to go on after the end-of-sequence token (for benchmarks).")
    speculate: bool = setting(True, "False decodes plainly: the same engine, no drafts.")
    logprobs: int | None = setting(
        None,
        "Report the log-probability of every token and of this many most probable ones; None: report none.",
        ge=0,
        le=_MAX_LOGPROBS,
    )
    record_margins: bool = setting(
        False, "Whether to keep, for every token, the difference between the two best logits (for benchmarks)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0.0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature {self.temperature} is too small for float32 logits; use 0 for greedy decoding"
            )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens must be in 0..max_tokens ({self.max_tokens}), not {self.min_tokens}")
        for name in ("ignore_eos", "min_tokens"):
            if self.grammar is not None and getattr(self, name):
                raise ConfigError(
                    f"{name} cannot be combined with grammar, which decides where the answer ends; leave one out"
                )
