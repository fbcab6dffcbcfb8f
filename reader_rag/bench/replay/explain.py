"""A replay step by step in text: what was drafted, what was accepted, and where it was copied from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.replayer import Step
from reader_rag.draft import SOURCES, Occurrence

_AROUND = 4
"""Tokens shown before and after a copied span."""


def explain(trace: Trace, steps: Sequence[Step], show: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Describe a replayed answer step by step.

    Args:
        trace: The answer.
        steps: Its steps.
        show: Turns tokens into text.

    Yields:
        Lines. In a tree accepted nodes are marked with `+`.
    """
    for number, step in enumerate(steps, 1):
        expected = step.tree.expected_accepted
        yield (
            f"step {number}, token {step.position}: {len(step.path)} of {len(step.tree)} drafted tokens accepted "
            f"({expected:.2f} expected), {len(step.emitted)} emitted: {show(step.emitted)!r}"
        )
        for line in step.tree.lines(lambda token: show([token]), accepted=set(step.path)):
            yield f"  {line}"
        for line in _origins(trace, step, show):
            yield f"  = {line}"
        yield ""


def _origins(trace: Trace, step: Step, show: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Where the accepted nodes were copied from, one line for each contiguous span."""
    start = 0
    for end in range(1, len(step.path) + 1):
        if end < len(step.path) and _goes_on(step.places[end - 1], step.places[end]):
            continue
        copied = show([int(step.tree.tokens[node]) for node in step.path[start:end]])
        first, last = step.places[start], step.places[end - 1]
        if first is None or last is None:
            yield f"{copied!r}: successor, the target's own next tokens where it stood before"
        else:
            source = SOURCES[int(step.tree.sources[step.path[start]])]
            yield f"{copied!r}: {source}, {_where(trace, first, last, show)}"
        start = end


def _goes_on(place: Occurrence | None, following: Occurrence | None) -> bool:
    if place is None or following is None:
        return place is following
    return following == replace(place, position=place.position + 1)


def _where(trace: Trace, first: Occurrence, last: Occurrence, show: Callable[[Sequence[int]], str]) -> str:
    apart = (one for one in trace.passages if first.apart and one.stop is None and one.id == first.passage_id)
    text = next((one.tokens for one in apart), None)
    where = f"tokens {first.position} to {last.position}"
    if text is None:
        text = (*trace.prompt, *trace.output)
        where += " of the prompt" if first.position < len(trace.prompt) else " (its own answer)"
    if first.passage_id is not None:
        where = f"passage {first.passage_id}, {where}"
    before = show(text[max(first.position - _AROUND, 0) : first.position])
    behind = show(text[last.position + 1 : last.position + 1 + _AROUND])
    return f"{where}: {before!r} [...] {behind!r}"
