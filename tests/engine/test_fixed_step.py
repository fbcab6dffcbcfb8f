"""An engine with the fixed step answers as without: batches, samplers, grammars, strict mode, prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from costs_stub import EverythingPays
from products import place_changes_bits
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from reader_rag.config import Grammar, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.observer import Observer, StepReport
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.model.fixed_step.step import FixedStep

TEXT = "the tin in the other house and the one that is on the table in the hall are the same tin and the same one "


def made(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Engine:
    engine = Engine(model, tokenizer, profile="off", forward="torch", **options)
    if engine.target.fixed is None:
        engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return engine


@pytest.fixture(scope="module")
def fixed(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Iterator[Engine]:
    engine = made(tiny_model, tiny_tokenizer, cuda_graphs="on")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def dynamic(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Iterator[Engine]:
    engine = made(tiny_model, tiny_tokenizer)
    yield engine
    engine.close()


def step_of(engine: Engine) -> FixedStep:
    step = engine.target.fixed_step
    assert isinstance(step, FixedStep)
    return step


def prompts(engine: Engine, count: int) -> list[Prompt]:
    """Of 27 to 250 tokens, so that answers cross borders of the columns attended to."""
    return [engine.encode((TEXT * 3)[: 60 + 61 * n]) for n in range(count)]


def told(answers: list[Generation]) -> list[Any]:
    return [(answer.token_ids, answer.text, answer.finish_reason) for answer in answers]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_batches_of_all_samplers(fixed: Engine, dynamic: Engine, count: int) -> None:
    kinds = [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=30, temperature=0.4, seed=2**63 + 5),
        SamplingParams(max_tokens=25, temperature=0.8, top_p=0.9, seed=3),
        SamplingParams(max_tokens=40, repetition_penalty=1.2),
        SamplingParams(max_tokens=12, speculate=False),
    ]
    params = [kinds[n % len(kinds)] for n in range(count)]
    got, expected = fixed.generate(prompts(fixed, count), params), dynamic.generate(prompts(dynamic, count), params)
    assert told(got) == told(expected)
    assert sum(answer.stats.accepted for answer in got) > 5
    assert all(answer.stats.cache_bytes > 0 for answer in got)
    assert step_of(fixed).cache.sequences == 0


def test_grammars_and_log_probabilities(fixed: Engine, dynamic: Engine) -> None:
    pytest.importorskip("llguidance")
    params = [
        SamplingParams(max_tokens=40, grammar=Grammar.regex("(the |tin |in ){3,9}")),
        SamplingParams(max_tokens=30, logprobs=3),
        SamplingParams(max_tokens=30, record_margins=True),
    ]
    got, expected = fixed.generate(prompts(fixed, 3), params), dynamic.generate(prompts(dynamic, 3), params)
    assert told(got) == told(expected)
    for one, other in zip(got[1].logprobs, expected[1].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert got[2].margins == pytest.approx(expected[2].margins, abs=1e-3)


class _Steps(Observer):
    def __init__(self, step: FixedStep) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self._step = step

    def stepped(self, report: StepReport) -> None:
        moved = self._step.transfers
        self.copies.append((self._step.passes, moved.to_device_calls, moved.to_host_calls))


@pytest.mark.parametrize(
    ("options", "to_host"),
    [
        ({}, 1),
        ({"temperature": 0.8, "seed": 1}, 1),
        ({"temperature": 1.0}, 1),
        ({"temperature": 0.8, "top_p": 0.9}, 2),
        ({"temperature": 0.8, "repetition_penalty": 1.1}, 2),
        ({"repetition_penalty": 1.1}, 2),
        ({"logprobs": 2}, 2),
        ({"temperature": 0.8, "logprobs": 2}, 2),
    ],
)
@pytest.mark.parametrize("count", [1, 4])
def test_copies_of_a_step(fixed: Engine, options: dict[str, Any], to_host: int, count: int) -> None:
    steps = _Steps(step_of(fixed))
    fixed.observers.append(steps)
    fixed.generate(prompts(fixed, count), SamplingParams(max_tokens=20, **options))
    fixed.observers.remove(steps)
    assert len(steps.copies) > 3
    for before, after in zip(steps.copies, steps.copies[1:], strict=False):
        assert [after[n] - before[n] for n in range(3)] == [1, 1, to_host]


def test_an_answer_reuses_the_prefix_of_one_that_was_decoded_in_the_fixed_step(fixed: Engine, dynamic: Engine) -> None:
    prompt = fixed.encode(TEXT * 2)
    first = fixed.generate(prompt, SamplingParams(max_tokens=80))
    longer = Prompt([*prompt.token_ids, *first.token_ids, *fixed.encode(" and").token_ids])
    got = fixed.generate(longer, SamplingParams(max_tokens=20))
    assert got.stats.reused_tokens > len(prompt.token_ids)
    assert got.token_ids == dynamic.generate(longer, SamplingParams(max_tokens=20)).token_ids


def test_reserved_memory_is_that_of_the_fixed_cache(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    from reader_rag.config import BatchConfig

    probe = made(tiny_model, tiny_tokenizer, cuda_graphs="on")
    positions = len(prompts(probe, 1)[0].token_ids) + 20
    most = step_of(probe).cache_bytes([(positions, probe.config.draft.max_nodes)] * 2)
    engine = made(tiny_model, tiny_tokenizer, cuda_graphs="on", batch=BatchConfig(max_cache_bytes=most))
    answers = engine.generate(prompts(engine, 1) * 5, SamplingParams(max_tokens=20))
    assert len({answer.token_ids for answer in answers}) == 1
    assert 0 < step_of(engine).cache.nbytes <= most
    assert step_of(engine).cache.rows == 2


def test_strict_chains_have_the_bits_of_plain_decoding(tiny_model: LlamaForCausalLM, tiny_tokenizer: Any) -> None:
    if place_changes_bits(torch.float32, 8):
        pytest.skip("a row's place changes its bits here")
    engine = made(tiny_model, tiny_tokenizer, cuda_graphs="on", exactness="strict")
    step = step_of(engine)
    before = step.passes
    plain, drafted = (
        engine.generate(prompts(engine, 4), SamplingParams(max_tokens=40, record_margins=True, speculate=speculate))
        for speculate in (False, True)
    )
    assert [answer.margins for answer in drafted] == [answer.margins for answer in plain]
    assert told(drafted) == told(plain)
    assert sum(answer.stats.accepted for answer in drafted) > 3
    assert step.passes - before == sum(answer.stats.steps for answer in (*plain, *drafted))
