"""The fixed step: batches of trees in few shapes, one copy each way, and the dynamic step wherever it does not fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from call_recorder import CallRecorder
from fixed_targets import Twins, fixed_target, run_and_check, some_steps
from random_trees import random_tree
from tiny_models import VOCABULARY, make_model
from transformers import TemperatureLogitsWarper

from reader_rag.draft import DraftTree
from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.kv_cache.layer_states import LayerOutputs
from reader_rag.kv_cache.prefix_cache import PrefixCache
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.model.fixed_step.checks import data_dependent_call
from reader_rag.model.fixed_step.select import add_fixed_step
from reader_rag.model.fixed_step.shapes import MOST_POSITIONS, StepShape, shown_for, step_bytes, widest, width_for
from reader_rag.model.fixed_step.step import FixedStep
from reader_rag.model.interface import Asked, Step
from reader_rag.model.target import Target
from reader_rag.sampling.noise import Draw
from reader_rag.sampling.sampler import ProcessedSampler, Verified


@pytest.fixture(scope="module")
def dynamic() -> Target:
    return Target(make_model("Llama"), forward="torch")


def strict_step(target: Target, recorder: CallRecorder | None = None) -> FixedStep:
    """A fixed step of strict mode, without its self-test: the shapes that keep bits are others on other CPUs."""
    return FixedStep(
        target.model,
        target.kinds,
        target.to_backend,
        recorder=recorder,
        fixed=target.fixed,
        position_bytes=target.position_bytes,
        capacity=target.capacity,
        head=target.logits_of,
    )


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "Llama4Text", "GPT2"])
def test_batches_in_which_sequences_join_sit_out_and_leave(name: str) -> None:
    (target, step), other = fixed_target(name), Target(make_model(name), forward="torch")
    twins = [Twins(target, other, n, 9 + 7 * n) for n in range(5)]
    random = np.random.default_rng(0)
    for round_ in range(12):
        if round_ in (4, 8):
            twins.pop(0).fixed.release()
        if round_ == 6:
            twins.append(Twins(target, other, 9, 30))
        chosen = [twin for twin in twins if random.random() < 0.7] or twins[:1]
        run_and_check(step, chosen, round_)
        assert step.cache.sequences <= 5
    for twin in twins[1:]:
        twin.fixed.release()
    run_and_check(step, twins[:1], 50)  # alone again, in the first row
    assert step.cache.row_of(twins[0].fixed) == 0
    twins[0].fixed.release()
    assert step.cache.sequences == 0


def test_lengths_across_the_borders_of_the_columns_attended_to(dynamic: Target) -> None:
    target, step = fixed_target()
    for length in (55, 60, 63, 64, 65, 120, 127, 128):
        twin = Twins(target, dynamic, length, length, 230)
        for round_ in range(4):
            run_and_check(step, [twin], round_, 16)
        twin.fixed.release()


def test_every_width_and_more_moves_than_the_next_step_is_wide(dynamic: Target) -> None:
    target, step = fixed_target()
    twin = Twins(target, dynamic, 1, 20)
    for nodes in (0, 3, 7, 15, 31, 63, 0):
        tree = random_tree(nodes, nodes, VOCABULARY)
        one = Step(5, tree, twin.fixed)
        (passed,) = step.run([one]) or ()
        twin.check(one, passed, int(tree.depths.argmax()) if nodes else -1)
    # Behind a deep path of scattered nodes comes a plain step: it makes all their moves.
    chain = DraftTree.of([7, *range(10, 20)], [-1, -1, *range(1, 10)], [1, *range(1, 11)], np.full(11, 0.5))
    one = Step(5, chain, twin.fixed)
    (passed,) = step.run([one]) or ()
    twin.check(one, passed, 10)
    assert len(step.cache.moves_of(0)) == 10
    one = Step(6, DraftTree.empty(), twin.fixed)
    (passed,) = step.run([one]) or ()
    twin.check(one, passed, -1)
    assert step.cache.moves_of(0) == []


def test_a_pass_that_fails_loses_nothing(dynamic: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target, step = fixed_target()
    twins = [Twins(target, dynamic, n, 9 + n) for n in range(2)]
    for round_ in range(2):
        run_and_check(step, twins, round_)
    forward = target.model.forward
    with monkeypatch.context() as patch:
        patch.setattr(target.model, "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step.run(some_steps(twins, 3))
    assert target.model.forward == forward
    for round_ in range(2):
        run_and_check(step, twins, round_)


def test_what_has_no_fixed_shape_is_a_dynamic_step(dynamic: Target) -> None:
    target, step = fixed_target()
    twin = Twins(target, dynamic, 1, 30)
    run_and_check(step, [twin], 1)
    tree = random_tree(4, 64, VOCABULARY)  # one node too many
    one = Step(5, tree, twin.fixed)
    assert step.run([one]) is None
    assert twin.fixed.batch is step.cache
    torch.testing.assert_close(
        target.verify(5, tree, twin.fixed), dynamic.verify(5, tree, twin.dynamic), atol=1e-4, rtol=0
    )
    assert twin.fixed.batch is None
    for cache in (twin.fixed, twin.dynamic):
        cache.commit([0, 1])
    run_and_check(step, [twin], 2)  # and back
    assert step.widest(1) == 64
    assert step.widest(9) == 32
    assert step.widest(33) == 0


def test_a_batch_of_the_dynamic_step_goes_on_in_the_fixed_one(dynamic: Target) -> None:
    target, step = fixed_target()
    twins = [Twins(target, dynamic, n, 9 + 5 * n) for n in range(3)]
    wide = [Step(5, random_tree(n, 70, VOCABULARY), twin.fixed) for n, twin in enumerate(twins)]
    for twin, one, logits in zip(twins, wide, target.verify_batch(wide), strict=True):
        torch.testing.assert_close(logits, dynamic.verify(one.root, one.tree, twin.dynamic), atol=1e-4, rtol=0)
        for cache in (twin.fixed, twin.dynamic):
            cache.commit([0])
    assert all(twin.fixed.batch is target._batch for twin in twins)
    run_and_check(step, twins, 1)
    assert all(twin.fixed.batch is step.cache for twin in twins)
    assert target._batch.nbytes == 0


def test_sequences_that_do_not_fit_the_bytes_are_decoded_dynamically(dynamic: Target) -> None:
    target, step = fixed_target()
    each = target.position_bytes(1)
    _, small = fixed_target(max_bytes=2 * 513 * each)
    twins = [Twins(target, dynamic, n, 9) for n in range(3)]  # of 200 + 63 + 1 positions and 64 more: 512 columns
    assert small.run(some_steps(twins[:2], 1)) is not None
    assert small.cache.nbytes == 2 * 513 * each
    assert small.run(some_steps(twins, 2)) is None
    assert step.cache_bytes([(200, 63)] * 2) == 2 * 513 * each


class _Counts:
    """How often inputs are prepared, and sequences copied into the fixed cache and out of it."""

    def __init__(self, step: FixedStep, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts = Counter[str]()
        for place, name in ((step, "prepare"), (step.cache, "_take"), (step.cache, "give_back")):
            monkeypatch.setattr(place, name, self._counted(name, getattr(place, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            self._counts[name] += 1
            return function(*given, **named)

        return counted

    def take(self) -> tuple[int, int, int]:
        """Preparations, copies in, copies out since the last call."""
        counts, names = self._counts.copy(), ("prepare", "_take", "give_back")
        self._counts.clear()
        return counts[names[0]], counts[names[1]], counts[names[2]]


def test_a_refused_step_is_prepared_once_and_copied_out_only_by_the_dynamic_step(
    dynamic: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, step = fixed_target()
    twins, counts = [Twins(target, dynamic, n, 9 + 5 * n) for n in range(2)], _Counts(step, monkeypatch)
    run_and_check(step, twins, 1)
    assert counts.take() == (1, 2, 0)
    wide = [Step(5, random_tree(n, 70, VOCABULARY), twin.fixed) for n, twin in enumerate(twins)]
    assert step.run(wide) is None
    assert counts.take() == (1, 0, 0)
    assert all(twin.fixed.batch is step.cache for twin in twins)
    for twin, one, logits in zip(twins, wide, target.verify_batch(wide, refused=True), strict=True):
        torch.testing.assert_close(logits, dynamic.verify(one.root, one.tree, twin.dynamic), atol=1e-4, rtol=0)
        for cache in (twin.fixed, twin.dynamic):
            cache.commit([0])
    assert counts.take() == (0, 0, 2)
    target.verify_batch(wide)  # asks the fixed step itself; the sequences are out already
    assert counts.take() == (1, 0, 0)
    run_and_check(step, twins, 2)
    assert counts.take() == (1, 2, 0)


def test_sequences_of_strict_mode_stay_in_the_fixed_cache(dynamic: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(make_model("Llama"), FixedShape(), forward="torch")
    step = strict_step(target)
    twins, counts = [Twins(target, dynamic, n, 9 + 5 * n) for n in range(3)], _Counts(step, monkeypatch)
    for round_ in range(3):
        steps = [Step(3 + n, DraftTree.from_chain([5, 6, 7]), twin.fixed) for n, twin in enumerate(twins)]
        passed = step.run(steps)
        assert passed is not None
        for twin, one, found in zip(twins, steps, passed, strict=True):
            twin.check(one, found, round_ % 3)
        assert counts.take() == (3, 0 if round_ else 3, 0)
    steps[1] = Step(3, DraftTree.from_chain([5] * 20), twins[1].fixed)  # longer than the width: none is computed
    passes = step.passes
    assert step.run(steps) is None
    assert (step.passes, counts.take()) == (passes, (0, 0, 0))


def test_a_sequence_that_cannot_be_copied_out_stays_in_the_fixed_cache(
    dynamic: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, step = fixed_target()
    twin = Twins(target, dynamic, 1, 30)
    run_and_check(step, [twin], 1)
    with monkeypatch.context() as patch:
        patch.setattr(twin.fixed.tree_layers[-1], "update", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step.give_back(some_steps([twin], 1))
    assert twin.fixed.batch is step.cache
    assert twin.fixed.length == twin.dynamic.length
    run_and_check(step, [twin], 2)


def test_a_sequence_in_the_fixed_step_is_rolled_back(dynamic: Target) -> None:
    target, step = fixed_target()
    twin = Twins(target, dynamic, 1, 20)
    tree = DraftTree.of([7, 8, 9, 10], [-1, -1, 1, 2], [1, 1, 2, 3], np.full(4, 0.5))
    one = Step(5, tree, twin.fixed)
    (passed,) = step.run([one]) or ()
    twin.check(one, passed, 3)  # its nodes are not in a row: they are moved by the next pass
    assert step.cache.moves_of(0)
    for cache in (twin.fixed, twin.dynamic):
        cache.roll_back(22)
    run_and_check(step, [twin], 3)


def test_a_sequence_in_the_fixed_step_goes_to_the_prefix_cache(dynamic: Target) -> None:
    target, step = fixed_target()
    twin = Twins(target, dynamic, 1, 30)
    for round_ in range(3):
        run_and_check(step, [twin], round_)
    kept, expected = twin.fixed.states(0, twin.fixed.length), twin.dynamic.states(0, twin.fixed.length)
    for pair, other in zip(kept, expected, strict=True):
        assert pair is not None
        assert other is not None
        for states, own in zip(pair, other, strict=True):
            torch.testing.assert_close(states, own, atol=1e-5, rtol=0)
    cache = PrefixCache(1 << 20, 8)
    cache.insert("a", list(range(24)), twin.fixed, None)
    again = target.new_cache(100, 3)
    assert cache.restore("a", list(range(30)), again, None) == 24


@pytest.mark.parametrize("recorder", [None, CallRecorder()], ids=["called", "replayed"])
def test_outputs_of_layers_are_those_of_the_dynamic_step(recorder: CallRecorder | None, dynamic: Target) -> None:
    target, step = fixed_target(recorder=recorder)
    twins = [Twins(target, dynamic, n, 20 + n) for n in range(2)]
    for round_ in range(9):
        steps = some_steps(twins, round_ % 2, 4)
        got = [LayerOutputs((2, 0)), LayerOutputs((1,))]
        passed = step.run([replace(one, outputs=outputs) for one, outputs in zip(steps, got, strict=True)])
        assert passed is not None
        for twin, one, outputs in zip(twins, steps, got, strict=True):
            expected = LayerOutputs(outputs.layers)
            dynamic.verify(one.root, one.tree, twin.dynamic, expected)
            for each in (outputs, expected):
                each.commit()
            ours, theirs = outputs.take(40), expected.take(40)
            assert ours is not None
            assert theirs is not None
            assert ours.rows.shape == (len(one.tree) + 1, len(outputs.layers), 32)
            torch.testing.assert_close(ours.rows, theirs.rows, atol=1e-4, rtol=0)
    assert (step.graphs.replays > 0) == (recorder is not None)


def test_outputs_of_layers_that_are_not_found_are_those_of_a_dynamic_step(dynamic: Target) -> None:
    target = Target(make_model("Llama"), forward="torch")
    target.layers = ()
    step = add_fixed_step(target, "on", name="x")
    assert step is not None
    twin = Twins(target, dynamic, 1, 20)
    (one,) = some_steps([twin], 1)
    assert step.run([replace(one, outputs=LayerOutputs((1,)))]) is None
    assert step.run([one]) is not None


# Copies between host and device


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_step_is_one_copy_to_the_device_and_one_from_it(count: int, dynamic: Target) -> None:
    target, step = fixed_target()
    twins = [Twins(target, dynamic, n, 9 + n) for n in range(count)]
    run_and_check(step, twins, 0)
    steps, moved = some_steps(twins, 1), step.transfers
    before = moved.to_device_calls, moved.to_host_calls
    states = HiddenStates(9, 32, torch.device("cpu"))
    states.append(torch.randn(9, 32), 9)
    asked = np.array([2, 7, 5], np.int32)
    passed = step.run(steps, [Asked(states, asked)])
    assert passed is not None
    (expected,) = target.logits_of([states.take(asked)])
    assert passed[-1].top is not None
    assert passed[-1].top.argmax == expected.argmax(-1).tolist()
    assert (moved.to_device_calls - before[0], moved.to_host_calls - before[1]) == (1, 1)
    step.run(steps, wanted=[n == 0 for n in range(count)])
    assert (moved.to_device_calls - before[0], moved.to_host_calls - before[1]) == (2, 3)


@pytest.mark.parametrize("recorder", [None, CallRecorder()], ids=["called", "replayed"])
@pytest.mark.parametrize("fixed", [None, FixedShape()], ids=["batch", "strict"])
def test_the_pass_draws_what_the_host_would(recorder: CallRecorder | None, fixed: FixedShape | None) -> None:
    target, step = fixed_target(recorder=recorder) if fixed is None else (None, None)
    if target is None or step is None:
        target = Target(make_model("Llama"), fixed, forward="torch")
        step = strict_step(target, recorder)
    draws = [Draw(2**64 - 5, 0.7), None, Draw(3)]
    twins = [Twins(target, target, n, 9 + 5 * n) for n in range(3)]
    moved = step.transfers
    for round_ in range(8):
        one = DraftTree.from_chain([5, 6, 7]) if fixed is not None else random_tree(round_ % 3, 5, VOCABULARY)
        steps = [Step(round_, one, twin.fixed, draw=draw) for twin, draw in zip(twins, draws, strict=True)]
        before = moved.to_device_calls, moved.to_host_calls
        passed = step.run(steps)
        assert passed is not None
        copies = 1 if fixed is None else 3
        compared = recorder is not None and step.graphs.recorded
        assert moved.to_device_calls - before[0] == copies
        assert moved.to_host_calls - before[1] == copies or compared
        for twin, draw, found in zip(twins, draws, passed, strict=True):
            assert found.top is not None
            if draw is None:
                assert found.drawn is None
                continue
            text = np.zeros(twin.fixed.length + 1, np.int32)
            sampler = ProcessedSampler([TemperatureLogitsWarper(draw.temperature)], draw.seed)
            assert sampler.draw == draw
            choose = sampler(Verified(found.logits, one, text))
            assert found.drawn == [choose(row) for row in range(len(one) + 1)]
            assert found.drawn != found.top.argmax
        for twin in twins:
            twin.fixed.commit([0, 1])
    assert (step.graphs.replays > 0) == (recorder is not None)


def test_a_row_without_a_token_is_known_as_one(dynamic: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target, step = fixed_target()
    twin, forward = Twins(target, dynamic, 1, 9), target.model.forward

    def spoiled(*given: Any, **named: Any) -> Any:
        output = forward(*given, **named)
        output.logits[:, 0] = torch.nan
        return output

    monkeypatch.setattr(target.model, "forward", spoiled)
    passed = step.run([Step(1, DraftTree.from_chain([2]), twin.fixed, draw=Draw(1))])
    assert passed is not None
    drawn = passed[0].drawn
    assert drawn is not None
    assert drawn[0] == -1
    assert drawn[1] >= 0


def test_data_dependent_calls_are_found_with_their_line() -> None:
    values = torch.arange(4)
    assert data_dependent_call(lambda: values + 1) is None
    for call in (values[1].item, values.nonzero, lambda: values[values > 1], lambda: bool(values[1] > 0)):
        found = data_dependent_call(call)
        assert found is not None
    assert found.startswith("_local_scalar_dense in test_step.py:")


# Shapes and memory


def test_shapes() -> None:
    assert [width_for(count) for count in (1, 2, 4, 5, 16, 17, 64)] == [1, 4, 4, 8, 16, 32, 64]
    assert [shown_for(columns) for columns in (1, 64, 65, 1100)] == [64, 64, 128, 2048]
    assert [widest(count) for count in (1, 8, 9, 16, 17, 32, 33)] == [64, 64, 32, 32, 16, 16, 0]
    assert StepShape(0, 8, 16, 128, 1).positions == 128


def test_the_buffers_have_the_bytes_of_the_formula() -> None:
    _, step = fixed_target()
    cache = step.graphs
    shape = StepShape(0, 1, 1, 64, step.cache.generation, layers=(1, 2))
    buffers = cache.allocated(step.forward(shape))
    inputs = step.inputs.device
    total = sum(buffer.nbytes for buffer in (*buffers, inputs))
    assert total == step_bytes(VOCABULARY, 4, 10, 2 * 32 * 4)
    assert buffers.logits.shape[0] == MOST_POSITIONS
