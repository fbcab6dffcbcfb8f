"""`reader-rag bench generate --batch`: decoding methods with several prompts at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from reader_rag.bench.generate.methods import Clock, Task, cache_bytes, ends_of, request_of, shortened
from reader_rag.bench.generate.peak_memory import PeakMemory
from reader_rag.bench.generate.runs import Run, Runs, make_report
from reader_rag.config import BatchConfig
from reader_rag.engine.engine import Engine
from reader_rag.engine.observer import Load, Observer, Outcome, StepReport
from reader_rag.engine.outputs import Stats
from reader_rag.errors import ConfigError

_GROUP = 2
"""Prompts of a group / prompts that are decoded at once: when one ends, the next begins."""

_ALONE = ("hf-lookup", "llama-cpp")
"""Methods that decode one prompt at a time."""

GroupMethod = Callable[[Engine, Sequence[Task]], Run]


class _Watch(Observer):
    def __init__(self) -> None:
        self.emitted = self.steps = self.row_steps = self.cache_bytes = 0
        self.decode_s = 0.0
        self._ended: list[tuple[Stats, float]] = []

    def stepped(self, report: StepReport) -> None:
        self.steps += 1
        self.row_steps += len(report.emitted)
        self.emitted += sum(report.emitted)
        self.decode_s += report.seconds

    def loaded(self, load: Load) -> None:
        self.cache_bytes = max(self.cache_bytes, load.cache_bytes)

    def answered(self, stats: Stats, outcome: Outcome) -> None:
        self._ended.append((stats, time.perf_counter()))

    def end_of(self, stats: Stats) -> float:
        """When the request with these counts and times has ended."""
        return next(when for ended, when in self._ended if ended == stats)


def ours_together(engine: Engine, tasks: Sequence[Task], *, speculate: bool) -> Run:
    """Answer with this engine, with drafts or plain.

    Each prompt has a tenant of its own, so that none drafts from another's text.

    Args:
        engine: The engine.
        tasks: The prompts, submitted together.
        speculate: Whether to decode with drafts.
    """
    tenants = [f"bench-{number}" for number in range(len(tasks))]
    for tenant in tenants:
        engine.forget(tenant)
    watch = _Watch()
    engine.observers.append(watch)
    try:
        started = time.perf_counter()
        streams, submitted = [], []
        for tenant, task in zip(tenants, tasks, strict=True):
            generation, sampler = request_of(task, speculate=speculate)
            submitted.append(time.perf_counter())
            streams.append(engine.submit(task.prompt, generation, sampler=sampler, tenant=tenant))
        for stream in streams:
            for _ in stream:
                pass
        wall_s = time.perf_counter() - started
        engine.between_steps(lambda: None)  # observers hear of an end after its reader
    finally:
        engine.observers.remove(watch)
    results = [stream.result for stream in streams]
    begun = [at + result.stats.queue_s for at, result in zip(submitted, results, strict=True)]
    return Run(
        tokens=tuple(result.token_ids for result in results),
        lengths=tuple(len(result.token_ids) for result in results),
        emitted=watch.emitted,
        decode_s=watch.decode_s,
        steps=watch.steps,
        row_steps=watch.row_steps,
        ttft_s=tuple(result.stats.ttft_s for result in results),
        question_s=tuple(watch.end_of(result.stats) - at for at, result in zip(begun, results, strict=True)),
        wall_s=wall_s,
        cache_bytes=watch.cache_bytes,
    )


def transformers_together(engine: Engine, tasks: Sequence[Task], batch: int) -> Run:
    """Answer with `generate` of `transformers`, in padded batches.

    Args:
        engine: The engine whose model is used.
        tasks: The prompts.
        batch: Most prompts of a call of `generate`.
    """
    tokens: list[tuple[int, ...]] = []
    emitted = steps = row_steps = held = 0
    decode_s, ttft_s, question_s = 0.0, [], []
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
        question_s += [to_first + after] * len(some)
        held = max(held, bytes_held)
    return Run(
        tokens=tuple(tokens),
        lengths=tuple(map(len, tokens)),
        emitted=emitted,
        decode_s=decode_s,
        steps=steps,
        row_steps=row_steps,
        ttft_s=tuple(ttft_s),
        question_s=tuple(question_s),
        wall_s=time.perf_counter() - started,
        cache_bytes=held,
    )


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
    generation = tasks[0].generation
    clock = Clock()
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=generation.max_tokens,
            eos_token_id=ends_of(engine, generation),
            pad_token_id=pad,
            streamer=clock,
            return_dict_in_generate=True,
        )
    ended = time.perf_counter()
    answers = []
    for row in out.sequences[:, longest:].tolist():
        ends = frozenset[int]() if generation.ignore_eos else engine.eos_ids
        end = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
        answers.append(tuple(row[: end + 1]))
    return answers, clock.first - started, ended - clock.first, cache_bytes(out.past_key_values)


def compare_batch(
    engine: Engine,
    tasks: Sequence[tuple[str, Task]],
    methods: Sequence[str],
    batch: int,
    progress: Callable[[str], None] = lambda _: None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Run the methods in turn, group by group, with `batch` prompts decoded at once.

    Args:
        engine: The model; its scheduler is replaced by one with `batch` rows.
        tasks: Prompt ids and what to decode.
        methods: "plain", "reader" and "hf"; "hf-lookup" and "llama-cpp" decode one prompt at a time and are left out.
        batch: At least 2.
        progress: Called with what runs next.
        seconds: Begin no further group when so many seconds have passed; None: run all.

    Returns:
        The JSON report, as `make_report` describes it, of the prompts that were run.

    Raises:
        ConfigError: An unknown method, or one that cannot replay a trace or sample.
    """
    known: dict[str, GroupMethod] = {
        "plain": partial(ours_together, speculate=False),
        "reader": partial(ours_together, speculate=True),
        "hf": partial(transformers_together, batch=batch),
    }
    chosen = [method for method in methods if method not in _ALONE]
    unknown = sorted(set(chosen) - set(known))
    if not chosen:
        raise ConfigError(f"{' and '.join(_ALONE)} decode one prompt at a time: name {', '.join(known)} for a batch")
    if unknown:
        raise ConfigError(f"unknown method {', '.join(unknown)} for a batch; there are {', '.join(known)}")
    if "hf" in chosen and any(task.forced is not None or task.generation.temperature > 0 for _, task in tasks):
        raise ConfigError("hf cannot replay a trace or sample in batches: use --methods plain,reader only")
    limit = math.inf if seconds is None else time.monotonic() + seconds
    engine.scheduler.limits = BatchConfig(max_rows=batch)
    groups = [tasks[first : first + _GROUP * batch] for first in range(0, len(tasks), _GROUP * batch)]
    for name in chosen:
        known[name](engine, [shortened(task) for _, task in groups[0][:batch]])
    measured = {name: Runs() for name in chosen}
    memory = PeakMemory(engine.target.device)
    done: list[str] = []
    for number, group in enumerate(groups, 1):
        if done and time.monotonic() > limit:
            break
        done += [task_id for task_id, _ in group]
        for name in chosen:
            progress(f"batch {batch}: group {number}/{len(groups)} {name}")
            measured[name].add(partial(known[name], engine, [task for _, task in group]), memory)
    return make_report(engine, done, measured, {name: name for name in chosen}, batch)
