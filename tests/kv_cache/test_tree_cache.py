"""The cache holds what was committed, shows it with what was just written, and forgets the rest."""

from __future__ import annotations

import pytest
import torch

from reader_rag.kv_cache.tree_cache import TreeCache

HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 3, 5


def write(cache: TreeCache, marks: list[int], layer: int = 0) -> tuple[list[int], list[int]]:
    """Write positions whose keys are all `mark` and values all `100 * mark`; returns the marks that are shown."""
    column = torch.tensor(marks, dtype=torch.float32)[None, None, :, None]
    keys = column.expand(1, HEADS, len(marks), KEY_WIDTH)
    values = (100 * column).expand(1, HEADS, len(marks), VALUE_WIDTH)
    shown_keys, shown_values = cache.update(keys, values, layer)
    assert shown_keys.shape == (1, HEADS, shown_keys.shape[2], KEY_WIDTH)
    assert shown_values.shape == (1, HEADS, shown_keys.shape[2], VALUE_WIDTH)
    assert (shown_keys == shown_keys[:, :1, :, :1]).all()
    assert (shown_values == shown_values[:, :1, :, :1]).all()
    return shown_keys[0, 0, :, 0].int().tolist(), (shown_values[0, 0, :, 0] / 100).int().tolist()


def test_a_pass_sees_the_committed_positions_and_its_own() -> None:
    cache = TreeCache(1, 10)
    assert write(cache, [1, 2, 3]) == ([1, 2, 3], [1, 2, 3])
    cache.commit([0, 1, 2])
    assert cache.length == 3
    assert write(cache, [4, 5]) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])


def test_what_is_not_kept_is_overwritten_by_the_next_pass() -> None:
    cache = TreeCache(1, 10)
    write(cache, [1, 2, 3, 4])
    cache.commit([0])
    assert write(cache, [5]) == ([1, 5], [1, 5])
    assert write(cache, [6, 7]) == ([1, 6, 7], [1, 6, 7])
    cache.commit([])
    assert cache.length == 1


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([0, 1, 2, 3, 4], [10, 11, 12, 13, 14]),
        ([0, 1], [10, 11]),
        ([0, 2, 4], [10, 12, 14]),
        ([0, 3, 4], [10, 13, 14]),
        ([0, 2, 3, 4], [10, 12, 13, 14]),
        ([4], [14]),
        ([2, 1, 0], [12, 11, 10]),
    ],
)
def test_any_of_the_written_positions_can_be_kept_in_order(rows: list[int], kept: list[int]) -> None:
    cache = TreeCache(2, 10)
    for layer in range(2):
        write(cache, [1, 2], layer)
    cache.commit([0, 1])
    for layer in range(2):
        write(cache, [10, 11, 12, 13, 14], layer)
    cache.commit(rows)
    assert cache.length == 2 + len(rows)
    for layer in range(2):
        assert write(cache, [99], layer) == ([1, 2, *kept, 99], [1, 2, *kept, 99])


def test_the_whole_capacity_can_be_used_and_no_more() -> None:
    cache = TreeCache(1, 4)
    write(cache, [1, 2])
    cache.commit([0, 1])
    assert write(cache, [3, 4]) == ([1, 2, 3, 4], [1, 2, 3, 4])
    with pytest.raises(IndexError, match="5 positions do not fit a cache of 4"):
        write(cache, [3, 4, 5])
    assert write(cache, [6]) == ([1, 2, 6], [1, 2, 6])


def test_a_fixed_number_of_positions_can_be_shown_whatever_they_hold() -> None:
    cache = TreeCache(1, 6)
    cache.show(4)
    assert write(cache, [1, 2]) == ([1, 2, 0, 0], [1, 2, 0, 0])
    cache.commit([0])
    assert write(cache, [3]) == ([1, 3, 0, 0], [1, 3, 0, 0])
    cache.show(None)
    assert write(cache, [4]) == ([1, 4], [1, 4])


def test_positions_are_shown_without_copying_them() -> None:
    cache = TreeCache(1, 4)
    first, _ = cache.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), 0)
    cache.commit([0, 1])
    second, _ = cache.update(torch.ones(1, 1, 1, 3), torch.ones(1, 1, 1, 3), 0)
    assert first.data_ptr() == second.data_ptr()


def test_a_layer_that_holds_nothing_of_its_own_keeps_step() -> None:
    cache = TreeCache(2, 8)
    write(cache, [1, 2], layer=0)
    cache.commit([0, 1])
    write(cache, [3, 4, 5], layer=0)
    cache.commit([0, 2])
    assert [layer.length for layer in cache.tree_layers] == [4, 4]


def test_bytes_are_those_of_the_whole_capacity_in_the_models_type() -> None:
    cache = TreeCache(2, 8)
    assert cache.nbytes == 0
    for layer in range(2):
        write(cache, [1], layer)
    assert cache.nbytes == 2 * 8 * HEADS * (KEY_WIDTH + VALUE_WIDTH) * 4
    half = torch.ones(1, HEADS, 1, KEY_WIDTH, dtype=torch.bfloat16)
    in_half = TreeCache(1, 8)
    in_half.update(half, half, 0)
    assert in_half.nbytes == 8 * HEADS * 2 * KEY_WIDTH * 2


@torch.inference_mode()
def test_another_cache_begins_with_copies_of_the_first_positions() -> None:
    cache, other = TreeCache(2, 10), TreeCache(2, 6)
    write(cache, [1, 2, 3, 4, 5])
    cache.commit([0, 1, 2, 3])
    blocks = [cache.states(0, 2), cache.states(2, 4)]
    assert blocks[0][1] is None  # the second layer wrote nothing
    cache.set_committed(0)
    write(cache, [9, 9, 9, 9])
    other.restore(blocks)
    assert [layer.length for layer in other.tree_layers] == [4, 4]
    assert write(other, [6]) == ([1, 2, 3, 4, 6], [1, 2, 3, 4, 6])
    other.commit([0])
    with pytest.raises(IndexError, match="7 positions do not fit a cache of 6"):
        write(other, [7, 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_for_another_cache_in_one_piece_are_of_all_layers_at_once(dtype: torch.dtype) -> None:
    cache, other = (TreeCache.in_one_piece(2, capacity, HEADS, KEY_WIDTH, dtype) for capacity in (8, 5))
    keys = torch.randn(2, 1, HEADS, 4, KEY_WIDTH).to(dtype)
    for layer in range(2):
        cache.update(keys[layer], -keys[layer], layer)
    cache.commit([0, 1, 2])
    blocks = [cache.states(0, 1), cache.states(1, 3)]
    assert [len(block) for block in blocks] == [1, 1]
    cache.arrays[0][:] = 0
    other.restore(blocks)
    assert other.length == 3
    for layer in range(2):
        held = other.tree_layers[layer]
        assert held.keys is not None
        assert held.values is not None
        assert torch.equal(held.keys[:, :, :3], keys[layer][:, :, :3])
        assert torch.equal(held.values[:, :, :3], -keys[layer][:, :, :3])
        assert not held.keys[:, :, 3:].any()


def test_transformers_reads_lengths_from_it() -> None:
    cache = TreeCache(1, 10)
    assert cache.get_seq_length() == 0
    write(cache, [1, 2, 3])
    cache.commit([0, 1])
    assert cache.get_seq_length() == 2
    assert cache.get_mask_sizes(4, 0) == (6, 0)
    assert cache.is_sliding == [False]
