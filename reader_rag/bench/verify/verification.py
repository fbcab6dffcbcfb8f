"""Compares drafted with plain decoding: tokens, texts, and the bits of the logits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from reader_rag.bench.report import machine
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Prompt, first_difference
from reader_rag.sampling.sampler import ProcessedSampler, Sampler, Verified

_TENANT = "verify"


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
        answers: Number of pairs of answers.
        tokens: Tokens compared: of each pair up to its first difference, that one included.
        drafted: Drafted tokens.
        accepted: Drafted tokens that were accepted; if 0, nothing was tested.
        other_bits: Number of compared tokens whose logits are not equal bit for bit.
        differences: The first difference of each pair that has one.
        plain_s: Seconds of plain decoding without prefill.
        reader_s: Seconds of drafted decoding without prefill.
        plain_tokens: Tokens emitted in `plain_s`.
        reader_tokens: Tokens emitted in `reader_s`.
    """

    machine: dict[str, Any]
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    other_bits: int = 0
    differences: list[Difference] = field(default_factory=list)
    plain_s: float = 0.0
    reader_s: float = 0.0
    plain_tokens: int = 0
    reader_tokens: int = 0

    @property
    def strict(self) -> bool:
        """Whether the bits of the logits must be equal."""
        return bool(self.machine["exactness"] == "strict")

    @property
    def must_agree(self) -> bool:
        """Whether tokens must be equal: in strict mode, and in types whose rounding is too fine to change them."""
        fine = self.machine["dtype"] in ("float32", "float64") and not self.machine["quantized"]
        return self.strict or fine

    @property
    def passed(self) -> bool:
        """Whether everything that must be equal is equal."""
        return not (self.must_agree and self.differences) and not (self.strict and self.other_bits)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"must_agree": self.must_agree, "passed": self.passed}


class _Watch:
    """A sampler that records, for each token it chooses, a digest of the logits and the margin of the choice."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
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
    progress: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Decode every prompt with and without drafts, and compare tokens, texts and the bits of the logits.

    Args:
        engine: Decodes with drafts and without.
        prompts: Ids and prompts.
        generation: Length and sampling, the same for both.
        seeds: Each prompt is sampled with each of them; greedy decoding uses none.
        progress: Called with what runs next.
    """
    outcome = Verification(machine(engine))
    sampled: list[int | None] = list(seeds) if generation.temperature > 0.0 else [None]
    for number, (name, prompt) in enumerate(prompts, 1):
        for seed in sampled:
            progress(f"{number}/{len(prompts)} {name}" + (f", seed {seed}" if seed is not None else ""))
            settings = replace(generation, seed=seed)
            plain = _answer(engine, prompt, replace(settings, speculate=False), outcome)
            reader = _answer(engine, prompt, replace(settings, speculate=True), outcome)
            _compare(engine, name, seed, plain, reader, outcome)
    return outcome


def _answer(engine: Engine, prompt: Prompt, generation: SamplingParams, outcome: Verification) -> _Answer:
    watch = _Watch(engine.requests.sampler(prompt, generation))
    engine.forget(_TENANT, learned=False)  # no prefill is shared
    result = engine.generate(prompt, generation, sampler=watch, tenant=_TENANT)
    stats = result.stats
    if generation.speculate:
        outcome.reader_s += stats.decode_s
        outcome.reader_tokens += stats.completion_tokens - 1
        outcome.drafted += stats.drafted
        outcome.accepted += stats.accepted
    else:
        outcome.plain_s += stats.decode_s
        outcome.plain_tokens += stats.completion_tokens - 1
    return _Answer(result.token_ids, result.text, watch.digests, watch.margins)


def _compare(
    engine: Engine, name: str, seed: int | None, plain: _Answer, reader: _Answer, outcome: Verification
) -> None:
    position = first_difference(plain.tokens, reader.tokens)
    if position is None and plain.text != reader.text:
        position = len(plain.tokens)
    both = min(len(plain.tokens), len(reader.tokens))
    shared = both if position is None else min(position + 1, both)
    outcome.answers += 1
    outcome.tokens += shared
    outcome.other_bits += sum(a != b for a, b in zip(plain.digests[:shared], reader.digests[:shared], strict=True))
    if position is not None:

        def text(tokens: tuple[int, ...]) -> str:
            return str(engine.tokenizer.decode(list(tokens[position : position + 1])))

        recorded = plain.margins[position] if position < len(plain.margins) else math.inf
        margin = recorded if math.isfinite(recorded) else None
        outcome.differences.append(Difference(name, seed, position, text(plain.tokens), text(reader.tokens), margin))
