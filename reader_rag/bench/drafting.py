"""What drafting itself costs: time of a draft, of following a token, of indexing a text; memory; first use."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay import Best, ReplayConfig, Replayer, Tally
from reader_rag.draft import Calibration, ContextIndex, SuccessorTable, TreeBuilder
from reader_rag.draft.profile import Profile

_SIZES = (8, 16, 64)
_LONG = 32_000
_ROUNDS = 5
_PLACES = 20
"""In each answer, at which drafts are timed in turn."""
_FIRST_USE = """
import time
started = time.perf_counter()
from reader_rag.draft import ContextIndex, TreeBuilder
builder = TreeBuilder()
tree = builder.build(ContextIndex([1, 2, 3, 1, 2]))
builder.observe([3])
print(time.perf_counter() - started)
"""


def measure_drafting(traces: Sequence[Trace], best: Best, profile: Profile | None) -> dict[str, Any]:
    """Time drafting on recorded answers.

    Args:
        traces: The answers.
        best: The target's best next tokens, by trace id.
        profile: What is known of the model beforehand.

    Returns:
        By size of tree, microseconds of a draft, the Python call included: of drafts at many places of a text in turn,
        and of drafts within a replay, whose own bookkeeping goes through the CPU's caches between them. Microseconds
        to follow a token, a step's tokens at once; milliseconds to index a long context; bytes of the index by token;
        seconds of first use in a new process.
    """
    report: dict[str, Any] = {"drafts": {}}
    for nodes in _SIZES:
        tally = Tally()
        replayer = Replayer(ReplayConfig(nodes=nodes), best, profile)
        for trace in traces:
            replayer.run(trace, tally)
        times = _in_turn(traces, nodes, best, profile)
        report["drafts"][str(nodes)] = {
            "us_p50": round(float(np.percentile(times, 50)), 1),
            "us_p99": round(float(np.percentile(times, 99)), 1),
            "us_in_replay_p50": tally.percentile(50),
            "us_in_replay_p99": tally.percentile(99),
        }
    steps = [us for trace in traces for us in _following(trace)]
    report["us_per_token_followed_p50"] = round(float(np.median(steps)), 2) if steps else None
    tokens = np.resize(np.concatenate([np.array(trace.prompt) for trace in traces]), _LONG)
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        index = ContextIndex(tokens)
        times.append(1e3 * (time.perf_counter() - started))
    report[f"ms_to_index_{_LONG}"] = round(float(np.median(times)), 2)
    report["index_bytes_per_token"] = round(index.nbytes / _LONG, 1)
    report["first_use_s"] = round(min(_first_use() for _ in range(3)), 2)
    return report


def _in_turn(traces: Sequence[Trace], nodes: int, best: Best, profile: Profile | None) -> list[float]:
    """Microseconds of drafts at several places of each answer, one after the other, a few rounds."""
    times = []
    for trace in traces:
        text = np.array([*trace.prompt, *trace.output], np.int32)
        table = SuccessorTable(prior=profile.tokens if profile is not None else None)
        if trace.id in best:
            table.learn_text(text, 0, best[trace.id])
        builder = TreeBuilder(max_nodes=nodes, successors=table, calibration=Calibration(learns=False))
        emitted = (len(trace.output) * part // _PLACES for part in range(_PLACES))
        places = [ContextIndex(text[: len(trace.prompt) + count]) for count in emitted]
        for _ in range(_ROUNDS):
            for index in places:
                started = time.perf_counter()
                builder.build(index)
                times.append(1e6 * (time.perf_counter() - started))
    return times


def _following(trace: Trace) -> list[float]:
    """Microseconds a token, four tokens at a time."""
    index = ContextIndex(trace.prompt, reserve=len(trace.output))
    times = []
    for start in range(0, len(trace.output) - 3, 4):
        tokens = list(trace.output[start : start + 4])
        started = time.perf_counter()
        index.extend(tokens)
        times.append(1e6 * (time.perf_counter() - started) / len(tokens))
    return times


def _first_use() -> float:
    run = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=True)
    return float(run.stdout)
