"""Prompts and traces that benchmarks run on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reader_rag.errors import ConfigError


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt of a prompts file: one JSON object a line, `{"id", "category", "turns": [text, ...]}`."""

    id: str
    category: str
    text: str


@dataclass(frozen=True)
class Trace:
    """A recorded answer: one JSON object a line, `{"id", "category", "model", "prompt": [ids], "output": [ids]}`."""

    id: str
    category: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


_Row = TypeVar("_Row", BenchPrompt, Trace)


def read_prompts(path: Path, categories: Sequence[str] = (), limit: int | None = None) -> list[BenchPrompt]:
    """The first turns of a prompts file.

    Args:
        path: The file.
        categories: Keep these; none: all.
        limit: Most prompts of each category; None: all.

    Raises:
        ConfigError: The file cannot be read, a line is not of that form, or nothing is left.
    """
    prompts = [BenchPrompt(str(row["id"]), str(row["category"]), str(row["turns"][0])) for row in _rows(path, "turns")]
    return _selected(prompts, path, categories, limit)


def read_traces(path: Path, categories: Sequence[str] = (), limit: int | None = None) -> list[Trace]:
    """The answers of a trace file; arguments and errors as in `read_prompts`."""
    traces = [
        Trace(str(row["id"]), str(row["category"]), tuple(row["prompt"]), tuple(row["output"]))
        for row in _rows(path, "prompt")
        if row["output"]
    ]
    return _selected(traces, path, categories, limit)


def _rows(path: Path, field: str) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {path}: {cause}") from cause
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not row[field] or "id" not in row or "category" not in row:
                raise ValueError(f"id, category or {field} missing or empty")
        except (ValueError, KeyError, TypeError) as cause:
            raise ConfigError(f"{path}, line {number}: not a JSON object with id, category and {field}") from cause
        yield row


def _selected(rows: list[_Row], path: Path, categories: Sequence[str], limit: int | None) -> list[_Row]:
    known = sorted({row.category for row in rows})
    unknown = sorted(set(categories) - set(known))
    if unknown:
        raise ConfigError(f"{path} has no category {', '.join(unknown)}; it has {', '.join(known)}")
    kept: list[_Row] = []
    for category in categories or known:
        kept += [row for row in rows if row.category == category][:limit]
    if not kept:
        raise ConfigError(f"{path} has nothing to run")
    return kept
