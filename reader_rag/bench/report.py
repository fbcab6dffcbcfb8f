"""Parts of several benchmarks' reports: the machine, ratios of speeds, prompts whose answers differ."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any, Protocol

import numba
import torch
import transformers

from reader_rag.engine.engine import Engine
from reader_rag.model.fingerprint import dtype_name, quantization_name
from reader_rag.util.cpu import cpu_name


class TimedRun(Protocol):
    """A run of a method whose decode steps were timed."""

    @property
    def emitted(self) -> int:
        """Tokens that the decode steps emitted."""

    @property
    def decode_s(self) -> float:
        """Seconds of the decode steps."""


def speed(runs: Sequence[TimedRun]) -> float:
    """Tokens of decode steps per second of decode steps; 0.0 if there were none."""
    seconds = sum(run.decode_s for run in runs)
    return sum(run.emitted for run in runs) / seconds if seconds else 0.0


def speed_ratios(ours: Sequence[TimedRun], theirs: Sequence[TimedRun]) -> dict[str, float | None]:
    """Ratios of the speeds of one method to those of another, rounded to three digits.

    Args:
        ours: Runs of the one method.
        theirs: Runs of the other on the same prompts, in the same order.

    Returns:
        "median", "min" and "max" over the runs, and "total" over all tokens; None where nothing was measured.
    """
    pairs = [(speed([a]), speed([b])) for a, b in zip(ours, theirs, strict=True)]
    each = [a / b for a, b in pairs if a and b]
    return _ratios(each, speed(ours) / speed(theirs) if each else 0.0)


def duration_ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """How many times as fast one method is as another, by seconds of the same work, rounded to three digits.

    Args:
        ours: Seconds of the one method.
        theirs: Seconds of the other for the same prompts, in the same order.

    Returns:
        Seconds of the other / seconds of the one: "median", "min" and "max" over the prompts, and "total" of all
        seconds; None where there are no prompts.
    """
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    return _ratios(each, sum(theirs) / sum(ours) if each else 0.0)


def _ratios(each: Sequence[float], total: float) -> dict[str, float | None]:
    if not each:
        return dict.fromkeys(("median", "min", "max", "total"))
    found = {"median": statistics.median(each), "min": min(each), "max": max(each), "total": total}
    return {name: round(value, 3) for name, value in found.items()}


def different(ids: Sequence[str], ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The number of prompts that were compared, and the ids of those whose tokens differ.

    Args:
        ids: Ids of the prompts.
        ours: Tokens of each prompt by one method.
        theirs: Tokens of each prompt by the other.
    """
    differing = [one for one, a, b in zip(ids, ours, theirs, strict=True) if a != b]
    return {"compared": len(ids), "different": differing}


def machine(engine: Engine) -> dict[str, Any]:
    """What the figures depend on: model, dtype, device, threads and versions.

    Args:
        engine: The measured engine.
    """
    device = engine.target.device
    return {
        "model": engine.name,
        "dtype": dtype_name(engine.model),
        "exactness": engine.config.exactness,
        "drafting": engine.drafting,
        "quantization": quantization_name(engine.model),
        "quantized": bool(getattr(engine.model, "is_quantized", False)) or quantization_name(engine.model) != "none",
        "forward": "compiled" if engine.target.cpu is not None else "torch",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numba": numba.__version__,
    }
