"""What earlier answers in a datastore are worth, on traces made by hand."""

from __future__ import annotations

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.recall import halves, measure_recall
from reader_rag.bench.replay.replayer import ReplayConfig


def trace(name: str, category: str, prompt: list[int], output: list[int]) -> Trace:
    return Trace(id=name, category=category, prompt=tuple(prompt), output=tuple(output))


ASKED = list(range(100, 110))
ANSWER = list(range(40))


def test_an_answer_that_comes_again_takes_few_steps() -> None:
    report = measure_recall(
        [trace("a", "rag", ASKED, ANSWER)], [trace("b", "rag", ASKED, ANSWER)], ReplayConfig(), {}, None
    )
    assert (report["documents"], report["tokens"]) == (1, 50)
    row = report["categories"]["rag"]
    assert row["without"]["mat"] == 1.0  # no token comes twice in it
    assert row["with"]["mat"] >= 20
    assert row["with"]["accepted_from_datastore"] >= 38
    assert row["ratio"] == row["with"]["mat"]
    assert row["oracle"] == {"with": 20.0, "without": 1.0, "ratio": 20.0}


def test_answers_that_have_nothing_in_common_cost_nothing() -> None:
    report = measure_recall(
        [trace("a", "rag", ASKED, ANSWER)], [trace("b", "rag", [1], [60, 61, 60, 61, 60])], ReplayConfig(), {}, None
    )
    assert report["categories"]["rag"]["ratio"] == 1.0


def test_each_category_is_halved() -> None:
    traces = [trace(name, name[0], [1], [2]) for name in ("a1", "a2", "b1", "a3", "a4", "b2", "b3")]
    known, asked = halves(traces)
    assert [one.id for one in known] == ["a1", "a2", "b1"]
    assert [one.id for one in asked] == ["a3", "a4", "b2", "b3"]
