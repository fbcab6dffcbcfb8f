"""What was learned from one tenant is kept for it, never shown to another, and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from reader_rag.config import DraftConfig
from reader_rag.draft import Calibration, ContextIndex, TreeBuilder
from reader_rag.draft.profile import Profile
from reader_rag.engine.draft_state import DraftStates

DRAFT = DraftConfig(max_successors=64)
TENANTS = 16
"""Remembered at most."""


def row(*tokens: int) -> list[int]:
    """Best next tokens, filled up with "no more"."""
    return [*tokens, *[-1] * (8 - len(tokens))]


def teach(learned: DraftStates, tenant: str, following: int, draft: DraftConfig = DRAFT) -> None:
    """Token 1 was followed by this one."""
    learned.of(tenant, draft).successors.learn([-1], [1], [row(following)])


def known(learned: DraftStates, tenant: str, draft: DraftConfig = DRAFT) -> list[int]:
    """What follows token 1."""
    return learned.of(tenant, draft).successors.after(-1, 1)


def test_what_a_tenant_taught_is_there_when_it_asks_again() -> None:
    learned = DraftStates(None)
    first = learned.of("a", DRAFT)
    teach(learned, "a", 7)
    assert learned.of("a", DRAFT) is first
    assert known(learned, "a") == [7]


def test_what_one_tenant_taught_is_not_known_to_another_nor_to_requests_without_one() -> None:
    learned = DraftStates(None)
    teach(learned, "a", 7)
    teach(learned, "b", 8)
    assert (known(learned, "a"), known(learned, "b"), known(learned, "c"), known(learned, "")) == ([7], [8], [], [])


def test_how_right_drafts_were_is_counted_for_each_tenant_apart() -> None:
    learned = DraftStates(None)
    a, b = (learned.of(tenant, DRAFT).calibration for tenant in "ab")
    builder = TreeBuilder(calibration=a)
    builder.build(ContextIndex([1, 2, 1]))
    builder.observe([2])
    shipped = Calibration().counts
    assert not np.array_equal(a.counts, shipped)
    assert np.array_equal(b.counts, shipped)


def test_settings_that_learn_otherwise_learn_apart_and_all_others_together() -> None:
    learned = DraftStates(None)
    smaller, uncorrected = DraftConfig(max_successors=32), DraftConfig(max_successors=64, calibrates=False)
    teach(learned, "a", 7)
    assert known(learned, "a", smaller) == known(learned, "a", uncorrected) == []
    assert known(learned, "a", DraftConfig(max_successors=64, max_nodes=3, max_depth=5)) == [7]
    assert learned.of("a", smaller).successors.nbytes == 32 * 136
    assert (learned.of("a", DRAFT).calibration.learns, learned.of("a", uncorrected).calibration.learns) == (True, False)


# Bounded


def test_the_tenant_that_asked_longest_ago_is_forgotten_first() -> None:
    learned = DraftStates(None)
    for tenant in range(TENANTS):
        teach(learned, str(tenant), 100 + tenant)
    # All are remembered, and asked in their order: 0 asked longest ago. Then 0 asks again, which leaves 1.
    assert [known(learned, str(tenant)) for tenant in range(TENANTS)] == [[100 + tenant] for tenant in range(TENANTS)]
    assert known(learned, "0") == [100]
    teach(learned, "new", 99)
    assert [known(learned, tenant) for tenant in ("0", "2", "15", "new")] == [[100], [102], [115], [99]]
    assert known(learned, "1") == []


def test_a_forgotten_tenants_counts_start_anew() -> None:
    learned = DraftStates(None)
    held = learned.of("first", DRAFT)
    held.calibration.counts += 1.0
    for tenant in range(TENANTS):
        learned.of(str(tenant), DRAFT)
    again = learned.of("first", DRAFT)
    assert again is not held
    assert np.array_equal(again.calibration.counts, Calibration().counts)


# Forgetting


def test_forgetting_drops_all_that_one_tenant_taught_under_any_settings_and_nothing_else() -> None:
    learned = DraftStates(None)
    other = DraftConfig(max_successors=32, calibrates=False)
    for tenant, following in (("a", 7), ("b", 8)):
        for draft in (DRAFT, other):
            teach(learned, tenant, following, draft)
    learned.forget("a")
    assert (known(learned, "a"), known(learned, "a", other)) == ([], [])
    assert (known(learned, "b"), known(learned, "b", other)) == ([8], [8])


def test_forgetting_a_tenant_that_never_asked_does_nothing() -> None:
    learned = DraftStates(None)
    teach(learned, "ab", 7)
    learned.forget("a")
    learned.forget("")
    assert known(learned, "ab") == [7]


# Off


def test_where_nothing_is_learned_tenants_share_an_empty_record_that_stays_empty() -> None:
    learned = DraftStates(None)
    off = DraftConfig(max_successors=0, calibrates=False)
    teach(learned, "a", 7, off)
    a, b = learned.of("a", off), learned.of("b", off)
    assert known(learned, "a", off) == []
    assert a.successors.nbytes == 0
    builder = TreeBuilder(successors=a.successors, calibration=a.calibration)
    builder.build(ContextIndex([1, 2, 1]))
    builder.observe([2])
    assert np.array_equal(b.calibration.counts, Calibration().counts)


def test_requests_that_learn_nothing_displace_nobody() -> None:
    learned = DraftStates(None)
    teach(learned, "a", 7)
    for tenant in range(2 * TENANTS):
        learned.of(str(tenant), DraftConfig(max_successors=0, calibrates=False))
    assert known(learned, "a") == [7]


def test_successors_may_be_off_alone() -> None:
    learned = DraftStates(None)
    counts_only = DraftConfig(max_successors=0)
    teach(learned, "a", 7, counts_only)
    assert known(learned, "a", counts_only) == []
    assert learned.of("a", counts_only).calibration.learns
    assert learned.of("a", counts_only) is not learned.of("b", counts_only)


# The profile


@pytest.mark.parametrize("draft", [DRAFT, DraftConfig(max_successors=64, calibrates=False)])
def test_a_profile_is_known_to_every_tenant_from_the_start_and_is_never_written(draft: DraftConfig) -> None:
    profile = Profile("m", "v", np.array([row(1), row(4, 5)], np.int32))
    learned = DraftStates(profile)
    teach(learned, "a", 7, draft)
    assert known(learned, "b", draft) == [4, 5]
    # The profile's 4 starts with a third of 0.55, of which 4/5 are left, below 7's 0.55.
    assert known(learned, "a", draft) == [7, 4, 5]
    assert profile.tokens.tolist() == [row(1), row(4, 5)]


def test_without_successors_the_profile_is_not_used() -> None:
    learned = DraftStates(Profile("m", "v", np.array([row(1), row(4)], np.int32)))
    assert known(learned, "a", DraftConfig(max_successors=0)) == []
    assert known(learned, "a", DraftConfig(max_successors=0, calibrates=False)) == []
