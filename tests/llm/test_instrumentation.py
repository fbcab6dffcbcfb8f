"""Spans and events of `ReaderLLM`, as LlamaIndex's OpenTelemetry integration exports them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import SummaryIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import TextNode
from llama_index.observability.otel import LlamaIndexOpenTelemetry
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_engine import ScriptedEngine

import reader_rag.llm
from reader_rag.draft.tree import SOURCES
from reader_rag.engine.outputs import Generation, Stats
from reader_rag.llm import ReaderLLM
from reader_rag.llm.instrumentation import ReaderAnswerEvent

SECRET = "heron"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is exported by the integration; it is taken away afterwards."""
    root = get_dispatcher()
    monkeypatch.setattr(root, "event_handlers", list(root.event_handlers))
    monkeypatch.setattr(root, "span_handlers", list(root.span_handlers))
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    # The tracer is asked for globally, and a process can set its provider only once.
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    LlamaIndexOpenTelemetry(
        span_exporter=exporter, span_processor="simple", tracer_provider=provider
    ).start_registering()
    yield exporter
    provider.shutdown()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(script=["a ", SECRET, " stands"])


@pytest.fixture
def llm(engine: ScriptedEngine) -> ReaderLLM:
    return ReaderLLM.from_engine(engine)


def spans_of(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def answers(spans: dict[str, ReadableSpan]) -> list[tuple[str, dict[str, Any]]]:
    """Our events, with the names of their spans."""
    return [
        (name, dict(event.attributes or {}))
        for name, span in spans.items()
        for event in span.events
        if event.name == "ReaderAnswerEvent"
    ]


async def ask(llm: ReaderLLM, way: str) -> None:
    index = SummaryIndex([TextNode(text=f"A {SECRET} stands in the water.")])
    streams = way.endswith("stream")
    query_engine = index.as_query_engine(llm=llm, streaming=streams)
    response = await query_engine.aquery("Who?") if way.startswith("async") else query_engine.query("Who?")
    if way == "stream":
        assert "".join(response.response_gen) == f"a {SECRET} stands"
    elif way == "async stream":
        assert "".join([part async for part in response.async_response_gen()]) == f"a {SECRET} stands"
    else:
        assert str(response) == f"a {SECRET} stands"


@pytest.mark.parametrize(
    ("way", "call", "told_in"),
    [
        ("plain", "ReaderLLM.chat", "ReaderLLM.chat"),
        ("async", "ReaderLLM.achat", "ReaderLLM.achat"),
        ("stream", "ReaderLLM.stream_chat", "ReaderLLM.answer"),
        ("async stream", "ReaderLLM.astream_chat", "ReaderLLM.answer"),
    ],
)
async def test_a_query_gives_a_span_with_the_figures_of_its_answer(
    llm: ReaderLLM, exporter: InMemorySpanExporter, way: str, call: str, told_in: str
) -> None:
    await ask(llm, way)
    spans = spans_of(exporter)
    ((name, figures),) = answers(spans)
    assert name == told_in
    assert figures["finish_reason"] == "stop"
    assert (figures["completion_tokens"], figures["steps"], figures["drafted"], figures["accepted"]) == (3, 4, 9, 5)
    assert figures["call_span_id"].startswith(f"{call}-")
    assert figures["span_id"].startswith(f"{told_in}-")
    assert SECRET not in str(figures)
    if told_in != call:
        inner, outer = spans[told_in], spans[call]
        assert inner.parent is not None
        assert inner.parent.span_id == outer.context.span_id
        assert inner.context.trace_id == outer.context.trace_id
        assert inner.end_time >= outer.end_time  # LlamaIndex's own ends before there is text
    assert {span.status.status_code for span in spans.values()} == {trace.StatusCode.OK}


def test_completions_are_told_of_too(llm: ReaderLLM, exporter: InMemorySpanExporter) -> None:
    llm.complete("Who?", max_tokens=2)
    list(llm.stream_complete("Who?"))
    reported = {name: figures["finish_reason"] for name, figures in answers(spans_of(exporter))}
    assert reported == {"ReaderLLM.complete": "length", "ReaderLLM.answer": "stop"}


def test_all_figures_are_plain_values_under_their_own_names(
    monkeypatch: pytest.MonkeyPatch, exporter: InMemorySpanExporter, llm: ReaderLLM, engine: ScriptedEngine
) -> None:
    stats = Stats(
        prompt_tokens=20,
        completion_tokens=9,
        steps=2,
        drafted=11,
        accepted=6,
        accepted_by_source={"context": 1, "passage": 2, "successor": 3},
        queue_s=0.5,
        ttft_s=0.25,
        decode_s=4.0,
        draft_s=0.125,
        cache_bytes=4096,
        reused_tokens=64,
        prediction_accepted=5,
        prediction_rejected=2,
    )
    monkeypatch.setattr("scripted_engine.ScriptedStream.result", Generation("x", (1,), "length", stats))
    llm.complete("Who?")
    ((_, figures),) = answers(spans_of(exporter))
    for name in ("timestamp", "id_", "span_id", "call_span_id", "class_name"):
        assert figures.pop(name)
    assert figures == {
        "finish_reason": "length",
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "steps": 2,
        "drafted": 11,
        "accepted": 6,
        "accepted_context": 1,
        "accepted_passage": 2,
        "accepted_datastore": 0,
        "accepted_successor": 3,
        "accepted_external": 0,
        "accepted_prediction": 0,
        "tokens_per_step": 4.0,
        "tokens_per_s": 2.0,
        "queue_s": 0.5,
        "ttft_s": 0.25,
        "decode_s": 4.0,
        "draft_s": 0.125,
        "cache_bytes": 4096,
        "reused_tokens": 64,
        "prediction_accepted": 5,
        "prediction_rejected": 2,
    }


def test_every_source_of_drafts_has_a_field() -> None:
    assert {f"accepted_{source}" for source in SOURCES} <= ReaderAnswerEvent.model_fields.keys()


def test_a_stream_that_is_read_elsewhere_keeps_the_tags_of_its_call(
    llm: ReaderLLM, exporter: InMemorySpanExporter
) -> None:
    with instrument_tags({"user": "u1"}):
        stream = llm.stream_complete("Who?")
    before = trace.get_current_span()
    list(stream)
    assert trace.get_current_span() is before
    ((name, figures),) = answers(spans_of(exporter))
    assert (name, figures["tags.user"]) == ("ReaderLLM.answer", "u1")


async def test_streams_read_in_turn_have_each_their_own_span(llm: ReaderLLM, exporter: InMemorySpanExporter) -> None:
    first, second = await llm.astream_complete("Who?"), await llm.astream_complete("Who?", max_tokens=2)
    assert (await anext(first)).delta == (await anext(second)).delta == "a "
    assert [part.delta async for part in first] == [SECRET, " stands"]
    assert [part.delta async for part in second] == [SECRET]
    own = [span for span in exporter.get_finished_spans() if span.name == "ReaderLLM.answer"]
    assert [span.events[0].attributes["finish_reason"] for span in own] == ["stop", "length"]
    ids = [span.events[0].attributes["call_span_id"] for span in own]
    assert len(set(ids)) == 2


class TestAnswersThatAreNotDone:
    def test_a_stream_that_is_closed_early_has_a_span_and_no_figures(
        self, llm: ReaderLLM, exporter: InMemorySpanExporter
    ) -> None:
        stream = llm.stream_complete("Who?")
        next(stream)
        stream.close()
        span = spans_of(exporter)["ReaderLLM.answer"]
        assert (span.status.status_code, span.events) == (trace.StatusCode.OK, ())

    async def test_an_async_stream_whose_reader_is_cancelled(
        self, llm: ReaderLLM, engine: ScriptedEngine, exporter: InMemorySpanExporter
    ) -> None:
        async def read() -> None:
            async for _ in await llm.astream_complete("Who?"):
                pass

        engine.may_step.clear()
        task = asyncio.create_task(read())
        assert await asyncio.to_thread(engine.step_begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.may_step.set()
        assert spans_of(exporter)["ReaderLLM.answer"].status.status_code == trace.StatusCode.OK

    def test_a_stream_that_fails_has_a_span_with_its_error(
        self, llm: ReaderLLM, engine: ScriptedEngine, exporter: InMemorySpanExporter
    ) -> None:
        engine.fails_at = 1
        with pytest.raises(RuntimeError, match="caught fire"):
            list(llm.stream_complete("Who?"))
        span = spans_of(exporter)["ReaderLLM.answer"]
        assert span.status.status_code == trace.StatusCode.ERROR
        assert [event.name for event in span.events] == ["SpanDropEvent", "exception"]

    def test_a_stream_that_nobody_reads_opens_no_span(self, llm: ReaderLLM, exporter: InMemorySpanExporter) -> None:
        llm.stream_complete("Who?").close()
        assert list(spans_of(exporter)) == ["ReaderLLM.stream_complete"]


def test_a_handler_that_fails_does_not_disturb_the_answer(
    monkeypatch: pytest.MonkeyPatch, llm: ReaderLLM, engine: ScriptedEngine
) -> None:
    class Broken(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            raise RuntimeError

    monkeypatch.setattr(get_dispatcher(), "event_handlers", [Broken()])
    assert llm.complete("Who?").text == f"a {SECRET} stands"
    assert list(llm.stream_complete("Who?"))[-1].text == f"a {SECRET} stands"


def test_the_examples_of_the_docs_run(
    monkeypatch: pytest.MonkeyPatch, exporter: InMemorySpanExporter, engine: ScriptedEngine
) -> None:
    """The page's Python as it stands, but for the port, the exporter and the model."""
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    ports: list[int] = []
    monkeypatch.setattr("prometheus_client.start_http_server", ports.append)
    monkeypatch.setattr(reader_rag.llm.ReaderLLM, "_load", lambda self, draft_sources: engine)
    monkeypatch.setattr(engine, "observers", [], raising=False)
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
    assert ports == [9100]
    assert len(engine.observers) == 1
    assert "ReaderAnswerEvent" in {event.name for span in exporter.get_finished_spans() for event in span.events}
