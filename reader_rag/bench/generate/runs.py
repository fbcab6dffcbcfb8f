"""What `bench generate` measures of a method, and the report of all methods."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reader_rag.bench.generate.peak_memory import PeakMemory
from reader_rag.bench.report import different, machine, speed, speed_ratios
from reader_rag.engine.engine import Engine

_COMPARED = ("plain", "hf", "hf-lookup")


@dataclass(frozen=True)
class Run:
    """One prompt, or several that were decoded together, by one method.

    Attributes:
        tokens: Emitted tokens of each prompt.
        emitted: Tokens that decode steps emitted: all but the first of each answer.
        decode_s: Seconds of the decode steps.
        steps: Number of decode steps.
        row_steps: Number of sequences in a step, summed over the steps.
        ttft_s: Seconds to the first token of each prompt, from when it could begin.
        wall_s: Seconds of the whole run, prefill included.
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

    @classmethod
    def of_one(cls, tokens: tuple[int, ...], ttft_s: float, decode_s: float, steps: int, cache_bytes: int) -> Run:
        """The run of one prompt alone.

        Args:
            tokens: Emitted tokens.
            ttft_s: Seconds to the first token.
            decode_s: Seconds from the first token to the last.
            steps: Forward passes after the first token.
            cache_bytes: Bytes of keys and values.
        """
        emitted = len(tokens) - 1
        seconds = decode_s if emitted else 0.0
        return cls((tokens,), emitted, seconds, steps, steps, (ttft_s,), ttft_s + decode_s, cache_bytes)


@dataclass
class Runs:
    """All runs of one variant of a method, with the peak memory of each in megabytes."""

    runs: list[Run] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def add(self, run: Callable[[], Run], memory: PeakMemory) -> None:
        """Run once more, and record the peak memory.

        Args:
            run: The run.
            memory: Measures its memory.
        """
        memory.reset()
        self.runs.append(run())
        peak = memory.peak_mb()
        if peak is not None:
            self.peaks.append(peak)

    @property
    def decode_tokens_per_s(self) -> float:
        """All tokens of decode steps / all seconds of decode steps; 0.0 if there were none."""
        return speed(self.runs)

    def summary(self) -> dict[str, Any]:
        """The row of a report."""
        steps, rows = sum(run.steps for run in self.runs), sum(run.row_steps for run in self.runs)
        tokens = sum(len(answer) for run in self.runs for answer in run.tokens)
        return {
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
            "ttft_s": round(statistics.median(seconds for run in self.runs for seconds in run.ttft_s), 4),
            "mat": round(sum(run.emitted for run in self.runs) / rows, 3) if rows else 1.0,
            "ms_per_step": round(1e3 * sum(run.decode_s for run in self.runs) / steps, 2) if steps else None,
            "rows_per_step": round(rows / steps, 2) if steps else None,
            "tokens_per_s": round(tokens / sum(run.wall_s for run in self.runs), 2),
            "cache_mb": round(max(run.cache_bytes for run in self.runs) / 1e6, 1),
            "peak_mb": round(max(self.peaks), 1) if self.peaks else None,
        }


def make_report(
    engine: Engine, ids: Sequence[str], measured: Mapping[str, Runs], chosen: Mapping[str, str], batch: int
) -> dict[str, Any]:
    """The JSON report of `bench generate`.

    Args:
        engine: The model.
        ids: Ids of the prompts.
        measured: The runs of each variant.
        chosen: By method, the variant that stands for it.
        batch: Prompts decoded at once.

    Returns:
        Speed, seconds to the first token, tokens per step and memory by method; ratios of `reader` to the others (of
        all tokens; median, least and greatest over runs); and for which prompts `reader` and `plain` emitted different
        tokens. `decode_tokens_per_s` counts the seconds of decode steps, `tokens_per_s` all seconds.
    """
    report: dict[str, Any] = {
        "batch": batch,
        "methods": {method: {**measured[name].summary(), "variant": name} for method, name in chosen.items()},
        "variants": {name: runs.summary() for name, runs in measured.items()},
        "ratios": {},
        "prompts": len(ids),
        "machine": machine(engine),
    }
    if "reader" in chosen:
        ours = measured["reader"]
        for other in _COMPARED:
            if other in chosen:
                report["ratios"][f"reader/{other}"] = speed_ratios(ours.runs, measured[chosen[other]].runs)
    if {"reader", "plain"} <= set(chosen):
        answers = [[tokens for run in measured[name].runs for tokens in run.tokens] for name in ("reader", "plain")]
        report["identical"] = different(ids, *answers)
    return report
