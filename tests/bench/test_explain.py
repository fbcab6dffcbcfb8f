"""A replay explained step by step: the tree, the accepted nodes, and their sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from reader_rag.bench.inputs import Trace, TracePassage
from reader_rag.bench.replay.explain import explain
from reader_rag.bench.replay.replayer import ReplayConfig, Replayer, Step, Tally
from reader_rag.draft import SOURCES, DraftTree, Occurrence

CONTEXT, PASSAGE, SUCCESSOR = (SOURCES.index(name) for name in ("context", "passage", "successor"))
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def ids(text: str) -> tuple[int, ...]:
    return tuple(LETTERS.index(letter) for letter in text)


def show(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def chain(text: str, sources: Sequence[int], positions: Sequence[int], probability: float = 0.5) -> DraftTree:
    """A tree without branches; match lengths grow from 1."""
    held = DraftTree.from_chain(ids(text), probability)
    return DraftTree.of(
        held.tokens,
        held.parents,
        held.depths,
        held.probabilities,
        np.array(sources, np.int32),
        np.array(positions, np.int32),
        held.depths,
    )


def explained_text(trace: Trace, *steps: Step) -> list[str]:
    return list(explain(trace, steps, show))


def origins(trace: Trace, *steps: Step) -> list[str]:
    """The lines that say where accepted tokens came from."""
    return [line.removeprefix("  = ") for line in explained_text(trace, *steps) if line.startswith("  = ")]


def copied(text: str, source: int, places: Sequence[Occurrence | None]) -> Step:
    """A step that drafted these tokens and all of them rightly."""
    tree = chain(text, [source] * len(text), [place.position if place else -1 for place in places])
    return Step(0, tree, tuple(range(len(text))), ids(text), tuple(places))


def test_a_step_is_told_in_a_line_then_its_tree_then_where_the_accepted_tokens_came_from() -> None:
    # Text: k a b c d a, then the answer b c e. After "a" stood b c d; c was followed by e says the successor.
    tree = DraftTree.of(
        np.array(ids("bcxd"), np.int32),
        np.array([-1, 0, -1, 1], np.int32),
        np.array([1, 2, 1, 3], np.int32),
        np.array([0.6, 0.4, 0.25, 0.125]),
        np.array([CONTEXT, CONTEXT, SUCCESSOR, CONTEXT], np.int32),
        np.array([2, 3, -1, 4], np.int32),
        np.array([1, 2, 2, 3], np.int32),
    )
    trace = Trace("t", "a", ids("kabcda"), ids("bce"))
    step = Step(0, tree, (0, 1), ids("bce"), (Occurrence(None, 2), Occurrence(None, 3)))
    # 0.6 + 0.4 + 0.25 + 0.125 = 1.375: an even last digit is rounded to.
    assert explained_text(trace, step) == [
        "step 1, token 0: 2 of 4 drafted tokens accepted (1.38 expected), 3 emitted: 'bce'",
        "  + 'b' p=0.600 context@2 match=1",
        "  +   'c' p=0.400 context@3 match=2",
        "        'd' p=0.125 context@4 match=3",
        "    'x' p=0.250 successor match=2",
        "  = 'bc': context, tokens 2 to 3 of the prompt: 'ka' [...] 'dabc'",
        "",
    ]


def test_steps_are_numbered_and_named_by_the_place_of_their_first_token_in_the_answer() -> None:
    trace = Trace("t", "a", ids("a"), ids("bcd"))
    steps = [Step(at, DraftTree.empty(), (), ids("bcd")[at : at + 1], ()) for at in range(3)]
    assert explained_text(trace, *steps) == [
        "step 1, token 0: 0 of 0 drafted tokens accepted (0.00 expected), 1 emitted: 'b'",
        "",
        "step 2, token 1: 0 of 0 drafted tokens accepted (0.00 expected), 1 emitted: 'c'",
        "",
        "step 3, token 2: 0 of 0 drafted tokens accepted (0.00 expected), 1 emitted: 'd'",
        "",
    ]
    assert explained_text(trace) == []


def test_four_tokens_are_shown_on_either_side_of_what_was_copied() -> None:
    trace = Trace("t", "a", ids("abcdefghijklmnop"), ids("gh"))
    step = copied("gh", CONTEXT, [Occurrence(None, 6), Occurrence(None, 7)])
    assert origins(trace, step) == ["'gh': context, tokens 6 to 7 of the prompt: 'cdef' [...] 'ijkl'"]


def test_what_was_copied_from_the_answer_itself_is_called_so() -> None:
    # The text: a b | c d e c d e; the answer begins at position 2.
    trace = Trace("t", "a", ids("ab"), ids("cdecde"))
    step = copied("de", CONTEXT, [Occurrence(None, 3), Occurrence(None, 4)])
    assert origins(trace, step) == ["'de': context, tokens 3 to 4 (its own answer): 'abc' [...] 'cde'"]


def test_what_was_copied_from_a_marked_passage_names_it() -> None:
    trace = Trace("t", "a", ids("xabcy"), ids("bc"), (TracePassage("some file", 1, 4),))
    step = copied("bc", CONTEXT, [Occurrence("some file", 2), Occurrence("some file", 3)])
    assert origins(trace, step) == ["'bc': context, passage some file, tokens 2 to 3 of the prompt: 'xa' [...] 'ybc'"]


def test_what_was_copied_from_a_passage_beside_the_prompt_is_shown_in_that_passage() -> None:
    # The passage is longer than the prompt, so that the prompt cannot be what is shown.
    passages = (TracePassage("p", tokens=ids("mn")), TracePassage("q", tokens=ids("hijklmno")))
    trace = Trace("t", "a", ids("x"), ids("kl"), passages)
    step = copied("kl", PASSAGE, [Occurrence("q", 3, apart=True), Occurrence("q", 4, apart=True)])
    assert origins(trace, step) == ["'kl': passage, passage q, tokens 3 to 4: 'hij' [...] 'mno'"]


def test_a_token_that_was_not_copied_is_a_successor() -> None:
    trace = Trace("t", "a", ids("x"), ids("kl"))
    assert origins(trace, copied("kl", SUCCESSOR, [None, None])) == [
        "'kl': successor, the target's own next tokens where it stood before"
    ]


@pytest.mark.parametrize(
    ("places", "stretches"),
    [
        # One unbroken stretch; a gap; backwards; another passage; a successor between copies.
        ([Occurrence(None, 1), Occurrence(None, 2), Occurrence(None, 3)], ["bcd"]),
        ([Occurrence(None, 1), Occurrence(None, 3), Occurrence(None, 4)], ["b", "cd"]),
        ([Occurrence(None, 3), Occurrence(None, 2), Occurrence(None, 2)], ["b", "c", "d"]),
        ([Occurrence("p", 1), Occurrence("p", 2), Occurrence("q", 3)], ["bc", "d"]),
        ([Occurrence("p", 1), Occurrence("p", 2, apart=True), Occurrence("p", 3, apart=True)], ["b", "cd"]),
        ([Occurrence(None, 1), None, Occurrence(None, 3)], ["b", "c", "d"]),
        ([None, None, Occurrence(None, 3)], ["bc", "d"]),
    ],
)
def test_each_unbroken_stretch_has_a_line(places: list[Occurrence | None], stretches: list[str]) -> None:
    passages = (TracePassage("p", tokens=ids("abcde")),)
    trace = Trace("t", "a", ids("abcde"), ids("bcd"), passages)
    lines = origins(trace, copied("bcd", CONTEXT, places))
    assert [line.partition(":")[0] for line in lines] == [repr(stretch) for stretch in stretches]


def test_tokens_that_were_not_accepted_have_no_origin() -> None:
    trace = Trace("t", "a", ids("abca"), ids("bx"))
    tree = chain("bc", [CONTEXT, CONTEXT], [1, 2])
    step = Step(0, tree, (0,), ids("bx"), (Occurrence(None, 1),))
    assert origins(trace, step) == ["'b': context, tokens 1 to 1 of the prompt: 'a' [...] 'cabx'"]


def test_a_replayed_answer_is_told_from_prompt_answer_passage_and_successor() -> None:
    #  text: k j a b c x a | b c z | y | z | y p | q r k | w
    #  at:   0 1 2 3 4 5 6   7 8 9  10  11  12 13  14 15 16  17
    # Trees have two nodes. After a stood b c. z and y are new, and y is followed by z again. After z stood y, and p is
    # new. After p stood q r in the passage. After k stood j, but the target said w there, which outweighs it.
    trace = Trace("t", "a", ids("kjabcxa"), ids("bczyzypqrkw"), (TracePassage("doc", tokens=ids("opqrs")),))
    best = np.full((18, 8), -1, np.int32)
    best[0, 0] = LETTERS.index("w")
    tally = Tally()
    steps = Replayer(ReplayConfig(nodes=2, calibrates=False, eager=True), {"t": best}).run(trace, tally)
    lines = explained_text(trace, *steps)
    assert [line.rpartition(": ")[2] for line in lines if line.startswith("step")] == [
        "'bcz'",
        "'y'",
        "'z'",
        "'yp'",
        "'qrk'",
        "'w'",
    ]
    assert [line.removeprefix("  = ") for line in lines if line.startswith("  = ")] == [
        "'bc': context, tokens 3 to 4 of the prompt: 'kja' [...] 'xabc'",
        "'y': context, tokens 10 to 10 (its own answer): 'abcz' [...] 'zypq'",
        "'qr': passage, passage doc, tokens 2 to 3: 'op' [...] 's'",
        "'w': successor, the target's own next tokens where it stood before",
    ]
    # Accepted nodes are marked, others not.
    assert [line[2] for line in lines if " p=" in line] == ["+", "+", "+", " ", "+", "+", "+", " "]
    assert "successor" in lines[-4]
    assert "context@1" in lines[-3]
