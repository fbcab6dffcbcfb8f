"""Parts of several benchmarks' reports: the machine, ratios of speeds, prompts whose answers differ."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import torch
import transformers

from reader_rag.engine.engine import Engine


def ratio(ours: float, theirs: float) -> float | None:
    """The ratio of two speeds; None if one is 0, which means not measured.

    Args:
        ours: Tokens per second of one method.
        theirs: Tokens per second of the other.
    """
    return ours / theirs if ours and theirs else None


def summary_of_ratios(each: Sequence[float], total: float | None) -> dict[str, float | None]:
    """Median, least and greatest ratio and the ratio over all tokens, rounded to three digits.

    Args:
        each: Ratio of speeds on each prompt or group of prompts.
        total: Ratio of speeds over all tokens.
    """
    if not each or total is None:
        return {"median": None, "min": None, "max": None, "total": None}
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
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "exactness": engine.config.exactness,
        "drafting": engine.drafting,
        "quantized": bool(getattr(engine.model, "is_quantized", False)),
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


def cpu_name() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
