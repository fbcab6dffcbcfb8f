"""Recorded passes, with a recorder that needs no GPU; and the same with CUDA graphs where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder, RecordedCalls
from fixed_targets import Twins, fixed_target, run_and_check, some_steps
from tiny_models import VOCABULARY, make_model

from reader_rag.errors import ReaderWarning
from reader_rag.model.fixed_step.graphs import COMPARED
from reader_rag.model.fixed_step.step import FixedStep
from reader_rag.model.interface import Step
from reader_rag.model.target import Target


@pytest.fixture(scope="module")
def dynamic() -> Target:
    return Target(make_model("Llama"), forward="torch")


def warm(step: FixedStep, twins: list[Twins], times: int = 2 + COMPARED, most: int = 1) -> None:
    """Steps of one shape."""
    for round_ in range(times):
        run_and_check(step, twins, round_, most)


def test_a_shape_is_called_then_recorded_then_compared_then_replayed(dynamic: Target) -> None:
    recorder = CallRecorder()
    target, step = fixed_target(recorder=recorder)
    base = len(recorder.graphs)
    twin = Twins(target, dynamic, 1, 70)
    calls, forward = [0], target.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return forward(*args, **kwargs)

    target.model.forward = counted  # type: ignore[method-assign]
    seen = []
    for round_ in range(8):
        before = calls[0], step.graphs.replays
        run_and_check(step, [twin], round_, 1)
        seen.append((calls[0] - before[0], step.graphs.replays - before[1]))
    # A call; a call and its recording; a call and a replay, three times; replays.
    assert seen == [(1, 0), (2, 0), (1, 1), (1, 1), (1, 1), (0, 1), (0, 1), (0, 1)]
    assert len(recorder.graphs) == base + 1


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GPT2"])
def test_replays_are_right_for_other_sequences_lengths_and_trees(name: str) -> None:
    target, step = fixed_target(name, recorder=CallRecorder())
    other = Target(make_model(name), forward="torch")
    twins = [Twins(target, other, n, 9 + 2 * n) for n in range(4)]
    for round_ in range(30):
        run_and_check(step, twins, round_, 9)
        if round_ == 8:
            twins.pop(1).fixed.release()
            twins.append(Twins(target, other, 17, 12))
    assert step.graphs.replays >= 10
    assert not step.graphs.refused


def test_every_number_of_the_shape_is_a_key(dynamic: Target) -> None:
    target, step = fixed_target(recorder=CallRecorder())
    warm(step, [Twins(target, dynamic, 1, 20)])
    assert {shape.width for shape in step.graphs.shapes} == {1}
    twins = [Twins(target, dynamic, n, 20) for n in range(2)]
    warm(step, twins)  # rows
    warm(step, [Twins(target, dynamic, 5, 90)])  # columns
    warm(step, [twins[0]], 40, most=4)  # widths, with and without moves
    shapes = step.graphs.shapes
    assert len(shapes) == len(set(shapes))
    assert len({shape.generation for shape in shapes}) == 1
    assert {shape.rows for shape in shapes} >= {1, 4}
    assert {shape.shown for shape in shapes} >= {64, 128}
    assert {shape.width for shape in shapes} >= {1, 4}
    assert {shape.moves for shape in shapes} == {False, True}


def test_buffers_that_are_allocated_anew_drop_what_refers_to_the_old_ones(dynamic: Target) -> None:
    target, step = fixed_target(recorder=CallRecorder())
    twin = Twins(target, dynamic, 1, 20)
    warm(step, [twin])
    generation = step.cache.generation
    assert len(step.graphs) == 1
    longer = Twins(target, dynamic, 2, 20, capacity=700)
    run_and_check(step, [twin, longer], 1)
    assert step.cache.generation > generation
    assert len(step.graphs) == 0
    warm(step, [twin, longer])


def test_the_least_recently_used_is_dropped_at_the_bound(dynamic: Target) -> None:
    target, step = fixed_target(recorder=CallRecorder())
    step.graphs.most = 2
    twins = [Twins(target, dynamic, n, 20) for n in range(4)]
    run_and_check(step, twins, 0, 1)
    one, two, four = twins[:1], twins[:2], twins
    for some in (one, two, one, four):
        warm(step, some, 2 + COMPARED)
    assert [shape.rows for shape in step.graphs.shapes] == [1, 4]
    recorded = step.graphs.recorded
    warm(step, two, 1)  # recorded again, at once
    assert step.graphs.recorded == recorded + 1
    assert [shape.rows for shape in step.graphs.shapes] == [4, 2]


class _StaleRecorder(CallRecorder):
    """Records passes whose mask was computed once: a number that should be in the key and is not."""

    def record(self, function: Callable[[], None]) -> RecordedCalls:
        graph = super().record(function)
        graph._calls = [call for call in graph._calls if "where" not in call[0].__name__]
        return graph


def test_a_replay_that_differs_is_dropped_with_a_warning_and_answers_stay_right(dynamic: Target) -> None:
    target, step = fixed_target(recorder=_StaleRecorder())
    twins = [Twins(target, dynamic, n, 20 + n) for n in range(2)]
    with pytest.warns(
        ReaderWarning, match=r"runs without a CUDA graph \(its replay differs from a call by .*; answers"
    ):
        warm(step, twins, 6, 4)
    assert step.graphs.refused
    assert not set(step.graphs.shapes) & step.graphs.refused


def test_a_pass_that_cannot_be_recorded_is_called(dynamic: Target) -> None:
    class Refuses(CallRecorder):
        def record(self, function: Callable[[], None]) -> RecordedCalls:
            function()
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    target, step = fixed_target(recorder=Refuses())
    twin = Twins(target, dynamic, 1, 20)
    with pytest.warns(ReaderWarning, match="cannot be recorded: operation not permitted when stream is capturing"):
        warm(step, [twin], 6)
    assert step.graphs.replays == 0


def test_outputs_of_all_shapes_are_in_the_same_buffers(dynamic: Target) -> None:
    """An output holds until the next pass: who keeps one longer sees the next, whatever its shape."""
    target, step = fixed_target(recorder=CallRecorder())
    twins = [Twins(target, dynamic, n, 20) for n in range(2)]
    warm(step, twins)
    warm(step, twins[:1])
    first = step.run(some_steps(twins, 1, 1))
    second = step.run(some_steps(twins[:1], 2, 1))
    assert first is not None
    assert second is not None
    assert first[0].logits.data_ptr() == second[0].logits.data_ptr()
    assert torch.equal(
        target.verify(5, some_steps(twins, 1, 1)[0].tree, twins[0].fixed),
        step.run([Step(5, some_steps(twins, 1, 1)[0].tree, twins[0].fixed)])[0].logits,
    )  # type: ignore[index]
    kept = target.verify_batch(some_steps(twins[:1], 3, 1))[0]
    copy = kept.clone()
    step.run(some_steps(twins[:1], 4, 1))
    assert torch.equal(kept, copy)  # what a target returns is a copy


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3Text", "Phi3"])
def test_cuda_graphs_replay_the_steps_of_the_dynamic_step(name: str) -> None:
    models = [make_model(name).to("cuda") for _ in range(2)]
    target, other = (Target(model, forward="torch") for model in models)
    from reader_rag.model.fixed_step.select import add_fixed_step

    step = add_fixed_step(target, "auto", name=name)
    assert step is not None
    twins = [Twins(target, other, n, 9 + 2 * n) for n in range(4)]
    for round_ in range(30):
        run_and_check(step, twins, round_, 9)
    assert step.graphs.replays >= 10
    assert not step.graphs.refused
    assert step.transfers.to_device_calls >= 30
    assert models[0].config.vocab_size == VOCABULARY
