"""`reader-rag bench generate` with one prompt at a time: decoding methods on the same model and prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from reader_rag.bench.generate.methods import METHODS, Task, shortened
from reader_rag.bench.generate.peak_memory import PeakMemory
from reader_rag.bench.generate.runs import Runs, make_report
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError


def compare(
    engine: Engine,
    tasks: Sequence[tuple[str, Task]],
    methods: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the methods in turn, prompt by prompt, in this process.

    Args:
        engine: The engine whose model is used.
        tasks: Pairs of prompt id and task.
        methods: Names of `METHODS`.
        progress: Called with what runs next.

    Returns:
        The JSON report, as `make_report` describes it.

    Raises:
        ConfigError: An unknown method, or one that cannot replay a trace.
    """
    unknown = sorted(set(methods) - set(METHODS))
    if unknown or not methods:
        raise ConfigError(f"unknown method {', '.join(unknown)}; there are {', '.join(METHODS)}")
    if set(methods) - {"plain", "reader"} and any(task.forced is not None for _, task in tasks):
        raise ConfigError("transformers' generate() cannot replay a trace: use --methods plain,reader only")
    variants = {name: variant for method in methods for name, variant in METHODS[method].items()}
    for variant in variants.values():
        variant(engine, shortened(tasks[0][1]))
    measured = {name: Runs() for name in variants}
    memory = PeakMemory(engine.target.device)
    for number, (task_id, task) in enumerate(tasks, 1):
        for name, variant in variants.items():
            progress(f"{number}/{len(tasks)} {task_id} {name}")
            measured[name].add(partial(variant, engine, task), memory)
    fastest = {method: max(METHODS[method], key=lambda name: measured[name].decode_tokens_per_s) for method in methods}
    return make_report(engine, [task_id for task_id, _ in tasks], measured, fastest, 1)
