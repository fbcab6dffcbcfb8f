"""Requests that are decoded together get the answers that each gets alone, whatever the others do."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from costs_stub import EverythingPays
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny_models import make_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from waiting import LIMIT_S, join, wait_until

from reader_rag.config import BatchConfig, DraftConfig, SamplingParams
from reader_rag.engine import scheduler as scheduler_module
from reader_rag.engine import step as batch_module
from reader_rag.engine import stream as stream_module
from reader_rag.engine.engine import Engine
from reader_rag.engine.observer import Load, Observer
from reader_rag.engine.outputs import Generation, Passage, Prompt
from reader_rag.engine.scheduler import Scheduler
from reader_rag.engine.stream import GenerationStream
from reader_rag.errors import (
    BatchError,
    BusyError,
    CallbackError,
    ConfigError,
    EngineClosedError,
    NestedCallError,
    PromptError,
)
from reader_rag.model import target as step_module
from reader_rag.sampling.topk import rank_passes

TEXTS = (
    "the cat sat on the mat and the cat sat on the hat",
    "in the nation of the otter, the otter and the heron is",
    "a",
    "one and two and three and one and two and",
    "that is to say, " * 9,
)
DRAFT = DraftConfig(max_nodes=12)
IDLE = Load(running=0, waiting=0, cache_bytes=0)


class ByHand(Scheduler):
    """A scheduler whose turns are taken when the test says so."""

    def _wake_worker(self) -> None:
        """There is no worker thread."""

    def close(self) -> None:
        for row in [*self._rows, *self._waiting]:
            row.delivery.cancel()
        while self.load != IDLE:
            self._turn()


def turn(engine: Engine) -> None:
    """Have a scheduler `ByHand` let requests join and leave, and make one step."""
    engine.scheduler._turn()


def drain(engine: Engine) -> None:
    while engine.busy != IDLE:
        turn(engine)


@pytest.fixture
def make_engine(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(by_hand: bool = False, model: Any = None, forward: Any = "auto", **limits: Any) -> Engine:
        batch = BatchConfig(**limits)
        engine = Engine(model or tiny_model, tiny_tokenizer, draft=DRAFT, batch=batch, forward=forward)
        engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
        if by_hand:
            engine.scheduler = ByHand(engine.context, batch, engine.prefix_bytes)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """References to all caches made in this test."""
    made: list[weakref.ref[Any]] = []
    new_cache = step_module.Target.new_cache

    def noted(self: Any, *args: Any) -> Any:
        cache = new_cache(self, *args)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(step_module.Target, "new_cache", noted)
    return made


def held(caches: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in caches)


def ask(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | options)


ASKED = (
    ask(),
    ask(temperature=0.9, seed=3, max_tokens=40),
    ask(max_tokens=1),
    ask(stop=("e",), max_tokens=60),
    ask(speculate=False, max_tokens=17),
    ask(temperature=1.2, top_p=0.9, seed=8, repetition_penalty=1.3),
    ask(ignore_eos=False, logprobs=2, max_tokens=33),
)


def alone(engine: Engine, prompt: Prompt, generation: SamplingParams) -> Generation:
    """The answer that plain decoding gives to nothing but this."""
    scheduler = Scheduler(engine.context, BatchConfig(max_rows=1), engine.prefix_bytes)  # the engine's may be by hand
    return scheduler.submit(engine.requests.build(prompt, replace(generation, speculate=False))).finish()


@pytest.fixture(scope="module")
def all_alone(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> list[Generation]:
    """Those to all texts as `ASKED`, in order."""
    engine = Engine(tiny_model, tiny_tokenizer, draft=DRAFT)
    return [alone(engine, engine.encode(text), generation) for text in TEXTS for generation in ASKED]


def drained(stream: Any) -> Generation:
    text = "".join(chunk.text for chunk in stream)
    assert text == stream.result.text
    result: Generation = stream.result
    return result


class TestAnswers:
    @pytest.mark.parametrize(("forward", "fetches"), [("auto", False), ("torch", False), ("torch", True)])
    @pytest.mark.parametrize("rows", [2, 5])
    def test_each_gets_the_answer_that_it_gets_alone(
        self,
        make_engine: Callable[..., Engine],
        all_alone: list[Generation],
        monkeypatch: pytest.MonkeyPatch,
        rows: int,
        forward: str,
        fetches: bool,
    ) -> None:
        if fetches:  # as where the logits are on an accelerator
            monkeypatch.setattr(
                batch_module, "fetch_top_k", lambda passes, learns: list(rank_passes(passes, learns=learns))
            )
        engine = make_engine(max_rows=rows, forward=forward)
        asked = [(engine.encode(text), generation) for text in TEXTS for generation in ASKED]
        streams = [engine.submit(prompt, generation) for prompt, generation in asked]
        for expected, stream in zip(all_alone, streams, strict=True):
            got = drained(stream)
            assert (got.token_ids, got.text, got.finish_reason) == (
                expected.token_ids,
                expected.text,
                expected.finish_reason,
            )
            assert [held.token_id for held in got.logprobs] == [held.token_id for held in expected.logprobs]
        assert engine.busy == IDLE

    def test_they_share_passes(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True, max_rows=4)
        sizes: list[int] = []
        verify = engine.target.verify_batch
        engine.target.verify_batch = lambda steps, asked: sizes.append(len(steps)) or verify(steps, asked)  # type: ignore
        for text in TEXTS:
            engine.submit(engine.encode(text), ask(speculate=False, max_tokens=8))
        streams = [engine.submit(engine.encode(text), ask(speculate=False, max_tokens=8)) for text in TEXTS[:4]]
        drain(engine)
        assert [len(stream.result.token_ids) for stream in streams] == [8] * 4
        assert max(sizes) == 4
        assert sum(sizes) == 9 * 7 - 5 * 7  # the five whose streams were dropped were never begun
        assert len(sizes) < 4 * 7

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["Mistral", "Gemma3Text", "Bloom", "Mamba"])
    def test_whatever_can_be_verified_on_the_model(
        self, make_engine: Callable[..., Engine], name: str, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        with pytest.warns() if name in ("Bloom", "Mamba") else _nothing():
            engine = Engine(make_model(name), tiny_tokenizer, draft=DRAFT, batch=BatchConfig(max_rows=3))
        prompts = [Prompt(tuple(range(3, 3 + length))) for length in (5, 30, 17, 44)]
        expected = [alone(engine, prompt, ask()) for prompt in prompts]
        streams = [engine.submit(prompt, ask()) for prompt in prompts]
        assert [drained(stream).token_ids for stream in streams] == [answer.token_ids for answer in expected]
        engine.close()

    def test_passages_are_named(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()
        prompt = engine.encode("a")
        answer = engine.generate(prompt, ask(max_tokens=60)).text
        result = drained(engine.submit(prompt, ask(max_tokens=60), [Passage("p", answer)]))
        assert result.copied
        assert {span.passage_id for span in result.copied} == {"p"}

    @pytest.mark.parametrize("forward", ["auto", "torch"])
    def test_what_was_answered_together_is_reused(self, make_engine: Callable[..., Engine], forward: str) -> None:
        engine = make_engine(forward=forward)
        prompts = [engine.encode(text * 6) for text in TEXTS[:2]]
        first = [drained(stream) for stream in [engine.submit(prompt, ask(max_tokens=80)) for prompt in prompts]]
        again = [Prompt((*p.token_ids, *answer.token_ids, 9)) for p, answer in zip(prompts, first, strict=True)]
        streams = [engine.submit(prompt, ask()) for prompt in again]
        for stream, prompt, earlier in zip(streams, again, prompts, strict=True):
            got = drained(stream)
            assert got.stats.reused_tokens > len(earlier.token_ids)
            engine.forget()
            assert got.token_ids == alone(engine, prompt, ask()).token_ids


class TestOrder:
    def test_a_long_prompt_delays_the_others_by_one_chunk(
        self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(step_module, "chunk_size", lambda _model: 32)
        engine = make_engine(by_hand=True, forward="torch")
        first = engine.submit(engine.encode(TEXTS[0]), ask(max_tokens=60, speculate=False))
        turn(engine)
        long = engine.submit(engine.encode(TEXTS[1] * 8), ask(max_tokens=4))
        seen = []
        while not long.result.token_ids:
            before = len(first.result.token_ids)
            turn(engine)
            seen.append(len(first.result.token_ids) - before)
        assert len(seen) >= 5
        assert seen == [1] * len(seen)
        drain(engine)
        assert drained(long).token_ids == alone(engine, engine.encode(TEXTS[1] * 8), ask(max_tokens=4)).token_ids

    def test_first_come_first_served(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True, max_rows=2)
        streams = [engine.submit(engine.encode(TEXTS[2]), ask(max_tokens=1)) for _ in range(5)]
        begun = []
        while engine.busy != IDLE:
            turn(engine)
            begun.append(sum(bool(stream.result.token_ids) for stream in streams))
            assert [bool(stream.result.token_ids) for stream in streams] == [True] * begun[-1] + [False] * (
                5 - begun[-1]
            )
        assert begun[-1] == 5

    def test_tenants_take_turns(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True, max_rows=1)
        greedy = [engine.submit(engine.encode("a"), ask(max_tokens=1), tenant="many") for _ in range(6)]
        modest = engine.submit(engine.encode("a"), ask(max_tokens=1), tenant="one")
        for _ in range(2):
            turn(engine)
        assert modest.result.token_ids
        assert sum(bool(stream.result.token_ids) for stream in greedy) == 1

    def test_whoever_gives_up_costs_the_tenant_no_turn(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True, max_rows=1)
        running = engine.submit(engine.encode("a"), ask(max_tokens=3), tenant="z")
        turn(engine)
        gone, mine = (engine.submit(engine.encode("a"), ask(max_tokens=1), tenant="one") for _ in range(2))
        other = engine.submit(engine.encode("a"), ask(max_tokens=1), tenant="two")
        gone.close()
        while not mine.result.token_ids:
            turn(engine)
        assert running.result.token_ids
        assert not other.result.token_ids
        drain(engine)

    def test_a_request_that_waits_for_room_is_not_overtaken(self, make_engine: Callable[..., Engine]) -> None:
        position = make_engine().target.cache_bytes(1, 0) // 2
        engine = make_engine(by_hand=True, max_cache_bytes=200 * position)
        first = engine.submit(engine.encode("a"), ask(max_tokens=80))
        large = engine.submit(engine.encode("a"), ask(max_tokens=150))
        small = engine.submit(engine.encode("a"), ask(max_tokens=1))
        turn(engine)
        assert engine.busy.running == 1
        assert engine.busy.waiting == 2
        assert engine.busy.cache_bytes <= 200 * position
        drain(engine)
        assert [len(stream.result.token_ids) for stream in (first, large, small)] == [80, 150, 1]


class TestLimits:
    def test_what_never_fits_is_refused_at_once(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(max_cache_bytes=20_000)
        with pytest.raises(ConfigError, match="need .* of keys and values, and max_cache_bytes is 0 MiB; lower"):
            engine.submit(engine.encode("a"), ask(max_tokens=500))
        assert len(drained(engine.submit(engine.encode("a"), ask(max_tokens=5))).token_ids) == 5

    def test_no_more_wait_than_may(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True, max_waiting=2)
        streams = [engine.submit(engine.encode("a"), ask()) for _ in range(2)]
        with pytest.raises(BusyError, match=r"the queue is full: 2 requests wait \(max_waiting\); try again later"):
            engine.submit(engine.encode("a"), ask())
        drain(engine)
        assert [drained(stream).finish_reason for stream in streams] == ["length"] * 2

    def test_who_waits_too_long_is_told(
        self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        monkeypatch.setattr(scheduler_module, "time", clock)
        engine = make_engine(by_hand=True, max_rows=1, max_wait_s=5.0)
        first = engine.submit(engine.encode("a"), ask(max_tokens=30))
        turn(engine)
        late = engine.submit(engine.encode("a"), ask())
        clock.now = 5.5
        drain(engine)
        with pytest.raises(BusyError, match=r"no place in the batch within 5 seconds \(max_wait_s\)"):
            drained(late)
        assert len(drained(first).token_ids) == 30

    @pytest.mark.parametrize("limits", [{"max_rows": 0}, {"max_cache_bytes": 0}, {"max_waiting": 0}, {"max_wait_s": 0}])
    def test_limits_out_of_range_are_refused(self, limits: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(limits))):
            BatchConfig(**limits)

    def test_the_queue_time_is_told(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True, max_rows=1)
        first, second = (engine.submit(engine.encode("a"), ask(max_tokens=20)) for _ in range(2))
        drain(engine)
        assert 0 <= first.result.stats.queue_s < second.result.stats.queue_s


class TestEnds:
    def test_closing_frees_before_the_next_step(
        self, make_engine: Callable[..., Engine], caches: list[weakref.ref[Any]]
    ) -> None:
        engine = make_engine(by_hand=True)
        before = held(caches)
        stream, other = (engine.submit(engine.encode(TEXTS[0]), ask(max_tokens=100)) for _ in range(2))
        for _ in range(4):
            turn(engine)
        assert held(caches) == before + 2
        stream.close()
        assert list(stream) == []
        turn(engine)
        assert (held(caches), engine.busy.running) == (before + 1, 1)
        drain(engine)
        assert (held(caches), engine.busy) == (before, IDLE)
        assert len(drained(other).token_ids) == 100
        stream.close()  # nothing more happens

    def test_a_stream_that_nobody_holds_ends(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True)
        stream = engine.submit(engine.encode("a"), ask(max_tokens=1000))
        turn(engine)
        assert engine.busy.running == 1
        del stream
        gc.collect()
        turn(engine)
        assert engine.busy == IDLE

    def test_an_error_ends_its_own_request_alone(
        self, make_engine: Callable[..., Engine], caches: list[weakref.ref[Any]]
    ) -> None:
        engine = make_engine()
        before = held(caches)

        def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > 12:
                raise ValueError("no more than twelve")
            return scores

        prompt = engine.encode("a")
        bad = engine.submit(prompt, ask(), logits_processor=[fails])
        good = [engine.submit(prompt, generation) for generation in ASKED]
        with pytest.raises(ValueError, match="no more than twelve"):
            drained(bad)
        assert list(bad) == []  # the error is raised once
        for stream, generation in zip(good, ASKED, strict=True):
            assert drained(stream).token_ids == alone(engine, prompt, generation).token_ids
        assert (held(caches), engine.busy) == (before, IDLE)

    @pytest.mark.parametrize("where", [0, 5])
    @pytest.mark.parametrize(
        "error", [StopIteration(), asyncio.CancelledError(), SystemExit(3), GeneratorExit(), KeyboardInterrupt()]
    )
    def test_what_means_another_end_elsewhere_is_an_error_of_its_own_request(
        self, make_engine: Callable[..., Engine], error: BaseException, where: int
    ) -> None:
        engine = make_engine(max_rows=2)
        good = engine.submit(engine.encode("the"), ask())

        def ends(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > where:
                raise error
            return scores

        bad = engine.submit(engine.encode("a"), ask(), logits_processor=[ends])
        own_type = isinstance(error, (SystemExit, GeneratorExit, KeyboardInterrupt))
        with pytest.raises(type(error) if own_type else CallbackError) as caught:
            drained(bad)
        assert own_type or repr(error) in str(caught.value)
        assert len(drained(good).token_ids) == 24

    def test_a_draft_that_fails_ends_its_own_request_alone(
        self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine(by_hand=True)
        bad, reading = (engine.submit(engine.encode(text), ask()) for text in TEXTS[:2])
        turn(engine)

        def too_costly(*_: Any, **__: Any) -> Iterator[Any]:
            yield from ()
            raise LookupError("too costly")

        monkeypatch.setattr(engine.scheduler._rows[0].sequence, "drafting", too_costly)
        drain(engine)
        with pytest.raises(LookupError, match="too costly"):
            drained(bad)
        assert len(drained(reading).token_ids) == 24

    def test_an_error_holds_nothing_of_what_was_decoded_together_with_it(
        self, make_engine: Callable[..., Engine]
    ) -> None:
        engine = make_engine(by_hand=True)

        def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > 4:
                raise ValueError("no more than four")
            return scores

        bad = engine.submit(engine.encode("a"), ask(), logits_processor=[fails])
        other = engine.submit(engine.encode("the"), ask())
        requests = [weakref.ref(row.sequence) for row in engine.scheduler._waiting]
        gc.collect()
        gc.disable()
        try:
            drain(engine)
            with pytest.raises(ValueError, match="no more than four") as caught:
                drained(bad)
            del bad, other
            assert requests[1]() is None
            assert str(caught.value) == "no more than four"
            assert "in fails\n" in caught.value.__notes__[0]  # the note says where it was raised
            del caught  # which has the frames of its reader
            assert requests[0]() is None
        finally:
            gc.enable()

    def test_a_token_that_there_is_not_is_refused_at_once(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True)
        for token in (10**6, -1):
            with pytest.raises(PromptError, match=rf"the prompt has the token id {token}, and .* has 0\.\."):
                engine.submit(Prompt((5, token)), ask())
        assert engine.busy == IDLE

    def test_a_pass_that_fails_is_tried_for_each_alone(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True)
        verify = engine.target.verify_batch
        streams = [engine.submit(engine.encode(text), ask()) for text in TEXTS[:3]]
        poisoned = engine.target.new_cache(len(engine.encode(TEXTS[1]).token_ids) + 24, DRAFT.max_nodes).capacity

        def out_of_memory(steps: Sequence[Any], asked: Sequence[Any]) -> list[torch.Tensor]:
            if len(steps) > 1 or steps[0].cache.capacity == poisoned:
                raise torch.OutOfMemoryError("no room")
            return verify(steps, asked)

        engine.target.verify_batch = out_of_memory  # type: ignore[method-assign]
        drain(engine)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            drained(streams[1])
        for stream, text in ((streams[0], TEXTS[0]), (streams[2], TEXTS[2])):
            assert drained(stream).token_ids == alone(engine, engine.encode(text), ask()).token_ids

    def test_a_fault_of_the_scheduler_reaches_all_readers(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(max_rows=2)

        def broken(*_: Any) -> None:
            raise RuntimeError("a bug")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler_module, "run_step", broken)
            streams = [engine.submit(engine.encode("a"), ask()) for _ in range(3)]
            for stream in streams:
                with pytest.raises(RuntimeError, match="a bug"):
                    drained(stream)
        assert len(drained(engine.submit(engine.encode("a"), ask())).token_ids) == 24

    def test_an_answer_that_cannot_be_kept_for_others_comes_all_the_same(
        self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make_engine(by_hand=True)

        def broken(*_: Any) -> None:
            raise ValueError("the store is broken")

        monkeypatch.setattr(engine.context.prefix_cache, "insert", broken)
        streams = [engine.submit(engine.encode("a"), ask(max_tokens=count)) for count in (5, 9)]
        drain(engine)
        assert [len(drained(stream).token_ids) for stream in streams] == [5, 9]
        assert "the store is broken" in caplog.text

    def test_bad_requests_are_refused_before_they_wait(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True)
        with pytest.raises(PromptError):
            engine.submit(Prompt(()), ask())
        assert engine.busy == IDLE

    def test_closing_the_engine_ends_all_and_later_calls_say_so(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(max_rows=2)
        streams = [engine.submit(engine.encode("a"), ask(max_tokens=1500)) for _ in range(4)]
        next(streams[0])
        engine.close()
        assert engine.busy == IDLE
        for stream in streams:
            with pytest.raises(BusyError, match="the engine was closed before the answer was finished"):
                drained(stream)
        engine.close()
        calls: list[Callable[[], Any]] = [
            lambda: engine.submit(engine.encode("a"), ask()),
            lambda: engine.generate(engine.encode("a"), ask()),
            lambda: engine.generate([engine.encode("a")], ask()),
            lambda: engine.between_steps(list),
            lambda: engine.forget("ann"),
        ]
        for call in calls:
            with pytest.raises(EngineClosedError, match="the engine was closed"):
                call()

    def test_an_engine_can_be_closed_between_its_steps(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()
        stream = engine.submit(engine.encode("a"), ask(max_tokens=1500))
        next(stream)
        engine.between_steps(engine.close)
        with pytest.raises(BusyError):
            drained(stream)

    def test_an_idle_engine_that_nobody_needs_is_freed(
        self, tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        engine = Engine(tiny_model, tiny_tokenizer)
        drained(engine.submit(engine.encode("a"), ask()))
        reference = weakref.ref(engine)
        del engine
        until = time.monotonic() + 5
        while reference() is not None and time.monotonic() < until:
            gc.collect()
        assert reference() is None

    def test_the_thread_ends_when_idle_and_another_begins(
        self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scheduler_module, "_IDLE_S", 0.01)
        engine = make_engine()
        for _ in range(2):
            drained(engine.submit(engine.encode("a"), ask()))
            worker = engine.scheduler._worker
            if worker is not None:
                worker.join(timeout=20)
                assert not worker.is_alive()


class IdleTask:
    """Counts its passes; each waits until the test lets it end."""

    def __init__(self, passes: int) -> None:
        self.left = passes
        self.begun = 0
        self.closed = False
        self.may_end = threading.Semaphore(0)

    def pause_s(self, idling: bool) -> float | None:
        return 0.0 if self.left > 0 and not self.closed else None

    def run(self) -> None:
        self.begun += 1
        assert self.may_end.acquire(timeout=LIMIT_S)
        self.left -= 1

    def close(self) -> None:
        self.closed = True


class TestIdleTime:
    @pytest.fixture
    def engine(self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
        monkeypatch.setattr(scheduler_module, "_IDLE_S", 0.01)
        return make_engine()

    def answer(self, engine: Engine) -> None:
        drained(engine.submit(engine.encode("a"), ask(max_tokens=3)))

    def test_is_the_profile_tasks_until_nothing_is_left(self, engine: Engine) -> None:
        task: Any = IdleTask(3)
        task.may_end.release(3)
        engine.scheduler.profile_task = task
        self.answer(engine)
        worker = engine.scheduler._worker
        if worker is not None:
            join(worker)
        assert (task.begun, task.left) == (3, 0)

    def test_does_not_begin_before_the_first_request(self, engine: Engine) -> None:
        task: Any = IdleTask(3)
        engine.scheduler.profile_task = task
        assert engine.scheduler._worker is None
        assert task.begun == 0

    def test_ends_with_the_pass_during_which_a_request_comes(self, engine: Engine) -> None:
        task: Any = IdleTask(100)
        engine.scheduler.profile_task = task
        self.answer(engine)
        wait_until(lambda: task.begun == 1, "the first pass")
        stream = engine.submit(engine.encode("a"), ask(max_tokens=3))
        begun_at_end: list[int] = []

        class Noting(Observer):
            def answered(self, stats: Any, outcome: Any) -> None:
                begun_at_end.append(task.begun)

        engine.observers.append(Noting())
        task.may_end.release()
        drained(stream)
        assert begun_at_end == [1]
        task.may_end.release(100)

    def test_ends_when_the_engine_is_closed(self, engine: Engine) -> None:
        task: Any = IdleTask(100)
        engine.scheduler.profile_task = task
        self.answer(engine)
        wait_until(lambda: task.begun == 1, "the first pass")
        closing = threading.Thread(target=engine.close)
        closing.start()
        wait_until(lambda: engine.scheduler._closing, "closing")
        task.may_end.release(100)
        join(closing)
        assert (task.begun, task.closed) == (1, True)


class TestThreads:
    def test_many_threads(self, make_engine: Callable[..., Engine], all_alone: list[Generation]) -> None:
        engine = make_engine()
        asked = [(engine.encode(text), generation) for text in TEXTS for generation in ASKED]
        with ThreadPoolExecutor(len(asked)) as pool:
            got = list(pool.map(lambda one: drained(engine.submit(*one)).token_ids, asked))
        assert got == [answer.token_ids for answer in all_alone]

    async def test_many_tasks_of_an_event_loop_that_goes_on(
        self, make_engine: Callable[..., Engine], all_alone: list[Generation]
    ) -> None:
        engine = make_engine()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async def read(prompt: Prompt, generation: SamplingParams) -> tuple[int, ...]:
            stream = engine.submit(prompt, generation)
            return tuple([token async for chunk in stream for token in chunk.token_ids])

        ticking = asyncio.create_task(tick())
        asked = [(engine.encode(text), generation) for text in TEXTS for generation in ASKED]
        got = await asyncio.gather(*(read(*one) for one in asked))
        ticking.cancel()
        assert got == [answer.token_ids for answer in all_alone]
        assert ticks > len(asked)

    async def test_a_cancelled_reader_leaves_the_stream_readable(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True)
        stream = engine.submit(engine.encode("a"), ask(max_tokens=3))
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        drain(engine)
        assert len([token async for chunk in stream for token in chunk.token_ids]) == 3

    def test_a_loop_that_is_gone_disturbs_nobody(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True)
        stream = engine.submit(engine.encode("a"), ask(max_tokens=3))
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(stream.__anext__())
        loop.run_until_complete(asyncio.sleep(0))
        waiting.cancel()
        loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
        loop.close()
        drain(engine)
        assert len(drained(stream).token_ids) == 3

    def test_a_processor_that_asks_its_own_engine_is_an_error(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()

        def asks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            engine.generate(engine.encode("a"), ask(max_tokens=4))
            return scores

        with pytest.raises(NestedCallError, match="cannot call the engine that runs it"):
            engine.generate(engine.encode("the"), ask(), logits_processor=[asks])
        assert len(engine.generate(engine.encode("the"), ask()).token_ids) == 24

    @pytest.mark.parametrize("prompts", [1, 2])
    def test_one_that_asks_it_through_another_thread_is_an_error_and_no_hang(
        self, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, prompts: int
    ) -> None:
        monkeypatch.setattr(stream_module, "_CHECK_S", 0.01)
        engine = make_engine(max_wait_s=0.05)
        inner = [engine.encode("a")] * prompts

        def asks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as other:
                other.submit(engine.generate, inner if prompts > 1 else inner[0], ask(max_tokens=4)).result(timeout=60)
            return scores

        with pytest.raises((BusyError, BatchError), match="has not returned for 0.05 seconds"):
            engine.generate(engine.encode("the"), ask(), logits_processor=[asks])
        assert len(engine.generate(engine.encode("the"), ask()).token_ids) == 24

    def test_a_call_between_steps_gives_up_where_a_step_does_not_end(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(max_wait_s=0.05)
        held_up, goes_on = threading.Event(), threading.Event()

        def waits(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            held_up.set()
            assert goes_on.wait(timeout=60)
            return scores

        stream = engine.submit(engine.encode("the"), ask(max_tokens=3), logits_processor=[waits])
        assert held_up.wait(timeout=60)
        with pytest.raises(BusyError, match="no step has ended within 0.05 seconds"):
            engine.forget()
        goes_on.set()
        assert len(drained(stream).token_ids) == 3


class TestOffline:
    def test_many_prompts_at_once(self, make_engine: Callable[..., Engine], capsys: pytest.CaptureFixture[str]) -> None:
        engine = make_engine(max_rows=3)
        prompts = [engine.encode(text) for text in TEXTS * 4]
        got = engine.generate(prompts, ask(), progress=True)
        assert [answer.token_ids for answer in got] == [alone(engine, prompt, ask()).token_ids for prompt in prompts]
        assert "20/20" in capsys.readouterr().err

    def test_settings_and_passages_of_each(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()
        prompts = [engine.encode(TEXTS[0])] * len(ASKED)
        texts = [engine.generate(prompts[0], one).text for one in ASKED]
        passages = [[Passage(str(number), text)] for number, text in enumerate(texts)]
        got = engine.generate(prompts, ASKED, passages)
        assert [answer.token_ids for answer in got] == [
            alone(engine, prompt, one).token_ids for prompt, one in zip(prompts, ASKED, strict=True)
        ]
        assert [span.passage_id for span in got[0].copied[:1]] == ["0"]
        with pytest.raises(ConfigError, match="2 settings for 7 prompts; give one for each"):
            engine.generate(prompts, ASKED[:2])

    def test_nothing_is_decoded_if_a_prompt_cannot_be(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(by_hand=True)
        with pytest.raises(PromptError):
            engine.generate([engine.encode("a"), Prompt(())], ask())
        assert engine.busy == IDLE

    def test_what_failed_does_not_take_the_others_with_it(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()
        prompts = [engine.encode(text) for text in ("a", "the", "in")]

        def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids[0, 0] == prompts[1].token_ids[0]:
                raise ValueError("not the")
            return scores

        with pytest.raises(BatchError, match="1 of 3 answers failed, the first with: not the") as caught:
            engine.generate(prompts, ask(), logits_processor=[fails])
        assert [type(result) for result in caught.value.results] == [Generation, ValueError, Generation]

    def test_a_selector_is_of_one_answer(self, make_engine: Callable[..., Engine]) -> None:
        with pytest.raises(ConfigError, match="a sampler chooses the tokens of one answer"):
            make_engine().generate([Prompt((5,))], sampler=lambda verified: lambda row: 5)  # type: ignore[call-overload]

    def test_it_waits_where_others_fill_the_queue(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine(max_rows=1, max_waiting=1, max_wait_s=0.001)  # which is for others
        got = engine.generate([engine.encode(text) for text in TEXTS], ask(max_tokens=4))
        assert [len(answer.token_ids) for answer in got] == [4] * 5

    def test_no_prompts_no_answers(self, make_engine: Callable[..., Engine]) -> None:
        assert make_engine().generate([]) == []


class TestObservers:
    def test_they_are_told(self, make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
        reported: list[tuple[str, Any]] = []

        class Notes(Observer):
            def stepped(self, report: Any) -> None:
                reported.append(("stepped", report))

            def answered(self, stats: Any, outcome: str) -> None:
                reported.append((outcome, stats))

            def loaded(self, load: Load) -> None:
                reported.append(("loaded", load))
                raise RuntimeError("an observer's own bug")

        engine = make_engine(by_hand=True)
        engine.observers.append(Notes())
        done, closed = (engine.submit(engine.encode(TEXTS[0]), ask()) for _ in range(2))
        turn(engine)
        closed.close()
        drain(engine)
        reports = [report for name, report in reported if name == "stepped"]
        assert sum(sum(report.emitted) for report in reports) == len(drained(done).token_ids) - 1
        accepted = sum(sum(sources.values()) for report in reports for sources in report.accepted)
        assert accepted == done.result.stats.accepted > 0
        assert [name for name, _ in reported if name in ("length", "cancelled")] == ["cancelled", "length"]
        assert reported[-1] == ("loaded", IDLE)
        assert "an observer's own bug" in caplog.text


class Together(RuleBasedStateMachine):
    """Requests come and go at random; those that end have the answer that they get alone, and nothing is left."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[GenerationStream, Prompt, SamplingParams, list[int]]] = []

    @initialize(rows=st.integers(1, 5))
    def begin(self, rows: int) -> None:
        self.engine.scheduler = ByHand(self.engine.context, BatchConfig(max_rows=rows), self.engine.prefix_bytes)

    @rule(
        text=st.sampled_from(TEXTS),
        cut=st.integers(0, 20),
        tokens=st.integers(1, 30),
        sampled=st.one_of(st.none(), st.integers(0, 5)),
        stop=st.sampled_from([(), ("e",), ("the", "q")]),
        speculate=st.booleans(),
        ignore_eos=st.booleans(),
        tenant=st.sampled_from(["", "other"]),
    )
    def submit(
        self,
        text: str,
        cut: int,
        tokens: int,
        sampled: int | None,
        stop: tuple[str, ...],
        speculate: bool,
        ignore_eos: bool,
        tenant: str,
    ) -> None:
        prompt = self.engine.encode(text[cut:] or "a")
        temperature = 0.0 if sampled is None else 1.0
        generation = SamplingParams(
            max_tokens=tokens,
            temperature=temperature,
            seed=sampled,
            stop=stop,
            speculate=speculate,
            ignore_eos=ignore_eos,
        )
        stream = self.engine.submit(prompt, generation, tenant=tenant)
        assert isinstance(stream, GenerationStream)
        self.open.append((stream, prompt, generation, []))

    @rule(turns=st.integers(1, 12))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            turn(self.engine)

    @precondition(lambda self: self.open)
    @rule(which=st.randoms(use_true_random=False))
    def close_one(self, which: Any) -> None:
        stream, *_ = self.open.pop(which.randrange(len(self.open)))
        stream.close()

    @precondition(lambda self: self.open)
    @rule(which=st.randoms(use_true_random=False))
    def read_what_is_there(self, which: Any) -> None:
        stream, _, _, read = self.open[which.randrange(len(self.open))]
        while True:
            try:
                chunk = stream._delivery.get(0)
            except StopIteration:
                return
            if chunk is None:
                return
            read.extend(chunk.token_ids)

    @invariant()
    def nobody_holds_more_than_a_place(self) -> None:
        assert self.engine.busy.running <= self.engine.scheduler.max_rows

    @invariant()
    def no_more_memory_is_held_than_reserved(self) -> None:
        caches: list[Any] = [row.sequence.cache for row in self.engine.scheduler._rows if row.sequence._state]
        batch = self.engine.target._batch  # type: ignore[attr-defined]
        held = batch.nbytes + sum(cache.nbytes for cache in caches if cache.batch is None)
        assert held <= self.engine.busy.cache_bytes

    def teardown(self) -> None:
        drain(self.engine)
        for stream, prompt, generation, read in self.open:
            read.extend(token for chunk in stream for token in chunk.token_ids)
            expected = alone(self.engine, prompt, generation)
            assert tuple(read) == expected.token_ids
            assert (stream.result.text, stream.result.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize("forward", ["auto", "torch"])
def test_requests_that_join_and_leave_at_random(make_engine: Callable[..., Engine], forward: str) -> None:
    engine = make_engine(forward=forward)

    class Machine(Together):
        pass

    Machine.engine = engine
    run_state_machine_as_test(Machine, settings=settings(max_examples=25, stateful_step_count=20))


@pytest.mark.slow
def test_two_hundred_requests_leave_nothing_behind(
    make_engine: Callable[..., Engine], caches: list[weakref.ref[Any]]
) -> None:
    engine = make_engine(max_rows=16)
    prompts = [engine.encode(TEXTS[number % len(TEXTS)]) for number in range(200)]
    expected = {text: alone(engine, engine.encode(text), ask()).token_ids for text in TEXTS}
    before = held(caches)

    def one(number: int) -> str:
        if number % 20 == 7:
            with pytest.raises(ZeroDivisionError):
                drained(engine.submit(prompts[number], ask(), logits_processor=[lambda ids, scores: scores / (1 // 0)]))
            return "bad"
        stream = engine.submit(prompts[number], ask())
        if number % 10 == 3:
            next(stream)
            stream.close()
            return "closed"
        assert drained(stream).token_ids == expected[TEXTS[number % len(TEXTS)]]
        return "right"

    for _ in range(3):
        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(one, range(200)))
        assert [outcomes.count(kind) for kind in ("right", "closed", "bad")] == [170, 20, 10]
        wait_until(lambda: engine.busy == IDLE, "the last that were closed have ended")
        assert engine.between_steps(lambda: held(caches)) == before


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...
