"""Many concurrent requests, some cancelled and some invalid: right answers, errors and leaks."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil
import torch

from reader_rag.bench.report import machine
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Prompt
from reader_rag.errors import PromptError
from reader_rag.kv_cache.tree_cache import TreeCache

Fate = Literal["answered", "cancelled", "bad"]

_WAIT_S = 60.0
_MOST_CHUNKS = 8
"""Most chunks that a cancelled request reads before it is cancelled."""


class _Refused(Exception):
    """The error of a logits processor that fails."""


def _refuses(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise _Refused


@dataclass(frozen=True)
class LoadPlan:
    """The requests of a load test.

    Attributes:
        requests: Number of requests in a round.
        at_once: Threads that send them.
        cancelled: Share of requests that are cancelled after a few chunks.
        bad: Share of requests that must fail: an empty prompt, one longer than the context window, a token outside the
            vocabulary, a logits processor that raises.
        rounds: Number of rounds.
        seed: Decides which requests are cancelled or fail.
    """

    requests: int = 200
    at_once: int = 16
    cancelled: float = 0.1
    bad: float = 0.05
    rounds: int = 3
    seed: int = 0

    def fates(self, round_number: int) -> list[Fate]:
        """How each request of a round ends, in order."""
        cancelled, bad = round(self.cancelled * self.requests), round(self.bad * self.requests)
        counts: dict[Fate, int] = {"cancelled": cancelled, "bad": bad, "answered": self.requests - cancelled - bad}
        fates = [fate for fate, count in counts.items() for _ in range(count)]
        random.Random(f"{self.seed}-{round_number}").shuffle(fates)
        return fates


def run_load(
    engine: Engine,
    prompts: Sequence[Prompt],
    generation: SamplingParams,
    plan: LoadPlan,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Send requests, and compare every answer with plain decoding of the same request alone.

    Args:
        engine: The model.
        prompts: Used in turn.
        generation: Settings of all requests.
        plan: Number of requests, and how they end.
        progress: Called with what runs next.

    Returns:
        The JSON report: for each round the number of requests that were answered rightly, answered wrongly, cancelled
        and refused, its seconds, the resident memory after it, and what the engine still holds (0 without a leak).
    """
    expected = []
    for number, prompt in enumerate(prompts, 1):
        progress(f"plain {number}/{len(prompts)}")
        expected.append(engine.generate(prompt, replace(generation, speculate=False)).token_ids)
    rounds = []
    for number in range(plan.rounds):
        progress(f"round {number + 1}/{plan.rounds}")
        rounds.append(_round(engine, prompts, expected, generation, plan, number))
    return {"plan": plan.__dict__, "prompts": len(prompts), "rounds": rounds, "machine": machine(engine)}


def _round(
    engine: Engine,
    prompts: Sequence[Prompt],
    expected: Sequence[tuple[int, ...]],
    generation: SamplingParams,
    plan: LoadPlan,
    number: int,
) -> dict[str, Any]:
    fates = plan.fates(number)
    chance = random.Random(f"{plan.seed}-{number}-chunks")
    chunks = [chance.randint(1, _MOST_CHUNKS) for _ in fates]

    def send(which: int) -> tuple[str, int]:
        at = which % len(prompts)
        if fates[which] == "bad":
            return _send_bad(engine, prompts[at], generation, which % 4), 0
        stream = engine.submit(prompts[at], generation)
        if fates[which] == "cancelled":
            for _ in zip(range(chunks[which]), stream, strict=False):
                pass
            stream.close()
            return "cancelled", 0
        tokens = tuple(token for chunk in stream for token in chunk.token_ids)
        return ("right" if tokens == expected[at] else "wrong"), len(tokens)

    started = time.perf_counter()
    with ThreadPoolExecutor(plan.at_once) as pool:
        outcomes = list(pool.map(send, range(plan.requests)))
    seconds = time.perf_counter() - started
    left, until = engine.busy, time.monotonic() + _WAIT_S
    while (left.running or left.waiting) and time.monotonic() < until:
        time.sleep(0.001)  # requests cancelled last end with the next step
        left = engine.busy
    held, prefixes = engine.between_steps(lambda: _held_bytes(engine))
    counts = Counter(outcome for outcome, _ in outcomes)
    return {
        "right": counts["right"],
        "wrong": counts["wrong"],
        "cancelled": counts["cancelled"],
        "refused": counts["refused"],
        "not_refused": counts["not refused"],
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(tokens for _, tokens in outcomes) / seconds, 2),
        "resident_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
        "running": left.running,
        "waiting": left.waiting,
        "cache_bytes": held,
        "prefix_mb": round(prefixes / 1e6, 1),
    }


def _send_bad(engine: Engine, prompt: Prompt, generation: SamplingParams, how: int) -> str:
    """Send a request that must fail; tell whether it did, with its own error."""
    try:
        if how == 0:
            stream = engine.submit(Prompt(()), generation)
        elif how == 1:
            stream = engine.submit(Prompt(tuple(prompt.token_ids) * (engine.context_window // 8)), generation)
        elif how == 2:
            stream = engine.submit(Prompt((*prompt.token_ids, 1 << 30)), generation)
        else:
            stream = engine.submit(prompt, generation, logits_processor=[_refuses])
        for _ in stream:
            pass
    except (PromptError, _Refused):
        return "refused"
    return "not refused"


def _held_bytes(engine: Engine) -> tuple[int, int]:
    """Bytes of all KV caches that are alive, and of the prefix cache."""
    gc.collect()
    held = sum(cache.nbytes for cache in gc.get_objects() if isinstance(cache, TreeCache))
    prefixes = engine.context.prefix_cache
    return held, prefixes.nbytes if prefixes is not None else 0
