"""What an occurrence's vote weighs."""

from __future__ import annotations

import pytest

from reader_rag.draft import CopyWeights


def test_votes_grow_with_the_match_length() -> None:
    assert CopyWeights(scale=0.5, power=2.0, longest=4).table.tolist() == [0.0, 0.5, 2.0, 4.5, 8.0]


def test_the_default_votes() -> None:
    table = CopyWeights().table
    assert len(table) == 129
    assert table[1] == pytest.approx(0.35)
    assert table[2] == pytest.approx(0.35 * 2**1.4)
    assert table[128] == pytest.approx(0.35 * 128**1.4)
