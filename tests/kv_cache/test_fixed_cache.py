"""The cache of the fixed step: rows that stay where they are, commits that the next pass makes, and a stated size."""

from __future__ import annotations

import gc

import pytest
import torch

from reader_rag.kv_cache.fixed_cache import FixedCache, Slots, power_of_two
from reader_rag.kv_cache.tree_cache import TreeCache

LAYERS, HEADS, WIDTH = 2, 3, 4
POSITION = 2 * LAYERS * HEADS * WIDTH * 4
"""Bytes of a position in float32."""


def filled(length: int, capacity: int = 40, mark: int = 0, silent: int | None = None) -> TreeCache:
    """A sequence whose position n has `mark` + n everywhere; a layer `silent` holds nothing of its own."""
    cache = TreeCache(LAYERS, capacity)
    states = (mark + torch.arange(length, dtype=torch.float32))[None, None, :, None].expand(1, HEADS, length, WIDTH)
    for n in range(LAYERS):
        if n != silent:
            cache.update(states, -states, n)
    cache.commit(list(range(length)))
    return cache


def positions(cache: TreeCache) -> list[int]:
    """What the committed positions hold, the same in keys and values of all layers."""
    found = [pair for pair in cache.states(0, cache.length) if pair is not None]
    for keys, values in found:
        assert torch.equal(keys, -values)
        assert torch.equal(keys, found[0][0])
    return [int(value) for value in found[0][0][0, 0, :, 0]]


def write(cache: FixedCache, sequence: TreeCache, mark: int, width: int, applies: bool = True) -> None:
    """A pass of a sequence that writes `mark` + n to its n-th position; it makes the moves of the last commit."""
    row = cache.row_of(sequence)
    assert row is not None
    rows = torch.tensor([[row]])
    if applies:
        moves = cache.moves_of(row) or [(cache.columns, cache.columns)]
        sources, targets = (torch.tensor([column]) for column in zip(*moves, strict=True))
        cache.write(rows, targets, cache.read(rows, sources))
        cache.moved([row])
    columns = torch.arange(sequence.length, sequence.length + width)[None]
    cache.slots = Slots(rows, columns, row, 16)
    states = (mark + torch.arange(width, dtype=torch.float32))[None, None, :, None].expand(1, HEADS, width, WIDTH)
    for n in range(LAYERS):
        keys, _ = cache.update(states, -states, n)
        assert keys.shape == (1, HEADS, 16, WIDTH)
    assert cache.get_seq_length() == 16 - width
    cache.slots = None


def test_a_sequence_joins_commits_scattered_positions_and_is_given_back() -> None:
    cache, sequence = FixedCache(LAYERS), filled(3)
    assert cache.join([sequence], 4) == [0]
    assert all(not layer.is_initialized for layer in sequence.tree_layers)
    write(cache, sequence, 100, 4)
    sequence.commit([0, 2, 3])
    assert cache.moves_of(0) == [(5, 4), (6, 5)]
    write(cache, sequence, 200, 2)
    sequence.commit([0])
    assert cache.moves_of(0) == []
    assert positions(sequence) == [0, 1, 2, 100, 102, 103, 200]
    write(cache, sequence, 300, 4)
    sequence.commit([0, 3])
    cache.give_back(sequence)  # with moves that no pass has made
    assert sequence.batch is None
    assert cache.sequences == 0
    assert positions(sequence) == [0, 1, 2, 100, 102, 103, 200, 300, 303]


def test_rows_are_closed_up_where_that_halves_a_pass() -> None:
    cache, sequences = FixedCache(LAYERS), [filled(3, mark=10 * n) for n in range(4)]
    assert cache.join(sequences, 4) == [0, 1, 2, 3]
    write(cache, sequences[3], 100, 4)
    sequences[3].commit([0, 2])
    sequences[0].release()
    assert cache.join([sequences[3]], 4) == [3]  # three sequences are in four rows anyway
    sequences[1].release()
    del sequences[1]
    assert cache.join([sequences[2]], 4) in ([0], [1])
    assert positions(sequences[2]) == [30, 31, 32, 100, 102]
    assert positions(sequences[1]) == [20, 21, 22]


