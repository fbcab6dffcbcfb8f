"""Positions of a prompt are asked for where drafts lack what follows their tokens, the most useful ones first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft import ContextIndex, SuccessorTable, TreeBuilder
from reader_rag.draft.kernels.prompt import AHEAD
from reader_rag.draft.prompt_successors import ASKED, PromptSuccessors
from reader_rag.draft.tree import SUCCESSOR, DraftTree


def of(prompt: list[int], table: SuccessorTable | None = None, answer: tuple[int, ...] = ()) -> PromptSuccessors:
    """All positions of a prompt but the last can be asked for."""
    index = ContextIndex(prompt)
    asked = PromptSuccessors(index, SuccessorTable() if table is None else table)
    asked.add(np.ones(len(prompt) - 1, np.bool_))
    index.extend(answer)
    return asked


def chain(tokens: list[int], positions: list[int]) -> DraftTree:
    """A chain; position -1: a successor's node."""
    count = len(tokens)
    sources = [0 if position >= 0 else SUCCESSOR for position in positions]
    return DraftTree.of(tokens, np.arange(-1, count - 1), np.arange(1, count + 1), [0.5] * count, sources, positions)


def best(*tokens: int) -> NDArray[np.int32]:
    return np.array([[*tokens, *[-1] * (8 - len(tokens))]], np.int32)


def test_copied_nodes_ask_at_their_source_and_behind_the_last_one() -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 5]
    draft = chain([6, 7], [1, 2])
    assert of(prompt).ask(draft).tolist() == [1, 2, *range(3, 3 + AHEAD)]


def test_nodes_that_are_verified_ask_for_nothing_of_their_own() -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 5]
    assert of(prompt).ask(chain([6, 7], [1, 2]), verified=1).tolist()[0] == 2
    assert of(prompt).ask(chain([6, 7], [1, 2]), verified=2).tolist() == [3, 4, 5, 6]


def test_successors_ask_at_the_latest_place_of_both_tokens_or_of_the_last_one() -> None:
    prompt = [5, 6, 7, 5, 6, 8, 6, 9, 5]
    draft = chain([6], [-1])
    asked = of(prompt)
    assert asked.ask(draft).tolist() == [4]
    asked.learn(np.array([4], np.int32), best(3))
    assert asked.ask(draft).tolist() == []  # the table has "5 6" now
    other = of(prompt, answer=(4,))
    assert other.ask(draft).tolist() == [6]  # "4 6" is nowhere; 6 is last at 6
    other.learn(np.array([6], np.int32), best(3))
    assert other.ask(draft).tolist() == []  # the table has 6 now


def test_places_in_the_answer_and_positions_without_states_are_not_asked_for() -> None:
    index = ContextIndex([5, 6, 7, 5])
    asked = PromptSuccessors(index, SuccessorTable())
    draft = chain([6], [-1])
    assert asked.ask(draft).tolist() == []
    asked.add(np.array([True, False, True]))
    assert asked.ask(draft).tolist() == []
    asked.add(np.array([False, True]))
    index.extend([6, 9, 5])
    assert asked.ask(draft).tolist() == [1]
    assert asked.ask(chain([9], [5])).tolist() == []


def test_what_the_table_knows_is_not_asked_for() -> None:
    table = SuccessorTable()
    table.learn([5], [6], best(1))
    prompt = [5, 6, 7, 8, 5]
    assert of(prompt, table).ask(chain([6], [1])).tolist() == [2, 3]


def test_a_position_is_asked_for_once_and_not_more_than_so_many() -> None:
    prompt = [*range(5, 5 + 4 * ASKED), 5]
    draft = chain(list(range(6, 6 + 2 * ASKED)), list(range(1, 1 + 2 * ASKED)))
    asked = of(prompt).ask(draft).tolist()
    assert asked == list(range(1, 1 + ASKED))
    twice = DraftTree.of([6, 6], [-1, -1], [1, 1], [0.5, 0.4], [0, 0], [1, 1])
    assert of([5, 6, 5]).ask(twice).tolist() == [1]


def test_it_finds_what_a_search_of_the_whole_prompt_finds() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        prompt = random.integers(0, 6, 30).tolist()
        table = SuccessorTable()
        index = ContextIndex(prompt)
        asked = PromptSuccessors(index, table)
        pending = random.random(30) < 0.7
        asked.add(pending)
        tree = TreeBuilder(max_nodes=6, successors=table).build(index)
        expected: list[int] = []
        for node in range(len(tree)):
            parent, token = int(tree.parents[node]), int(tree.tokens[node])
            before = int(tree.tokens[parent]) if parent >= 0 else prompt[-1]
            same = [p for p in range(30) if pending[p] and prompt[p] == token]
            both = [p for p in same if p and prompt[p - 1] == before]
            source = int(tree.positions[node])
            found = source if pending[source] else max(both or same, default=-1)
            if found >= 0 and found not in expected:
                expected.append(found)
        assert asked.ask(tree).tolist()[: len(expected)] == expected


def test_what_was_asked_for_is_learned_after_one_token_and_two() -> None:
    table = SuccessorTable()
    asked = of([5, 6, 7, 5], table)
    asked.learn(np.array([0, 1], np.int32), np.concatenate([best(4), best(3, 2)]))
    assert table.after(-1, 5) == [4]
    assert table.after(5, 6) == [3, 2]
    assert table.after(9, 6) == [3, 2]
