"""Racing drafted against plain decoding of one prompt."""

from __future__ import annotations

import pytest

from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Passage
from reader_rag.errors import BusyError
from reader_rag.llm.comparison import RaceStopped, race

TEXT = "the heron and the owl and the heron and the owl and the heron"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def test_a_race_records_both_time_lines_and_the_tokens_agree(tiny_engine: Engine) -> None:
    methods: list[str] = []
    prompt = tiny_engine.encode(TEXT)
    done = race(tiny_engine, prompt, PARAMS, (Passage("p", TEXT),), on_method=methods.append)
    assert methods == ["reader", "plain"]
    plain = tiny_engine.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True, speculate=False), recall=False)
    for recording in (done.reader, done.plain):
        assert "".join(text for _, text in recording.events) == plain.text
        times = [seconds for seconds, _ in recording.events]
        assert times == sorted(times)
    assert done.plain.result.stats.drafted == 0
    assert done.reader.result.stats.drafted > 0
    report = done.to_dict()
    assert (report["agree"], report["first_difference"]) == (True, None)
    assert report["reader"]["tokens"] == report["plain"]["tokens"] == 24


def test_a_race_refuses_to_run_beside_another_request(tiny_engine: Engine) -> None:
    prompt = tiny_engine.encode(TEXT)
    with (
        tiny_engine.submit(prompt, SamplingParams(max_tokens=1500, ignore_eos=True)),
        pytest.raises(BusyError, match="race when they are done"),
    ):
        race(tiny_engine, prompt, PARAMS)


def test_a_race_ends_when_another_request_comes(tiny_engine: Engine) -> None:
    prompt = tiny_engine.encode(TEXT)
    others = []

    def submit_beside(method: str) -> None:
        if method == "plain":
            others.append(tiny_engine.submit(prompt, SamplingParams(max_tokens=1500, ignore_eos=True)))

    with pytest.raises(BusyError):
        race(tiny_engine, prompt, PARAMS, on_method=submit_beside)
    others[0].close()


def test_a_stopped_race_leaves_nothing_running(tiny_engine: Engine) -> None:
    with pytest.raises(RaceStopped):
        race(tiny_engine, tiny_engine.encode(TEXT), PARAMS, stopped=lambda: True)
    tiny_engine.between_steps(lambda: None)
    assert tiny_engine.busy.running == 0
