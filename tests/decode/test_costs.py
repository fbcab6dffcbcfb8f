"""The tree size that pays, by hand-made costs."""

from __future__ import annotations

import numpy as np
import pytest

from reader_rag.decode.costs import StepCosts
from reader_rag.decode.step import Target
from reader_rag.draft.tree import DraftTree


def _chain(*probabilities: float) -> DraftTree:
    """A chain with the given path probabilities."""
    tree = DraftTree.from_chain(range(len(probabilities)))
    return DraftTree(
        tree.tokens,
        tree.parents,
        tree.depths,
        np.array(probabilities),
        tree.sources,
        tree.positions,
        tree.match_lengths,
    )


def test_times_between_measured_sizes_are_interpolated() -> None:
    costs = StepCosts([1, 3, 5], [1.0, 2.0, 6.0])
    assert costs.seconds[1:].tolist() == [1.0, 1.5, 2.0, 4.0, 6.0]


def test_a_larger_step_is_never_taken_to_be_cheaper() -> None:
    costs = StepCosts([1, 2, 3], [2.0, 1.0, 3.0])
    assert costs.seconds[1:].tolist() == [1.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("seconds_per_row", "size"),
    [
        (0.0, 4),  # rows are free: all of them
        (0.3, 2),  # 2.7/1.6 is more than 1.9/1.3 and than 3/1.9
        (0.75, 1),  # 1.9/1.75 is more than 2.7/2.5
        (2.0, 0),  # 1.9/3 is less than 1: plain
    ],
)
def test_nodes_are_verified_while_they_pay(seconds_per_row: float, size: int) -> None:
    rows = [1, 2, 3, 4, 5]
    costs = StepCosts(rows, [1.0 + seconds_per_row * (r - 1) for r in rows])
    assert costs.best_size(_chain(0.9, 0.8, 0.3, 0.05)) == size


def test_an_empty_tree_is_a_plain_step() -> None:
    assert StepCosts([1, 2], [1.0, 1.0]).best_size(DraftTree.empty()) == 0


def test_trees_beyond_what_was_measured_are_cut() -> None:
    assert StepCosts([1, 2, 3], [1.0, 1.0, 1.0]).best_size(_chain(0.9, 0.8, 0.7, 0.6)) == 2


def test_observations_move_the_nearest_sizes() -> None:
    costs = StepCosts([1, 9], [1.0, 1.0])
    for _ in range(500):
        costs.observe(9, 3.0)
    assert costs.seconds[9] == pytest.approx(3.0, abs=1e-3)
    assert costs.seconds[1] == 1.0
    assert costs.seconds[5] == pytest.approx(2.0, abs=1e-3)


def test_a_faster_step_is_believed_sooner_than_a_slower_one() -> None:
    costs = StepCosts([1, 2], [1.0, 2.0])
    costs.observe(2, 3.0)
    assert costs.seconds[2] == pytest.approx(2.05)
    costs.observe(2, 1.05)
    assert costs.seconds[2] == pytest.approx(1.55)


def test_a_bad_measurement_is_found_out() -> None:
    costs = StepCosts([1, 2, 3, 5], [1.0, 100.0, 100.0, 100.0])  # a stalled moment made drafts look hopeless
    tree = _chain(0.9, 0.8, 0.7, 0.6)
    sizes = []
    for _ in range(400):
        sizes.append(costs.best_size(tree))
        costs.observe(sizes[-1] + 1, 1.1 if sizes[-1] else 1.0)
    assert sizes[0] == 0
    assert sizes[-1] == 4


def test_a_stall_of_the_machine_is_not_learned() -> None:
    costs = StepCosts([1, 2], [1.0, 1.0])
    costs.observe(2, 100.0)
    assert costs.seconds[2] == 1.0


def test_a_target_is_measured_for_every_size_of_tree(tiny_model: object) -> None:
    costs = StepCosts.measure(Target(tiny_model), max_nodes=12)  # type: ignore[arg-type]
    seconds = costs.seconds[1:]
    assert len(seconds) == 13
    assert (seconds > 0).all()
    assert (np.diff(seconds) >= 0).all()
