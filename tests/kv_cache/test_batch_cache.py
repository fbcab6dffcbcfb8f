"""Several sequences share a cache: each gets the entries that a cache of its own would have, in bounded memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from costs_stub import EverythingPays
from hypothesis import given
from hypothesis import strategies as st
from random_trees import random_tokens, random_tree
from tiny_models import EAGER_ONLY, VOCABULARY, long_rope, make_model

from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.draft import DraftTree
from reader_rag.engine.engine import Engine
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.engine.step import run_step
from reader_rag.kv_cache import batch_cache
from reader_rag.kv_cache.batch_cache import BatchCache, Policy
from reader_rag.kv_cache.batch_layer import BatchLayer, Pass
from reader_rag.kv_cache.tree_cache import TreeCache
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.model.interface import Step, prefill
from reader_rag.model.plain_target import PlainCache
from reader_rag.model.target import Target

HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 3, 5
OF_A_POSITION = HEADS * (KEY_WIDTH + VALUE_WIDTH) * 4
"""Bytes in one layer."""
POLICIES: tuple[Policy, ...] = ("offset", "column")
both_policies = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def states(marks: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that are all `mark` and values that are all `100 * mark`, [sequences, heads, rows, width]."""
    column = torch.tensor(marks, dtype=torch.float32)[:, None, :, None]
    keys = column.expand(-1, HEADS, -1, KEY_WIDTH)
    return keys, (100 * column).expand(-1, HEADS, -1, VALUE_WIDTH)


def marks_of(keys: torch.Tensor, values: torch.Tensor) -> list[list[int]]:
    """The marks that keys and values were made of."""
    assert (keys == keys[:, :1, :, :1]).all()
    assert (values == 100 * keys[:, :1, :, :1]).all()
    return keys[:, 0, :, 0].int().tolist()


def sequence_of(
    marks: Sequence[int], layers: Sequence[int] = (0,), count: int = 1, capacity: int = 10_000
) -> TreeCache:
    """A sequence of its own with these positions, in `layers` of `count`."""
    sequence = TreeCache(count, capacity)
    for layer in layers:
        sequence.update(*states([marks]), layer)
    sequence.commit(list(range(len(marks))))
    return sequence


def write(
    batch: BatchCache, sequences: Sequence[TreeCache], rows: Sequence[Sequence[int]]
) -> tuple[Pass, list[list[int]]]:
    """A pass over layer 0 that writes those marks, equally many for each sequence; what each sees, in their order."""
    with batch.pass_over(sequences, [len(marks) for marks in rows]) as now:
        shown = marks_of(*batch.update(*states([rows[n] for n in now.order]), 0))
    return now, [shown[row] for row in np.argsort(now.order)]


def committed(now: Pass, shown: Sequence[Sequence[int]]) -> list[list[int]]:
    """What was committed of each sequence, in its order, as a pass saw it."""
    rows = np.argsort(now.order)
    return [
        [marks[c] for c in np.argsort(now.keys[row]) if now.keys[row, c] >= 0]
        for row, marks in zip(rows, shown, strict=True)
    ]


def bound(batch: BatchCache, layers: int = 1) -> int:
    return int(1.25 * batch.longest + batch.step) * batch.sequences * OF_A_POSITION * layers


# What lies where


def test_by_offset_every_sequence_writes_behind_its_own_and_what_is_kept_is_moved_there() -> None:
    batch = BatchCache(1, "offset")
    a, b = sequence_of([1, 2]), sequence_of([11, 12, 13])
    now, shown = write(batch, [a, b], [[3, 4], [14, 15]])
    assert now.starts.tolist() == [2, 3]
    assert shown == [[1, 2, 3, 4, 0], [11, 12, 13, 14, 15]]
    assert now.keys[:, :3].tolist() == [[0, 1, -2], [0, 1, 2]]  # below zero: to be seen through `visible` alone
    a.commit([1])
    b.commit([0, 1])
    assert (a.length, b.length) == (3, 5)
    assert batch.positions[:, :5].tolist() == [[0, 1, -1, 2, -1], [0, 1, 2, 3, 4]]
    now, shown = write(batch, [a, b], [[5], [16]])
    assert now.starts.tolist() == [3, 5]
    assert shown == [[1, 2, 4, 5, 0, 0], [11, 12, 13, 14, 15, 16]]
    assert batch.rearrangements == 0


