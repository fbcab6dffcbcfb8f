"""Prompts and recorded answers (traces) for benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reader_rag.errors import ConfigError

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine
    from reader_rag.engine.outputs import Prompt


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt of a prompts file, which has a line of JSON for each: `{"id", "category", "turns": [text, ...]}`.

    Attributes:
        id: Id of the prompt.
        category: Results are reported by category.
        text: The first turn.
    """

    id: str
    category: str
    text: str


def encode_prompt(engine: Engine, prompt: BenchPrompt) -> Prompt:
    """A prompt as the first message of a chat, or as it is where the model has no chat template.

    Args:
        engine: Its tokenizer encodes.
        prompt: The prompt.
    """
    if getattr(engine.tokenizer, "chat_template", None):
        return engine.encode_chat([{"role": "user", "content": prompt.text}])
    return engine.encode(prompt.text)


@dataclass(frozen=True)
class TracePassage:
    """A retrieved passage of a trace: a span of the prompt, or a text that the prompt does not contain.

    Attributes:
        id: Id of the passage.
        start: First token in the prompt.
        stop: One past the last token in the prompt; None: the prompt does not contain the passage.
        tokens: Token ids of the passage if `stop` is None.
    """

    id: str
    start: int = 0
    stop: int | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A recorded answer of a trace file, which has a line of JSON for each.

    A line is `{"id", "category", "model", "prompt": [ids], "output": [ids]}`. It may have `"passages"`, a list of
    `{"id", "start", "stop"}` (tokens of the prompt) or `{"id", "tokens": [ids]}`.

    Attributes:
        id: Id of the prompt.
        category: Results are reported by category.
        prompt: Token ids of the prompt.
        output: Token ids of the answer.
        passages: The retrieved passages.
    """

    id: str
    category: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    passages: tuple[TracePassage, ...] = ()


_Row = TypeVar("_Row", BenchPrompt, Trace)


def read_prompts(path: Path, categories: Sequence[str] = (), limit: int | None = None) -> list[BenchPrompt]:
    """The first turns of a prompts file.

    Args:
        path: The file.
        categories: Categories to keep; empty: all.
        limit: Most prompts of each category; None: all.

    Raises:
        ConfigError: The file cannot be read, a line has another form, or no line is left.
    """
    prompts = list(_rows(path, ("id", "category", "turns"), _prompt))
    return selected(prompts, path, categories, limit)


def read_traces(path: Path, categories: Sequence[str] = (), limit: int | None = None) -> list[Trace]:
    """The answers of a trace file; empty ones are left out.

    Args:
        path: The file.
        categories: Categories to keep; empty: all.
        limit: Most answers of each category; None: all.

    Raises:
        ConfigError: The file cannot be read, a line has another form, or no line is left.
    """
    traces = [trace for trace in _rows(path, ("id", "category", "prompt", "output"), _trace) if trace.output]
    return selected(traces, path, categories, limit)


def _rows(path: Path, fields: Sequence[str], make: Callable[[dict[str, Any]], _Row]) -> Iterator[_Row]:
    """Each line of a file, converted by `make`; `fields` are named in errors."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {path}: {cause}") from cause
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield make(json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as cause:
            wanted = ", ".join(fields[:-1]) + f" and {fields[-1]}"
            raise ConfigError(f"{path}, line {number}: not a JSON object with id, {wanted[4:]} ({cause})") from cause


def _prompt(row: dict[str, Any]) -> BenchPrompt:
    if not isinstance(row["turns"], list) or not row["turns"]:
        raise ValueError("turns is not a list of texts")
    return BenchPrompt(str(row["id"]), str(row["category"]), str(row["turns"][0]))


def _trace(row: dict[str, Any]) -> Trace:
    prompt, output = _token_ids(row["prompt"]), _token_ids(row["output"])
    if not prompt:
        raise ValueError("prompt is empty")
    passages = []
    for passage in row.get("passages", ()):
        start, stop = passage.get("start", 0), passage.get("stop")
        if stop is not None and not 0 <= start < stop <= len(prompt):
            raise ValueError(f"passage {passage['id']} has no tokens {start}..{stop} in a prompt of {len(prompt)}")
        passages.append(TracePassage(str(passage["id"]), start, stop, _token_ids(passage.get("tokens", ()))))
    return Trace(str(row["id"]), str(row["category"]), prompt, output, tuple(passages))


def _token_ids(values: Sequence[Any]) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ValueError(f"{value!r} is not a token id")
    return tuple(values)


def selected(rows: list[_Row], path: Path, categories: Sequence[str], limit: int | None) -> list[_Row]:
    """Rows of some categories.

    Args:
        rows: All rows.
        path: Where they are from, for errors.
        categories: Categories to keep; empty: all.
        limit: Most rows of each category; None: all.

    Raises:
        ConfigError: There is no such category, or no row is left.
    """
    known = sorted({row.category for row in rows})
    unknown = sorted(set(categories) - set(known))
    if unknown:
        raise ConfigError(f"{path} has no category {', '.join(unknown)}; it has {', '.join(known)}")
    kept: list[_Row] = []
    for category in categories or known:
        kept += [row for row in rows if row.category == category][:limit]
    if not kept:
        raise ConfigError(f"{path} has no usable line: use another file")
    return kept
