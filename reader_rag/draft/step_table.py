"""StepTable: seconds of steps by rows and drafted tokens, measured by a command, read from a file, or assumed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.draft.kernels import pool as kernels
from reader_rag.errors import ConfigError
from reader_rag.util.cpu import cpu_features
from reader_rag.util.files import atomic_path, read_regular

Float64 = NDArray[np.float64]

FORMAT, VERSION = "reader-rag step costs", 1
_FIELDS = ("model", "device", "vllm")

# Seconds of a position beside those of a plain step of one row. A step reads all weights whatever its width, and each
# position is computed with all of them. On a GPU reading takes longer until there are some hundred positions, and what
# one adds is mostly attention. A CPU's cores are busy with computing from a few positions on, and those without AVX-512
# from the second on, at least in 16 bits.
_GPU_POSITION, _WIDE_CPU_POSITION, _CPU_POSITION = 0.005, 0.03, 0.5


@dataclass(frozen=True)
class StepTable:
    """Seconds of steps by rows and drafted tokens; does not change while running.

    Attributes:
        rows: Rows of the steps, rising, the first 1.
        drafted: Drafted tokens in each of these rows, rising, the first 0.
        seconds: float64 [len(rows), len(drafted)], the median time of a step in which so many rows are each verified
            with so many drafted tokens.
        model: Name of the measured model.
        device: Name of the device.
        vllm: Version of vLLM.
        context_seconds: float64 [len(drafted)] or empty, seconds that each cached position adds to a step of one row
            with so many drafted tokens; `seconds` are then those behind an empty cache.
    """

    rows: tuple[int, ...]
    drafted: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    model: str = ""
    device: str = ""
    vllm: str = ""
    context_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, values, first in (("rows", self.rows, 1), ("drafted", self.drafted, 0)):
            rising = all(a < b for a, b in pairwise(values))
            if not values or values[0] != first or not rising:
                raise ConfigError(f"step costs: {name} must rise from {first}, not be {list(values)}")
        if len(self.drafted) < 2:
            raise ConfigError("step costs: drafted must name 0 and at least one other number")
        shape = (len(self.rows), len(self.drafted))
        if len(self.seconds) != shape[0] or any(len(line) != shape[1] for line in self.seconds):
            raise ConfigError(f"step costs: seconds must have {shape[0]} lines of {shape[1]} numbers")
        if not all(math.isfinite(value) and value > 0.0 for line in self.seconds for value in line):
            raise ConfigError("step costs: all seconds must be numbers above 0")
        if self.context_seconds and len(self.context_seconds) != shape[1]:
            raise ConfigError(f"step costs: context_seconds must have {shape[1]} numbers, or none")
        if not all(math.isfinite(value) and value >= 0.0 for value in self.context_seconds):
            raise ConfigError("step costs: all context_seconds must be numbers from 0 on")

    @classmethod
    def assumed(cls, device: str) -> StepTable:
        """A table for a device that was not measured: a plain step takes 1, each position a fixed share more.

        Args:
            device: "cpu", or anything else for an accelerator.
        """
        each = _GPU_POSITION
        if device == "cpu":
            each = _WIDE_CPU_POSITION if "avx512f" in cpu_features() else _CPU_POSITION
        rows, drafted = (1, 256), (0, 64)
        seconds = tuple(tuple(1.0 + each * (count * (1 + width) - 1) for width in drafted) for count in rows)
        return cls(rows, drafted, seconds, device=device)

    @classmethod
    def read(cls, path: Path | str) -> StepTable:
        """Read the file that `write` makes.

        Raises:
            ConfigError: It is not there, or no such file.
        """
        advice = "measure them again, or leave the setting out"
        try:
            content: Any = json.loads(read_regular(Path(path)))
        except (OSError, ValueError, RecursionError) as cause:
            raise ConfigError(f"cannot read step costs from {path}: {cause}; {advice}") from cause
        if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ConfigError(f"{path} does not hold step costs of version {VERSION}: {advice}")
        try:
            return cls(
                _integers(content["rows"]),
                _integers(content["drafted"]),
                tuple(tuple(float(value) for value in line) for line in content["seconds"]),
                **{name: str(content[name]) for name in _FIELDS},
                context_seconds=tuple(float(value) for value in content.get("context_seconds", ())),
            )
        except (KeyError, TypeError, ValueError) as cause:
            raise ConfigError(f"{path}: {cause}; {advice}") from cause

    def write(self, path: Path | str) -> None:
        """Write a file that `read` takes.

        Raises:
            OSError: It cannot be written.
        """
        content = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in (*_FIELDS, "rows", "drafted", "seconds")},
            **({"context_seconds": self.context_seconds} if self.context_seconds else {}),
        }
        with atomic_path(Path(path)) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def times(self, rows: int, most: int) -> Float64:
        """Seconds of steps over so many rows, by the positions that they have in all.

        Between measured numbers of rows and of drafted tokens the time is linear, and it goes on beyond both by one
        rule, that of `kernels.pool.seconds`; it never falls with more positions.

        Args:
            rows: Rows, at least 1.
            most: Most positions of a step, at least `rows`.

        Returns:
            float64 [most], the time of 1, 2, ... positions; those of fewer positions than rows are the plain step's.
        """
        lines = np.stack(
            [
                _line(count * np.array(self.drafted, np.float64), np.array(line), most - rows + 1)
                for count, line in zip(self.rows, self.seconds, strict=True)
            ]
        )
        # A step that took longer than a larger one was measured while the machine was busy: the larger one counts.
        lines = np.minimum.accumulate(lines[::-1])[::-1]
        sizes, last = np.array(self.rows, np.float64), len(self.rows) - 1
        if rows > sizes[last]:
            half = kernels.half_size(sizes)
            each = lines[last] / sizes[last]
            if last:
                each = np.minimum(each, (lines[last] - lines[half]) / (sizes[last] - sizes[half]))
            known = lines[last] + each * (rows - sizes[last])
        else:
            right = int(np.searchsorted(sizes, rows))
            left = max(right - 1, 0)
            share = (rows - sizes[left]) / max(sizes[right] - sizes[left], 1.0)
            known = lines[left] + share * (lines[right] - lines[left])
        return np.concatenate([np.full(rows - 1, known[0]), known])


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise TypeError(f"whole numbers are needed, not {values}")
    return tuple(values)


def _line(at: Float64, values: Float64, count: int) -> Float64:
    """float64 [count], the seconds for 0, 1, ... drafted tokens by those of the numbers `at`, the first of them 0."""
    known = np.empty(count)
    kernels.seconds(at + 1.0, values, np.zeros_like(values), 0.0, 1.0, known)
    return known
