"""Chains: they follow the best token from position to position, and the best tokens of all rows are verified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reader_rag.datastore import Datastore
from reader_rag.draft import Calibration, ContextIndex, TreeBuilder
from reader_rag.draft.chains import ChainDrafter, DatastoreSearch, as_lists
from reader_rag.draft.kernels.pool import share_out
from reader_rag.draft.step_table import StepTable

FREE = StepTable((1,), (0, 1), ((1.0, 1.0),))
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def drafts(
    drafter: ChainDrafter, texts: Sequence[Sequence[int]], came: Sequence[int] = (), limits: Sequence[int] = ()
) -> list[list[int]]:
    """What is to be verified of each row, for a batch whose rows hold these texts and nothing else."""
    array = np.zeros((len(texts), 200), np.int32)
    for row, text in zip(array, texts, strict=True):
        row[: len(text)] = text
    ones = np.ones(len(texts), np.int64)
    chains = drafter.draft(
        array,
        np.arange(len(texts)),
        np.array([len(text) for text in texts]),
        np.array(came) if len(came) else ones,
        np.array(limits) if len(limits) else 100 * ones,
    )
    return as_lists(*chains)


def chain(text: Sequence[int], longest: int = 8) -> list[int]:
    return drafts(ChainDrafter(1, longest, FREE, threads=1), [text])[0]


def test_a_chain_copies_what_followed_the_end_before() -> None:
    assert chain([1, 2, 3, 4, 5, 6, 1, 2], longest=4) == [3, 4, 5, 6]


def test_a_chain_may_run_into_itself() -> None:
    assert chain([9, 1, 2, 1, 2], longest=4) == [1, 2]


def test_where_nothing_is_repeated_nothing_is_drafted() -> None:
    assert chain([1, 2, 3]) == []


def test_the_prior_goes_on_where_nothing_is_copied() -> None:
    prior = np.full((10, 8), -1, np.int32)
    prior[[3, 4, 7], 0] = 4, 5, 8
    drafter = ChainDrafter(1, 4, FREE, prior=prior, threads=1)
    assert drafts(drafter, [[1, 2, 3]]) == [[4, 5]]
    # What stands in the text counts more.
    assert drafts(drafter, [[7, 9, 1, 7]]) == [[9, 1, 7, 8]]


@given(TEXTS)
def test_a_chain_takes_the_most_probable_child_at_each_node_of_the_whole_tree(text: list[int]) -> None:
    builder = TreeBuilder(max_nodes=1000, max_depth=5, min_probability=0.005, calibration=Calibration(learns=False))
    index = ContextIndex(text[:-1])
    index.extend(text[-1:])
    tree = builder.build(index)
    path: list[int] = []
    node = -1
    while len(children := np.flatnonzero(tree.parents == node)):
        node = int(children[np.argmax(tree.probabilities[children])])
        path.append(node)
    assert chain(text, longest=5) == tree.tokens[path].tolist()


def test_a_chain_is_the_same_whatever_else_is_in_the_batch() -> None:
    texts = [[1, 2, 3, 4, 1, 2], [5, 6, 7, 5, 6], [8, 9], [3, 3, 4, 3, 3]]
    alone = [chain(text, longest=5) for text in texts]
    assert alone[0] == [3, 4, 1, 2]
    assert drafts(ChainDrafter(4, 5, FREE, threads=1), texts) == alone
    many = ChainDrafter(200, 5, FREE, threads=3)
    assert drafts(many, texts * 50) == alone * 50


def test_a_limit_of_a_row_is_kept() -> None:
    texts = [[1, 2, 3, 4, 5, 1], [1, 2, 3, 4, 5, 1]]
    assert drafts(ChainDrafter(2, 8, FREE, threads=1), texts, limits=[2, 3]) == [[2, 3], [2, 3, 4]]


class TestWhatPays:
    def test_nothing_is_drafted_where_it_costs_more_than_it_brings(self) -> None:
        dear = StepTable((1,), (0, 1), ((1.0, 3.0),))
        assert drafts(ChainDrafter(1, 8, dear, threads=1), [[1, 2, 3, 4, 5, 6, 1, 2, 3]]) == [[]]

    def test_a_pool_goes_to_the_most_probable_tokens(self) -> None:
        # The first text repeats seven tokens, the second one. Each position costs a fifth of a plain step.
        costs = StepTable((1, 2), (0, 1), ((1.0, 1.2), (1.0, 1.4)))
        long = [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 1, 2, 3, 4, 5, 6, 7]
        short = [31, 32, 33, 34, 35, 31]
        first, second = drafts(ChainDrafter(2, 3, costs, threads=1), [long, short])
        assert first == [8, 9, 20]
        assert second == []

    def test_a_low_acceptance_ratio_shortens_what_is_verified_until_it_rises_again(self) -> None:
        costs = StepTable((1,), (0, 8), ((1.0, 1.8),))
        drafter = ChainDrafter(1, 8, costs, threads=1)
        text = [*range(100, 120), *range(100, 103)]
        first = len(drafts(drafter, [text])[0])
        assert first > 2
        lengths = []
        for token in range(200, 206):  # never what was drafted, and then again the beginning of what is known
            text += [token, *range(100, 103)]
            drafts(drafter, [text[:-3]], came=[1])
            lengths.append(len(drafts(drafter, [text], came=[3])[0]))
        assert lengths[-1] < first
        for token in range(103, 112):
            text.append(token)
            lengths.append(len(drafts(drafter, [text], came=[1])[0]))
        assert max(lengths[-4:]) > lengths[5]

    @given(
        st.lists(st.lists(st.floats(0.01, 0.99), max_size=5), min_size=1, max_size=4),
        st.lists(st.floats(0.01, 2.0), min_size=24, max_size=24),
        st.sampled_from([0.0, 0.02, 0.5]),
    )
    def test_no_other_choice_of_lengths_brings_more_tokens_a_second(
        self, chances: list[list[float]], gaps: list[float], least_gain: float
    ) -> None:
        rows = len(chances)
        times = np.cumsum(gaps)
        paths = np.zeros((rows, 5))
        for k, row in enumerate(chances):
            paths[k, : len(row)] = np.cumprod(row)
        drafted = np.array([len(row) for row in chances])
        chosen = np.empty(rows, np.int64)
        share_out(paths, drafted, np.ones(rows), times, least_gain, chosen)

        def rate(lengths: Sequence[int]) -> float:
            gain = sum(float(paths[k, :n].sum()) for k, n in enumerate(lengths))
            return float((rows + gain) / times[rows + sum(lengths) - 1])

        plain = rate([0] * rows)
        best = max(rate(lengths) for lengths in np.ndindex(*(drafted + 1).tolist()))
        needed = (1 + least_gain) * plain
        assume(abs(best - needed) > 1e-9 * needed or not least_gain)  # else rounding decides
        if best > needed:
            assert rate(chosen.tolist()) == pytest.approx(best)
        else:
            assert rate(chosen.tolist()) == pytest.approx(plain)


class TestOtherTexts:
    def test_a_datastore_is_searched_behind_enough_equal_tokens(self, tmp_path: Path) -> None:
        with Datastore.open(tmp_path, vocabulary=100, tokenizer="t") as store:
            store.add("a", [10, 11, 12, 13, 14, 15, 16, 17])
            search = DatastoreSearch(store.searcher([""]), min_match=4)
            drafter = ChainDrafter(2, 3, FREE, search=search, threads=1)
            assert drafts(drafter, [[1, 10, 11, 12, 13], [1, 2, 12, 13]]) == [[14, 15, 16], []]

    def test_outputs_of_ended_texts_are_drafted_from_only_if_that_is_asked_for(self) -> None:
        for kept, expected in ((0, []), (1000, [7, 8, 9])):
            drafter = ChainDrafter(1, 3, FREE, max_ended_tokens=kept, threads=1)
            drafts(drafter, [[1, 2, 6, 7, 8, 9]], came=[4])  # 1 2 is the prompt
            for token in range(100):  # texts that have nothing in common replace it
                drafts(drafter, [[50 + token]])
            assert drafts(drafter, [[3, 6]]) == [expected]
            assert drafts(drafter, [[3, 2]]) == [[]]  # a prompt is not kept
