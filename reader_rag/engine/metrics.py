"""Counts and times of an engine for Prometheus.

No metric names a text, a token, a passage or a tenant: what is scraped says nothing of whose documents were read.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, get_args

from reader_rag.draft.tree import SOURCES
from reader_rag.engine.observer import Load, Observer, Outcome, StepReport
from reader_rag.engine.outputs import Stats
from reader_rag.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

KINDS = ("prompt", "reused", "completion", "drafted", "accepted")
"""Of tokens: read, emitted, and the drafted ones that were verified, of which some were accepted."""

_OWN_LABELS = frozenset({"outcome", "kind", "source", "le", "quantile"})
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

# A step takes from a millisecond (a small model on a GPU) to seconds; drafting tens of microseconds of it.
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_DRAFT_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_POSITIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

MetricT = TypeVar("MetricT", "Counter", "Gauge", "Histogram")


def _prometheus() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as cause:
        raise MissingDependencyError("metrics need prometheus_client: pip install 'reader-rag[metrics]'") from cause
    return prometheus_client


class PrometheusMetrics(Observer):
    """Tells Prometheus what an engine does; append it to `engine.observers`.

    Args:
        registry: Where the metrics are registered; None takes the one that `prometheus_client` serves by default.
        labels: Put on every sample. Several engines of a process that share a registry have one `PrometheusMetrics`
            each, with labels of the same names and values that tell them apart.

    Raises:
        ConfigError: A label has a name that it cannot have, or the registry's metrics have labels of other names.
        MissingDependencyError: `prometheus_client` is not installed.

    Example:
        >>> llm.engine.observers.append(PrometheusMetrics())
        >>> prometheus_client.start_http_server(9100)
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, labels: Mapping[str, str] | None = None) -> None:
        self._labels = dict(labels or {})
        self._metrics = _metrics_of(registry or _prometheus().REGISTRY, tuple(sorted(self._labels)))
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Samples exist from the start: a counter that appears with its first event hides that event from `rate`."""
        metrics = self._metrics
        for outcome in get_args(Outcome):
            self._of(metrics.requests, outcome=outcome)
        for kind in KINDS:
            self._of(metrics.tokens, kind=kind)
        for source in SOURCES:
            self._of(metrics.accepted, source=source)
        if self._labels:
            for metric in metrics.unlabelled:
                metric.labels(**self._labels)

    def _of(self, metric: MetricT, **own: str) -> MetricT:
        """The metric with the labels of this engine, and its own."""
        labels = {**self._labels, **own}
        return metric.labels(**labels) if labels else metric

    def stepped(self, report: StepReport) -> None:
        """See `Observer`."""
        metrics = self._metrics
        self._of(metrics.step).observe(report.seconds)
        self._of(metrics.draft).observe(report.draft_s)
        self._of(metrics.positions).observe(report.positions)
        for emitted in report.emitted:
            self._of(metrics.emitted).observe(emitted)
        for accepted in report.accepted:
            # Zeros too: so all sources count the same steps, and their means add up to the mean of the whole.
            for source in {*SOURCES, *accepted}:
                self._of(metrics.accepted, source=source).observe(accepted.get(source, 0))

    def answered(self, stats: Stats, outcome: Outcome) -> None:
        """See `Observer`."""
        metrics = self._metrics
        self._of(metrics.requests, outcome=outcome).inc()
        counts = (stats.prompt_tokens, stats.reused_tokens, stats.completion_tokens, stats.drafted, stats.accepted)
        for kind, count in zip(KINDS, counts, strict=True):
            self._of(metrics.tokens, kind=kind).inc(count)
        self._of(metrics.queue).observe(stats.queue_s)
        if stats.completion_tokens:
            self._of(metrics.first_token).observe(stats.ttft_s)
            self._of(metrics.decode).observe(stats.decode_s)

    def loaded(self, load: Load) -> None:
        """See `Observer`."""
        metrics = self._metrics
        self._of(metrics.running).set(load.running)
        self._of(metrics.waiting).set(load.waiting)
        self._of(metrics.cache).set(load.cache_bytes)

    def moved(self, rearrangements: int, moved_bytes: int) -> None:
        """See `Observer`."""
        self._of(self._metrics.rearrangements).inc(rearrangements)
        self._of(self._metrics.moved).inc(moved_bytes)


class _Metrics:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, ...]) -> None:
        prometheus = _prometheus()
        self.labels = labels

        def counter(name: str, says: str, *own: str) -> Counter:
            metric: Counter = prometheus.Counter(f"reader_rag_{name}", says, [*labels, *own], registry=registry)
            return metric

        def gauge(name: str, says: str) -> Gauge:
            metric: Gauge = prometheus.Gauge(f"reader_rag_{name}", says, labels, registry=registry)
            return metric

        def histogram(name: str, says: str, buckets: Sequence[float], *own: str) -> Histogram:
            metric: Histogram = prometheus.Histogram(
                f"reader_rag_{name}", says, [*labels, *own], registry=registry, buckets=buckets
            )
            return metric

        self.requests = counter("requests_total", "Requests that have ended, by how.", "outcome")
        self.tokens = counter("tokens_total", "Tokens of requests that have ended, by kind.", "kind")
        self.queue = histogram("queue_seconds", "Time that a request waited for a place.", _REQUEST_S)
        self.first_token = histogram("first_token_seconds", "Time from then to the first token.", _REQUEST_S)
        self.decode = histogram("decode_seconds", "Time from the first token to the last.", _REQUEST_S)
        self.step = histogram("step_seconds", "Time of a verify step.", _STEP_S)
        self.draft = histogram("draft_seconds", "Time of a step that drafting took.", _DRAFT_S)
        self.positions = histogram("positions_per_step", "Positions of a step's forward pass.", _POSITIONS)
        self.emitted = histogram("tokens_per_step", "Tokens that a step emitted for an answer.", _TOKENS)
        self.accepted = histogram(
            "accepted_tokens", "Drafted tokens that a step accepted for an answer, by source.", _TOKENS, "source"
        )
        self.running = gauge("requests_running", "Requests that are decoded together now.")
        self.waiting = gauge("requests_waiting", "Requests that wait for a place.")
        self.cache = gauge("cache_reserved_bytes", "Reserved for keys and values of the running requests.")
        self.rearrangements = counter("rearrangements_total", "Times that keys and values of a batch were moved.")
        self.moved = counter("moved_bytes_total", "Bytes of keys and values that were moved, for whatever reason.")
        histograms = (self.queue, self.first_token, self.decode, self.step, self.draft, self.positions, self.emitted)
        gauges = (self.running, self.waiting, self.cache)
        self.unlabelled = (*histograms, *gauges, self.rearrangements, self.moved)


_made: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _metrics_of(registry: CollectorRegistry, labels: tuple[str, ...]) -> _Metrics:
    """The registry's metrics, made by the first that asks: a registry has one metric of a name."""
    for label in labels:
        if not _LABEL.fullmatch(label) or label in _OWN_LABELS:
            raise ConfigError(f"{label!r} cannot be a label here; take another name of letters, digits and _")
    with _making:
        metrics = _made.get(registry)
        if metrics is None:
            metrics = _made[registry] = _Metrics(registry, labels)
    if metrics.labels != labels:
        raise ConfigError(
            f"metrics of this registry have the labels {list(metrics.labels)}, not {list(labels)}; "
            "give the same names, or another registry"
        )
    return metrics
