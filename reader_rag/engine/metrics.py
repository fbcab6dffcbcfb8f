"""Prometheus metrics of an engine.

No metric has a text, a token, a passage or a tenant as a label, so scraped data does not show whose documents were
used.
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
"""Values of the label `kind` of `tokens_total`: prompt tokens, those of them that the prefix cache had, emitted tokens,
verified drafted tokens, and accepted drafted tokens."""

SOURCE_KINDS = ("asked", "skipped", "proposed", "accepted")
"""Values of the label `kind` of `draft_source_total`: steps in which a draft source from outside was asked, steps in
which it was not since it was not expected to pay, nodes that it proposed, and those of them that were emitted."""

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
    """An observer that records Prometheus metrics; append it to `engine.observers`.

    Args:
        registry: The registry of the metrics; None takes the default registry of `prometheus_client`.
        labels: Labels of every sample. If several engines of a process share a registry, give each a
            `PrometheusMetrics` with the same label names and different values.

    Raises:
        ConfigError: A label name is invalid or taken, or the registry's metrics have other label names.
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
        """Create all samples with 0: `rate` does not see the first event of a counter that appears with it."""
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
        """The metric with the labels of this engine and with `own`, the labels of the metric."""
        labels = {**self._labels, **own}
        return metric.labels(**labels) if labels else metric

    def stepped(self, report: StepReport) -> None:
        """Record the times and counts of a decode step.

        Args:
            report: Its counts and times.
        """
        metrics = self._metrics
        self._of(metrics.step).observe(report.seconds)
        self._of(metrics.draft).observe(report.draft_s)
        self._of(metrics.positions).observe(report.positions)
        for emitted in report.emitted:
            self._of(metrics.emitted).observe(emitted)
        for accepted in report.accepted:
            # Zeros too, so that all sources count the same steps and their means add up to the total mean.
            for source in {*SOURCES, *accepted}:
                self._of(metrics.accepted, source=source).observe(accepted.get(source, 0))

    def answered(self, stats: Stats, outcome: Outcome) -> None:
        """Record a request that has ended.

        Args:
            stats: Its counts and times.
            outcome: How it ended.
        """
        metrics = self._metrics
        self._of(metrics.requests, outcome=outcome).inc()
        counts = (stats.prompt_tokens, stats.reused_tokens, stats.completion_tokens, stats.drafted, stats.accepted)
        for kind, count in zip(KINDS, counts, strict=True):
            self._of(metrics.tokens, kind=kind).inc(count)
        for source, fared in stats.draft_sources.items():
            for kind in SOURCE_KINDS:
                self._of(metrics.source, source=source, kind=kind).inc(getattr(fared, kind))
        self._of(metrics.queue).observe(stats.queue_s)
        if stats.completion_tokens:
            self._of(metrics.first_token).observe(stats.ttft_s)
            self._of(metrics.decode).observe(stats.decode_s)

    def loaded(self, load: Load) -> None:
        """Set the gauges.

        Args:
            load: Running and waiting requests, and the reserved memory.
        """
        metrics = self._metrics
        self._of(metrics.running).set(load.running)
        self._of(metrics.waiting).set(load.waiting)
        self._of(metrics.cache).set(load.cache_bytes)

    def moved(self, rearrangements: int, moved_bytes: int) -> None:
        """Count what was moved in the batch cache.

        Args:
            rearrangements: How often all entries were moved.
            moved_bytes: Bytes that were moved.
        """
        self._of(self._metrics.rearrangements).inc(rearrangements)
        self._of(self._metrics.moved).inc(moved_bytes)

    def profiled(self, share: float) -> None:
        """Set the gauge.

        Args:
            share: Share of the vocabulary whose next tokens are known now.
        """
        self._of(self._metrics.profile).set(share)


class _Metrics:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, ...]) -> None:
        prometheus = _prometheus()
        self.labels = labels

        def counter(name: str, help_text: str, *own: str) -> Counter:
            metric: Counter = prometheus.Counter(f"reader_rag_{name}", help_text, [*labels, *own], registry=registry)
            return metric

        def gauge(name: str, help_text: str) -> Gauge:
            metric: Gauge = prometheus.Gauge(f"reader_rag_{name}", help_text, labels, registry=registry)
            return metric

        def histogram(name: str, help_text: str, buckets: Sequence[float], *own: str) -> Histogram:
            metric: Histogram = prometheus.Histogram(
                f"reader_rag_{name}", help_text, [*labels, *own], registry=registry, buckets=buckets
            )
            return metric

        self.requests = counter("requests_total", "Requests that have ended, by outcome.", "outcome")
        self.tokens = counter("tokens_total", "Tokens of requests that have ended, by kind.", "kind")
        self.source = counter(
            "draft_source_total",
            "Steps and tokens of draft sources from outside in requests that have ended, by source and kind.",
            *("source", "kind"),
        )
        self.queue = histogram("queue_seconds", "Time that a request waited in the queue.", _REQUEST_S)
        self.first_token = histogram(
            "first_token_seconds", "Time from admission to the batch to the first token.", _REQUEST_S
        )
        self.decode = histogram("decode_seconds", "Time from the first token to the last.", _REQUEST_S)
        self.step = histogram("step_seconds", "Time of a decode step.", _STEP_S)
        self.draft = histogram("draft_seconds", "Time of a decode step spent proposing drafts.", _DRAFT_S)
        self.positions = histogram("positions_per_step", "Positions of the forward pass of a decode step.", _POSITIONS)
        self.emitted = histogram("tokens_per_step", "Tokens that a decode step emitted for a sequence.", _TOKENS)
        self.accepted = histogram(
            "accepted_tokens",
            "Drafted tokens that a decode step accepted for a sequence, by source.",
            _TOKENS,
            "source",
        )
        self.running = gauge("requests_running", "Requests that are decoded now.")
        self.waiting = gauge("requests_waiting", "Requests in the queue.")
        self.cache = gauge("cache_reserved_bytes", "Bytes reserved for the KV caches of running requests.")
        self.profile = gauge(
            "profile_ratio", "Share of the vocabulary in the profile that idle time computes; 0 where it computes none."
        )
        self.rearrangements = counter(
            "rearrangements_total", "Times that all keys and values of the batch cache were moved."
        )
        self.moved = counter("moved_bytes_total", "Bytes of keys and values that were moved in the batch cache.")
        histograms = (self.queue, self.first_token, self.decode, self.step, self.draft, self.positions, self.emitted)
        gauges = (self.running, self.waiting, self.cache, self.profile)
        self.unlabelled = (*histograms, *gauges, self.rearrangements, self.moved)


_made: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _metrics_of(registry: CollectorRegistry, labels: tuple[str, ...]) -> _Metrics:
    """The registry's metrics, made at the first call: a registry cannot have two metrics of one name."""
    for label in labels:
        if not _LABEL.fullmatch(label) or label in _OWN_LABELS:
            raise ConfigError(
                f"{label!r} is not a possible label name, or is taken; use another one of letters, digits and _"
            )
    with _making:
        metrics = _made.get(registry)
        if metrics is None:
            metrics = _made[registry] = _Metrics(registry, labels)
    if metrics.labels != labels:
        raise ConfigError(
            f"the metrics of this registry have the labels {list(metrics.labels)}, not {list(labels)}; "
            "use the same label names, or another registry"
        )
    return metrics
