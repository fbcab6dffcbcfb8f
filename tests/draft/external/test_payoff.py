"""When a draft source is asked: where the tokens that it adds pay for its time."""

from __future__ import annotations

import pytest

from reader_rag.draft.external.payoff import CallTime, Pace, Payoff


def asked(payoff: Payoff, steps: int, gain: float, *, expected: float = 1.0, price: float = 0.5) -> list[int]:
    """The steps in which a source that always adds `gain` tokens and takes half a step is asked."""
    found = []
    for step in range(steps):
        if payoff.asks(expected, price, 0.5):
            found.append(step)
            payoff.observe(expected, gain)
        payoff.spent(1.0)
    return found


class TestPayoff:
    def test_a_source_that_adds_more_than_it_takes_is_always_asked(self) -> None:
        assert asked(Payoff(), 500, 0.6) == list(range(500))

    def test_one_that_adds_nothing_is_asked_a_few_times_and_then_once_in_a_while(self) -> None:
        found = asked(Payoff(), 1000, 0.0)
        warm_up = [step for step in found if step < 20]
        assert warm_up == list(range(len(warm_up)))
        assert 2 <= len(warm_up) <= 10
        # Half a step each: a 256th of all time is one in 128 steps.
        assert len(found) - len(warm_up) == 7

    def test_the_more_it_costs_the_less_often_it_is_tried(self) -> None:
        tries = [len(asked(Payoff(), 100, 0.0, price=price)) for price in (0.1, 0.5, 2.0, 8.0)]
        assert tries == sorted(tries, reverse=True)
        assert tries[0] > tries[1] > tries[3] >= 1

    def test_one_that_costs_nothing_and_adds_nothing_may_be_asked(self) -> None:
        assert len(asked(Payoff(), 100, 0.0, price=0.0)) == 100

    def test_one_that_displaces_better_tokens_is_not_asked_even_for_nothing(self) -> None:
        assert len(asked(Payoff(), 1000, -1.0, price=0.0)) < 50

    def test_it_is_asked_where_search_finds_little_and_not_inside_copies(self) -> None:
        payoff, found = Payoff(), {0.5: 0, 10.0: 0}
        for _ in range(200):
            for expected, gain in ((0.5, 2.0), (10.0, 0.0)):
                if payoff.asks(expected, 0.5, 0.5):
                    found[expected] += 1
                    payoff.observe(expected, gain)
                payoff.spent(1.0)
        assert found[0.5] == 200
        assert found[10.0] < 40

    def test_one_that_begins_to_pay_is_found_out(self) -> None:
        payoff = Payoff()
        asked(payoff, 1000, 0.0)
        found = asked(payoff, 10_000, 2.0)
        assert found[-100:] == list(range(9_900, 10_000))

    def test_the_estimate_is_the_mean_of_the_class_and_leans_on_all(self) -> None:
        payoff = Payoff()
        for _ in range(50):
            payoff.observe(1.0, 3.0)
        assert payoff.estimate(1.0) == pytest.approx(3.0)
        assert payoff.estimate(10.0) == pytest.approx(3.0)  # nothing is known of it but that
        for _ in range(50):
            payoff.observe(10.0, 0.0)
        assert payoff.estimate(10.0) == pytest.approx(8 * 1.5 / 58, abs=0.02)


def test_the_pace_is_that_of_the_steps_that_follow_and_leans_on_all() -> None:
    pace = Pace()
    assert pace.rate(0.0) is None
    for _ in range(400):
        pace.observe(0.0, 1, 2.0)
        pace.observe(10.0, 12, 2.0)
    assert pace.rate(0.0) == pytest.approx(0.55, abs=0.1)
    assert pace.rate(10.0) == pytest.approx(6.0, abs=0.5)
    assert pace.rate(3.0) == pytest.approx(3.25, abs=0.1)  # nothing is known of it
    for _ in range(300):
        pace.observe(10.0, 2, 2.0)
    assert 1.0 < pace.rate(10.0) < 1.5


def test_the_time_of_a_call_is_the_median_of_those_without_a_pause() -> None:
    time = CallTime()
    assert time.seconds is None
    time.observe(9.0, steady=False)
    assert time.seconds == 9.0
    for seconds in (1.0, 50.0, 2.0):
        time.observe(seconds, steady=True)
    assert time.seconds == 2.0
    time.observe(9.0, steady=False)
    assert time.seconds == 2.0
