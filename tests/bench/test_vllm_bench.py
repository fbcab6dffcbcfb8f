"""`bench vllm` and its kin without vLLM: how an engine is driven, what is counted, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from reader_rag.bench.vllm import engine as vllm_engine
from reader_rag.bench.vllm import stress as vllm_stress
from reader_rag.bench.vllm.compare import Sampling, VllmTask, _groups, _report, compare_vllm, first_difference
from reader_rag.bench.vllm.costs import FixedDrafts, measure_costs
from reader_rag.bench.vllm.engine import Answer, Driver, Group, pausing_group, run_group
from reader_rag.bench.vllm.options import Options
from reader_rag.bench.vllm.stress import StressPlan, storm
from reader_rag.bench.vllm.worker import _begin, _resume
from reader_rag.cli.main import app
from reader_rag.errors import ConfigError, MissingDependencyError


class ScriptedEngine:
    """Stands in for vLLM's `LLMEngine`: a request whose prompt is [n, ...] gets n, n + 1, ... by twos.

    The first token comes alone. Of the requests that are open `at_once` have a part in a step.
    """

    def __init__(self, at_once: int = 2) -> None:
        self.at_once = at_once
        self.running: dict[str, tuple[int, int, int]] = {}
        self.names: dict[str, str] = {}
        self.most = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> str:
        held = f"{name}-held"
        self.running[held] = (prompt["prompt_token_ids"][0], 0, params)
        self.names[held] = name
        return held

    def abort_request(self, names: Sequence[str], internal: bool) -> None:
        assert internal
        for name in names:
            del self.running[name]

    def step(self) -> list[Any]:
        outputs = []
        for held in list(self.running)[: self.at_once]:
            first, done, most = self.running[held]
            new = [first + n for n in range(done, min(done + (2 if done else 1), most))]
            finished = done + len(new) == most
            self.running[held] = (first, done + len(new), most)
            if finished:
                del self.running[held]
            outputs.append(
                SimpleNamespace(
                    request_id=self.names[held], finished=finished, outputs=[SimpleNamespace(token_ids=new)]
                )
            )
        return outputs

    def get_metrics(self) -> list[Any]:
        return []


def test_a_request_gets_its_tokens_and_the_steps_that_gave_them_are_counted() -> None:
    group = run_group(ScriptedEngine(), [[10], [20]], [5, 2])
    assert [answer.tokens for answer in group.answers] == [[10, 11, 12, 13, 14], [20, 21]]
    assert [answer.steps for answer in group.answers] == [2, 1]


def test_only_steps_after_each_request_has_its_first_token_are_timed() -> None:
    # One at a time: the second request has its first token when the first has all of its own.
    group = run_group(ScriptedEngine(at_once=1), [[10], [20]], [5, 4])
    assert group.emitted == 3
    assert 0 < group.decode_s < group.wall_s


def test_a_group_that_pauses_gets_the_same_tokens() -> None:
    engine = ScriptedEngine()
    assert _begin(engine, pausing_group, [[10], [20]], [5, 2], 0.0) is None  # the prompts are read
    assert _resume(engine) is None
    group = _resume(engine)
    assert [answer.tokens for answer in group.answers] == [[10, 11, 12, 13, 14], [20, 21]]
    assert group.emitted == 5


def test_a_group_that_ends_with_its_first_tokens_needs_no_turn() -> None:
    engine = ScriptedEngine()
    group = _begin(engine, pausing_group, [[10]], [1], 0.0)
    assert (group.emitted, group.decode_s) == (0, 0.0)


def test_an_aborted_request_ends_where_it_is() -> None:
    engine = ScriptedEngine()
    driver = Driver(engine)
    name, answer = driver.add([10], 9)
    driver.step()
    driver.abort(name)
    assert (answer.tokens, driver.open, engine.running) == ([10], 0, {})


def test_a_storm_answers_all_but_what_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stress, "greedy", lambda max_tokens: max_tokens)
    plan = StressPlan(requests=40, aborted=0.25, max_tokens=20, queued=6)
    asked = vllm_stress._requests(plan, 3)
    found = storm(ScriptedEngine(at_once=4), [[100], [200], [300]], asked, plan.queued)
    assert len(found["memory_mb"]) == 11
    cut_short = 0
    for one, tokens in zip(asked, found["tokens"], strict=True):
        first = 100 * (one.task + 1)
        assert tokens == list(range(first, first + len(tokens)))
        if one.abort_after is None:
            assert len(tokens) == one.max_tokens
        cut_short += len(tokens) < one.max_tokens
    assert sum(one.abort_after is not None for one in asked) == 10
    assert 0 < cut_short <= 10


def test_prompts_are_cut_to_mixed_lengths() -> None:
    tasks = [VllmTask(str(length), "rag", tuple(range(length))) for length in (5, 40, 2000, 2000, 2000)]
    cut = [task.prompt for task in vllm_stress.cut(tasks)]
    assert cut[0] == tuple(range(5))
    assert all(prompt == tuple(range(len(prompt))) and 8 <= len(prompt) <= 256 for prompt in cut[1:])
    assert len({len(prompt) for prompt in cut}) == 5


def test_prompts_are_grouped_within_their_category() -> None:
    tasks = [VllmTask(str(number), category, (1,)) for number, category in enumerate(["a", "b", "a", "a", "b"])]
    groups = [[task.id for task in group] for group in _groups(tasks, 2)]
    assert groups == [["0", "2"], ["3"], ["1", "4"]]


def group_of(seconds: float, *, steps: int, drafted: int = 0, accepted: int = 0) -> Group:
    """One answer of nine tokens."""
    answers = [Answer(list(range(9)), steps, first_s=0.5)]
    return Group(answers, emitted=8, decode_s=seconds, wall_s=seconds + 1, drafted=drafted, accepted=accepted)


def test_a_report_has_speeds_steps_and_ratios() -> None:
    groups = [[VllmTask("a", "rag", (1,))], [VllmTask("b", "rag", (1,))]]
    measured = {
        "plain": [group_of(2.0, steps=8), group_of(2.0, steps=8)],
        "reader": [group_of(1.0, steps=4, drafted=8, accepted=4), group_of(0.5, steps=2, drafted=8, accepted=6)],
    }
    report = _report(Options("m"), groups, measured)
    held = report["categories"]["rag"]
    assert held["methods"]["plain"]["decode_tokens_per_s"] == 4.0
    assert held["methods"]["plain"]["accepted_share"] is None
    assert held["methods"]["reader"] == {
        "decode_tokens_per_s": 10.67,
        "tokens_per_s_with_prompts": 5.14,
        "ttft_s": 0.5,
        "mat": 2.667,
        "drafted_per_step": 2.67,
        "accepted_share": 0.625,
        "tokens": 18,
    }
    assert held["ratios"] == {"reader/plain": {"median": 3.0, "min": 2.0, "max": 4.0, "total": 2.667}}


class AsksNothing:
    """Stands in for the worker that knows what the model prefers."""

    def run(self, work: Any, *args: Any) -> float:
        self.args = args
        return 0.25


def test_a_difference_is_told_with_its_place_and_margin() -> None:
    plain: Any = AsksNothing()
    found = first_difference(plain, (7, 8), [1, 2, 3], [1, 9, 3])
    assert found == {"position": 1, "plain": 2, "other": 9, "margin": 0.25}
    assert plain.args == ((7, 8, 1), 2, 9)


def test_an_answer_that_ended_too_soon_differs() -> None:
    plain: Any = AsksNothing()
    assert first_difference(plain, (7,), [1, 2], [1]) == {"position": 1, "plain": 2, "other": None, "margin": None}


def test_fixed_drafts_are_as_long_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedDrafts, "length", 3)
    drafter = FixedDrafts(SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 20)))
    none: Any = None
    assert drafter.propose([[1], [], [4, 9]], none, none) == [[8, 15, 2], [], [16, 3, 10]]


@pytest.mark.parametrize(
    ("rows", "drafted", "words"),
    [
        ([2, 4], [0, 4], "rows must rise from 1"),
        ([1], [1, 2], "drafted must rise from 0"),
        ([1], [0], "at least one other"),
    ],
)
def test_costs_that_make_no_table_are_not_measured(rows: list[int], drafted: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure_costs(Options("m"), rows, drafted)


def test_costs_need_room_for_the_steps() -> None:
    with pytest.raises(ConfigError, match="raise --max-model-len"):
        measure_costs(Options("m", max_model_len=512), [1], [0, 4], context=500)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    find = vllm_engine.find_spec
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None if name == "vllm" else find(name))


@pytest.mark.usefixtures("no_vllm")
def test_without_vllm_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(MissingDependencyError, match="pip install vllm"):
        vllm_engine.make_engine(Options("m"), "plain")


@pytest.mark.usefixtures("no_vllm")
def test_the_command_says_so_in_one_line(tmp_path: Path, model_folder: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "category": "rag", "turns": ["hello"]}) + "\n")
    result = CliRunner().invoke(app, ["bench", "vllm", "--model", str(model_folder), "--prompts", str(prompts)])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "pip install vllm" in result.stderr


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown method eagle; there are plain, ngram, suffix, reader"):
        compare_vllm(Options("m"), [VllmTask("a", "rag", (1,))], ["plain", "eagle"], Sampling())
