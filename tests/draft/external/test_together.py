"""Sources of several requests that share a model are asked in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from reader_rag.draft.checked_source import CheckedSource
from reader_rag.draft.external.together import Asking, Drafting, draft_alone, draft_together
from reader_rag.draft.source import Ask, Budget, Proposal, RequestState, Verified
from reader_rag.draft.tree import DraftTree
from reader_rag.errors import ReaderWarning

BUDGET = Budget(max_nodes=8, max_depth=4)


class Group:
    """Notes how many sources each call asks."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def propose_together(self, asks: Sequence[Ask]) -> list[Proposal]:
        self.calls.append(len(asks))
        return [ask.source.propose(ask.state, ask.budget) for ask in asks]  # type: ignore[misc]


class Repeat:
    """Proposes the last token once more."""

    needs_hidden_states = False

    def __init__(self, group: Group | None, error: BaseException | None = None) -> None:
        self.group = group
        self.error = error
        self.alone = 0

    def propose(self, state: RequestState, budget: Budget) -> Proposal:
        self.alone += 1
        if self.error is not None:
            raise self.error
        return Proposal.chain(state.tokens[-1:].tolist())

    def observe(self, verified: Verified) -> None: ...

    def forget(self) -> None: ...


def drafting(token: int, *sources: Repeat) -> Drafting:
    """Asks sources one after the other; the draft is the last one's."""
    tree = DraftTree.empty()
    for source in sources:
        state = RequestState(np.array([token], np.int32), 1)
        answer = yield Asking(CheckedSource(source, vocabulary=100), state, BUDGET)
        assert answer.seconds >= 0.0
        tree = answer.tree
    return tree


def test_sources_of_a_group_are_asked_in_one_call_and_others_alone() -> None:
    group, other = Group(), Group()
    made = draft_together(
        {
            "a": drafting(1, Repeat(group)),
            "b": drafting(2, Repeat(group)),
            "c": drafting(3, Repeat(other)),
            "d": drafting(4, Repeat(None)),
            "e": drafting(5),
        }
    )
    drafts = {key: None if one.tree is None else one.tree.tokens.tolist() for key, one in made.items()}
    assert drafts == {"a": [1], "b": [2], "c": [3], "d": [4], "e": []}
    assert (group.calls, other.calls) == ([2], [])  # one that asks alone is asked by itself
    assert made["a"].asking_s == made["b"].asking_s > 0.0  # equal shares of one call
    assert made["a"].seconds > made["a"].asking_s
    assert made["e"].asking_s == 0.0


def test_sources_that_are_asked_later_share_calls_too() -> None:
    group = Group()
    made = draft_together({n: drafting(n, Repeat(None), Repeat(group)) for n in range(3)})
    assert [one.tree.tokens.tolist() for one in made.values() if one.tree is not None] == [[0], [1], [2]]
    assert group.calls == [3]


def test_a_failing_source_is_switched_off_and_the_others_draft() -> None:
    group = Group()
    sources = [Repeat(group), Repeat(group, ValueError("broken")), Repeat(group)]
    with pytest.warns(ReaderWarning, match="the draft source Repeat is switched off for this request: .*broken"):
        made = draft_together({n: drafting(n, source) for n, source in enumerate(sources)})
    assert [one.tree.tokens.tolist() for one in made.values() if one.tree is not None] == [[0], [], [2]]


def test_what_ends_a_program_ends_its_request_alone() -> None:
    made = draft_together({0: drafting(1, Repeat(None, SystemExit())), 1: drafting(2, Repeat(None))})
    assert isinstance(made[0].error, SystemExit)
    assert made[0].tree is None
    assert made[1].tree is not None
    with pytest.raises(SystemExit):
        draft_alone(drafting(1, Repeat(None, SystemExit())))
