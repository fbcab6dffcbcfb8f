"""Compares drafted with plain decoding: tokens, texts, and the bits of the logits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from reader_rag.bench.report import machine
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.observer import Observer, StepReport
from reader_rag.engine.outputs import Generation, Prompt, first_difference
from reader_rag.sampling.sampler import ProcessedSampler, Sampler, Verified

_GROUP = 2
"""Requests submitted together / sequences decoded at once, in batches: when a sequence ends, another one joins."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two answers to one prompt.

    Attributes:
        prompt: Id of the prompt.
        seed: The seed; None: greedy.
        position: Index of the first token that differs.
        plain: Text of that token in the plain answer; empty if that answer ends there.
        reader: Text of that token in the drafted answer; empty if that answer ends there.
        margin: Difference of the two best logits of the plain answer there, sampling noise included; a small one is
            likely to be rounding. None if there was no second token, or the answer had ended.
    """

    prompt: str
    seed: int | None
    position: int
    plain: str
    reader: str
    margin: float | None


@dataclass
class Verification:
    """The outcome of `verify`.

    Attributes:
        machine: Model, type, device and versions.
        batch: Most sequences that were decoded at once.
        answers: Number of pairs of answers.
        tokens: Tokens compared: of each pair up to its first difference, that one included.
        differing_tokens: Number of compared tokens that differ; a pair with another one has at most one.
        differing_bits: Number of compared tokens whose logits are not equal bit for bit.
        drafted: Drafted tokens.
        accepted: Drafted tokens that were accepted; if 0, nothing was tested.
        differences: The first difference of each pair that has one, in its tokens or in its text.
        plain_s: Seconds of plain decoding without prefill.
        reader_s: Seconds of drafted decoding without prefill.
        plain_tokens: Tokens emitted in `plain_s`.
        reader_tokens: Tokens emitted in `reader_s`.
        steps: Decode steps, plain and drafted.
        row_steps: Number of sequences in a step, summed over the steps.
        draft_model: `name` of the draft model, and the counts of its `DraftTally`; None: there is none.
    """

    machine: dict[str, Any]
    batch: int = 1
    answers: int = 0
    tokens: int = 0
    differing_tokens: int = 0
    differing_bits: int = 0
    drafted: int = 0
    accepted: int = 0
    differences: list[Difference] = field(default_factory=list)
    plain_s: float = 0.0
    reader_s: float = 0.0
    plain_tokens: int = 0
    reader_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    draft_model: dict[str, Any] | None = None

    @property
    def bits_must_agree(self) -> bool:
        """Whether the bits of the logits must be equal: in compiled loops, whatever the type, and in strict mode."""
        return bool(self.machine["forward"] == "compiled" or self.machine["exactness"] == "strict")

    @property
    def must_agree(self) -> bool:
        """Whether tokens must be equal: where bits must, and in types whose rounding is too fine to change them."""
        fine = self.machine["dtype"] in ("float32", "float64") and not self.machine["quantized"]
        return self.bits_must_agree or fine

    @property
    def passed(self) -> bool:
        """Whether everything that must be equal is equal."""
        return not (self.must_agree and self.differences) and not (self.bits_must_agree and self.differing_bits)

    @property
    def rows_per_step(self) -> float | None:
        """Mean number of sequences in a step; None if there was no step."""
        return self.row_steps / self.steps if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        derived = ("must_agree", "bits_must_agree", "rows_per_step", "passed")
        return asdict(self) | {name: getattr(self, name) for name in derived}


class _Watch:
    """A sampler that chooses as another one, and records for each token a digest of the logits and the margin."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = self.chooses_as = sampler
        self.digests: list[bytes] = []
        self.margins: list[float] = []

    def __call__(self, verified: Verified) -> Callable[[int], int]:
        processed = self._sampler if isinstance(self._sampler, ProcessedSampler) else None
        choose = self._sampler(verified)

        def token(row: int) -> int:
            logits = verified.logits[row]
            bits = logits.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            self.digests.append(hashlib.blake2b(bits, digest_size=16).digest())
            # A logits processor with state must be called once per token.
            scores = logits.float() if processed is None else processed.perturbed(verified, row)
            best = scores.topk(min(2, len(scores))).values
            self.margins.append(float(best[0] - best[-1]))
            return choose(row) if processed is None else int(scores.argmax())

        return token


