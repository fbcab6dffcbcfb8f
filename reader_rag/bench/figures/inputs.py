"""The model and prompts of `bench report`: those that the user names, local ones, or tiny ones for a trial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from reader_rag.bench.figures.parts import Inputs
from reader_rag.bench.inputs import BenchPrompt, read_prompts
from reader_rag.errors import ConfigError

_SAYINGS = (
    "the cat and the hat and the cat and the hat and",
    "on the other side of the other side of the",
    "a rose is a rose is a rose is a",
)
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_QUICK_MINUTES = 60.0


def chosen_prompts(prompts: Path | None, each: int, work: Path) -> tuple[Path, tuple[str, ...], str]:
    """A prompts file with its categories, and what the report says of it.

    Args:
        prompts: The user's file; None: prompts from texts of this machine are written into `work`.
        each: Local prompts of each category.
        work: An existing folder.

    Raises:
        ConfigError: The file cannot be read, or has no category "rag".
    """
    if prompts is None:
        from reader_rag.bench.local_prompts import local_prompts

        path = _write_prompts(local_prompts(each), work / "prompts.jsonl")
        return path, _categories(path), "questions about Python's documentation and installed packages"
    categories = _categories(prompts)
    if "rag" not in categories:
        raise ConfigError(f"{prompts} has no prompts of the category rag; it has {', '.join(categories)}")
    return prompts, categories, prompts.name


def quick_inputs(work: Path) -> Inputs:
    """A random model of two layers, short prompts and short answers: all commands in a few minutes, no true figure.

    Args:
        work: An existing folder, for the model and the prompts.
    """
    from reader_rag.bench.load.memory import SMALL, make_random_model

    model = work / "tiny-random-model"
    model.mkdir(exist_ok=True)
    make_random_model(SMALL, model)
    (model / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    prompts = [
        BenchPrompt(f"{category}-{number}", category, text)
        for category in ("chat", "rag")
        for number, text in enumerate(_SAYINGS)
    ]
    path = _write_prompts(prompts, work / "prompts.jsonl")
    return Inputs(
        *(model, path, ("chat", "rag"), None, None, work), limit=2, max_tokens=8, minutes=_QUICK_MINUTES, quick=True
    )


def _categories(path: Path) -> tuple[str, ...]:
    return tuple(sorted({prompt.category for prompt in read_prompts(path)}))


def _write_prompts(prompts: Sequence[BenchPrompt], path: Path) -> Path:
    rows = ({"id": prompt.id, "category": prompt.category, "turns": [prompt.text]} for prompt in prompts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
