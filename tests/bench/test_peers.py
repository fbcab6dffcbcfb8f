"""Other drafters on hand-made answers whose steps are written out; `a b | c` are two steps, of two tokens and one."""

from __future__ import annotations

import sys

import pytest

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.peers import best_copy_steps, replay_peers

LIBRARY = (
    "vllm-suffix",
    "suffix-decoding",
    "suffix-decoding tuned tree",
    "suffix-decoding, warm",
    "suffix-decoding tuned tree, warm",
)

CHAINS = tuple(f"reader chain of {width}" for width in (4, 8, 10, 16))


def trace(prompt: tuple[int, ...], output: tuple[int, ...], category: str = "a") -> Trace:
    return Trace("same", category, prompt, output)


def mat(name: str, *traces: Trace, category: str = "a") -> float:
    return replay_peers(traces, lambda _: None)[0][name][category]


# The end 1 2 3 occurred at 3, its end 2 3 first at 0.
LONGER = trace((2, 3, 8, 1, 2, 3, 4, 5, 1, 2, 3), (4, 5, 6))
# Of the end 9 1 only its last token occurred before.
SINGLE = trace((1, 2, 9, 1), (2, 9, 3))
# The end 1 2 was followed by 3 first, by 4 later.
TWICE = trace((1, 2, 3, 1, 2, 4, 1, 2), (4, 5))


def test_prompt_lookup_copies_after_the_first_place_of_two_tokens_or_one() -> None:
    # 2 3 gives 8: 4 is emitted alone; then 3 4 gives 5 1 2 3 4.           4 | 5 6
    assert mat("prompt-lookup", LONGER) == 1.5
    # 1 gives 2 9 1.                                                       2 9 3
    assert mat("prompt-lookup", SINGLE) == 3.0
    # 1 2 gives 3; then 2 4 gives 1 2 4.                                   4 | 5
    assert mat("prompt-lookup", TWICE) == 1.0


def test_the_vllm_rule_takes_the_longest_end_of_two_tokens_or_more_at_its_first_place() -> None:
    # 1 2 3 gives 4 5 1 2 3.                                               4 5 6
    assert mat("vllm-ngram", LONGER) == 3.0
    # Nothing ends as 9 1; then 1 2 gives 9 1 2.                           2 | 9 3
    assert mat("vllm-ngram", SINGLE) == 1.5
    # 1 2 gives 3; then 1 2 4 gives 1 2 4.                                 4 | 5
    assert mat("vllm-ngram", TWICE) == 1.0


def test_our_chains_copy_what_followed_the_longest_end_as_far_as_they_may() -> None:
    # 98 99 gives 1..4; 3 4 5 then gives 6..9 and so on.                    1..5 | 6..10 | 11..15
    counted = tuple(range(1, 16))
    assert mat("reader chain of 4", trace((98, 99, *counted, 98, 99), counted)) == 5.0
    assert mat("reader chain of 16", trace((98, 99, *counted, 98, 99), counted)) == 15.0
    # 2 3 of LONGER gives 4 5 after 1 2 3, 8 after 2 3 alone.               4 5 6
    assert mat("reader chain of 4", LONGER) == 3.0


def test_the_tree_of_prompt_lookup_has_a_chain_for_each_of_the_latest_next_tokens() -> None:
    tree = "prompt-lookup-tree (dejavuu)"
    # 1 2 3 gives 4 5 1 2 3.                                               4 5 6
    assert mat(tree, LONGER) == 3.0
    # 1 2 gives 4 1 2, which came later, and 3 1 2 4 1.                    4 5   and   3 5
    assert mat(tree, TWICE) == 2.0
    assert mat(tree, trace(TWICE.prompt, (3, 5))) == 2.0
    # Of three next tokens the two latest are drafted: 5 and 4, not 3.     4 9   and   3 | 9
    thrice = (1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2)
    assert mat(tree, trace(thrice, (4, 9))) == 2.0
    assert mat(tree, trace(thrice, (3, 9))) == 1.0
    assert mat("prompt-lookup-tree of 64", trace(thrice, (3, 9))) == 2.0


def test_the_tree_of_prompt_lookup_drafts_eight_tokens_in_all() -> None:
    # 98 99 gives 1..8; 8 9 then gives 10..15.                             1..9 | 10..15
    counted = tuple(range(1, 16))
    assert mat("prompt-lookup-tree (dejavuu)", trace((98, 99, *counted, 98, 99), counted)) == 7.5


@pytest.mark.parametrize("name", ["prompt-lookup", "vllm-ngram"])
def test_the_rules_draft_ten_tokens(name: str) -> None:
    # 98 99 gives 1..10; 10 11 then gives 12..15.                          1..11 | 12..15
    counted = tuple(range(1, 16))
    assert mat(name, trace((98, 99, *counted, 98, 99), counted)) == 7.5


