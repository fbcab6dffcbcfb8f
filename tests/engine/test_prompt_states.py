"""Drafts ask for what follows positions of their prompt; hidden states are kept for that, counted and freed."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from costs_stub import EverythingPays
from numpy.typing import NDArray
from tiny_models import VOCABULARY, make_model
from waiting import wait_until

from reader_rag.bench.generate.random_weights import NoText
from reader_rag.config import BatchConfig, DraftConfig, SamplingParams
from reader_rag.draft.prompt_successors import ASKED
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.engine.proposer import Proposer
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.engine.step import run_step
from reader_rag.errors import ConfigError, ReaderWarning
from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.model import step_costs
from reader_rag.sampling.topk import rank_passes

WIDTH = 32
"""Numbers of a hidden state of the tiny models."""
DRAFT = DraftConfig(max_nodes=8)


def text_of(length: int, seed: int = 0) -> list[int]:
    """A random text that repeats itself, so that drafts have something to copy."""
    part = np.random.default_rng(seed).integers(3, VOCABULARY, length // 2)
    return np.resize(part, length).tolist()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReaderWarning)
            engine = Engine(make_model("Llama").to(dtype), NoText(), draft=DRAFT, **options)  # type: ignore[arg-type]
        engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def products_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the head of their own pay too, though the head is a large part of a tiny model."""
    monkeypatch.setattr(step_costs, "_ASKED_GAIN", 1.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All positions whose successors were learned because they were asked for."""
    positions: list[int] = []
    learn = Proposer.learn_asked

    def noted(self: Proposer, which: NDArray[np.int32], *args: Any) -> None:
        positions.extend(which.tolist())
        learn(self, which, *args)

    monkeypatch.setattr(Proposer, "learn_asked", noted)
    return positions


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HiddenStates]]:
    """References to the hidden states of all prompts of this test."""
    made: list[weakref.ref[HiddenStates]] = []
    begin = HiddenStates.__init__

    def noted(self: HiddenStates, *args: Any) -> None:
        begin(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(HiddenStates, "__init__", noted)
    return made


def answer(engine: Engine, tokens: Sequence[int], length: int = 30, **options: Any) -> Generation:
    params = SamplingParams(max_tokens=length, ignore_eos=True, **options)
    return engine.generate(Prompt(tokens), params, tenant="t")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("forward", "fetches"), [("auto", False), ("torch", False), ("torch", True)])
@pytest.mark.usefixtures("products_pay")
def test_answers_are_those_of_plain_decoding_and_what_was_asked_for_is_learned(
    make_engine: Callable[..., Engine],
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    forward: Any,
    fetches: bool,
    dtype: torch.dtype,
) -> None:
    if fetches:  # as on an accelerator, where the best tokens of all passes are ranked there
        ranked = lambda passes, learns: list(rank_passes(passes, learns=learns))  # noqa: E731
        monkeypatch.setattr("reader_rag.engine.step.fetch_top_k", ranked)
    engine = make_engine(dtype, forward=forward, prefix_bytes=0)
    tokens = text_of(60)
    drafted = answer(engine, tokens, record_margins=True)
    assert len(asked) > 3
    assert len(set(asked)) == len(asked)
    assert max(asked) < len(tokens) - 1  # what follows the last one is known before the first step
    plain = answer(engine, tokens, speculate=False, record_margins=True)
    if forward == "auto" or dtype == torch.float32:
        assert drafted.token_ids == plain.token_ids
    if forward == "auto":
        assert drafted.margins == plain.margins
    with torch.inference_mode():
        logits = engine.model(torch.tensor([tokens])).logits[0].float()
    table = engine.context.draft_states.of("t", DRAFT).successors
    for at in [*asked, len(tokens) - 1]:
        if at:
            # Several positions of two tokens are added up, and what is likely after one token comes behind.
            after = table.after(tokens[at - 1], tokens[at])
            assert int(logits[at].argmax()) in after


@pytest.mark.usefixtures("products_pay")
@pytest.mark.parametrize("forward", ["auto", "torch"])
def test_drafts_after_a_prefix_hit_are_those_of_a_prompt_that_was_computed(
    make_engine: Callable[..., Engine], asked: list[int], forward: Any
) -> None:
    tokens = text_of(150)
    cold, warm = (make_engine(forward=forward, prefix_bytes=size) for size in (0, 1 << 24))
    first = answer(cold, tokens)
    expected = [*asked]
    assert min(expected) < 128  # of what is restored below
    answer(warm, tokens, length=1)
    warm.context.draft_states.forget("t")
    asked.clear()
    again = answer(warm, tokens)
    assert again.stats.reused_tokens == 128
    assert asked == expected
    assert again.token_ids == first.token_ids
    assert (again.stats.steps, again.stats.accepted_by_source) == (first.stats.steps, first.stats.accepted_by_source)


def test_the_next_turn_of_a_chat_asks_for_positions_of_the_earlier_prompt_but_not_of_the_answer(
    make_engine: Callable[..., Engine], asked: list[int]
) -> None:
    engine, tokens = make_engine(), text_of(140)
    turn = answer(engine, tokens, length=60)
    chat = [*tokens, *turn.token_ids, *tokens[:20]]
    engine.context.draft_states.forget("t")
    asked.clear()
    again = answer(engine, chat)
    assert again.stats.reused_tokens == 192
    assert any(at < 128 for at in asked)
    assert not any(140 <= at < 192 for at in asked)
    assert again.token_ids == answer(make_engine(prefix_bytes=0), chat, speculate=False).token_ids


def test_states_of_prefixes_are_counted_and_belong_to_their_tenant(make_engine: Callable[..., Engine]) -> None:
    engine, tokens = make_engine(), text_of(150)
    prefixes = engine.context.prefix_cache
    assert prefixes is not None
    answer(engine, tokens, length=1, speculate=False)
    plain = prefixes.nbytes
    engine.forget("t")
    assert prefixes.nbytes == 0
    answer(engine, tokens, length=1)
    assert prefixes.nbytes == plain + HiddenStates.bytes_for(128, WIDTH)
    engine.forget("t")
    assert prefixes.nbytes == 0


@pytest.mark.parametrize(
    ("speculate", "draft", "keeps"),
    [(True, DRAFT, True), (False, DRAFT, False), (True, DraftConfig(max_nodes=8, max_successors=0), False)],
)
def test_states_of_running_requests_are_reserved(
    make_engine: Callable[..., Engine], speculate: bool, draft: DraftConfig, keeps: bool
) -> None:
    engine, prompt = make_engine(prefix_bytes=0), Prompt(text_of(150))
    params = SamplingParams(max_tokens=10, ignore_eos=True, speculate=speculate)
    needed = engine.target.cache_bytes(150 + 10, 8) + (HiddenStates.bytes_for(150, WIDTH) if keeps else 0)
    engine.scheduler.limits = BatchConfig(max_cache_bytes=needed - 1)
    with pytest.raises(ConfigError, match="prompt and answer need"):
        engine.generate(prompt, params, draft=draft)
    engine.scheduler.limits = BatchConfig(max_cache_bytes=needed)
    assert len(engine.generate(prompt, params, draft=draft).token_ids) == 10


@pytest.mark.parametrize("ending", ["complete", "closed", "dropped"])
def test_states_are_freed_with_their_request(
    make_engine: Callable[..., Engine], kept: list[weakref.ref[HiddenStates]], ending: str
) -> None:
    engine = make_engine(prefix_bytes=0)
    stream = engine.submit(Prompt(text_of(60)), SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    if ending == "complete":
        stream.finish()
    elif ending == "closed":
        stream.close()
    else:
        del stream
    wait_until(lambda: engine.busy.running == 0, "the request has ended")
    gc.collect()
    assert len(kept) == 1
    assert all(states is None or states.nbytes == 0 for states in (reference() for reference in kept))


@pytest.mark.parametrize(
    ("forward", "options", "keeps"),
    [
        ("auto", {}, True),
        ("torch", {}, False),  # the head's product of its own is a large part of a tiny model's pass
        ("auto", {"speculate": False}, False),
        ("auto", {"draft": DraftConfig(max_nodes=8, max_successors=0)}, False),
        ("auto", {"draft": DraftConfig(max_nodes=0)}, False),
    ],
)
def test_states_are_kept_only_where_drafts_can_use_them(
    make_engine: Callable[..., Engine],
    kept: list[weakref.ref[HiddenStates]],
    forward: Any,
    options: dict[str, Any],
    keeps: bool,
) -> None:
    engine, draft = make_engine(forward=forward), options.pop("draft", DRAFT)
    engine.generate(Prompt(text_of(60)), SamplingParams(max_tokens=8, ignore_eos=True, **options), draft=draft)
    assert len(kept) == keeps


def test_sequences_of_a_batch_ask_in_one_pass(make_engine: Callable[..., Engine], asked: list[int]) -> None:
    engine = make_engine(prefix_bytes=0)
    counts: list[tuple[int, int]] = []
    verify = engine.target.verify_batch

    def noted(steps: Sequence[Any], states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        counts.append((len(steps), len(states)))
        return verify(steps, states)

    engine.target.verify_batch = noted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [Prompt(text_of(60, seed)) for seed in range(3)]
    sequences = [DecodeSequence(engine.context, engine.requests.build(prompt, params)) for prompt in prompts]
    for sequence in sequences:
        while sequence.prefilling:
            sequence.prefill()
    while running := [sequence for sequence in sequences if sequence.finish is None]:
        assert run_step(engine.context, running) == {}
    answers = [sequence.result.token_ids for sequence in sequences]
    for sequence in sequences:
        sequence.release()
    assert any(steps > 1 and states > 1 for steps, states in counts)
    assert len(asked) > 10
    for prompt, tokens in zip(prompts, answers, strict=True):
        plain = SamplingParams(max_tokens=40, ignore_eos=True, speculate=False)
        assert engine.generate(prompt, plain).token_ids == tokens


@pytest.mark.parametrize("paid", [0, 3, 100])
def test_positions_that_do_not_pay_are_not_computed_and_sequences_take_turns(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, paid: int
) -> None:
    engine = make_engine(prefix_bytes=0)
    monkeypatch.setattr(EverythingPays, "best_asked", lambda _self, most, *_args: min(most, paid))
    counts: list[tuple[int, list[int]]] = []
    verify = engine.target.verify_batch

    def noted(steps: Sequence[Any], states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        counts.append((sum(len(step.tree) + 1 for step in steps), [len(rows) for rows in states]))
        return verify(steps, states)

    engine.target.verify_batch = noted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for stream in [engine.submit(Prompt(text_of(60, seed)), params) for seed in range(3)]:
        stream.finish()
    assert any(states for _, states in counts)
    for rows, states in counts:
        assert sum(states) <= paid + -rows % 4  # what fills up a block of four rows takes no time
        assert all(1 <= count <= ASKED for count in states)
