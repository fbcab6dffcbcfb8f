"""A simulated drafter beside search, on tiny recorded answers."""

from __future__ import annotations

import numpy as np
import pytest

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.replayer import ReplayConfig
from reader_rag.bench.replay.simulated import Drafter, SimulatedSource, compare, replay_drafted
from reader_rag.draft.source import Budget, RequestState
from reader_rag.errors import ConfigError

RANDOM = np.random.default_rng(5)
NEW = tuple(
    Trace(f"new-{n}", "new", tuple(RANDOM.integers(0, 500, 20).tolist()), tuple(RANDOM.integers(0, 500, 60).tolist()))
    for n in range(10)
)
"""Nothing repeats."""
COPIES = tuple(
    Trace(f"copy-{n}", "copy", trace.prompt + trace.output[:40] + trace.prompt[-3:], trace.output)
    for n, trace in enumerate(NEW)
)
"""The prompt has two thirds of the answer, behind the same three tokens."""
CONFIG = ReplayConfig(sources=("context",))


class TestDrafter:
    def test_it_is_named_by_quality_and_cost(self) -> None:
        assert Drafter.parse("0.8,0.1") == Drafter(0.8, 0.1)
        assert str(Drafter(0.8, 0.1)) == "80% right, 10% of a step"

    @pytest.mark.parametrize("text", ["", "0.8", "1.5,0", "0.5,-1", "a,b", "0.5,inf", "nan,0"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--simulated-drafter takes QUALITY,COST"):
            Drafter.parse(text)

    @pytest.mark.parametrize("quality", [0.0, 0.4, 0.8, 1.0])
    def test_its_first_token_is_right_as_often_as_it_says_and_the_same_each_time(self, quality: float) -> None:
        hits = []
        for trace in NEW:
            first, again = (SimulatedSource(trace, Drafter(quality, 0.0), 500) for _ in range(2))
            for length in range(len(trace.output)):
                tokens = np.array([*trace.prompt, *trace.output[:length]], np.int32)
                state = RequestState(tokens, len(trace.prompt))
                proposal = first.propose(state, Budget(64, 40))
                assert proposal.tokens == again.propose(state, Budget(64, 40)).tokens
                hits.append(proposal.tokens[0] == trace.output[length])
        assert np.mean(hits) == pytest.approx(quality, abs=0.06)


class TestReplay:
    def test_a_perfect_drafter_alone_emits_its_path_and_one_token_more(self) -> None:
        outcome = replay_drafted(NEW, CONFIG, Drafter(1.0, 0.5), {}, None, alone=True)["new"]
        assert outcome.asked == outcome.steps
        assert outcome.seconds == 1.5 * outcome.steps
        assert outcome.tokens == 600
        assert 3.5 < outcome.tokens / outcome.steps < 6.0

    def test_without_cost_and_quality_nothing_is_lost(self) -> None:
        plain = compare(COPIES, CONFIG, [Drafter(0.0, 0.0)], {}, None)
        assert plain["0% right, 0% of a step"]["copy"]["ratio"] == pytest.approx(1.0, abs=0.01)

    @pytest.mark.parametrize("quality", [0.0, 0.4, 0.8])
    @pytest.mark.parametrize("cost", [0.0, 0.1, 0.5])
    def test_both_together_are_as_fast_as_the_better_of_them(self, quality: float, cost: float) -> None:
        traces = (*NEW, *COPIES) * 4
        for row in compare(traces, CONFIG, [Drafter(quality, cost)], {}, None).values():
            for category, rates in row.items():
                assert rates["ratio"] > 0.99, (category, rates)
