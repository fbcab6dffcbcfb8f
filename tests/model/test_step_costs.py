"""The tree size that pays, by hand-made costs."""

from __future__ import annotations

import copy
import itertools
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from reader_rag.draft.step_table import StepTable
from reader_rag.draft.tree import DraftTree
from reader_rag.model import step_costs
from reader_rag.model.step_costs import DraftBackoff, StepCosts, load_costs, measure
from reader_rag.model.target import Target


def costs_of(rows: Sequence[int], base: Sequence[float], slope: Sequence[float] = ()) -> StepCosts:
    """Costs by the rows of a step."""
    return StepCosts(StepTable((1,), tuple(n - 1 for n in rows), (tuple(base),), context_seconds=tuple(slope)))


def _chain(*probabilities: float) -> DraftTree:
    """A chain with the given path probabilities."""
    tree = DraftTree.from_chain(range(len(probabilities)))
    return DraftTree.of(
        tree.tokens,
        tree.parents,
        tree.depths,
        np.array(probabilities),
        tree.sources,
        tree.positions,
        tree.match_lengths,
    )


def _best_size(costs: StepCosts, tree: DraftTree, context: int = 0, acceptance_ratio: float = 1.0) -> int:
    (size,) = costs.best_sizes([tree], [context], [acceptance_ratio])
    return size


def test_times_between_measured_sizes_are_interpolated() -> None:
    costs = costs_of([1, 3, 5], [1.0, 2.0, 6.0])
    assert costs.seconds()[:5].tolist() == [1.0, 1.5, 2.0, 4.0, 6.0]


def test_beyond_the_largest_size_a_row_adds_what_it_added_from_half_of_that_size_on() -> None:
    costs = costs_of([1, 4, 6, 10, 12], [1.0, 2.0, 7.0, 9.0, 10.0])
    assert costs.seconds()[11:15].tolist() == [10.0, 10.5, 11.0, 11.5]
    steep = costs_of([1, 4], [1.0, 100.0])  # one of both was measured in a bad moment
    assert steep.seconds()[7] == 200.0
    flat = costs_of([1, 64], [1.0, 1.0])  # as on a GPU
    assert flat.seconds()[511] == 1.0


def test_a_table_of_several_rows_says_the_same_beyond_its_sizes() -> None:
    table = StepTable((1,), (0, 3, 5, 9, 11), ((1.0, 2.0, 7.0, 9.0, 10.0),))
    assert table.times(1, 40).tolist() == StepCosts(table).seconds()[:40].tolist()


def test_the_text_before_adds_to_every_size_what_was_measured_there() -> None:
    costs = costs_of([1, 3], [1.0, 2.0], [0.001, 0.003])
    assert costs.seconds(1000)[:3].tolist() == pytest.approx([2.0, 3.5, 5.0])


def test_a_larger_step_is_never_taken_to_be_cheaper() -> None:
    costs = costs_of([1, 2, 3], [2.0, 1.0, 3.0])
    assert costs.seconds()[:3].tolist() == [1.0, 1.0, 3.0]


def test_a_long_text_makes_wide_steps_dear() -> None:
    costs = costs_of([1, 2, 3], [1.0, 1.1, 1.2], [0.0, 0.001, 0.002])
    tree = _chain(0.6, 0.5)
    assert _best_size(costs, tree, context=0) == 2
    assert _best_size(costs, tree, context=2000) == 0


def test_a_low_acceptance_ratio_makes_trees_smaller() -> None:
    costs = costs_of([1, 2, 3], [1.0, 1.2, 1.4])
    tree = _chain(0.6, 0.4)
    assert _best_size(costs, tree) == 2
    assert _best_size(costs, tree, acceptance_ratio=0.5) == 1  # 0.3, then 0.4 * 0.25
    assert _best_size(costs, tree, acceptance_ratio=0.1) == 0


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
    costs = costs_of(rows, [1.0 + seconds_per_row * (r - 1) for r in rows])
    assert _best_size(costs, _chain(0.9, 0.8, 0.3, 0.05)) == size


def test_an_empty_tree_is_a_plain_step() -> None:
    assert _best_size(costs_of([1, 2], [1.0, 1.0]), DraftTree.empty()) == 0


def test_nodes_beyond_what_was_measured_are_verified_while_they_pay() -> None:
    costs = costs_of([1, 2, 3], [1.0, 1.2, 1.4])
    assert _best_size(costs, _chain(0.9, 0.8, 0.7, 0.6)) == 4  # 4/1.8 is more than 2.7/1.4
    assert _best_size(costs, _chain(0.9, 0.8, 0.3, 0.1)) == 2  # 3/1.6 is less


