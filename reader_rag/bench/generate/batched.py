"""`reader-rag bench generate --batch`: decoding methods side by side, several prompts at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reader_rag.bench.generate.methods import Clock, Task, asked_for, cache_bytes, shortened
from reader_rag.bench.measured import Measured, PeakMemory
from reader_rag.bench.report import different, machine, ratio, summary_of_ratios
from reader_rag.config import BatchConfig
from reader_rag.engine.engine import Engine
from reader_rag.engine.observer import Load, Observer, StepReport
from reader_rag.engine.scheduler import Scheduler
from reader_rag.errors import ConfigError

_GROUP = 2
"""Prompts of a group, times those that are decoded at once: as one ends the next begins."""


@dataclass(frozen=True)
class GroupRun:
    """A group of prompts by one method.

    Attributes:
        tokens: Emitted tokens of each prompt.
        emitted: Tokens that came out of steps: all but the first of each answer.
        decode_s: Seconds of the steps.
        steps: How many there were.
        row_steps: Answers that had part in a step, over all steps.
        ttft_s: Of each prompt, seconds from when a place was free for it to its first token.
        wall_s: Seconds for the whole group, prompts included.
        cache_bytes: Most bytes of keys and values that were reserved or held at once.
    """

    tokens: tuple[tuple[int, ...], ...]
    emitted: int
    decode_s: float
    steps: int
    row_steps: int
    ttft_s: tuple[float, ...]
    wall_s: float
    cache_bytes: int

    @property
    def decode_tokens_per_s(self) -> float:
        """All tokens of steps / all seconds of steps."""
        return self.emitted / self.decode_s if self.decode_s else 0.0


GroupMethod = Callable[[Engine, Sequence[Task]], GroupRun]


class _Watch(Observer):
    def __init__(self) -> None:
        self.emitted = self.steps = self.row_steps = self.cache_bytes = 0
        self.decode_s = 0.0

    def stepped(self, report: StepReport) -> None:
        self.steps += 1
        self.row_steps += len(report.emitted)
        self.emitted += sum(report.emitted)
        self.decode_s += report.seconds

    def loaded(self, load: Load) -> None:
        self.cache_bytes = max(self.cache_bytes, load.cache_bytes)


def ours_together(engine: Engine, tasks: Sequence[Task], *, speculate: bool) -> GroupRun:
    """This engine, with drafts or plain; each prompt a tenant of its own, so that none drafts from another's text."""
    tenants = [f"bench-{number}" for number in range(len(tasks))]
    for tenant in tenants:
        engine.forget(tenant)
    watch = _Watch()
    engine.observers.append(watch)
    try:
        started = time.perf_counter()
        streams = []
        for tenant, task in zip(tenants, tasks, strict=True):
            generation, sampler = asked_for(task, speculate=speculate)
            streams.append(engine.submit(task.prompt, generation, sampler=sampler, tenant=tenant))
        for stream in streams:
            for _ in stream:
                pass
        wall_s = time.perf_counter() - started
    finally:
        engine.observers.remove(watch)
    results = [stream.result for stream in streams]
    return GroupRun(
        tuple(result.token_ids for result in results),
        watch.emitted,
        watch.decode_s,
        watch.steps,
        watch.row_steps,
        tuple(result.stats.ttft_s for result in results),
        wall_s,
        watch.cache_bytes,
    )


def transformers_together(engine: Engine, tasks: Sequence[Task], batch: int) -> GroupRun:
    """`transformers`' own `generate` on padded batches."""
    tokens: list[tuple[int, ...]] = []
    emitted = steps = row_steps = held = 0
    decode_s, ttft_s = 0.0, []
    started = time.perf_counter()
    for first in range(0, len(tasks), batch):
        some = tasks[first : first + batch]
        answers, to_first, after, bytes_held = _generate(engine, some)
        passes = max(len(answer) for answer in answers) - 1
        tokens += answers
        emitted += sum(len(answer) - 1 for answer in answers)
        steps += passes
        row_steps += sum(len(answer) - 1 for answer in answers)
        decode_s += after
        ttft_s += [to_first] * len(some)
        held = max(held, bytes_held)
    wall_s = time.perf_counter() - started
    return GroupRun(tuple(tokens), emitted, decode_s, steps, row_steps, tuple(ttft_s), wall_s, held)


def _generate(engine: Engine, tasks: Sequence[Task]) -> tuple[list[tuple[int, ...]], float, float, int]:
    """Answers, seconds to the first token and after it, and bytes of the cache."""
    model: Any = engine.model
    longest = max(len(task.prompt.token_ids) for task in tasks)
    pad = min(engine.eos_ids, default=0)
    rows = [[pad] * (longest - len(task.prompt.token_ids)) + list(task.prompt.token_ids) for task in tasks]
    ids = torch.tensor(rows, device=model.device)
    mask = torch.ones_like(ids)
    for row, task in zip(mask, tasks, strict=True):
        row[: longest - len(task.prompt.token_ids)] = 0
    clock = Clock()
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=tasks[0].generation.max_tokens,
            eos_token_id=sorted(engine.eos_ids) or None,
            pad_token_id=pad,
            streamer=clock,
            return_dict_in_generate=True,
        )
    ended = time.perf_counter()
    answers = []
    for row in out.sequences[:, longest:].tolist():
        end = next((at for at, token in enumerate(row) if token in engine.eos_ids), len(row) - 1)
        answers.append(tuple(row[: end + 1]))
    return answers, clock.first - started, ended - clock.first, cache_bytes(out.past_key_values)


