"""Metrics for Prometheus: of hand-made reports, and of an engine whose requests finish, fail and are cancelled."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from waiting import wait_until

from reader_rag.config import BatchConfig, SamplingParams
from reader_rag.draft.external.sources import SourceCounts
from reader_rag.draft.tree import SOURCES
from reader_rag.engine.metrics import PrometheusMetrics
from reader_rag.engine.observer import Load, Observer, Outcome, StepReport
from reader_rag.engine.outputs import Stats
from reader_rag.engine.scheduler import Scheduler
from reader_rag.engine.stream import GenerationStream
from reader_rag.errors import ConfigError

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> PrometheusMetrics:
    return PrometheusMetrics(registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"reader_rag_{name}", labels)


class TestWhatIsTold:
    def test_a_step(self, metrics: PrometheusMetrics, registry: CollectorRegistry) -> None:
        metrics.stepped(StepReport(9, [{"context": 2, "passage": 1}, {}], [4, 1], 0.0003, 0.03))
        assert value(registry, "step_seconds_sum") == 0.03
        assert value(registry, "draft_seconds_sum") == 0.0003
        assert value(registry, "positions_per_step_sum") == 9
        assert (value(registry, "tokens_per_step_sum"), value(registry, "tokens_per_step_count")) == (5, 2)
        accepted = {
            source: (
                value(registry, "accepted_tokens_sum", source=source),
                value(registry, "accepted_tokens_count", source=source),
            )
            for source in SOURCES
        }
        rest = dict.fromkeys(("datastore", "successor", "external", "prediction"), (0, 2))
        assert accepted == {"context": (2, 2), "passage": (1, 2)} | rest
        assert value(registry, "accepted_tokens_bucket", source="context", le="0.0") == 1
        assert value(registry, "accepted_tokens_bucket", source="context", le="2.0") == 2

    def test_a_source_that_is_not_known_yet(self, metrics: PrometheusMetrics, registry: CollectorRegistry) -> None:
        metrics.stepped(StepReport(3, [{"oracle": 2}], [3], 0.0, 0.03))
        assert value(registry, "accepted_tokens_sum", source="oracle") == 2

    def test_an_answer(self, metrics: PrometheusMetrics, registry: CollectorRegistry) -> None:
        stats = Stats(
            100, 20, steps=5, drafted=40, accepted=14, reused_tokens=64, queue_s=0.25, ttft_s=0.5, decode_s=2.0
        )
        metrics.answered(stats, "stop")
        assert value(registry, "requests_total", outcome="stop") == 1
        kinds = ("prompt", "reused", "completion", "drafted", "accepted")
        assert [value(registry, "tokens_total", kind=kind) for kind in kinds] == [100, 64, 20, 40, 14]
        times = ("queue_seconds", "first_token_seconds", "decode_seconds")
        assert [value(registry, f"{name}_sum") for name in times] == [0.25, 0.5, 2.0]

    def test_draft_sources_from_outside(self, metrics: PrometheusMetrics, registry: CollectorRegistry) -> None:
        for _ in range(2):
            metrics.answered(Stats(draft_sources={"Head": SourceCounts(5, 3, 20, 8)}), "stop")
        kinds = ("asked", "skipped", "proposed", "accepted")
        assert [value(registry, "draft_source_total", source="Head", kind=kind) for kind in kinds] == [10, 6, 40, 16]

    def test_a_request_without_a_token_has_no_time_to_its_first(
        self, metrics: PrometheusMetrics, registry: CollectorRegistry
    ) -> None:
        metrics.answered(Stats(prompt_tokens=100, queue_s=30.0), "cancelled")
        assert value(registry, "requests_total", outcome="cancelled") == 1
        assert value(registry, "queue_seconds_sum") == 30.0
        assert value(registry, "first_token_seconds_count") == value(registry, "decode_seconds_count") == 0

    def test_the_load_and_what_was_moved(self, metrics: PrometheusMetrics, registry: CollectorRegistry) -> None:
        metrics.loaded(Load(running=3, waiting=2, cache_bytes=1024))
        metrics.loaded(Load(running=4, waiting=1, cache_bytes=2048))
        metrics.moved(1, 512)
        metrics.moved(1, 256)
        assert (value(registry, "requests_running"), value(registry, "requests_waiting")) == (4, 1)
        assert value(registry, "cache_reserved_bytes") == 2048
        assert (value(registry, "rearrangements_total"), value(registry, "moved_bytes_total")) == (2, 768)

    def test_the_share_of_the_profile_that_is_computed(
        self, metrics: PrometheusMetrics, registry: CollectorRegistry
    ) -> None:
        assert value(registry, "profile_ratio") == 0
        metrics.profiled(0.25)
        assert value(registry, "profile_ratio") == 0.25

    def test_every_sample_is_there_before_anything_happened(self, registry: CollectorRegistry) -> None:
        PrometheusMetrics(registry, labels={"model": "tiny"})
        for outcome in ("stop", "length", "cancelled", "failed"):
            assert value(registry, "requests_total", outcome=outcome, model="tiny") == 0
        assert value(registry, "tokens_total", kind="drafted", model="tiny") == 0
        assert value(registry, "accepted_tokens_count", source="passage", model="tiny") == 0
        assert value(registry, "step_seconds_count", model="tiny") == 0
        assert value(registry, "requests_waiting", model="tiny") == 0


class TestLabels:
    def test_engines_that_share_a_registry_are_told_apart(self, registry: CollectorRegistry) -> None:
        first, second = (PrometheusMetrics(registry, labels={"model": name}) for name in ("a", "b"))
        first.moved(1, 1)
        second.moved(1, 2)
        assert [value(registry, "moved_bytes_total", model=name) for name in ("a", "b")] == [1, 2]

    def test_an_engine_that_is_made_anew_counts_on(self, registry: CollectorRegistry) -> None:
        PrometheusMetrics(registry).moved(1, 1)
        PrometheusMetrics(registry).moved(1, 2)
        assert value(registry, "moved_bytes_total") == 3

    def test_labels_of_other_names_need_another_registry(
        self, registry: CollectorRegistry, metrics: PrometheusMetrics
    ) -> None:
        with pytest.raises(ConfigError, match=r"have the labels \[\], not \['model'\]"):
            PrometheusMetrics(registry, labels={"model": "a"})

    @pytest.mark.parametrize("name", ["outcome", "kind", "source", "le", "a-b", "__a", "1a", ""])
    def test_names_that_cannot_be_labels_are_refused(self, registry: CollectorRegistry, name: str) -> None:
        with pytest.raises(ConfigError, match="is not a possible label name"):
            PrometheusMetrics(registry, labels={name: "x"})
        assert not generate_latest(registry)

    def test_without_the_library_it_says_what_to_install(self) -> None:
        code = """