def test_by_column_all_write_side_by_side_and_what_is_kept_stays_there() -> None:
    batch = BatchCache(1, "column")
    a, b = sequence_of([1, 2]), sequence_of(range(11, 31))
    now, shown = write(batch, [a, b], [[3, 4], [31, 32]])
    assert now.starts.tolist() == [20, 20]
    assert shown == [[1, 2, *[0] * 18, 3, 4], [*range(11, 33)]]
    moved = batch.bytes_moved
    a.commit([1])
    b.commit([0])
    assert batch.positions[:, 18:23].tolist() == [[-1, -1, -1, 2, -1], [18, 19, 20, -1, -1]]
    now, shown = write(batch, [a, b], [[5], [33]])
    assert now.starts.tolist() == [22, 22]
    assert shown == [[1, 2, *[0] * 18, 3, 4, 5], [*range(11, 32), 32, 33]]
    assert batch.bytes_moved == moved


def test_by_column_all_is_moved_together_when_the_columns_run_out() -> None:
    batch = BatchCache(1, "column")
    a, b = sequence_of([1, 2]), sequence_of(range(11, 51))
    for step in range(3):
        write(batch, [a, b], [[100 + step, 0], [200 + step, 0]])
        a.commit([0])
        b.commit([0])
    write(batch, [a], [[103, 104]])  # behind its own last column
    a.commit([1, 0])
    write(batch, [a], [[105, 106]])
    a.commit([0, 1])
    assert batch.columns == 47
    assert batch.rearrangements == 0
    moved = batch.bytes_moved
    now, shown = write(batch, [a, b], [[107, 108], [203, 204]])
    assert (batch.columns, batch.rearrangements) == (47, 1)
    assert now.starts.tolist() == [43, 43]
    assert shown[0][:9] == [1, 2, 100, 101, 102, 103, 104, 105, 106]
    assert now.keys[0, :10].tolist() == [0, 1, 2, 3, 4, 6, 5, 7, 8, -1]  # in any order: what counts is the position
    assert batch.bytes_moved - moved == 7 * OF_A_POSITION  # those of the shorter sequence behind its context
    assert shown[1] == [*range(11, 51), 200, 201, 202, 203, 204]


@both_policies
def test_the_last_row_moves_to_where_one_has_left(policy: Policy) -> None:
    batch = BatchCache(1, policy)
    a, b, c = sequence_of([1, 2]), sequence_of([11, 12]), sequence_of([21, 22])
    write(batch, [a, b, c], [[3], [13], [23]])
    b.release()
    c.commit([0])  # what it wrote before the other left
    a.commit([0])
    assert [batch.row_of(sequence) for sequence in (a, c)] == [0, 1]
    assert batch.positions[:, :3].tolist() == [[0, 1, 2], [0, 1, 2]]
    d = sequence_of([31])
    in_any_order = write(batch, [d, c, a], [[32], [24], [4]])
    assert committed(*in_any_order) == [[31], [21, 22, 23], [1, 2, 3]]
    assert b.length == 0


@both_policies
def test_a_row_that_another_sequence_had_holds_nothing_of_it(policy: Policy) -> None:
    batch = BatchCache(1, policy)
    sequences = [sequence_of(range(100 * n, 100 * n + 50)) for n in range(20)]
    write(batch, sequences, [[7]] * 20)
    sequences[-1].release()
    assert batch.rows == 20  # what is free is less than may be allocated beyond the longest sequence
    _, shown = write(batch, [*sequences[:-1], sequence_of([1])], [[2]] * 20)
    assert [mark for mark in shown[-1] if mark] == [1, 2]


