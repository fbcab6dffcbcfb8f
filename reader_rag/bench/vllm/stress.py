"""Answers of an overloaded vLLM: many requests, too small a KV cache, some requests aborted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reader_rag.bench.vllm.compare import VllmTask, first_difference, machine
from reader_rag.bench.vllm.engine import Answer, Driver, counters, greedy, run_group
from reader_rag.bench.vllm.options import Options
from reader_rag.bench.vllm.worker import Worker

_MOST_BEFORE_ABORT = 12
"""Most tokens of a request before it is aborted; it may have none, or be waiting."""
_SHORTEST, _LONGEST = 8, 256
"""Least and most tokens of a prefix of a prompt."""
_PARTS = 10
"""Parts of a run; memory is measured after each."""
_WARM = 4
"""Parts after which memory should not grow: what is allocated at the first use is allocated by then."""
TIE = 1e-3
"""Difference of log-probabilities up to which two tokens count as a tie in float32: rounding depends on the batch."""


@dataclass(frozen=True)
class StressPlan:
    """The requests of a stress test.

    Attributes:
        requests: Number of requests.
        aborted: Share of them that is aborted.
        max_tokens: Most tokens of an answer; each request has a random limit up to that.
        queued: Most requests that are running or waiting.
        seed: Seed of all random choices.
    """

    requests: int = 500
    aborted: float = 0.15
    max_tokens: int = 48
    queued: int = 32
    seed: int = 0


@dataclass(frozen=True)
class _Request:
    """One request: index of its prompt, most tokens, and the number of tokens after which it is aborted."""

    task: int
    max_tokens: int
    abort_after: int | None


def cut(tasks: Sequence[VllmTask], seed: int = 0) -> list[VllmTask]:
    """Prefixes of prompts, of random lengths.

    Args:
        tasks: The prompts.
        seed: Seed of the lengths.
    """
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
    """Send the requests to an engine with drafts, and compare every answer with plain decoding's.

    Args:
        options: Settings of the engine.
        cache_tokens: Positions of its KV cache; plain decoding has enough.
        tasks: Prompts, each used many times.
        plan: The requests.
        progress: Called with what runs next.

    Returns:
        The JSON report: counts of requests, wrong answers and ties with the margin at the first difference,
        preemptions, memory, and the growth of memory with drafts and in plain decoding of the same requests.

    Raises:
        ConfigError: vLLM refuses the settings.
        MissingDependencyError: vLLM is not installed.
    """
    requests = _requests(plan, len(tasks))
    progress("plain decoding")
    with Worker(replace(options, cache_tokens=None), "plain") as plain:
        plain.wait()
        expected: list[list[int]] = []
        for first in range(0, len(tasks), options.at_once):
            some = [task.prompt for task in tasks[first : first + options.at_once]]
            expected += plain.run(_answers, some, plan.max_tokens)
        progress(f"{plan.requests} requests")
        small = replace(options, cache_tokens=cache_tokens)
        found = _run_storm(small, "reader", tasks, requests, plan)
        progress(f"{plan.requests} requests, plainly")
        undrafted = _run_storm(small, "plain", tasks, requests, plan)
        parted = []
        for one, tokens in zip(requests, found["tokens"], strict=True):
            wanted = expected[one.task][: len(tokens) if one.abort_after is not None else one.max_tokens]
            if tokens != wanted:
                parted.append(
                    {"id": tasks[one.task].id, **first_difference(plain, tasks[one.task].prompt, wanted, tokens)}
                )
    ties = [one for one in parted if one["margin"] is not None and abs(one["margin"]) <= TIE]
    return {
        "requests": len(requests),
        "aborted": sum(one.abort_after is not None for one in requests),
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
    options: Options, method: str, tasks: Sequence[VllmTask], requests: Sequence[_Request], plan: StressPlan
) -> dict[str, Any]:
    with Worker(options, method) as worker:
        worker.wait()
        found: dict[str, Any] = worker.run(storm, [task.prompt for task in tasks], requests, plan.queued)
    return found


def _grown(memory: Sequence[float]) -> float:
    """Megabytes by which memory grew after the first `_WARM` parts."""
    return round(memory[-1] - memory[_WARM], 1)


def _requests(plan: StressPlan, tasks: int) -> list[_Request]:
    draw = random.Random(plan.seed)
    aborted = [True] * round(plan.requests * plan.aborted)
    aborts = aborted + [False] * (plan.requests - len(aborted))
    draw.shuffle(aborts)
    return [
        _Request(
            draw.randrange(tasks),
            draw.randint(1, plan.max_tokens),
            draw.randint(0, _MOST_BEFORE_ABORT) if abort else None,
        )
        for abort in aborts
    ]


def _answers(engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    return [answer.tokens for answer in run_group(engine, prompts, [greedy(max_tokens)] * len(prompts)).answers]


def storm(engine: Any, prompts: Sequence[Sequence[int]], requests: Sequence[_Request], queued: int) -> dict[str, Any]:
    """Answer all requests; runs in the worker process.

    Args:
        engine: vLLM's engine.
        prompts: Token ids of each prompt.
        requests: The requests, which name prompts by their index.
        queued: Most requests at a time.

    Returns:
        Tokens of each request, megabytes of the process after each part, and vLLM's counters.
    """
    import psutil

    process = psutil.Process()
    driver = Driver(engine)
    before = counters(engine)
    answers: list[Answer] = []
    to_abort: dict[str, tuple[Answer, int]] = {}
    memory: list[float] = []
    while len(answers) < len(requests) or driver.open:
        while len(answers) < len(requests) and driver.open < queued:
            if len(answers) >= len(requests) * len(memory) // _PARTS:
                memory.append(round(process.memory_info().rss / 1e6, 1))
            one = requests[len(answers)]
            name, answer = driver.add(prompts[one.task], greedy(one.max_tokens))
            answers.append(answer)
            if one.abort_after is not None:
                to_abort[name] = (answer, one.abort_after)
        driver.step()
        for name, (answer, after) in list(to_abort.items()):
            if not driver.is_open(name):
                del to_abort[name]
            elif len(answer.tokens) >= after:
                driver.abort(name)
                del to_abort[name]
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