def _methods(batch: int) -> dict[str, GroupMethod]:
    return {
        "plain": lambda engine, tasks: ours_together(engine, tasks, speculate=False),
        "reader": lambda engine, tasks: ours_together(engine, tasks, speculate=True),
        "hf": lambda engine, tasks: transformers_together(engine, tasks, batch),
    }


class _Groups(Measured[GroupRun]):
    @property
    def decode_tokens_per_s(self) -> float:
        seconds = sum(run.decode_s for run in self.runs)
        return sum(run.emitted for run in self.runs) / seconds if seconds else 0.0

    def summary(self) -> dict[str, Any]:
        steps, rows = sum(run.steps for run in self.runs), sum(run.row_steps for run in self.runs)
        emitted = sum(run.emitted for run in self.runs)
        return {
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
            "ttft_s": round(statistics.median(seconds for run in self.runs for seconds in run.ttft_s), 4),
            "mat": round(emitted / rows, 3) if rows else 1.0,
            "ms_per_step": round(1e3 * sum(run.decode_s for run in self.runs) / steps, 2) if steps else None,
            "rows_per_step": round(rows / steps, 2) if steps else None,
            "tokens_per_s": round(
                sum(len(tokens) for run in self.runs for tokens in run.tokens) / sum(run.wall_s for run in self.runs), 2
            ),
            "cache_mb": round(max(run.cache_bytes for run in self.runs) / 1e6, 1),
            "peak_mb": self.peak_mb,
        }


def compare_batch(
    engine: Engine,
    tasks: Sequence[tuple[str, Task]],
    methods: Sequence[str],
    batch: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the methods in turn, group by group, with `batch` prompts decoded at once.

    Args:
        engine: The model; its scheduler is replaced by one with that many places.
        tasks: Prompt ids and what to decode.
        methods: "plain", "reader" and "hf"; "hf-lookup" decodes one prompt at a time and is left out.
        batch: At least 2.
        progress: Told what runs next.

    Returns:
        The JSON report of the bench contract. `decode_tokens_per_s` counts the seconds of steps; `tokens_per_s` all
        seconds, prompts included.

    Raises:
        ConfigError: An unknown method, or one that cannot replay a trace or draw.
    """
    known = _methods(batch)
    chosen = [method for method in methods if method != "hf-lookup"]
    unknown = sorted(set(chosen) - set(known))
    if unknown or not chosen:
        raise ConfigError(f"unknown method {', '.join(unknown)} for a batch; there are {', '.join(known)}")
    if "hf" in chosen and any(task.forced is not None or task.generation.temperature > 0 for _, task in tasks):
        raise ConfigError("batches that replay a trace or draw are measured with --methods plain,reader only")
    engine.close()
    engine.scheduler = Scheduler(engine, BatchConfig(max_rows=batch))
    groups = [tasks[first : first + _GROUP * batch] for first in range(0, len(tasks), _GROUP * batch)]
    for name in chosen:
        known[name](engine, [shortened(task) for _, task in groups[0][:batch]])
    measured = {name: _Groups() for name in chosen}
    memory = PeakMemory(engine.target.device)
    for number, group in enumerate(groups, 1):
        for name in chosen:
            progress(f"batch {batch}: group {number}/{len(groups)} {name}")
            measured[name].add(partial(known[name], engine, [task for _, task in group]), memory)
    engine.close()
    return _report(engine, tasks, measured, batch)


def _report(
    engine: Engine, tasks: Sequence[tuple[str, Task]], measured: dict[str, _Groups], batch: int
) -> dict[str, Any]:
    rows = {name: runs.summary() for name, runs in measured.items()}
    report: dict[str, Any] = {
        "batch": batch,
        "methods": {name: {**row, "variant": name} for name, row in rows.items()},
        "variants": rows,
        "ratios": {},
        "prompts": len(tasks),
        "machine": machine(engine),
    }
    for other in ("plain", "hf"):
        if "reader" in measured and other in measured:
            speeds = [[run.decode_tokens_per_s for run in measured[name].runs] for name in ("reader", other)]
            report["ratios"][f"reader/{other}"] = summary_of_ratios(
                [a / b for a, b in zip(*speeds, strict=True) if a and b],
                ratio(measured["reader"].decode_tokens_per_s, measured[other].decode_tokens_per_s),
            )
    if {"reader", "plain"} <= set(measured):
        answers = [[tokens for run in measured[name].runs for tokens in run.tokens] for name in ("reader", "plain")]
        report["identical"] = different([task_id for task_id, _ in tasks], *answers)
    return report
