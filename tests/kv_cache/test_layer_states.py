"""Outputs of chosen layers: the rows that a sequence commits, without an index that is copied to the device."""

from __future__ import annotations

import torch

from reader_rag.kv_cache.layer_states import LayerOutputs, LayerStates


def test_rows_are_kept_in_the_order_of_the_path() -> None:
    first, second = torch.arange(8 * 2 * 3).view(8, 2, 3).float(), torch.randn(5, 2, 3)
    for rows in ([0], [0, 1, 2], [0, 3, 4, 7], [0, 2, 5, 6], list(range(8))):
        outputs = LayerOutputs((1, 2))
        outputs.receive(first)
        outputs.commit(rows)
        outputs.receive(second)
        outputs.commit()
        states = outputs.take(40)
        assert states is not None
        assert states.first == 40 - len(rows) - 5
        assert torch.equal(states.rows, torch.cat([first[rows], second]))
        assert outputs.take(40) is None


def test_a_pass_that_is_not_committed_is_dropped() -> None:
    outputs = LayerOutputs((1,))
    outputs.receive(torch.zeros(3, 1, 2))
    outputs.receive(torch.ones(3, 1, 2))
    outputs.commit([0, 2])
    outputs.commit([0])
    states = outputs.take(2)
    assert states is not None
    assert torch.equal(states.rows, torch.ones(2, 1, 2))


def test_what_is_kept_does_not_hold_the_memory_of_a_whole_pass() -> None:
    outputs, rows = LayerOutputs((1,)), torch.zeros(64, 1, 8)
    outputs.receive(rows)
    outputs.commit([0, 1])
    assert [kept.untyped_storage().nbytes() for kept in outputs._kept] == [2 * 8 * 4]


def test_the_states_of_some_layers_lie_side_by_side() -> None:
    rows = torch.arange(2 * 3 * 2).view(2, 3, 2)
    states = LayerStates((0, 4, 9), 5, rows)
    assert torch.equal(states.of((0, 4, 9)), rows.flatten(1))
    assert torch.equal(states.of((9, 0)), torch.tensor([[4, 5, 0, 1], [10, 11, 6, 7]]))
