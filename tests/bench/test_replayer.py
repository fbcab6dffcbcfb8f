"""Replays of hand-made answers whose steps are written out; `a b | c` are two steps, of two tokens and one."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reader_rag.bench.inputs import Trace, TracePassage
from reader_rag.bench.replay.replayer import (
    BINS,
    ReplayConfig,
    Replayer,
    Step,
    Tally,
    check_best,
    read_best,
    replay,
)
from reader_rag.draft import Calibration, DraftTree, Occurrence
from reader_rag.draft.profile import Profile
from reader_rag.errors import ConfigError

COPIES = ReplayConfig(sources=("context",), calibrates=False)
SUCCESSORS = ReplayConfig(sources=("successor",), calibrates=False, eager=True)
BOTH = ReplayConfig(calibrates=False, eager=True)
BOTH_LAZILY = ReplayConfig(nodes=4, calibrates=False)


def trace(
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    passages: tuple[TracePassage, ...] = (),
    name: str = "t",
    category: str = "a",
) -> Trace:
    return Trace(name, category, prompt, output, passages)


def row(*tokens: int) -> list[int]:
    """Best next tokens, filled up with "no more"."""
    return [*tokens, *[-1] * (8 - len(tokens))]


def rows(held: Trace, best: Mapping[int, list[int]]) -> dict[str, NDArray[np.int32]]:
    """Best next tokens of a trace, by position; none at the others."""
    length = len(held.prompt) + len(held.output)
    return {held.id: np.array([row(*best.get(at, [])) for at in range(length)], np.int32)}


def giving_away(held: Trace) -> dict[str, NDArray[np.int32]]:
    """At every position, the token that comes next."""
    text = [*held.prompt, *held.output]
    return rows(held, {at: [text[at + 1]] for at in range(len(text) - 1)})


def run(
    held: Trace,
    config: ReplayConfig,
    best: Mapping[str, NDArray[np.int32]] | None = None,
    profile: Profile | None = None,
) -> tuple[list[Step], Tally]:
    tally = Tally()
    return Replayer(config, best, profile).run(held, tally), tally


def emitted(steps: list[Step]) -> list[tuple[int, ...]]:
    return [step.emitted for step in steps]


def drafted(step: Step) -> list[int]:
    return [int(token) for token in step.tree.tokens]


def paths(step: Step) -> list[list[int]]:
    """The tokens from the root to each node."""
    found: list[list[int]] = []
    for token, parent in zip(drafted(step), step.tree.parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def counts(tally: Tally) -> dict[str, Any]:
    """All that is counted, but for the times."""
    held = {field.name: getattr(tally, field.name) for field in fields(Tally) if field.name != "microseconds"}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in held.items()}


# Settings


def test_the_default_settings_draft_64_nodes_from_all_sources_and_are_cold() -> None:
    config = ReplayConfig()
    assert (config.nodes, config.sources, config.warm, config.eager) == (64, ("context", "successor"), False, False)
    assert (config.calibrates, config.merges) == (True, True)


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        (("passage",), "passage"),
        (("context", "magic", "guess"), "guess, magic"),
        ((), "nothing"),
        (("",), "nothing"),
    ],
)
def test_sources_that_there_are_not_are_named_with_those_there_are(sources: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^--sources takes context, successor, not {named}$"):
        ReplayConfig(sources=sources)


@pytest.mark.parametrize("nodes", [0, -1, 1025])
def test_trees_have_between_1_and_1024_nodes(nodes: int) -> None:
    assert (ReplayConfig(nodes=1).nodes, ReplayConfig(nodes=1024).nodes) == (1, 1024)
    with pytest.raises(ConfigError, match=f"^--nodes must be 1..1024, not {nodes}$"):
        ReplayConfig(nodes=nodes)


# Steps of copies

#               0  1  2  3  4    5  6  7  8  9  10
CYCLE = trace((1, 2, 3, 4, 1), (2, 3, 4, 1, 2, 9))


def test_a_step_emits_what_is_copied_rightly_and_one_token_more() -> None:
    # After the 1 of position 0 stand 2 3 4 1, all of them right, and the target adds 2. Then 1 2 stood before
    # positions 2 and 6, which both give 3 first; the target says 9.      2 3 4 1 2 | 9
    steps, tally = run(CYCLE, COPIES)
    assert emitted(steps) == [(2, 3, 4, 1, 2), (9,)]
    assert [step.position for step in steps] == [0, 5]
    assert [len(step.path) for step in steps] == [4, 0]
    assert drafted(steps[0]) == [2, 3, 4, 1]
    # From position 2 to the end: the path agrees with position 6, whose text ends after four tokens, and goes on.
    assert drafted(steps[1]) == [3, 4, 1, 2, 3, 4, 1, 2]
    assert steps[0].places == tuple(Occurrence(None, at) for at in (1, 2, 3, 4))
    assert (tally.prompts, tally.tokens, tally.steps, tally.drafted) == (1, 6, 2, 12)
    assert tally.accepted == {"context": 4}
    assert tally.mat == 3.0


def test_the_nodes_of_a_tree_bound_what_a_step_can_emit() -> None:
    # Three of the four copied tokens are drafted, the target adds the fourth. Then 1 stood before positions 1 and 5,
    # and both give 2 3 4, of which 2 is right.                            2 3 4 1 | 2 9
    steps, tally = run(CYCLE, ReplayConfig(nodes=3, sources=("context",), calibrates=False))
    assert emitted(steps) == [(2, 3, 4, 1), (2, 9)]
    assert (tally.drafted, tally.accepted["context"], tally.mat) == (6, 4, 3.0)


def test_without_repetition_every_step_emits_one_token() -> None:
    steps, tally = run(trace((1, 2, 3), (4, 5, 6)), COPIES)
    assert emitted(steps) == [(4,), (5,), (6,)]
    assert (tally.mat, tally.drafted, dict(tally.accepted)) == (1.0, 0, {})


def test_an_answer_that_ends_with_a_copied_token_gets_none_behind_it() -> None:
    # 2 3 is drafted and more; nothing comes after it.                     2 3
    steps, tally = run(trace((1, 2, 3, 4, 1), (2, 3)), COPIES)
    assert emitted(steps) == [(2, 3)]
    assert steps[0].path == (0, 1)
    assert tally.mat == 2.0


def test_an_answer_copies_from_itself() -> None:
    # Nothing repeats before the second 5; then 6 7 stand behind the first.  5 | 6 | 7 | 5 | 6 7 8
    steps, _ = run(trace((1,), (5, 6, 7, 5, 6, 7, 8)), COPIES)
    assert emitted(steps) == [(5,), (6,), (7,), (5,), (6, 7, 8)]
    assert steps[-1].places == (Occurrence(None, 2), Occurrence(None, 3))


def test_a_category_divides_all_its_tokens_by_all_its_steps() -> None:
    # CYCLE takes 2 steps for 6 tokens, the other 3 for 3.
    tallies = replay([CYCLE, trace((1,), (5,), name="b", category="b"), trace((1, 2, 3), (4, 5, 6))], COPIES)
    assert list(tallies) == ["a", "b"]
    assert (tallies["a"].prompts, tallies["a"].mat) == (2, 9 / 5)
    assert (tallies["b"].prompts, tallies["b"].mat) == (1, 1.0)
    summary = tallies["a"].summary()
    assert {name: summary[name] for name in ("prompts", "mat", "drafted_per_step", "accepted_from_context")} == {
        "prompts": 2,
        "mat": 1.8,
        "drafted_per_step": 2.4,  # 12 in 5 steps
        "accepted_from_context": 4,
    }
    assert 0.0 < summary["us_per_draft_p50"] <= summary["us_per_draft_p99"]
    assert len(tallies["a"].microseconds) == 5


# Passages


def test_marked_passages_are_named_where_tokens_are_copied_from_them() -> None:
    #             0  1  2  3  4  5  6  7
    held = trace((9, 1, 2, 3, 4, 8, 1), (2, 3, 4, 7), (TracePassage("p", 0, 3), TracePassage("q", 3, 5)))
    steps, tally = run(held, COPIES)
    assert emitted(steps) == [(2, 3, 4, 7)]
    assert steps[0].places == (Occurrence("p", 2), Occurrence("q", 3), Occurrence("q", 4))
    assert tally.accepted == {"context": 3}


def test_passages_that_the_prompt_does_not_contain_are_searched_as_texts_of_their_own() -> None:
    held = trace((9, 1), (2, 3, 7), (TracePassage("p", tokens=(6, 5)), TracePassage("q", tokens=(4, 1, 2, 3))))
    steps, tally = run(held, COPIES)
    assert emitted(steps) == [(2, 3, 7)]
    assert steps[0].places == (Occurrence("q", 2, apart=True), Occurrence("q", 3, apart=True))
    assert tally.accepted == {"passage": 2}
    # Not where only the target's own next tokens are asked for.
    assert emitted(run(held, SUCCESSORS, rows(held, {}))[0]) == [(2,), (3,), (7,)]


# Successors: nothing is known before the step that computes it


def test_what_the_target_says_after_the_last_token_is_not_known_when_a_step_drafts() -> None:
    # Every row gives the next token away, but no token comes twice: each row is computed by the very step that needed
    # it.
    held = trace((1,), (5, 6, 7))
    steps, tally = run(held, SUCCESSORS, giving_away(held))
    assert emitted(steps) == [(5,), (6,), (7,)]
    assert [len(step.tree) for step in steps] == [0, 0, 0]
    assert tally.mat == 1.0


def test_what_an_earlier_step_computed_is_known() -> None:
    # 1 says 5 and 5 says 1. Step 1 knows nothing. Step 2 knows what 1 says, and stands after 5. Step 3 knows both, and
    # drafts 5 1 5 ...                                                     5 | 1 | 5 1 5
    held = trace((1,), (5, 1, 5, 1, 5))
    steps, tally = run(held, SUCCESSORS, giving_away(held))
    assert emitted(steps) == [(5,), (1,), (5, 1, 5)]
    assert [len(step.tree) for step in steps[:2]] == [0, 0]
    assert drafted(steps[2])[:3] == [5, 1, 5]
    assert tally.accepted == {"successor": 3}
    assert steps[2].places == (None, None, None)


def test_an_eager_replay_learns_the_prompt_before_the_first_step_but_for_its_last_token() -> None:
    # The first 1 says 5, the last one says 8, which is right.             8
    held = trace((1, 5, 1), (8,))
    steps, _ = run(held, SUCCESSORS, rows(held, {0: [5], 2: [8]}))
    assert drafted(steps[0]) == [5]
    assert steps[0].path == ()


@pytest.mark.parametrize("eager", [True, False])
def test_what_follows_a_prompt_position_is_known_from_the_step_after_the_one_that_asked(eager: bool) -> None:
    # The draft copies 2 3 4, and asks for what follows each of them: after "2 3" may come 5.
    held = trace((1, 2, 3, 4, 1), (2, 3, 6, 1, 2, 9))
    config = ReplayConfig(nodes=8, calibrates=False, eager=eager)
    steps, _ = run(held, config, rows(held, {1: [7], 2: [5], 3: [8]}))
    assert ([2, 3, 5] in paths(steps[0])) == eager
    assert steps[-1].emitted == (2, 9)
    assert [2, 3, 5] in paths(steps[-1])


def test_positions_that_no_draft_asks_for_teach_nothing() -> None:
    held = trace((1, 2, 8, 5, 1), (2, 9))
    replayer = Replayer(BOTH_LAZILY, rows(held, {1: [7], 3: [6]}))
    steps = replayer.run(held, Tally())
    assert drafted(steps[0])[:2] == [2, 8]
    assert replayer.successors.after(1, 2)[:1] == [7]
    assert replayer.successors.after(8, 5)[:1] == [6]  # behind the copy: asked for ahead
    far = trace((1, 2, *range(20, 60), 5, 1), (2, 9))
    replayer = Replayer(BOTH_LAZILY, rows(far, {1: [7], 42: [6]}))
    replayer.run(far, Tally())
    assert replayer.successors.after(1, 2)[:1] == [7]
    assert replayer.successors.after(59, 5) == []


LATER = trace((1, 2, 3, 1, 2, 4, 1), (2, 3, 1, 2, 4, 1, 2, 3, 1, 3, 2, 1, 2, 4))


@pytest.mark.parametrize("config", [SUCCESSORS, BOTH, ReplayConfig(), BOTH_LAZILY])
def test_rows_of_positions_whose_logits_are_not_computed_yet_change_no_draft(config: ReplayConfig) -> None:
    whole = giving_away(LATER)
    steps, _ = run(LATER, config, whole)
    assert sum(len(step.tree) for step in steps) > 0
    for step in steps:
        # At output position p the text has prompt + p tokens; what follows the last of them is what the step asks.
        known = len(LATER.prompt) + step.position - 1
        blind = {LATER.id: np.concatenate([whole[LATER.id][:known], np.full((len(whole[LATER.id]) - known, 8), 77)])}
        (again,) = (other for other in run(LATER, config, blind)[0] if other.position == step.position)
        assert drafted(again) == drafted(step)
        assert again.tree.probabilities.tolist() == step.tree.probabilities.tolist()


def test_rows_that_are_computed_already_do_change_drafts() -> None:
    # So that the test above says something: with the last known row of each step it would fail.
    whole = giving_away(LATER)
    steps, _ = run(LATER, SUCCESSORS, whole)
    changed = 0
    for step in steps[1:]:
        known = len(LATER.prompt) + step.position - 2
        blind = {LATER.id: np.concatenate([whole[LATER.id][:known], np.full((len(whole[LATER.id]) - known, 8), 77)])}
        again = [other for other in run(LATER, SUCCESSORS, blind)[0] if other.position == step.position]
        changed += not again or drafted(again[0]) != drafted(step)
    assert changed


def test_a_trace_without_rows_is_drafted_without_successors_even_where_a_profile_is_given() -> None:
    # The profile says 2 after 1, which would be right; copies are made all the same.
    profile = Profile("m", "v", np.array([row(2)] * 10, np.int32))
    held = trace((1,), (2, 3, 2, 3, 4))
    steps, tally = run(held, BOTH, {"another": np.zeros((3, 8), np.int32)}, profile)
    assert emitted(steps) == [(2,), (3,), (2,), (3, 4)]
    assert tally.accepted == {"context": 1}
    steps, tally = run(held, SUCCESSORS, None, profile)
    assert [len(step.tree) for step in steps] == [0, 0, 0, 0, 0]
    # With rows, even if they say nothing, the profile is used: after each token it says 2.
    steps, tally = run(held, SUCCESSORS, rows(held, {}), profile)
    assert drafted(steps[0])[0] == 2
    assert emitted(steps)[0] == (2, 3)


def test_successors_are_off_where_they_are_not_asked_for() -> None:
    held = trace((1,), (5, 1, 5, 1, 5))
    with_rows, without = run(held, COPIES, giving_away(held)), run(held, COPIES)
    assert counts(with_rows[1]) == counts(without[1])
    assert "successor" not in with_rows[1].accepted


# Merging

# After 7 stood 8, and after 7 8 the target would say 5, though 1 stood there; after a single 7 it would say 3.
#                0  1  2  3    4  5  6
MIXED = trace((7, 8, 1, 7), (8, 5, 6))
MIXED_ROWS = rows(MIXED, {0: [3], 1: [5]})


def test_a_successor_goes_on_where_a_copy_is_right_up_to_it() -> None:
    steps, tally = run(MIXED, BOTH, MIXED_ROWS)
    assert emitted(steps) == [(8, 5, 6)]
    assert tally.accepted == {"context": 1, "successor": 1}
    assert steps[0].places == (Occurrence(None, 1), None)


@pytest.mark.parametrize("sources", [("context", "successor"), ("successor", "context")])
def test_without_merging_each_source_drafts_a_tree_of_its_own_and_the_better_one_counts(
    sources: tuple[str, ...],
) -> None:
    # Copies: 8 1 7. Successors: 3 after 7, and nothing after 7 3. 8 is accepted, 5 added; after 8 5 nobody drafts.
    #                                                                      8 5 | 6
    config = ReplayConfig(sources=sources, calibrates=False, merges=False, eager=True)
    steps, tally = run(MIXED, config, MIXED_ROWS)
    assert emitted(steps) == [(8, 5), (6,)]
    assert tally.accepted == {"context": 1}
    assert tally.drafted == 3 + 1
    assert steps[0].places == (Occurrence(None, 1),)


def test_without_merging_each_source_has_an_equal_part_of_the_nodes() -> None:
    # One of three for copies, which takes 8, and one for successors, which takes 3.
    _, tally = run(MIXED, ReplayConfig(nodes=3, calibrates=False, merges=False, eager=True), MIXED_ROWS)
    assert tally.drafted == 1 + 1


def test_without_merging_a_trace_without_rows_gives_copies_all_nodes() -> None:
    config = ReplayConfig(nodes=4, calibrates=False, merges=False)
    steps, tally = run(CYCLE, config)
    assert emitted(steps) == [(2, 3, 4, 1, 2), (9,)]
    assert tally.drafted == 4 + 4


@pytest.mark.parametrize("sources", [("context", "successor"), ("successor", "context")])
def test_without_merging_what_is_copied_from_passages_is_still_located(sources: tuple[str, ...]) -> None:
    marked, apart = TracePassage("m", 0, 2), TracePassage("s", tokens=(4, 1, 2, 3))
    config = ReplayConfig(sources=sources, calibrates=False, merges=False)
    for held, places in (
        (trace((9, 1), (2, 3, 7), (apart,)), (Occurrence("s", 2, apart=True), Occurrence("s", 3, apart=True))),
        (trace((1, 2, 9, 1), (2, 7), (marked,)), (Occurrence("m", 1),)),
    ):
        steps, _ = run(held, config, rows(held, {}))
        assert steps[0].places == places


# Warm and cold

# The first answer tells that 5 follows 1 and 2 follows 5.
FIRST = trace((1, 5, 2), (3,), name="first")
SECOND = trace((9, 1), (5, 2, 7), name="second")
TWO_ROWS = giving_away(FIRST) | rows(SECOND, {})


def test_cold_answers_know_nothing_of_each_other() -> None:
    replayer = Replayer(SUCCESSORS, TWO_ROWS)
    replayer.run(FIRST, Tally())
    assert emitted(replayer.run(SECOND, Tally())) == [(5,), (2,), (7,)]


def test_warm_answers_draft_from_what_earlier_ones_taught() -> None:
    # 1 said 5; 5 said 2.                                                  5 2 7
    replayer = Replayer(ReplayConfig(sources=("successor",), calibrates=False, warm=True, eager=True), TWO_ROWS)
    replayer.run(FIRST, Tally())
    assert emitted(replayer.run(SECOND, Tally())) == [(5, 2, 7)]


def test_an_answer_never_copies_from_another_one_warm_or_cold() -> None:
    for warm in (False, True):
        replayer = Replayer(ReplayConfig(sources=("context",), calibrates=False, warm=warm))
        replayer.run(FIRST, Tally())
        assert emitted(replayer.run(SECOND, Tally())) == [(5,), (2,), (7,)]


def test_corrections_are_learned_within_an_answer_and_kept_only_if_warm() -> None:
    shipped, alone = Calibration().counts, Replayer(ReplayConfig(sources=("context",)))
    alone.run(CYCLE, Tally())
    assert not np.array_equal(alone.calibration.counts, shipped)
    for warm in (False, True):
        replayer = Replayer(ReplayConfig(sources=("context",), warm=warm))
        replayer.run(CYCLE, Tally())
        replayer.run(CYCLE, Tally())
        assert np.array_equal(replayer.calibration.counts, alone.calibration.counts) is not warm


def test_without_calibration_estimates_are_taken_as_they_are_throughout() -> None:
    replayer = Replayer(ReplayConfig(sources=("context",), calibrates=False, warm=True))
    replayer.run(CYCLE, Tally())
    assert np.array_equal(replayer.calibration.counts, Calibration.blank().counts)


def test_a_calibration_that_is_given_counts_over_all_answers() -> None:
    given = Calibration.blank()
    before = given.counts.copy()
    replay([CYCLE, CYCLE], ReplayConfig(sources=("context",)), calibration=given)
    # Each answer has four hits and a miss: 2 3 4 1 of the first step, and 3 of the second.
    hits, expected, _ = given.counts - before
    assert hits.sum() == 2 * 4
    assert 0.0 < expected.sum() < 2 * 5


@pytest.mark.parametrize("warm", [False, True])
def test_two_replays_give_the_same_counts(warm: bool) -> None:
    config = ReplayConfig(nodes=16, warm=warm)
    best = giving_away(LATER) | TWO_ROWS
    first, second = (replay([LATER, FIRST, CYCLE, SECOND, MIXED], config, best) for _ in range(2))
    assert counts(first["a"]) == counts(second["a"])
    assert first["a"].drafted > 0


# Judging estimates

# Root: 10 (0.62) and 12 (0.125). Under 10: 11, of whose path 0.31 is left, half of its parent's. Under 12: 13.
TREE = DraftTree.of(
    np.array([10, 11, 12, 13], np.int32),
    np.array([-1, 0, -1, 2], np.int32),
    np.array([1, 2, 1, 2], np.int32),
    np.array([0.62, 0.31, 0.125, 0.05]),
    np.zeros(4, np.int32),
    np.zeros(4, np.int32),
    np.ones(4, np.int32),
)


def at(**bins: float) -> list[float]:
    """Values by bin, zero elsewhere."""
    held = [0.0] * BINS
    for name, value in bins.items():
        held[int(name[1:])] = value
    return held


def test_nodes_whose_parent_was_accepted_are_judged_by_their_estimate_given_the_parent() -> None:
    # Of twenty bins 0.62 falls into 12 (0.6 to 0.65), 0.5 into 10, 0.125 into 2. 13 hangs under a wrong token.
    tally = Tally()
    tally.judge(TREE, [0])
    assert tally.judged.tolist() == at(_12=1, _10=1, _2=1)
    assert tally.right.tolist() == at(_12=1)
    assert tally.predicted.tolist() == pytest.approx(at(_12=0.62, _10=0.5, _2=0.125))


def test_judgements_add_up_over_steps() -> None:
    tally = Tally()
    tally.judge(TREE, [0, 1])  # 10 and 11 are right, 12 wrong
    tally.judge(TREE, [2])  # 12 right, 10 and 13 wrong; 13 has 0.05 / 0.125 = 0.4: bin 8
    tally.judge(TREE, [])  # 10 and 12 wrong
    assert tally.judged.tolist() == at(_12=3, _10=1, _2=3, _8=1)
    assert tally.right.tolist() == at(_12=1, _10=1, _2=1)
    assert tally.predicted.tolist() == pytest.approx(at(_12=1.86, _10=0.5, _2=0.375, _8=0.4))


def test_certainty_falls_into_the_last_bin_and_an_empty_tree_into_none() -> None:
    tally = Tally()
    tally.judge(DraftTree.from_chain([5], 1.0), [0])
    tally.judge(DraftTree.empty(), [])
    assert tally.judged.tolist() == tally.right.tolist() == tally.predicted.tolist() == at(_19=1)


def test_a_replay_judges_every_step() -> None:
    # 2 3 4 1 of the first step, right, and 3 of the second, wrong; all else hangs under a token that did not come.
    _, tally = run(CYCLE, COPIES)
    assert (tally.judged.sum(), tally.right.sum()) == (5, 4)


def test_an_empty_tally_has_a_summary() -> None:
    assert Tally().summary() == {
        "prompts": 0,
        "mat": 0.0,
        "drafted_per_step": 0.0,
        "us_per_draft_p50": 0.0,
        "us_per_draft_p99": 0.0,
    }


def test_percentiles_are_of_the_drafts_times() -> None:
    tally = Tally(microseconds=[float(us) for us in range(101)])
    assert (tally.percentile(50), tally.percentile(99), tally.percentile(100)) == (50.0, 99.0, 100.0)


# Files of best next tokens


def packed(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


ROWS = np.arange(24).reshape(3, 8)
WHOLE = packed(t=ROWS)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_rows_are_read_by_trace_id_as_int32(dtype: type[np.integer[Any]], tmp_path: Path) -> None:
    (tmp_path / "b.npz").write_bytes(packed(t=ROWS.astype(dtype), u=ROWS[:1].astype(dtype)))
    best = read_best(tmp_path / "b.npz")
    assert list(best) == ["t", "u"]
    assert all(held.dtype == np.int32 for held in best.values())
    assert (best["t"].tolist(), best["u"].tolist()) == (ROWS.tolist(), ROWS[:1].tolist())


def test_a_missing_file_of_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*b\.npz"):
        read_best(tmp_path / "b.npz")


UNREADABLE = {
    "empty": b"",
    "text": b"not numbers\n",
    "cut off": WHOLE[: len(WHOLE) // 2],
    "cut off early": WHOLE[:10],
    "flipped": WHOLE[:60] + bytes(byte ^ 255 for byte in WHOLE[60:70]) + WHOLE[70:],
    "one array": npy(ROWS),
    "objects": packed(t=np.full((3, 8), None)),
    "words": packed(t=np.full((3, 8), "x")),
}


@pytest.mark.parametrize("raw", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_file_of_rows_is_named(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "b.npz").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"b\.npz"):
        read_best(tmp_path / "b.npz")


@pytest.mark.parametrize("rows_of_another_form", [ROWS[:, :7], ROWS.ravel(), ROWS[None]])
def test_rows_of_another_form_are_refused_by_the_name_of_their_trace(
    rows_of_another_form: NDArray[Any], tmp_path: Path
) -> None:
    (tmp_path / "b.npz").write_bytes(packed(good=ROWS, bad=rows_of_another_form))
    with pytest.raises(ConfigError, match=r"b\.npz: bad is not of shape \[positions, 8\]"):
        read_best(tmp_path / "b.npz")


def test_rows_must_be_as_many_as_the_traces_tokens_and_traces_without_rows_are_told() -> None:
    held = [trace((1, 2), (3,), name=name) for name in ("x", "y", "z")]
    right = np.zeros((3, 8), np.int32)
    assert check_best(held, {"x": right, "y": right, "z": right, "of no trace": right[:1]}) == []
    assert check_best(held, {"y": right}) == ["x", "z"]
    for length in (2, 4):
        with pytest.raises(ConfigError, match=f"--top8 has {length} rows for trace y, which has 3 tokens: .*other"):
            check_best(held, {"y": np.zeros((length, 8), np.int32)})
