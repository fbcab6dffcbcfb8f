"""Drafted against plain decoding of one prompt: how fast, and whether the tokens are the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from reader_rag.config import SamplingParams
from reader_rag.engine.outputs import Generation, Passage, Prompt, first_difference

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

MOST_ROUNDS = 3
_ENOUGH_SECONDS = 12.0
_WARM_UP_TOKENS = 8
_WARM_UP_PROMPT = 64


@dataclass(frozen=True)
class Method:
    """One way of decoding, over all rounds.

    Attributes:
        tokens_per_s: Median decode speed.
        tokens_per_step: Mean tokens emitted per forward pass.
        ttft_s: Median seconds to the first token.
        tokens: Tokens of the answer.
    """

    tokens_per_s: float
    tokens_per_step: float
    ttft_s: float
    tokens: int


@dataclass(frozen=True)
class Difference:
    """Where two answers to one prompt part.

    Attributes:
        position: Index of the first token that differs.
        plain: That token's text in the plain answer; empty if that answer ends there.
        reader: The same in the drafted answer.
        margin: How far apart plain decoding's two best logits were there: the smaller, the likelier is rounding.
    """

    position: int
    plain: str
    reader: str
    margin: float


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`.

    Attributes:
        plain: Plain decoding.
        reader: Decoding with drafts.
        rounds: How often each was run.
        dtype: The model's type, e.g. "float32".
        difference: None if the answers are the same, token for token.
    """

    plain: Method
    reader: Method
    rounds: int
    dtype: str
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Whether both ways gave the same tokens."""
        return self.difference is None

    @property
    def ratio(self) -> float:
        """Speed with drafts over speed without; 0.0 where an answer was too short to tell."""
        return self.reader.tokens_per_s / self.plain.tokens_per_s if self.plain.tokens_per_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "dtype": self.dtype,
            "rounds": self.rounds,
            "plain": vars(self.plain),
            "reader": vars(self.reader),
            "ratio": self.ratio,
            "identical": self.identical,
            "difference": None if self.difference is None else vars(self.difference),
        }


def compare(
    engine: Engine,
    prompt: Prompt,
    generation: SamplingParams,
    passages: Sequence[Passage] = (),
    tenant: str = "",
) -> Comparison:
    """Decode a prompt with and without drafts, in turn, up to three times each while that is quick.

    A datastore is left alone: it may hold this very answer.

    Args:
        engine: Decodes both ways.
        prompt: What to answer.
        generation: Length and sampling; both ways get the same.
        passages: Texts that the answer may repeat.
        tenant: Whose earlier answers may serve the drafts.
    """
    ways = {name: replace(generation, speculate=name == "reader") for name in ("plain", "reader")}
    _warm_up(engine, prompt, ways, passages, tenant)
    runs: dict[str, list[Generation]] = {name: [] for name in ways}
    started = time.perf_counter()
    for number in range(MOST_ROUNDS):
        # The order changes every round, so that a machine that slows down meanwhile is unfair to neither.
        for name in list(ways)[:: -1 if number % 2 else 1]:
            engine.forget(tenant, learned=False)  # each reads the whole prompt
            runs[name].append(engine.generate(prompt, ways[name], passages, tenant=tenant, recall=False))
        if time.perf_counter() - started > _ENOUGH_SECONDS:
            break
    return Comparison(
        plain=_method(runs["plain"]),
        reader=_method(runs["reader"]),
        rounds=len(runs["plain"]),
        dtype=str(engine.model.dtype).removeprefix("torch."),
        difference=_difference(engine, prompt, ways["plain"], passages, tenant, runs),
    )


def _warm_up(
    engine: Engine, prompt: Prompt, ways: dict[str, SamplingParams], passages: Sequence[Passage], tenant: str
) -> None:
    """Pay what only the first use costs (compiled kernels, memory) before anything is timed."""
    short = Prompt(prompt.token_ids[:_WARM_UP_PROMPT])
    for generation in ways.values():
        few = min(generation.max_tokens, _WARM_UP_TOKENS)
        engine.generate(
            short, replace(generation, max_tokens=few, ignore_eos=True, stop=()), passages, tenant=tenant, recall=False
        )


def _method(runs: Sequence[Generation]) -> Method:
    return Method(
        tokens_per_s=median(run.stats.tokens_per_s for run in runs),
        tokens_per_step=runs[0].stats.tokens_per_step,
        ttft_s=median(run.stats.ttft_s for run in runs),
        tokens=len(runs[0].token_ids),
    )


def _difference(
    engine: Engine,
    prompt: Prompt,
    plain: SamplingParams,
    passages: Sequence[Passage],
    tenant: str,
    runs: dict[str, list[Generation]],
) -> Difference | None:
    reference = runs["plain"][0].token_ids
    other = next((run.token_ids for run in (*runs["reader"], *runs["plain"]) if run.token_ids != reference), None)
    if other is None:
        return None
    position = first_difference(other, reference)
    assert position is not None
    # Up to there both answers are the same, so plain decoding's margin is the one that was decided by.
    engine.forget(tenant, learned=False)
    short = replace(plain, record_margins=True, max_tokens=position + 1)
    again = engine.generate(prompt, short, passages, tenant=tenant, recall=False)
    margin = again.margins[position] if position < len(again.margins) else 0.0

    def text(token_ids: Sequence[int]) -> str:
        return str(engine.tokenizer.decode(list(token_ids[position : position + 1])))

    return Difference(position, text(reference), text(other), margin)
