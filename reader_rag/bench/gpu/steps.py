"""Times of single decode steps: the dynamic step, the fixed step called, the fixed step replayed as a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from reader_rag.draft.tree import DraftTree
from reader_rag.model.fixed_step.graphs import COMPARED
from reader_rag.model.fixed_step.shapes import WIDTHS
from reader_rag.model.fixed_step.step import FixedStep
from reader_rag.model.interface import Step, prefill
from reader_rag.model.target import Target

_WARM = 2 + COMPARED
"""Uses of a shape after which it is replayed alone."""


@dataclass(frozen=True)
class StepTime:
    """The time of one kind of step.

    Attributes:
        way: "dynamic", "called" (the fixed step without graphs) or "replayed".
        rows: Sequences.
        width: Positions of each, the root and a chain behind it.
        context: Committed positions of each.
        ms: Median milliseconds, up to the best tokens on the host.
    """

    way: str
    rows: int
    width: int
    context: int
    ms: float


@torch.inference_mode()
def measure_steps(
    target: Target,
    shapes: Sequence[tuple[int, int, int]],
    repeats: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[StepTime]:
    """Time steps of some shapes in every way that the target has.

    Args:
        target: The model, with or without a fixed step.
        shapes: (rows, width, context) of each.
        repeats: Timed steps of each.
        say: Called with what runs next.

    Returns:
        A time for each shape and way, in the order of `shapes`; a shape whose caches do not fit the memory has none.
    """
    times: list[StepTime] = []
    for rows, width, context in shapes:
        say(f"{rows} x {width} positions behind {context}")
        for way, run in _ways(target):
            try:
                seconds = _timed(target, run, (rows, width, context), repeats)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            if seconds is not None:
                times.append(StepTime(way, rows, width, context, 1e3 * seconds))
    return times


def _ways(target: Target) -> Iterator[tuple[str, Callable[[Sequence[Step]], Any]]]:
    step = target.fixed_step
    yield "dynamic", lambda steps: _dynamic(target, steps)
    if isinstance(step, FixedStep):
        yield "called", lambda steps: _called(step, steps)
        if step.graphs.recorder is not None:
            yield "replayed", step.run


def _dynamic(target: Target, steps: Sequence[Step]) -> bool:
    step, target.fixed_step = target.fixed_step, None
    try:
        logits = target.verify_batch(steps)
        torch.cat(logits).argmax(-1).to("cpu")
    finally:
        target.fixed_step = step
    return True


def _called(step: FixedStep, steps: Sequence[Step]) -> Any:
    with _without_graphs(step):
        return step.run(steps)


@contextmanager
def _without_graphs(step: FixedStep) -> Iterator[None]:
    recorder, step.graphs.recorder = step.graphs.recorder, None
    try:
        yield
    finally:
        step.graphs.recorder = recorder


def _timed(
    target: Target, run: Callable[[Sequence[Step]], Any], shape: tuple[int, int, int], repeats: int
) -> float | None:
    """Median seconds of a step; None: it has no such shape."""
    rows, width, context = shape
    caches = [target.new_cache(context + width, WIDTHS[-1]) for _ in range(rows)]
    try:
        for cache in caches:
            prefill(target, [1], cache)
            cache.set_committed(context)
        steps = [Step(1, DraftTree.from_chain([2] * (width - 1)), cache) for cache in caches]
        seconds = []
        for n in range(_WARM + repeats):
            began = time.perf_counter()
            if run(steps) is None:
                return None
            if n >= _WARM:
                seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)
    finally:
        for cache in caches:
            cache.release()