@pytest.mark.parametrize("name", ["prompt-lookup", "vllm-ngram"])
def test_a_category_divides_all_its_tokens_by_all_its_steps(name: str) -> None:
    # Three tokens in one step and three in two, in either order; two in two.
    traces = (LONGER, trace(TWICE.prompt, TWICE.output, "b"), SINGLE)
    assert mat(name, *traces) == 6 / 3
    assert mat(name, *traces, category="b") == 1.0


@pytest.mark.parametrize(
    ("held", "after_match", "anywhere"),
    [
        # After a match: nothing follows an earlier 5; after 3 stood 4 5; nothing follows a 9; after 1 stood 2.
        #   3 | 4 9 | 1 | 2        From anywhere: 3 4 is copied, then 1 2.        3 4 9 | 1 2
        (trace((1, 2, 3, 4, 5), (3, 4, 9, 1, 2)), 4, 2),
        # After 1 stood 7, and 2 3: the best is taken.                            2 3 4
        (trace((1, 7, 1, 2, 3, 1), (2, 3, 4)), 1, 1),
        # What is copied must stand there already: after the first 1 stands a single 1, later three; from anywhere two.
        #   1 1 | 1 1              From anywhere:                                 1 1 1 | 1
        (trace((1, 1), (1, 1, 1, 1)), 2, 2),
        # At most forty tokens.                                                   1..41 | 42..50
        (trace((99, *range(1, 51), 99), tuple(range(1, 51))), 2, 2),
    ],
)
def test_the_oracles_copy_what_agrees_longest(held: Trace, after_match: int, anywhere: int) -> None:
    assert best_copy_steps(held, after_match=True) == after_match
    assert best_copy_steps(held, after_match=False) == anywhere


def test_the_oracle_copies_from_other_texts_too_but_not_across_their_ends() -> None:
    held = trace((1, 2), (3, 4, 5, 6))
    assert best_copy_steps(held, after_match=True) == 4
    assert best_copy_steps(held, after_match=True, known=[(2, 3, 4, 5, 6)]) == 1
    assert best_copy_steps(held, after_match=True, known=[(2, 3), (4, 5, 6)]) == 2


def test_the_oracles_have_rows_of_their_own() -> None:
    held = trace((1, 2, 3, 4, 5), (3, 4, 9, 1, 2))
    assert mat("oracle: best copy after a match", held) == 5 / 4
    assert mat("oracle: best copy", held) == 5 / 2


def test_without_the_library_its_rows_are_left_out_and_a_line_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    reported: list[str] = []
    results, notes = replay_peers([SINGLE], reported.append)
    assert list(results) == [
        "prompt-lookup",
        "prompt-lookup-tree (dejavuu)",
        "prompt-lookup-tree of 64",
        "vllm-ngram",
        *CHAINS,
        "oracle: best copy after a match",
        "oracle: best copy",
    ]
    assert reported == [f"{name}: a" for name in results]
    assert len(notes) == 1
    assert "pip install reader-rag[peers]" in notes[0]


class TestSuffixDecoding:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("arctic_inference")

    def test_its_rows_stand_between_the_rules_and_the_oracles(self) -> None:
        results, notes = replay_peers([SINGLE], lambda _: None)
        assert list(results)[4:-2] == [*CHAINS, *LIBRARY]
        assert notes == []

    def test_the_factor_bounds_the_draft_by_the_match(self) -> None:
        # 1 matches: the chain drafts 2, then 1 2 3 matches and it drafts 4 5 6.    2 3 | 4 5 6
        # The tree may draft four tokens for each that matched: 2 3 4 5.            2 3 4 5 6
        held = trace((1, 2, 3, 4, 5, 6, 7, 1), (2, 3, 4, 5, 6))
        assert mat("suffix-decoding", held) == 5 / 2
        assert mat("suffix-decoding tuned tree", held) == 5.0

    def test_a_tree_holds_both_continuations(self) -> None:
        # After 2 stood 3 and 4. Chain: 2, and the token after it is emitted anyway; the tree: 2 with 3 and 4 below.
        #   2 4 | 5                Tree: 2 4 5
        held = trace((1, 2, 3, 1, 2, 4, 1), (2, 4, 5))
        assert mat("suffix-decoding", held) == 3 / 2
        assert mat("suffix-decoding tuned tree", held) == 3.0

    def test_only_a_warm_one_drafts_from_earlier_answers_and_only_of_its_category(self) -> None:
        # The first answer repeats nothing: five steps. The second repeats the first.
        #   Cold: 3 | 4 | 5 | 6    Warm: 2 gives 3, then 2 3 4 gives 5 6.    3 4 | 5 6    Tuned: 3 4 5 6
        first, second = trace((1,), (2, 3, 4, 5, 6)), trace((9, 2), (3, 4, 5, 6))
        steps = dict(zip(LIBRARY, (9, 9, 9, 7, 6), strict=True))
        for name in LIBRARY:
            assert mat(name, first, second) == pytest.approx(9 / steps[name], abs=1e-4)
            assert mat(name, first, trace(second.prompt, second.output, "b"), category="b") == 1.0