@both_policies
def test_sequences_that_sit_out_lose_nothing(policy: Policy) -> None:
    batch = BatchCache(1, policy)
    a, b, c = sequence_of([1, 2]), sequence_of([11, 12, 13]), sequence_of([21])
    write(batch, [a, b, c], [[3, 4], [14, 15], [22, 23]])
    write(batch, [b], [[16, 17]])  # before the others say what they keep of theirs
    a.commit([0, 1])
    c.commit([1])
    b.commit([1])
    assert committed(*write(batch, [c, a], [[24], [5]])) == [[21, 23], [1, 2, 3, 4]]  # not side by side
    assert committed(*write(batch, [b], [[18]])) == [[11, 12, 13, 17]]
    c.commit([0])
    assert committed(*write(batch, [a, b, c], [[5], [18], [25]])) == [[1, 2, 3, 4], [11, 12, 13, 17], [21, 23, 24]]


@both_policies
def test_layers_that_hold_nothing_of_their_own_keep_step(policy: Policy) -> None:
    batch = BatchCache(2, policy)
    sequences = [sequence_of([1, 2], [0], 2), sequence_of([11], [0], 2)]
    write(batch, sequences, [[3], [12]])
    for sequence in sequences:
        sequence.commit([0])
        assert [layer.length for layer in sequence.tree_layers] == [sequence.length] * 2
    assert not batch.batch_layers[1].is_initialized
    assert batch.nbytes == 2 * batch.columns * OF_A_POSITION


@both_policies
def test_sequences_that_hold_nothing_yet_may_join(policy: Policy) -> None:
    batch = BatchCache(1, policy)
    a, b = TreeCache(1, 20), TreeCache(1, 20)
    assert write(batch, [a, b], [[1], [11]])[1] == [[1], [11]]
    a.commit([0])
    b.commit([0])
    assert write(batch, [a, b, sequence_of([21, 22])], [[2], [12], [23]])[1][0][:1] == [1]


def test_a_batch_that_grows_goes_on_by_the_other_policy() -> None:
    batch = BatchCache(1)
    sequences = [sequence_of([100 * n, 100 * n + 1]) for n in range(1, 16)]
    marks = [[int(102 + 100 * n), 7, 8] for n in range(15)]
    for count in (15, 16, 15):
        sequences += [sequence_of([1600, 1601]) for _ in range(count - len(sequences))]
        for sequence in sequences[count:]:
            sequence.release()
        del sequences[count:]
        seen = committed(*write(batch, sequences, [*marks, [1, 7, 8]][:count]))
        assert batch.policy == ("offset" if count == 16 else "column")
        assert [len(row) for row in seen] == [sequence.length for sequence in sequences]
        assert seen[4][:2] == [500, 501]
        for sequence in sequences:
            sequence.commit([0, 2])


def test_a_sequence_does_not_grow_beyond_what_it_was_made_for() -> None:
    batch = BatchCache(1)
    a, b = sequence_of([1, 2], capacity=3), sequence_of([11])
    with pytest.raises(IndexError, match="4 positions do not fit a cache of 3"):
        write(batch, [a, b], [[3, 4], [12, 13]])
    assert batch.sequences == 0
    with batch.pass_over([a, b], [1, 2]):  # padding does not count
        pass


# Memory


