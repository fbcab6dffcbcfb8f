"""The budget of replays: a step takes a plain step and its drafted tokens, and drafts only what pays."""

from __future__ import annotations

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.budget import tokens_per_plain_step

REPEATED = Trace("a", "c", (1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3), (4, 5, 6, 7))


def test_where_drafts_are_free_the_whole_repetition_is_one_step() -> None:
    # 4 5 6 7 is drafted and accepted at once.
    assert tokens_per_plain_step([REPEATED], 0.0, {}, None, calibrates=False) == {"c": 4.0}


def test_where_a_drafted_token_costs_as_much_as_a_step_none_is_drafted() -> None:
    assert tokens_per_plain_step([REPEATED], 1.0, {}, None, calibrates=False) == {"c": 1.0}
