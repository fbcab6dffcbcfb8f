"""`reader-rag bench generate`: decoding methods side by side on the same model and prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from reader_rag.bench.generate.methods import METHODS, Run, Task, shortened
from reader_rag.bench.measured import Measured, PeakMemory
from reader_rag.bench.report import different, machine, ratio, summary_of_ratios
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError

_RATIOS = ("plain", "hf", "hf-lookup")


class _Answers(Measured[Run]):
    @property
    def decode_tokens_per_s(self) -> float:
        """All tokens after the first of each answer / all seconds after the first."""
        seconds = sum(run.decode_s for run in self.runs if len(run.tokens) > 1)
        return sum(len(run.tokens) - 1 for run in self.runs) / seconds if seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """The row of a report."""
        steps = sum(run.steps for run in self.runs)
        return {
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
            "ttft_s": round(statistics.median(run.ttft_s for run in self.runs), 4),
            "mat": round(sum(len(run.tokens) - 1 for run in self.runs) / steps, 3) if steps else 1.0,
            "ms_per_step": round(1e3 * sum(run.decode_s for run in self.runs) / steps, 2) if steps else None,
            "cache_mb": round(max(run.cache_bytes for run in self.runs) / 1e6, 1),
            "peak_mb": self.peak_mb,
        }


def compare(
    engine: Engine,
    tasks: Sequence[tuple[str, Task]],
    methods: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the methods in turn, prompt by prompt, in this process.

    Args:
        engine: The model.
        tasks: Prompt ids and what to decode.
        methods: Names out of `METHODS`.
        progress: Told what runs next.

    Returns:
        The JSON report of the bench contract for batch 1: speed, time to first token, tokens per step and memory by
        method, ratios of `reader` to the others (median, least and greatest over prompts), and for which prompts
        `reader` and `plain` emitted different tokens.

    Raises:
        ConfigError: An unknown method, or one that cannot replay a trace.
    """
    unknown = sorted(set(methods) - set(METHODS))
    if unknown or not methods:
        raise ConfigError(f"unknown method {', '.join(unknown)}; there are {', '.join(METHODS)}")
    replayed = any(task.forced is not None for _, task in tasks)
    if replayed and set(methods) - {"plain", "reader"}:
        raise ConfigError(
            "a trace is replayed with --methods plain,reader only: generate() cannot be made to follow one"
        )
    variants = {name: variant for method in methods for name, variant in METHODS[method].items()}
    for variant in variants.values():
        variant(engine, shortened(tasks[0][1]))
    measured = {name: _Answers() for name in variants}
    memory = PeakMemory(engine.target.device)
    for number, (task_id, task) in enumerate(tasks, 1):
        for name, variant in variants.items():
            progress(f"{number}/{len(tasks)} {task_id} {name}")
            measured[name].add(partial(variant, engine, task), memory)
    return _report(engine, tasks, methods, measured)


def _report(
    engine: Engine, tasks: Sequence[tuple[str, Task]], methods: Sequence[str], measured: dict[str, _Answers]
) -> dict[str, Any]:
    best = {method: max(METHODS[method], key=lambda name: measured[name].decode_tokens_per_s) for method in methods}
    report: dict[str, Any] = {
        "batch": 1,
        "methods": {method: {**measured[best[method]].summary(), "variant": best[method]} for method in methods},
        "variants": {name: runs.summary() for name, runs in measured.items()},
        "ratios": {},
        "prompts": len(tasks),
        "machine": machine(engine),
    }
    if "reader" in methods:
        for other in _RATIOS:
            if other in methods:
                report["ratios"][f"reader/{other}"] = _ratios(measured["reader"], measured[best[other]])
    if {"reader", "plain"} <= set(methods):
        answers = [[run.tokens for run in measured[name].runs] for name in ("reader", "plain")]
        report["identical"] = different([task_id for task_id, _ in tasks], *answers)
    return report


def _ratios(ours: _Answers, theirs: _Answers) -> dict[str, float | None]:
    """How much faster, prompt by prompt and over all tokens."""
    each = [
        a.decode_tokens_per_s / b.decode_tokens_per_s
        for a, b in zip(ours.runs, theirs.runs, strict=True)
        if a.decode_tokens_per_s and b.decode_tokens_per_s
    ]
    return summary_of_ratios(each, ratio(ours.decode_tokens_per_s, theirs.decode_tokens_per_s))