@both_policies
def test_a_sequence_that_joins_gives_its_own_tensors_back_and_the_last_to_leave_gives_all(policy: Policy) -> None:
    batch = BatchCache(2, policy)
    sequences = [sequence_of(range(30), [0, 1], 2) for _ in range(3)]
    with batch.pass_over(sequences, [4, 1, 2]):
        pass
    assert [layer.nbytes for sequence in sequences for layer in sequence.tree_layers] == [0] * 6
    assert batch.nbytes == 3 * sequences[0].nbytes == 6 * batch.columns * OF_A_POSITION
    for sequence in sequences:
        sequence.release()
        assert batch.nbytes <= bound(batch, 2)
    assert batch.nbytes == batch.sequences == 0
    assert sequences[0].nbytes == 0


@both_policies
def test_a_sequence_that_was_dropped_leaves_with_the_next_pass(policy: Policy) -> None:
    batch = BatchCache(1, policy)
    a, b = sequence_of(range(50)), sequence_of([11])
    write(batch, [a, b], [[3], [12]])
    b.commit([0])
    del a
    gc.collect()
    assert committed(*write(batch, [b], [[13]])) == [[11, 12]]
    assert batch.sequences == 1
    assert batch.nbytes <= bound(batch)


@both_policies
def test_a_sequence_released_by_another_thread_during_a_pass_leaves_after_it(policy: Policy) -> None:
    batch = BatchCache(1, policy)
    a, b = sequence_of([1]), sequence_of([11])
    with batch.pass_over([a, b], [1, 1]):
        closer = threading.Thread(target=a.release)
        closer.start()
        closer.join(timeout=10)
        assert not closer.is_alive()
        assert batch.sequences == 2
        assert marks_of(*batch.update(*states([[2], [12]]), 0)) == [[1, 2], [11, 12]]
    assert batch.sequences == 1
    b.commit([0])
    assert write(batch, [b], [[13]])[1] == [[11, 12, 13]]


