"""What `bench generate` measures of a method, and the report of all methods."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reader_rag.bench.generate.peak_memory import PeakMemory
from reader_rag.bench.report import different, duration_ratios, machine, speed, speed_ratios
from reader_rag.engine.engine import Engine

_COMPARED = ("plain", "hf", "hf-lookup", "llama-cpp")


@dataclass(frozen=True)
class Run:
    """One prompt, or several that were decoded together, by one method.

    Attributes:
        tokens: Emitted tokens of each prompt; empty if the method reports only how many they are.
        lengths: Number of emitted tokens of each prompt.
        emitted: Tokens that decode steps emitted: all but the first of each answer.
        decode_s: Seconds of the decode steps.
        steps: Number of decode steps.
        row_steps: Number of sequences in a step, summed over the steps.
        ttft_s: Seconds to the first token of each prompt, from when it could begin.
        question_s: Seconds of each whole question: prefill and answer, from when the prompt could begin to the last
            token.
        wall_s: Seconds of the whole run, prefill included.
        cache_bytes: Most bytes of keys and values that were reserved or held at once; None if the method does not
            report them.
        prompt_tokens: Tokens of a prompt that was prefilled alone; None if others were decoded meanwhile.
    """

    tokens: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    emitted: int
    decode_s: float
    steps: int
    row_steps: int
    ttft_s: tuple[float, ...]
    question_s: tuple[float, ...]
    wall_s: float
    cache_bytes: int | None
    prompt_tokens: int | None = None

    @classmethod
    def of_one(
        cls,
        prompt_tokens: int,
        answer: tuple[int, ...] | int,
        ttft_s: float,
        decode_s: float,
        steps: int,
        cache_bytes: int | None,
    ) -> Run:
        """The run of one prompt alone.

        Args:
            prompt_tokens: Tokens of the prompt.
            answer: Emitted tokens, or their number.
            ttft_s: Seconds to the first token.
            decode_s: Seconds from the first token to the last.
            steps: Forward passes after the first token.
            cache_bytes: Bytes of keys and values; None: unknown.
        """
        tokens, length = ((), answer) if isinstance(answer, int) else ((answer,), len(answer))
        return cls(
            tokens=tokens,
            lengths=(length,),
            emitted=max(length - 1, 0),
            decode_s=decode_s if length > 1 else 0.0,
            steps=steps,
            row_steps=steps,
            ttft_s=(ttft_s,),
            question_s=(ttft_s + decode_s,),
            wall_s=ttft_s + decode_s,
            cache_bytes=cache_bytes,
            prompt_tokens=prompt_tokens,
        )


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
        # A method that does not report its cache runs a second model in this process: the peak would count both.
        peak = memory.peak_mb() if self.runs[-1].cache_bytes is not None else None
        if peak is not None:
            self.peaks.append(peak)

    @property
    def decode_tokens_per_s(self) -> float:
        """All tokens of decode steps / all seconds of decode steps; 0.0 if there were none."""
        return speed(self.runs)

    def summary(self) -> dict[str, Any]:
        """The row of a report."""
        steps, rows = sum(run.steps for run in self.runs), sum(run.row_steps for run in self.runs)
        first = [seconds for run in self.runs for seconds in run.ttft_s]
        prompts = [run.prompt_tokens for run in self.runs if run.prompt_tokens is not None]
        caches = [run.cache_bytes for run in self.runs if run.cache_bytes is not None]
        tokens = sum(sum(run.lengths) for run in self.runs)
        return {
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 2),
            "prompt_tokens_per_s": round(sum(prompts) / sum(first), 2) if prompts else None,
            "ttft_s": round(statistics.median(first), 4),
            "question_s": round(statistics.median(self.question_s), 4),
            "questions_total_s": round(sum(self.question_s), 3),
            "tokens": tokens,
            "mat": round(sum(run.emitted for run in self.runs) / rows, 3) if rows else 1.0,
            "ms_per_step": round(1e3 * sum(run.decode_s for run in self.runs) / steps, 2) if steps else None,
            "rows_per_step": round(rows / steps, 2) if steps else None,
            "tokens_per_s": round(tokens / sum(run.wall_s for run in self.runs), 2),
            "cache_mb": round(max(caches) / 1e6, 1) if caches else None,
            "peak_mb": round(max(self.peaks), 1) if self.peaks else None,
        }

    @property
    def question_s(self) -> list[float]:
        """Seconds of every whole question."""
        return [seconds for run in self.runs for seconds in run.question_s]


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
        Speed, seconds to the first token and of a whole question (median, and total over the prompts), tokens per step
        and memory by method; how many times as fast `reader` is as the others: in decoding (of all tokens; median,
        least and greatest over runs), and under "questions" in whole questions (of all seconds; median, least and
        greatest over prompts); and for which prompts `reader` and `plain` emitted different tokens.
        `decode_tokens_per_s` counts the seconds of decode steps, `prompt_tokens_per_s` those before the first token,
        `tokens_per_s` all seconds.
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
                theirs = measured[chosen[other]]
                report["ratios"][f"reader/{other}"] = {
                    **speed_ratios(ours.runs, theirs.runs),
                    "questions": duration_ratios(ours.question_s, theirs.question_s),
                }
    if {"reader", "plain"} <= set(chosen):
        answers = [[tokens for run in measured[name].runs for tokens in run.tokens] for name in ("reader", "plain")]
        report["identical"] = different(ids, *answers)
    return report
