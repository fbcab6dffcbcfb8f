"""`reader-rag bench vllm-stress`: many requests in a vLLM with too small a cache, some aborted; are answers right?"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reader_rag.bench.vllm.compare import VllmTask, first_difference, machine
from reader_rag.bench.vllm.engine import Answer, Driver, Options, counters, greedy, run_group
from reader_rag.bench.vllm.worker import Worker

_MOST_BEFORE_ABORT = 12
"""A request that is aborted has so many tokens at most before; it may have none, or wait for its turn."""
_SHORTEST, _LONGEST = 8, 256
"""Tokens of a prompt that is cut."""
_PARTS = 10
"""How often memory is looked at."""
_WARM = 4
"""Parts after which memory is expected to stay: by then all that is made at the first use was made."""
TIE = 1e-3
"""Difference of log-probabilities below which two tokens count as equal in float32: rows that are computed together
round otherwise than alone."""


@dataclass(frozen=True)
class StressPlan:
    """What is asked.

    Attributes:
        requests: How many.
        aborted: Share of them that is aborted.
        max_tokens: Most tokens of an answer; each has its own length up to that.
        queued: Requests that are begun and have not ended, at most.
        seed: Decides all of it.
    """

    requests: int = 500
    aborted: float = 0.15
    max_tokens: int = 48
    queued: int = 32
    seed: int = 0


@dataclass(frozen=True)
class _Asked:
    """One request: which prompt, how many tokens, and after how many it is aborted."""

    task: int
    max_tokens: int
    abort_after: int | None


def cut(tasks: Sequence[VllmTask], seed: int = 0) -> list[VllmTask]:
    """Prompts of mixed lengths: the beginnings of given ones."""
    draw = random.Random(seed)
    longest = [min(len(task.prompt), _LONGEST) for task in tasks]
    return [
        replace(task, prompt=task.prompt[: draw.randint(min(_SHORTEST, most), most)])
        for task, most in zip(tasks, longest, strict=True)
    ]


def stress(
    options: Options,
    cache_tokens: int,
    tasks: Sequence[VllmTask],
    plan: StressPlan,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the plan with drafts, and compare every answer with plain decoding's.

    Args:
        options: The engine.
        cache_tokens: Positions of its key/value cache; plain decoding has all it wants.
        tasks: Prompts; each is asked many times.
        plan: What is asked.
        progress: Told what runs next.

    Returns:
        The JSON report: how many ended how, wrong answers with the margin where they part, ties, preemptions, memory,
        and by how much it grows where plain decoding is asked the same.

    Raises:
        ConfigError: vLLM refuses the settings.
        MissingDependencyError: vLLM is not installed.
    """
    asked = _asked(plan, len(tasks))
    progress("plain decoding")
    with Worker(replace(options, cache_tokens=None), "plain") as plain:
        plain.wait()
        expected: list[list[int]] = []
        for first in range(0, len(tasks), options.at_once):
            some = [task.prompt for task in tasks[first : first + options.at_once]]
            expected += plain.run(_answers, some, plan.max_tokens)
        progress(f"{plan.requests} requests")
        small = replace(options, cache_tokens=cache_tokens)
        found = _run_storm(small, "reader", tasks, asked, plan)
        progress(f"{plan.requests} requests, plainly")
        undrafted = _run_storm(small, "plain", tasks, asked, plan)
        parted = []
        for one, tokens in zip(asked, found["tokens"], strict=True):
            wanted = expected[one.task][: len(tokens) if one.abort_after is not None else one.max_tokens]
            if tokens != wanted:
                parted.append(
                    {"id": tasks[one.task].id, **first_difference(plain, tasks[one.task].prompt, wanted, tokens)}
                )
    ties = [one for one in parted if one["margin"] is not None and abs(one["margin"]) <= TIE]
    return {
        "requests": len(asked),
        "aborted": sum(one.abort_after is not None for one in asked),
        "tokens": sum(map(len, found["tokens"])),
        "wrong": [one for one in parted if one not in ties],
        "ties": ties,
        "preemptions": found["preemptions"],
        "drafted": found["drafted"],
        "accepted": found["accepted"],
        "memory_mb": found["memory_mb"],
        "grown_mb": _grown(found["memory_mb"]),
        "grown_mb_plain": _grown(undrafted["memory_mb"]),
        "cache_tokens": cache_tokens,
        "machine": machine(options),
    }


def _run_storm(
    options: Options, method: str, tasks: Sequence[VllmTask], asked: Sequence[_Asked], plan: StressPlan
) -> dict[str, Any]:
    with Worker(options, method) as worker:
        worker.wait()
        found: dict[str, Any] = worker.run(storm, [task.prompt for task in tasks], asked, plan.queued)
    return found


def _grown(memory: Sequence[float]) -> float:
    """Megabytes that came after the first parts, which fill what is filled once."""
    return round(memory[-1] - memory[_WARM], 1)


def _asked(plan: StressPlan, tasks: int) -> list[_Asked]:
    draw = random.Random(plan.seed)
    aborted = [True] * round(plan.requests * plan.aborted)
    fates = aborted + [False] * (plan.requests - len(aborted))
    draw.shuffle(fates)
    return [
        _Asked(
            draw.randrange(tasks),
            draw.randint(1, plan.max_tokens),
            draw.randint(0, _MOST_BEFORE_ABORT) if fate else None,
        )
        for fate in fates
    ]


def _answers(engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    return [answer.tokens for answer in run_group(engine, prompts, [greedy(max_tokens)] * len(prompts)).answers]


def storm(engine: Any, prompts: Sequence[Sequence[int]], asked: Sequence[_Asked], queued: int) -> dict[str, Any]:
    """Answer all that is asked, so many at a time; runs in the worker.

    Returns:
        Tokens of each request, megabytes of the process after each part, and vLLM's counts.
    """
    import psutil

    process = psutil.Process()
    driver = Driver(engine)
    before = counters(engine)
    answers: list[Answer] = []
    doomed: dict[str, tuple[Answer, int]] = {}
    memory: list[float] = []
    while len(answers) < len(asked) or driver.open:
        while len(answers) < len(asked) and driver.open < queued:
            if len(answers) >= len(asked) * len(memory) // _PARTS:
                memory.append(round(process.memory_info().rss / 1e6, 1))
            one = asked[len(answers)]
            name, answer = driver.add(prompts[one.task], greedy(one.max_tokens))
            answers.append(answer)
            if one.abort_after is not None:
                doomed[name] = (answer, one.abort_after)
        driver.step()
        for name, (answer, after) in list(doomed.items()):
            if not driver.is_open(name):
                del doomed[name]
            elif len(answer.tokens) >= after:
                driver.abort(name)
                del doomed[name]
    memory.append(round(process.memory_info().rss / 1e6, 1))
    after_all = counters(engine)
    counted = {name: after_all[name] - before[name] for name in before}
    return {
        "tokens": [answer.tokens for answer in answers],
        "memory_mb": memory,
        "preemptions": counted["num_preemptions"],
        "drafted": counted["spec_decode_num_draft_tokens"],
        "accepted": counted["spec_decode_num_accepted_tokens"],
    }
