"""Measures drafting without a model: time of a draft, of appending a token, of indexing a text; memory; first use."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.replayer import Best, ReplayConfig, Replayer, Tally
from reader_rag.draft import Calibration, ContextIndex, SuccessorTable, TreeBuilder
from reader_rag.draft.chains import ChainDrafter, as_lists
from reader_rag.draft.profile import Profile
from reader_rag.draft.step_table import StepTable

_SIZES = (8, 16, 64)
_LONG = 32_000
_ROUNDS = 5
_POSITIONS = 20
"""Positions of each answer at which drafts are timed in turn."""
_ROWS, _ROW_TOKENS, _CHAIN = (32, 256), 4000, 16
"""Batches for chains: numbers of rows, tokens of a row, and tokens of a chain."""
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
        best: The target's most probable next tokens, by trace id.
        profile: The model's profile; None: there is none.

    Returns:
        By tree size, microseconds of a draft with the Python call: at many positions of a text in turn, and within a
        replay, whose bookkeeping evicts data from the CPU's caches. Microseconds to append a token, with all tokens of
        a step in one call; microseconds of a step of a batch with a chain for each row, on one thread and on all cores;
        milliseconds to index a long context; bytes of the index per token; seconds of the first use in a new process.
    """
    report: dict[str, Any] = {"drafts": {}}
    for nodes in _SIZES:
        tally = Tally()
        replayer = Replayer(ReplayConfig(nodes=nodes), best, profile)
        for trace in traces:
            replayer.run(trace, tally)
        times = _draft_times(traces, nodes, best, profile)
        report["drafts"][str(nodes)] = {
            "us_p50": round(float(np.percentile(times, 50)), 1),
            "us_p99": round(float(np.percentile(times, 99)), 1),
            "us_in_replay_p50": tally.percentile(50),
            "us_in_replay_p99": tally.percentile(99),
        }
    appends = [us for trace in traces for us in _append_times(trace)]
    report["us_per_token_followed_p50"] = round(float(np.median(appends)), 2) if appends else None
    for rows in _ROWS:
        report[f"step_of_{rows}_rows_of_{_ROW_TOKENS}_tokens"] = {
            f"us_p50_{name}": round(float(np.median(_batch_steps(traces, profile, rows, threads))), 1)
            for name, threads in (("one_thread", 1), ("threads", None))
        }
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


def _draft_times(traces: Sequence[Trace], nodes: int, best: Best, profile: Profile | None) -> list[float]:
    """Microseconds of drafts at several positions of each answer, one after the other, in a few rounds."""
    times = []
    for trace in traces:
        text = np.array([*trace.prompt, *trace.output], np.int32)
        table = SuccessorTable(prior=profile.tokens if profile is not None else None)
        if trace.id in best:
            table.learn_text(text, 0, best[trace.id])
        builder = TreeBuilder(max_nodes=nodes, successors=table, calibration=Calibration(learns=False))
        emitted = (len(trace.output) * part // _POSITIONS for part in range(_POSITIONS))
        indexes = [ContextIndex(text[: len(trace.prompt) + count]) for count in emitted]
        for _ in range(_ROUNDS):
            for index in indexes:
                started = time.perf_counter()
                builder.build(index)
                times.append(1e6 * (time.perf_counter() - started))
    return times


def _append_times(trace: Trace) -> list[float]:
    """Microseconds to append a token to an index, in calls of four tokens."""
    index = ContextIndex(trace.prompt, reserve=len(trace.output))
    times = []
    for start in range(0, len(trace.output) - 3, 4):
        tokens = list(trace.output[start : start + 4])
        started = time.perf_counter()
        index.extend(tokens)
        times.append(1e6 * (time.perf_counter() - started) / len(tokens))
    return times


def _batch_steps(traces: Sequence[Trace], profile: Profile | None, rows: int, threads: int | None) -> list[float]:
    """Microseconds of the steps of a batch of long answers after long contexts, until the first row ends.

    A context is the answer's own prompt after other prompts. Each step appends the tokens that the step before would
    have accepted.
    """
    before = np.concatenate([np.array(trace.prompt, np.int32) for trace in traces])
    long = sorted(traces, key=lambda trace: -len(trace.output))[: _ROWS[0]]
    chosen = [long[row % len(long)] for row in range(rows)]
    answers = [np.array(trace.output, np.int32) for trace in chosen]
    longest = max(map(len, answers))
    texts = np.zeros((rows, _ROW_TOKENS + longest), np.int32)
    for row, answer in enumerate(answers):
        own = np.array(chosen[row].prompt, np.int32)[-_ROW_TOKENS:]
        others = np.resize(np.roll(before, -row * len(before) // rows), _ROW_TOKENS - len(own))
        texts[row, : _ROW_TOKENS + len(answer)] = np.concatenate([others, own, answer])
    prior = profile.tokens if profile is not None else None
    drafter = ChainDrafter(rows, _CHAIN, StepTable.assumed("cuda"), prior=prior, threads=threads)
    row_indices, emitted = np.arange(rows), np.ones(rows, np.int64)
    ends = _ROW_TOKENS + np.array([len(answer) for answer in answers])
    lengths = _ROW_TOKENS + emitted
    times = []
    while (lengths < ends).all():
        started = time.perf_counter()
        chains, verified = drafter.draft(texts, row_indices, lengths, emitted, ends - lengths)
        drafts = as_lists(chains, verified)
        times.append(1e6 * (time.perf_counter() - started))
        for row, draft in enumerate(drafts):
            ahead = texts[row, lengths[row] : ends[row]].tolist()
            agreed = [token == other for token, other in zip(draft, ahead, strict=False)]
            emitted[row] = min([*agreed, False].index(False) + 1, len(ahead))
        lengths = lengths + emitted
    return times[1:] or times  # the first step indexes the texts


def _first_use() -> float:
    run = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=True)
    return float(run.stdout)