import sys
sys.modules["prometheus_client"] = None
from reader_rag.errors import MissingDependencyError
from reader_rag.engine.metrics import PrometheusMetrics
try:
    PrometheusMetrics()
except MissingDependencyError as error:
    print(error)
"""
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert shown == "metrics need prometheus_client: pip install 'reader-rag[metrics]'\n"


class Ends(Observer):
    def __init__(self) -> None:
        self.ends: list[tuple[Outcome, Stats]] = []
        self.loads: list[Load] = []

    def answered(self, stats: Stats, outcome: Outcome) -> None:
        self.ends.append((outcome, stats))

    def loaded(self, load: Load) -> None:
        self.loads.append(load)

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for outcome, _ in self.ends]


@pytest.fixture
def reported_values(tiny_engine: Engine) -> Iterator[Ends]:
    ends = Ends()
    tiny_engine.observers.append(ends)
    yield ends
    tiny_engine.observers.remove(ends)


EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)


class TestEndsAreToldOnce:
    def test_a_finished_answer(self, tiny_engine: Engine, reported_values: Ends) -> None:
        with tiny_engine.submit(tiny_engine.encode("the garden"), EIGHT) as stream:
            for _ in stream:
                pass
            assert next(stream, None) is None
            stream.close()
        assert reported_values.ends == [("length", stream.result.stats)]
        assert stream.result.stats.completion_tokens == 8

    def test_a_stream_that_is_closed_early(self, tiny_engine: Engine, reported_values: Ends) -> None:
        stream = tiny_engine.submit(tiny_engine.encode("the garden"), LONG)
        next(stream)
        stream.close()
        stream.close()
        tiny_engine.between_steps(lambda: None)
        assert next(stream, None) is None
        assert reported_values.outcomes == ["cancelled"]
        assert reported_values.ends[0][1].completion_tokens >= 1

    def test_a_stream_that_is_closed_in_the_queue(self, tiny_engine: Engine, reported_values: Ends) -> None:
        def submit_and_close() -> None:
            stream.append(others.submit(tiny_engine.submit, tiny_engine.encode("the garden"), EIGHT).result(timeout=60))
            stream[0].close()

        stream: list[GenerationStream] = []
        with ThreadPoolExecutor(1) as others:
            tiny_engine.between_steps(submit_and_close)
        tiny_engine.between_steps(lambda: None)
        assert reported_values.outcomes == ["cancelled"]
        assert stream[0].result.token_ids == ()

    @pytest.mark.parametrize("error", [ValueError, ZeroDivisionError])
    def test_an_answer_that_breaks_off(
        self, tiny_engine: Engine, reported_values: Ends, error: type[BaseException]
    ) -> None:
        def fails(ids: Any, scores: Any) -> bool:
            raise error

        with (
            pytest.raises(error),
            tiny_engine.submit(tiny_engine.encode("the garden"), EIGHT, stopping_criteria=[fails]) as stream,
        ):
            next(stream)
        tiny_engine.between_steps(lambda: None)
        assert reported_values.outcomes == ["failed"]

    def test_a_stream_that_its_own_observer_closes(self, tiny_engine: Engine, reported_values: Ends) -> None:
        class Closes(Observer):
            def answered(self, stats: Stats, outcome: Outcome) -> None:
                stream.close()

        closes = Closes()
        tiny_engine.observers.append(closes)
        try:
            stream = tiny_engine.submit(tiny_engine.encode("the garden"), EIGHT)
            list(stream)
        finally:
            tiny_engine.observers.remove(closes)
        assert reported_values.outcomes == ["length"]

    def test_one_that_gives_up_waiting_and_one_that_is_decoded(
        self, tiny_engine: Engine, reported_values: Ends
    ) -> None:
        scheduler = Scheduler(tiny_engine.context, BatchConfig(max_rows=1), 0)
        asked = [tiny_engine.requests.build(tiny_engine.encode(text), EIGHT) for text in ("the garden", "the tree")]
        started, goes_on = threading.Event(), threading.Event()

        class Blocks(Observer):
            def loaded(self, load: Load) -> None:
                if load.running and threading.current_thread().name == "reader-rag-scheduler":
                    started.set()
                    assert goes_on.wait(timeout=60)

        blocks = Blocks()
        tiny_engine.observers.append(blocks)
        try:
            first = scheduler.submit(asked[0])
            assert started.wait(timeout=60)
            with ThreadPoolExecutor(1) as other:
                submitted = other.submit(scheduler.submit, asked[1])
                wait_until(lambda: scheduler.load.waiting, "the second request is in the queue")
                goes_on.set()
                submitted.result(timeout=60).close()
        finally:
            tiny_engine.observers.remove(blocks)
        assert sum(len(chunk.token_ids) for chunk in first) == 8
        scheduler.close()
        assert sorted(reported_values.outcomes) == ["cancelled", "length"]
        assert [(load.running, load.waiting) for load in reported_values.loads[-3:]] == [(1, 1), (1, 0), (0, 0)]
        assert reported_values.loads[-1].cache_bytes == 0
        waited = {outcome: stats.queue_s for outcome, stats in reported_values.ends}
        assert waited["cancelled"] > 0.0

    def test_metrics_of_an_engine(self, tiny_engine: Engine, registry: CollectorRegistry) -> None:
        metrics = PrometheusMetrics(registry)
        tiny_engine.observers.append(metrics)
        try:
            prompt = tiny_engine.encode("the garden and the tree")
            alone = tiny_engine.generate(prompt, EIGHT)
            (together,) = tiny_engine.generate([prompt], EIGHT)
            tiny_engine.between_steps(lambda: None)  # its thread has reported everything
        finally:
            tiny_engine.observers.remove(metrics)
        assert alone.token_ids == together.token_ids
        assert value(registry, "requests_total", outcome="length") == 2
        assert value(registry, "tokens_total", kind="prompt") == 2 * len(prompt.token_ids)
        assert value(registry, "tokens_total", kind="completion") == 16
        steps = alone.stats.steps + together.stats.steps
        assert value(registry, "step_seconds_count") == steps
        assert value(registry, "tokens_per_step_sum") == 14  # the first token of an answer comes with its prompt
        accepted = alone.stats.accepted + together.stats.accepted
        by_source = [value(registry, "accepted_tokens_sum", source=s) for s in SOURCES]
        assert sum(by_source) == accepted == value(registry, "tokens_total", kind="accepted")
        assert value(registry, "requests_running") == value(registry, "requests_waiting") == 0


class TestDocs:
    def test_every_metric_is_in_the_table(self, metrics: PrometheusMetrics, registry: CollectorRegistry) -> None:
        names = set()
        for metric in registry.collect():
            names.add(f"{metric.name}_total" if metric.type == "counter" else metric.name)
        assert set(re.findall(r"^\| `(reader_rag_\w+)", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)) == names