class _Steps(Observer):
    """Counts the decode steps of all sequences together."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = self.steps = self.rows = 0

    def stepped(self, report: StepReport) -> None:
        self.seconds += report.seconds
        self.tokens += sum(report.emitted)
        self.steps += 1
        self.rows += len(report.emitted)


class _Request(NamedTuple):
    """A prompt and its sampling, which are decoded twice."""

    name: str
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class _Answer:
    tokens: tuple[int, ...]
    text: str
    digests: list[bytes]
    margins: list[float]


def verify(
    engine: Engine,
    prompts: Sequence[tuple[str, Prompt]],
    generation: SamplingParams,
    seeds: Sequence[int] = (0,),
    batch: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Decode every prompt with and without drafts, and compare tokens, texts and the bits of the logits.

    In a batch, sequences join and leave while others are decoded: first all of a group without drafts, then with them.

    Args:
        engine: Decodes with drafts and without; the size of its batch is changed.
        prompts: Ids and prompts.
        generation: Length and sampling, the same for both.
        seeds: Each prompt is sampled with each of them; greedy decoding uses none.
        batch: Sequences that are decoded at once.
        progress: Called with what runs next.
    """
    engine.scheduler.limits = replace(engine.scheduler.limits, max_rows=batch)
    outcome = Verification(machine(engine), batch)
    sampled: list[int | None] = list(seeds) if generation.temperature > 0.0 else [None]
    requests = [_Request(name, prompt, replace(generation, seed=seed)) for name, prompt in prompts for seed in sampled]
    size = batch * _GROUP if batch > 1 else 1
    for first in range(0, len(requests), size):
        group = requests[first : first + size]
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        progress(f"{first + 1}/{len(requests)} {_title(group[0])}{more}")
        plain = _answers(engine, group, outcome, speculate=False)
        reader = _answers(engine, group, outcome, speculate=True)
        for request, one, other in zip(group, plain, reader, strict=True):
            _compare(engine, request, one, other, outcome)
    if engine.draft_model is not None:
        outcome.draft_model = {"name": engine.draft_model.name} | asdict(engine.draft_model.tally)
    return outcome


def _title(request: _Request) -> str:
    return request.name if request.params.seed is None else f"{request.name} (seed {request.params.seed})"


def _answers(engine: Engine, group: Sequence[_Request], outcome: Verification, *, speculate: bool) -> list[_Answer]:
    """The answers to several requests that are submitted together, each as a tenant of its own.

    So none drafts from a text that another one is writing, and drafts do not depend on which is ahead.
    """
    steps = _Steps()
    engine.observers.append(steps)
    try:
        watches = [_Watch(engine.requests.sampler(request.prompt, request.params)) for request in group]
        streams = []
        for number, (request, watch) in enumerate(zip(group, watches, strict=True)):
            tenant = f"verify-{number}"
            engine.forget(tenant, learned=False)  # no prefill is shared
            params = replace(request.params, speculate=speculate)
            streams.append(engine.submit(request.prompt, params, sampler=watch, tenant=tenant))
        results = [stream.finish() for stream in streams]
    finally:
        engine.observers.remove(steps)
    _count(outcome, steps, results, speculate=speculate)
    return [
        _Answer(result.token_ids, result.text, watch.digests, watch.margins)
        for result, watch in zip(results, watches, strict=True)
    ]


def _count(outcome: Verification, steps: _Steps, results: Sequence[Generation], *, speculate: bool) -> None:
    outcome.steps += steps.steps
    outcome.row_steps += steps.rows
    if speculate:
        outcome.reader_s += steps.seconds
        outcome.reader_tokens += steps.tokens
        outcome.drafted += sum(result.stats.drafted for result in results)
        outcome.accepted += sum(result.stats.accepted for result in results)
    else:
        outcome.plain_s += steps.seconds
        outcome.plain_tokens += steps.tokens


def _compare(engine: Engine, request: _Request, plain: _Answer, reader: _Answer, outcome: Verification) -> None:
    position = first_difference(plain.tokens, reader.tokens)
    outcome.differing_tokens += position is not None
    if position is None and plain.text != reader.text:
        position = len(plain.tokens)
    both = min(len(plain.tokens), len(reader.tokens))
    shared = both if position is None else min(position + 1, both)
    outcome.answers += 1
    outcome.tokens += shared
    outcome.differing_bits += sum(a != b for a, b in zip(plain.digests[:shared], reader.digests[:shared], strict=True))
    if position is not None:

        def text(tokens: tuple[int, ...]) -> str:
            return str(engine.tokenizer.decode(list(tokens[position : position + 1])))

        recorded = plain.margins[position] if position < len(plain.margins) else math.inf
        margin = recorded if math.isfinite(recorded) else None
        outcome.differences.append(
            Difference(request.name, request.params.seed, position, text(plain.tokens), text(reader.tokens), margin)
        )