def test_sequences_that_were_garbage_collected_free_their_rows() -> None:
    cache, sequence = FixedCache(LAYERS), filled(3)
    cache.join([sequence, filled(3)], 4)
    gc.collect()
    assert cache.sequences == 1
    assert cache.join([filled(2)], 4) == [1]
    assert cache.generation == 1


def test_the_buffers_have_the_bytes_of_the_formula_and_move_only_to_grow() -> None:
    cache, sequences = FixedCache(LAYERS), [filled(3) for _ in range(3)]
    for count, rows in ((1, 1), (2, 2), (3, 4)):
        assert cache.join(sequences[:count], 8) is not None
        assert (cache.rows, cache.columns) == (rows, 64)
        assert cache.nbytes == rows * (64 + 1) * POSITION
    generation, keys = cache.generation, cache.fixed_layers[0].keys
    assert cache.join([filled(3)], 8) == [3]
    assert cache.fixed_layers[0].keys is keys
    assert cache.generation == generation
    assert [power_of_two(number) for number in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_growing_keeps_what_is_written_and_what_is_committed() -> None:
    cache, sequence = FixedCache(LAYERS), filled(3)
    cache.join([sequence], 4)
    write(cache, sequence, 100, 4)
    sequence.commit([0, 2])
    write(cache, sequence, 200, 4)
    longer = filled(3, capacity=90, mark=50)
    assert cache.join([longer], 4) == [1]
    sequence.commit([0, 3])
    assert positions(sequence) == [0, 1, 2, 100, 102, 200, 203]
    assert positions(longer) == [50, 51, 52]


def test_a_bound_of_bytes_is_kept() -> None:
    cache = FixedCache(LAYERS, max_bytes=4 * 65 * POSITION)
    short = [filled(3) for _ in range(4)]
    assert cache.join(short, 8) == [0, 1, 2, 3]
    fifth = filled(3)
    assert cache.join([fifth], 8) is None
    assert fifth.batch is None
    assert positions(fifth) == [0, 1, 2]
    for sequence in short[1:]:
        sequence.release()
    long = filled(3, capacity=100)  # four rows of 128 columns would not fit, two do
    assert cache.join([long], 8) == [1]
    assert (cache.rows, cache.columns) == (2, 128)
    assert cache.nbytes <= 4 * 65 * POSITION
    assert positions(short[0]) == [0, 1, 2]


def test_rows_hold_nothing_of_who_was_there_before() -> None:
    cache, sequence = FixedCache(LAYERS), filled(30, mark=7)
    cache.join([sequence], 4)
    sequence.release()
    cache.join([filled(2)], 4)
    keys = cache.fixed_layers[0].keys
    assert keys is not None
    assert not keys[0, :, 2:].any()


def test_layers_without_keys_of_their_own_have_no_buffers() -> None:
    cache, sequence = FixedCache(LAYERS), filled(3, silent=1)
    cache.join([sequence], 4)
    assert cache.nbytes == (64 + 1) * POSITION // 2
    assert cache.states(sequence, 0, 3)[1] is None
    cache.give_back(sequence)
    assert positions(sequence) == [0, 1, 2]


def test_memory_that_is_full_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, sequence, longer = FixedCache(LAYERS), filled(3), filled(3, capacity=90)
    cache.join([sequence], 4)
    made = torch.Tensor.new_zeros
    calls = [0]

    def full(self: torch.Tensor, *size: int) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("full")
        return made(self, *size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", full)
        with pytest.raises(torch.OutOfMemoryError):
            cache.join([longer], 4)
    assert positions(sequence) == [0, 1, 2]
    assert positions(longer) == [0, 1, 2]
    assert cache.join([sequence, longer], 4) == [0, 1]
