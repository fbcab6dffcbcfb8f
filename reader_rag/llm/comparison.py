"""Compares drafted with plain decoding of one prompt: speed, time lines, and whether the tokens are the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from reader_rag.config import SamplingParams
from reader_rag.engine.outputs import Generation, Passage, Prompt, first_difference
from reader_rag.errors import BusyError
from reader_rag.model.fingerprint import dtype_name, quantization_name

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

MOST_ROUNDS = 3
_ENOUGH_SECONDS = 12.0
_WARM_UP_TOKENS = 8
_WARM_UP_PROMPT = 64


@dataclass(frozen=True)
class Method:
    """The figures of one decoding method over all rounds.

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
    """The first difference of two answers to one prompt.

    Attributes:
        position: Index of the first token that differs.
        plain: Text of that token in the plain answer; empty if that answer ends there.
        reader: Text of that token in the drafted answer; empty if that answer ends there.
        margin: Plain decoding's best logit less its second best there; if it is small, rounding is the likely cause.
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
        rounds: How often each method was run.
        dtype: The model's type, e.g. "float32"; of a quantised one "int8".
        difference: None if the answers are the same, token for token.
    """

    plain: Method
    reader: Method
    rounds: int
    dtype: str
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Whether both methods gave the same tokens."""
        return self.difference is None

    @property
    def ratio(self) -> float:
        """Decode speed with drafts over that without; 0.0 where an answer was too short to measure."""
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
    params: SamplingParams,
    passages: Sequence[Passage] = (),
) -> Comparison:
    """Decode a prompt with and without drafts in turn, one to three times each within about 12 seconds.

    Every run starts without state of earlier requests: without draft state, cached prefixes and the datastore, which
    may contain this answer.

    Args:
        engine: The engine that decodes by both methods.
        prompt: The prompt.
        params: Length and sampling, the same for both methods.
        passages: Texts that the answer may repeat.
    """
    methods = {name: replace(params, speculate=name == "reader") for name in ("plain", "reader")}
    run = FreshRuns(engine, prompt, passages)
    run.warm_up(methods.values())
    runs: dict[str, list[Generation]] = {name: [] for name in methods}
    started = time.perf_counter()
    for number in range(MOST_ROUNDS):
        # The order changes every round, so that a machine that slows down over time favours neither method.
        for name in list(methods)[:: -1 if number % 2 else 1]:
            runs[name].append(run(methods[name]))
        if time.perf_counter() - started > _ENOUGH_SECONDS:
            break
    quantization = quantization_name(engine.model)
    return Comparison(
        plain=_method(runs["plain"]),
        reader=_method(runs["reader"]),
        rounds=len(runs["plain"]),
        dtype=dtype_name(engine.model) if quantization == "none" else quantization,
        difference=_difference(engine, run, methods["plain"], runs),
    )


@dataclass(frozen=True)
class Recording:
    """One run with its time line.

    Attributes:
        events: For each chunk of the answer, the seconds since the request was submitted, and its text.
        result: The answer.
    """

    events: tuple[tuple[float, str], ...]
    result: Generation

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        stats = self.result.stats
        return {
            "events": [[seconds, text] for seconds, text in self.events],
            "tokens": len(self.result.token_ids),
            "tokens_per_second": stats.tokens_per_s,
            "tokens_per_step": stats.tokens_per_step,
        }


@dataclass(frozen=True)
class Race:
    """The outcome of `race`.

    Attributes:
        reader: The run with drafts.
        plain: The run without.
    """

    reader: Recording
    plain: Recording

    @property
    def first_difference(self) -> int | None:
        """The index of the first token that differs; None if the answers are the same, token for token."""
        return first_difference(self.reader.result.token_ids, self.plain.result.token_ids)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "reader": self.reader.to_dict(),
            "plain": self.plain.to_dict(),
            "agree": self.first_difference is None,
            "first_difference": self.first_difference,
        }


class RaceStopped(Exception):
    """A race was stopped by who ran it."""


def race(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    passages: Sequence[Passage] = (),
    *,
    on_method: Callable[[str], None] = lambda name: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Race:
    """Decode a prompt once with drafts and once without, one after the other, and record when each text came.

    As in `compare`, no run uses state of earlier requests, and none is kept.

    Args:
        engine: The engine that decodes by both methods; it must have no other request.
        prompt: The prompt.
        params: Length and sampling, the same for both methods.
        passages: Texts that the answer may repeat.
        on_method: Called with "reader" and with "plain" before each run.
        stopped: Asked at each chunk whether to stop.

    Raises:
        BusyError: The engine has another request, which would share the steps and falsify the times.
        RaceStopped: `stopped` said so.
    """
    run = FreshRuns(engine, prompt, passages)
    methods = {name: replace(params, speculate=name == "reader") for name in ("reader", "plain")}
    check_idle(engine)
    run.warm_up(methods.values())
    recorded = {}
    for name, method in methods.items():
        on_method(name)
        recorded[name] = run.record(method, stopped)
    return Race(**recorded)


def check_idle(engine: Engine) -> None:
    """Raise an error if an engine has requests. One that was ended just now is none.

    Args:
        engine: The engine.

    Raises:
        BusyError: It has some.
    """
    engine.between_steps(lambda: None)  # after which what was ended is dropped
    _check_alone(engine, 0)


def _check_alone(engine: Engine, own: int) -> None:
    load = engine.busy
    if load.running + load.waiting > own:
        raise BusyError("other requests are running, which would falsify the times; race when they are done")


class FreshRuns:
    """Answers a prompt under a tenant of its own, whose state is dropped after every run.

    Args:
        engine: The engine.
        prompt: The prompt.
        passages: Texts that the answer may repeat.
    """

    def __init__(self, engine: Engine, prompt: Prompt, passages: Sequence[Passage]) -> None:
        self._engine = engine
        self._prompt = prompt
        self._passages = passages
        self._tenant = f"comparison-{uuid4()}"

    def __call__(self, params: SamplingParams) -> Generation:
        """Answer the prompt.

        Args:
            params: Length and sampling.
        """
        return self._generate(self._prompt, params)

    def record(self, params: SamplingParams, stopped: Callable[[], bool]) -> Recording:
        """Answer the prompt, and record when each text came.

        Args:
            params: Length and sampling.
            stopped: Asked at each chunk whether to stop.

        Raises:
            BusyError: Another request was submitted meanwhile.
            RaceStopped: `stopped` said so.
        """
        events = []
        begin = time.perf_counter()
        try:
            with self._engine.submit(self._prompt, params, self._passages, tenant=self._tenant, recall=False) as stream:
                for chunk in stream:
                    events.append((time.perf_counter() - begin, chunk.text))
                    if stopped():
                        raise RaceStopped
                    _check_alone(self._engine, 1)
                return Recording(tuple(events), stream.result)
        finally:
            self._engine.forget(self._tenant)

    def warm_up(self, methods: Iterable[SamplingParams]) -> None:
        """Run each method briefly before anything is timed, because kernels are compiled at first use.

        Args:
            methods: Sampling parameters of each method.
        """
        short = Prompt(self._prompt.token_ids[:_WARM_UP_PROMPT])
        for params in methods:
            few = min(params.max_tokens, _WARM_UP_TOKENS)
            self._generate(short, replace(params, max_tokens=few, ignore_eos=True, stop=()))

    def _generate(self, prompt: Prompt, params: SamplingParams) -> Generation:
        try:
            return self._engine.generate(prompt, params, self._passages, tenant=self._tenant, recall=False)
        finally:
            self._engine.forget(self._tenant)


def _method(runs: Sequence[Generation]) -> Method:
    return Method(
        tokens_per_s=median(run.stats.tokens_per_s for run in runs),
        tokens_per_step=runs[0].stats.tokens_per_step,
        ttft_s=median(run.stats.ttft_s for run in runs),
        tokens=len(runs[0].token_ids),
    )


def _difference(
    engine: Engine, run: FreshRuns, plain: SamplingParams, runs: dict[str, list[Generation]]
) -> Difference | None:
    reference = runs["plain"][0].token_ids
    other = next((one.token_ids for one in (*runs["reader"], *runs["plain"]) if one.token_ids != reference), None)
    if other is None:
        return None
    position = first_difference(other, reference)
    assert position is not None
    # Both answers are the same before that position, so plain decoding's margin there decided between the two tokens.
    again = run(replace(plain, record_margins=True, max_tokens=position + 1))
    margin = again.margins[position] if position < len(again.margins) else 0.0

    def text(token_ids: Sequence[int]) -> str:
        return str(engine.tokenizer.decode(list(token_ids[position : position + 1])))

    return Difference(position, text(reference), text(other), margin)