@both_policies
def test_memory_grows_by_no_more_than_a_layer_beyond_what_it_grows_to(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, layers = BatchCache(8, policy), range(8)
    sequences = [sequence_of(range(40), layers, 8, capacity=40) for _ in range(4)]
    held: list[int] = []
    made = BatchLayer._made

    def watched(self: BatchLayer, like: torch.Tensor) -> torch.Tensor:
        new = made(self, like)
        own = sum(layer.nbytes for sequence in sequences for layer in sequence.tree_layers)
        held.append(batch.nbytes + own + new.nbytes * (1 if like.shape[3] == KEY_WIDTH else 8 / VALUE_WIDTH))
        return new

    monkeypatch.setattr(BatchLayer, "_made", watched)
    for sequence in sequences:
        sequence.capacity = 1000
    for _ in range(30):
        with batch.pass_over(sequences, [2] * 4):
            pass
        assert max(held, default=0) <= batch.nbytes * 9 / 8
        for sequence in sequences:
            sequence.commit([0, 1])
    assert len(held) > 16


def test_by_column_an_entry_is_moved_a_constant_number_of_times() -> None:
    moves = {}
    for steps in (100, 800):
        random, batch = np.random.default_rng(0), BatchCache(1, "column")
        sequences = [sequence_of([0] * int(random.integers(20, 60))) for _ in range(4)]
        for _ in range(steps):
            with batch.pass_over(sequences, [9] * 4):
                pass
            for sequence in sequences:
                accepted = min(int(random.geometric(0.4)) - 1, 8)
                sequence.commit([0, *sorted(1 + random.choice(8, accepted, replace=False))])
            assert batch.nbytes <= bound(batch)
        assert batch.rearrangements > 5
        moves[steps] = batch.bytes_moved / (sum(sequence.length for sequence in sequences) * OF_A_POSITION)
    assert max(moves.values()) < 7


def test_rows_that_are_replaced_in_a_large_batch_are_seldom_moved_all() -> None:
    batch = BatchCache(1, "offset")
    sequences = [sequence_of(range(100)) for _ in range(32)]
    for _ in range(3):
        write(batch, sequences, [[7]] * 32)
        sequences[3].release()
        sequences[3] = sequence_of(range(100))
    assert batch.bytes_moved < (32 + 3 * 3) * 110 * OF_A_POSITION


# Against a list for each sequence


class Twin:
    """A cache and, for every sequence, the list of marks that it must hold."""

    def __init__(self, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batch = BatchCache(3, policy)
        self.sequences: list[tuple[TreeCache, list[int]]] = []
        self.mark = 0
        self.failing: int | None = None
        made = BatchLayer._made

        def may_fail(layer: BatchLayer, like: torch.Tensor) -> torch.Tensor:
            if self.failing is not None:
                self.failing -= 1
                if self.failing < 0:
                    raise torch.OutOfMemoryError
            return made(layer, like)

        monkeypatch.setattr(BatchLayer, "_made", may_fail)

    def new(self, length: int) -> None:
        marks = self.marks(length)
        self.sequences.append((sequence_of(marks, [0, 2], 3), marks))  # the layer between shares another's keys

    def marks(self, count: int) -> list[int]:
        self.mark += count
        return list(range(self.mark - count + 1, self.mark + 1))

    def held(self, sequence: TreeCache, n: int) -> list[int]:
        layer = self.batch.batch_layers[n]
        sequences = [ref() for ref in layer.layout.sequences]
        if sequence not in sequences:
            own = sequence.tree_layers[n]
            assert own.keys is not None
            assert own.values is not None
            return marks_of(own.keys[:, :, : own.length], own.values[:, :, : own.length])[0]
        row = sequences.index(sequence)
        entries = layer.layout.entries[row]
        columns = torch.from_numpy(np.argsort(entries, kind="stable")[np.sort(entries) >= 0])
        assert layer.keys is not None
        assert layer.values is not None
        assert np.sort(entries)[np.sort(entries) >= 0].tolist() == list(range(sequence.length))
        return marks_of(layer.keys[row : row + 1, :, columns], layer.values[row : row + 1, :, columns])[0]

    def check(self) -> None:
        for sequence, marks in self.sequences:
            assert sequence.length == len(marks)
            if marks:
                assert self.held(sequence, 0) == self.held(sequence, 2) == marks
        assert not self.batch.batch_layers[1].is_initialized
        if self.failing is None:
            assert self.batch.nbytes <= bound(self.batch, 2)
            assert self.batch.columns <= 1.25 * self.batch.longest + self.batch.step

    def verify(self, chosen: Sequence[int], random: np.random.Generator) -> dict[int, list[int]]:
        """A pass over those sequences; what it wrote of each."""
        counts = random.integers(1, 8, len(chosen)).tolist()
        sequences = [self.sequences[n][0] for n in chosen]
        with self.batch.pass_over(sequences, counts) as now:
            rows = [self.marks(now.width) for _ in chosen]
            for layer in (0, 2):
                shown = marks_of(*self.batch.update(*states([rows[n] for n in now.order]), layer))
                for place, n in enumerate(now.order):
                    seen = {int(p): mark for p, mark in zip(now.keys[place], shown[place], strict=True) if p >= 0}
                    assert [seen[p] for p in sorted(seen)] == self.sequences[chosen[n]][1]
                    assert shown[place][now.starts[place] :][: now.width] == rows[n]
        return {n: marks[:count] for n, marks, count in zip(chosen, rows, counts, strict=True)}

    def keep(self, written: dict[int, list[int]], random: np.random.Generator) -> None:
        for n, marks in written.items():
            rows = np.flatnonzero(random.random(len(marks)) < 0.4).tolist()
            if random.random() < 0.2:
                rows = rows[::-1]
            self.sequences[n][0].commit(rows)
            self.sequences[n][1].extend(marks[row] for row in rows)

    def leave(self, n: int, *, released: bool) -> None:
        sequence, _ = self.sequences.pop(n)
        if released:
            sequence.release()

    def some(self, random: np.random.Generator) -> list[int]:
        order = random.permutation(len(self.sequences))
        return order[: random.integers(1, len(order) + 1)].tolist()


STEPS = st.tuples(
    st.sampled_from(["pass", "pass", "pass", "join", "leave", "drop", "two", "fail"]),
    st.integers(0, 1 << 20),
)


@both_policies
@given(steps=st.lists(STEPS, min_size=5, max_size=40))
def test_every_sequence_has_what_a_list_of_its_own_would_hold(policy: Policy, steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, torch.inference_mode():
        twin = Twin(policy, monkeypatch)
        for kind, seed in steps:
            random = np.random.default_rng(seed)
            if kind == "join" or not twin.sequences:
                for _ in range(int(random.integers(1, 4))):
                    twin.new(int(random.integers(0, 40)))
                continue
            if kind in ("leave", "drop"):
                twin.leave(int(random.integers(len(twin.sequences))), released=kind == "leave")
            elif kind == "pass":
                twin.keep(twin.verify(twin.some(random), random), random)
            else:  # a pass, another or one that fails for want of memory, and only then what is kept of the first
                chosen = twin.some(random)
                others = [n for n in range(len(twin.sequences)) if n not in chosen]
                written = twin.verify(chosen, random)
                if kind == "fail":
                    twin.new(int(random.integers(50, 100)))
                    twin.failing = int(random.integers(0, 4))
                    try:
                        written |= twin.verify([*others, len(twin.sequences) - 1], random)
                    except torch.OutOfMemoryError:
                        twin.check()
                elif others:
                    written |= twin.verify(others, random)
                twin.keep(written, random)
                if random.random() < 0.5 and len(twin.sequences) > 1:
                    twin.leave(int(random.integers(len(twin.sequences))), released=True)
                twin.check()
                if twin.failing is not None:
                    twin.failing = None
                    twin.keep(twin.verify(twin.some(random), random), random)
            gc.collect(0)
            if kind != "drop":
                twin.check()


# Whole passes


FAMILIES = ["Llama", "GPT2", "Gemma2", "Gemma3Text", "Llama4Text", "Mistral", "DeepseekV3"]


def family(name: str) -> Target:
    return Target(make_model(name, attention="eager" if name in EAGER_ONLY else None), forward="torch")


@pytest.fixture
def policy_of_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setattr(batch_cache, "default_policy", lambda _: request.param)
    return request.param  # type: ignore[no-any-return]


every_policy = pytest.mark.parametrize("policy_of_all", POLICIES, indirect=True)


def path_rows(tree: DraftTree, node: int) -> list[int]:
    """The rows of a pass on the path to a node."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node + 1)
        node = int(tree.parents[node])
    return [0, *path]


class Pair:
    """A sequence that is decoded among others, and its twin that is decoded alone."""

    def __init__(self, target: Target, seed: int, length: int) -> None:
        self.target = target
        self.among, self.alone = target.new_cache(150, 12), target.new_cache(150, 12)
        for cache in (self.among, self.alone):
            prefill(target, random_tokens(seed, length, VOCABULARY), cache)

    def accept(self, step: Step, logits: torch.Tensor, node: int) -> None:
        expected = self.target.verify(step.root, step.tree, self.alone)
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        for cache in (self.among, self.alone):
            cache.commit(path_rows(step.tree, node))
        assert self.among.length == self.alone.length


@every_policy
@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_verified_together_have_the_logits_of_each_alone(name: str, policy_of_all: Policy) -> None:
    target, random = family(name), np.random.default_rng(0)
    pairs = [Pair(target, n, 9 + 7 * n) for n in range(4)]  # shorter and longer than the windows
    for round_ in range(10):
        if round_ == 4:
            pairs.pop(1).among.release()
        if round_ == 6:
            pairs.append(Pair(target, 9, 30))
        chosen = [pair for pair in pairs if random.random() < 0.8] or pairs[:1]
        steps = [
            Step(5 + round_, random_tree(100 * round_ + n, int(random.integers(0, 10)), VOCABULARY), pair.among)
            for n, pair in enumerate(chosen)
        ]
        for pair, step, logits in zip(chosen, steps, target.verify_batch(steps), strict=True):
            pair.accept(step, logits, int(random.integers(-1, len(step.tree))))
    assert target._batch.policy == policy_of_all
    for pair in pairs[1:]:
        pair.among.release()
    step = Step(7, random_tree(3, 5, VOCABULARY), pairs[0].among)  # the others have left
    pairs[0].accept(step, target.verify_batch([step])[0], 2)
    pairs[0].accept(step, target.verify(step.root, step.tree, step.cache), 4)
    pairs[0].among.release()
    assert target._batch.nbytes == 0


def test_sequences_are_verified_in_one_pass_and_one_alone_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    target = family("Llama")
    pairs = [Pair(target, n, 9) for n in range(3)]
    passes: list[tuple[int, ...]] = []
    forward = target.model.forward
    monkeypatch.setattr(
        target.model, "forward", lambda ids, **inputs: (passes.append(tuple(ids.shape)), forward(ids, **inputs))[1]
    )
    target.verify_batch([Step(5, random_tree(0, 4, VOCABULARY), pairs[0].among)])
    assert pairs[0].among.batch is None
    target.verify_batch([Step(5, random_tree(n, n, VOCABULARY), pair.among) for n, pair in enumerate(pairs)])
    assert passes == [(1, 5), (3, 3)]
    with pytest.raises(ValueError, match="no prefill is possible"):
        prefill(target, [1], pairs[0].among)


@pytest.mark.parametrize(("name", "fixed", "branches"), [("Llama", FixedShape(9, 32), True), ("Bloom", None, False)])
def test_where_no_tree_is_verified_every_sequence_has_a_pass_of_its_own(
    name: str, fixed: FixedShape | None, branches: bool
) -> None:
    target = Target(make_model(name), fixed, forward="torch", branches=branches)
    assert not target.pads
    pairs = [Pair(target, n, 9 + n) for n in range(2)]
    steps = [Step(5, DraftTree.from_chain([6, 7, 8]), pair.among) for pair in pairs]
    for pair, step, logits in zip(pairs, steps, target.verify_batch(steps), strict=True):
        pair.accept(step, logits, 1)
        assert pair.among.batch is None


def test_a_sequence_behind_the_switch_of_its_rotation_does_not_turn_the_others() -> None:
    target = Target(long_rope(switch=40), forward="torch")
    pairs = [Pair(target, n, length) for n, length in enumerate([20, 50, 10, 60])]
    for round_ in range(3):
        steps = [Step(5 + round_, DraftTree.from_chain([6, 7]), pair.among) for pair in pairs]
        for pair, step, logits in zip(pairs, steps, target.verify_batch(steps), strict=True):
            pair.accept(step, logits, 1)


def test_a_pass_that_fails_loses_nothing() -> None:
    target = family("Gemma3Text")
    pairs = [Pair(target, n, 15 + n) for n in range(3)]

    def steps() -> list[Step]:
        return [Step(5, random_tree(n, 6, VOCABULARY), pair.among) for n, pair in enumerate(pairs)]

    for pair, step, logits in zip(pairs, steps(), target.verify_batch(steps()), strict=True):
        pair.accept(step, logits, 4)

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("device lost")

    hook = target.model.model.layers[3].register_forward_pre_hook(failing)
    with pytest.raises(RuntimeError, match="device lost"):
        target.verify_batch(steps())
    hook.remove()
    apart = [target.verify_batch([step])[0] for step in steps()]  # all, before any says what it keeps
    for pair, step, logits in zip(pairs, steps(), apart, strict=True):
        pair.accept(step, logits, 3)


@every_policy
def test_committed_positions_can_be_set_for_timing(policy_of_all: Policy) -> None:
    target = family("Llama")
    caches = [target.new_cache(200, 4) for _ in range(2)]
    for cache in caches:
        prefill(target, [5], cache)
    steps = [Step(6, DraftTree.from_chain([7, 8]), cache) for cache in caches]
    for length in (1, 150, 20):
        target.verify_batch(steps)
        for cache in caches:
            cache.set_committed(length)
            assert cache.length == length
        assert target._batch.longest == length
        assert target._batch.columns <= 1.25 * length + 3
        assert [len(logits) for logits in target.verify_batch(steps)] == [3, 3]


@every_policy
def test_requests_advanced_together_answer_as_each_alone_and_give_their_rows_back(
    policy_of_all: Policy, tiny_model: Any, tiny_tokenizer: Any
) -> None:
    engine = Engine(tiny_model, tiny_tokenizer, forward="torch", draft=DraftConfig(max_nodes=12))
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    prompts = ["the rain in the", "one of the stations and the other of the stations and", "a"]

    requests = [
        engine.requests.build(engine.encode(prompt), SamplingParams(max_tokens=10 + 8 * n, ignore_eos=True))
        for n, prompt in enumerate(prompts)
    ]
    alone = [engine.generate(request.prompt, request.params).token_ids for request in requests]
    sequences = [DecodeSequence(engine.context, request) for request in requests]
    for sequence in sequences:
        while sequence.prefilling:
            sequence.prefill()
    while running := [sequence for sequence in sequences if sequence.finish is None]:
        assert run_step(engine.context, running) == {}
        for sequence in running:
            if sequence.finish is not None:
                sequence.release()
    assert [sequence.result.token_ids for sequence in sequences] == alone
    assert isinstance(engine.target, Target)
    assert engine.target._batch.bytes_moved > 0
    assert engine.target._batch.nbytes == 0


@both_policies
def test_a_sequence_that_is_rolled_back_goes_on_from_there(policy: Policy) -> None:
    batch = BatchCache(1, policy)
    first, second = sequence_of([1, 2, 3, 4]), sequence_of([11, 12])
    write(batch, [first, second], [[5, 6], [13, 14]])
    first.commit([0, 1])
    second.commit([0])
    first.roll_back(3)
    now, shown = write(batch, [first, second], [[7, 8], [15, 16]])
    assert committed(now, shown) == [[1, 2, 3], [11, 12, 13]]
    first.commit([0, 1])
    now, shown = write(batch, [first, second], [[9], [17]])
    assert committed(now, shown) == [[1, 2, 3, 7, 8], [11, 12, 13]]
    with pytest.raises(ValueError, match="no roll back to 6 of 5 positions"):
        first.roll_back(6)


def test_a_plain_cache_gives_its_state_back() -> None:
    cache = PlainCache({"state": torch.zeros(3)})
    assert cache.nbytes == 12
    cache.release()
    assert (cache.nbytes, cache.length, cache.state) == (0, 0, {})


@both_policies
def test_what_is_kept_of_a_sequence_among_others_is_what_is_kept_of_it_alone(policy: Policy) -> None:
    batch, sequence, other = BatchCache(2, policy), sequence_of([1, 2, 3], (0,), 2), sequence_of([7], (0,), 2)
    write(batch, [sequence, other], [[4, 5, 6, 8], [9, 9, 9, 9]])
    sequence.commit([0, 2, 3])
    other.commit([0])
    held, nothing = sequence.states(1, 6)
    assert nothing is None  # a layer that shares another's keys
    assert held is not None
    assert marks_of(*held) == [[2, 3, 4, 6, 8]]
    again = TreeCache(2, 10)
    again.restore([sequence.states(0, 4), sequence.states(4, 6)])
    assert again.length == 6
    assert marks_of(*[states[:, :, :6] for states in (again.tree_layers[0].keys, again.tree_layers[0].values)]) == [
        [1, 2, 3, 4, 6, 8]
    ]