def test_rows_of_the_heads_product_take_the_heads_share_of_what_a_wider_pass_takes() -> None:
    costs = costs_of([1, 2, 4, 8], [1.0, 1.0, 1.0, 3.0])
    assert costs.head_seconds(6, 2, 0, 0.5).tolist() == [0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    assert costs.head_seconds(2, 0, 0, 0.5).tolist() == [0.0, 0.5, 0.5]  # a product of its own reads all weights
    assert costs.head_seconds(2, 600, 0, 0.5).tolist() == [0.0, 0.0, 0.0]  # beyond what costs are known for


def test_positions_of_prompts_are_computed_where_they_take_next_to_nothing() -> None:
    stairs = costs_of([1, 4, 5, 8], [1.0, 1.0, 2.0, 2.0])
    assert stairs.best_asked(16, 2, 0, 0.2, 1) == 2  # the rows up to the next stair
    assert stairs.best_asked(1, 2, 0, 0.2, 1) == 1
    assert stairs.best_asked(0, 2, 0, 0.2, 1) == 0
    assert stairs.best_asked(3, 3, 0, 0.001, 1) == 3  # the head is next to nothing of the pass
    flat = costs_of([1, 64], [1.0, 1.0])
    assert flat.best_asked(16, 9, 0, 0.9, 8) == 16
    assert flat.best_asked(16, 0, 0, 0.9, 1) == 0  # a product of its own is most of a pass
    assert flat.best_asked(16, 0, 0, 0.01, 1) == 16
    assert flat.best_asked(16, 0, 0, 0.01, 16) == 0  # and what it saves is a part of one sequence of many


def test_a_busy_machine_is_slower_at_all_sizes_alike() -> None:
    costs = costs_of([1, 8], [1.0, 4.0])
    before = costs.seconds()
    for _ in range(50):
        costs.observe(1, 0, 2.0)
        costs.observe(8, 0, 8.0)
    assert costs.seconds() == pytest.approx(2.0 * before, rel=0.05)
    assert costs.seconds()[7] / costs.seconds()[0] == pytest.approx(4.0, rel=0.05)


def test_a_size_that_costs_otherwise_than_measured_is_found_out() -> None:
    costs = costs_of([1, 8], [1.0, 8.0])
    for _ in range(300):
        costs.observe(1, 0, 1.0)
        costs.observe(8, 0, 2.0)
    assert costs.seconds()[7] / costs.seconds()[0] == pytest.approx(2.0, rel=0.1)


def test_an_observation_moves_the_measured_sizes_beside_it() -> None:
    costs = costs_of([1, 5, 9, 13], [1.0, 1.0, 1.0, 1.0])
    for _ in range(200):
        costs.observe(1, 0, 1.0)
        costs.observe(7, 0, 3.0)
    seconds = costs.seconds() / costs.seconds()[0]
    assert seconds[6] == pytest.approx(3.0, rel=0.2)
    assert seconds[12] >= seconds[8] > 1.5


def test_a_bad_measurement_is_found_out() -> None:
    costs = costs_of([1, 2, 3, 5], [1.0, 100.0, 100.0, 100.0])  # a stalled moment made drafts look hopeless
    tree = _chain(0.9, 0.8, 0.7, 0.6)
    sizes = []
    for _ in range(900):
        sizes.append(_best_size(costs, tree))
        costs.observe(sizes[-1] + 1, 0, 1.1 if sizes[-1] else 1.0)
    assert sizes[0] == 0
    assert sizes[-1] == 4


def test_the_next_size_is_tried_in_case_it_was_measured_in_a_bad_moment() -> None:
    costs = costs_of([1, 2, 3, 4, 5], [1.0, 1.0, 1.1, 1.5, 2.0])
    tree, sizes = _chain(0.7, 0.49, 0.34, 0.24), []
    for _ in range(300):
        sizes.append(_best_size(costs, tree))
        costs.observe(sizes[-1] + 1, 0, 2.0 if sizes[-1] == 4 else 1.0)
    assert sizes[:31] == [2] * 31
    assert sizes[31] == 3
    assert sizes[-8:].count(3) >= 7


def test_where_no_draft_pays_most_steps_go_without_one() -> None:
    costs, backoff = costs_of([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0]), DraftBackoff()
    drafted = verified = 0
    for _ in range(400):
        if not backoff.skips_draft():
            size = _best_size(costs, _chain(0.1, 0.05, 0.01))
            (saved_s,), token_s = costs.savings([1], [size], [0])
            backoff.observe(saved_s - 0.01, token_s)
            drafted += 1
            verified += bool(size)
    assert 80 < drafted < 200
    assert 1 <= verified < 10  # a few are tried all the same


def test_an_accepted_token_ends_the_backoff() -> None:
    backoff = DraftBackoff()
    for _ in range(16):
        backoff.observe(-0.1, 1.0)
    assert [backoff.skips_draft() for _ in range(8)].count(True) == 6
    backoff.observe(0.9, 1.0)
    assert not any(backoff.skips_draft() for _ in range(8))


def test_drafts_that_save_less_than_they_take_are_given_up_though_some_tokens_are_accepted() -> None:
    """Each saves 0.05 in two steps, and takes 0.1."""
    kept, given_up = DraftBackoff(), DraftBackoff()
    for step in range(32):
        kept.observe(0.3 if step % 2 else -0.1, 1.0)
        given_up.observe(0.05 if step % 2 else -0.1, 1.0)
    assert not any(kept.skips_draft() for _ in range(8))
    assert any(given_up.skips_draft() for _ in range(8))


def test_what_the_drafts_of_a_pass_saved() -> None:
    costs = costs_of([1, 2, 3, 4, 5], [1.0, 1.2, 1.4, 1.6, 1.8])
    saved, token_s = costs.savings([3], [4], [0])
    assert saved == pytest.approx([2.0 - 0.8])
    assert token_s == 1.0
    assert costs.savings([1], [0], [0]) == ([0.0], 1.0)
    saved, token_s = costs.savings([2, 1], [2, 1], [0, 0])
    assert token_s == pytest.approx(0.6)
    assert saved == pytest.approx([0.6 - 0.4, -0.2])
    padded, _ = costs.savings([2, 1], [1, 0], [0, 0], padded=True)
    assert padded == pytest.approx([0.6 - 0.4, 0.0])


def test_the_nodes_of_several_texts_are_one_pool() -> None:
    # Three texts; a position more costs a third of the plain step.
    costs = costs_of([1, 3, 12], [1.0, 1.0, 4.0])
    sure, likely, wild = _chain(0.99, 0.99, 0.99), _chain(0.7, 0.7), _chain(0.1, 0.1)
    assert costs.best_sizes([wild, sure, wild], [0, 0, 0]) == [0, 0, 0]
    cheap = costs_of([1, 3, 12], [1.0, 1.0, 1.5])
    assert cheap.best_sizes([wild, sure, likely], [0, 0, 0]) == [0, 3, 2]
    assert cheap.best_sizes([wild, sure, DraftTree.empty()], [0, 0, 0]) == [0, 3, 0]
    # A low ratio lowers deep nodes most; what comes after them in their tree waits too.
    assert cheap.best_sizes([wild, sure, likely], [0, 0, 0], [1.0, 1.0, 0.2]) == [0, 3, 0]


@pytest.mark.parametrize("seed", range(20))
def test_the_pool_is_spent_as_by_trying_all_ways(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chains = [np.cumprod(rng.uniform(0.2, 0.99, rng.integers(0, 5))) for _ in range(3)]
    trees = [_chain(*chain) for chain in chains]
    seconds = np.cumsum(rng.uniform(0.02, 0.5, 16)) + 1.0
    costs = costs_of(list(range(1, 17)), seconds)

    def speed(sizes: Sequence[int]) -> float:
        gain = sum(float(chain[:size].sum()) for chain, size in zip(chains, sizes, strict=True))
        return (3 + gain) / float(seconds[3 + sum(sizes) - 1])

    best = max(itertools.product(*(range(len(chain) + 1) for chain in chains)), key=speed)
    assert speed(costs.best_sizes(trees, [0, 0, 0])) == pytest.approx(speed(best))


def test_texts_that_are_padded_take_as_many_positions_as_the_largest_tree() -> None:
    # Nine positions cost no more than three, a tenth is dear.
    costs = costs_of([1, 9, 10, 12], [1.0, 1.0, 9.0, 9.0])
    deep, flat = _chain(0.9, 0.9, 0.9, 0.9), _chain(0.3, 0.3, 0.3)
    assert costs.best_sizes([deep, flat, flat], [0, 0, 0]) == [4, 2, 0]
    # Padded, the width of one is that of all, and what fits into it costs nothing.
    assert costs.best_sizes([deep, flat, flat], [0, 0, 0], padded=True) == [2, 2, 2]


def test_more_texts_than_costs_are_known_for_are_decoded_plainly() -> None:
    costs = costs_of([1, 2], [1.0, 1.0])
    assert costs.best_sizes([_chain(0.9)] * 600, [0] * 600) == [0] * 600


def test_a_stall_of_the_machine_is_not_learned() -> None:
    costs = costs_of([1, 2], [1.0, 1.0])
    costs.observe(2, 0, 100.0)
    assert costs.seconds()[1] == 1.0


@pytest.mark.slow
def test_a_target_is_measured_for_every_size_of_tree(tiny_model: object) -> None:
    costs = StepCosts(measure(Target(tiny_model), max_nodes=12))  # type: ignore[arg-type]
    seconds = costs.seconds()
    assert costs.max_nodes == 12
    assert (seconds > 0).all()
    assert (np.diff(seconds) >= 0).all()
    assert (costs.seconds(1000) >= seconds).all()


def test_costs_are_measured_once_for_a_model_and_a_device(tmp_path: Path, tiny_model: object) -> None:
    target = Target(tiny_model)  # type: ignore[arg-type]
    first = load_costs(target, 6, tmp_path / "deeper")
    again = load_costs(target, 6, tmp_path / "deeper")
    (path,) = (tmp_path / "deeper").iterdir()
    assert StepTable.read(path) == first.table == again.table
    assert again.seconds(100).tolist() == first.seconds(100).tolist()
    assert load_costs(target, 9, tmp_path / "deeper").max_nodes == 9  # larger trees are measured anew


def in_half(model: LlamaForCausalLM) -> LlamaForCausalLM:
    return copy.deepcopy(model).bfloat16()


def with_another_weight(model: LlamaForCausalLM) -> LlamaForCausalLM:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight += 1.0
    return changed


@pytest.mark.parametrize("change", [in_half, with_another_weight])
def test_another_type_or_other_weights_have_costs_of_their_own(
    change: Callable[[LlamaForCausalLM], LlamaForCausalLM], tmp_path: Path, tiny_model: LlamaForCausalLM
) -> None:
    load_costs(Target(tiny_model), 3, tmp_path)
    load_costs(Target(change(tiny_model)), 3, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("cpu_name", lambda: "another CPU"), ("cpu_features", lambda: frozenset({"avx2", "avx512f", "avx512vnni"}))],
)
def test_another_processor_has_costs_of_its_own(
    name: str, value: Any, tmp_path: Path, tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "cpu_name", lambda: "a CPU")
    monkeypatch.setattr(step_costs, "cpu_features", lambda: frozenset({"avx2", "avx512f"}))
    load_costs(Target(tiny_model), 3, tmp_path)
    (path,) = tmp_path.iterdir()
    assert StepTable.read(path).device.startswith(f"cpu a CPU, {platform.machine()} avx2 avx512f, ")
    monkeypatch.setattr(step_costs, name, value)
    load_costs(Target(tiny_model), 3, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_where_the_first_measurement_finds_int8_slower_one_warning_says_so(
    tmp_path: Path, tiny_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(step_costs, "warn_if_int8_is_slower", lambda model, compiled: asked.append(compiled))
    for _ in range(2):
        load_costs(Target(tiny_model), 3, tmp_path)
    assert asked == [Target(tiny_model).cpu is not None]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"key": {"model": "tiny"}, "rows": [1, 4], "base": [1, 2], "slope": [0, 0]}',  # of reader_rag 0.1
        '{"format": "reader-rag step costs", "version": 1, "model": "other", "device": "other", "vllm": "", '
        '"rows": [1], "drafted": [0, 6], "seconds": [[1.0, 2.0]]}',
    ],
)
def test_a_file_of_something_else_is_measured_again(tmp_path: Path, content: str, tiny_model: object) -> None:
    target = Target(tiny_model)  # type: ignore[arg-type]
    measured = load_costs(target, 6, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    costs = load_costs(target, 6, tmp_path)
    assert (costs.max_nodes, costs.table.model) == (6, measured.table.model)
    assert StepTable.read(path) == costs.table


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, tiny_model: object) -> None:
    (tmp_path / "file").write_text("")
    assert load_costs(Target(tiny_model), 3, tmp_path / "file").max_nodes == 3  # type: ignore[arg-type]
    assert [held.name for held in tmp_path.iterdir()] == ["file"]
