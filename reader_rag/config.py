"""Settings as frozen dataclasses that validate themselves when made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from reader_rag.errors import ConfigError

Exactness = Literal["fast", "strict"]
Forward = Literal["auto", "torch"]

_LEAST_TEMPERATURE = 1e-4


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


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
class GenerationConfig:
    """What one call asks for.

    Attributes:
        max_tokens: Most tokens to emit.
        stop: Strings that end the text; the text ends before the first of them.
        temperature: 0 takes the most probable token (greedy); above 0 samples.
        top_k: Sample among the k most probable tokens; 0 takes all.
        top_p: Sample among the fewest tokens whose probabilities sum to at least this.
        seed: Key of the sampling noise. The same seed gives the same tokens, drafted or plain. None draws one.
        ignore_eos: Go on after the end-of-sequence token (for benchmarks).
        speculate: False decodes plainly: the same engine, no drafts.
        record_margins: Keep, for every token, how far the best logit lay above the second best.
    """

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    speculate: bool = True
    record_margins: bool = False

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        _require(not isinstance(self.stop, str), "stop must be a tuple of strings, not one string")
        _require(all(isinstance(s, str) and s for s in self.stop), "stop strings must not be empty")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0.0,
            f"temperature must be a number of at least 0, not {self.temperature}",
        )
        _require(
            self.temperature == 0.0 or self.temperature >= _LEAST_TEMPERATURE,
            f"temperature {self.temperature} divides logits beyond float32; use 0 for greedy decoding",
        )
        _require(self.top_k >= 0, f"top_k must be at least 0 (0: all tokens), not {self.top_k}")
        _require(0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], not {self.top_p}")
        _require(self.seed is None or 0 <= self.seed < 2**64, f"seed must be in 0..2**64-1, not {self.seed}")
