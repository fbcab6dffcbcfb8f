"""NVIDIA's SPEED-Bench: reads its files, and compares decoding methods by its categories.

The data set `nvidia/SPEED-Bench` has the split "qualitative", whose categories are subjects, and splits of one prompt
length each, "throughput_1k" to "throughput_32k", whose categories say how predictable the answers are. A row has
`question_id`, `category` and `turns`, and more that is not used. What others own is missing from the published files:
their turns are placeholders, which NVIDIA's `prepare_data.py` (github.com/NVIDIA/Model-Optimizer,
examples/specdec_bench) fills in. It writes `FOLDER/speed/SPLIT/test.parquet`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reader_rag.bench.inputs import BenchPrompt, encode_prompt
from reader_rag.errors import ConfigError, MissingDependencyError
from reader_rag.util.one_line import first_line

if TYPE_CHECKING:
    from reader_rag.config import SamplingParams
    from reader_rag.engine.engine import Engine

SPLITS = ("qualitative", *(f"throughput_{size}k" for size in (1, 2, 8, 16, 32)))
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_COLUMNS = ("question_id", "category", "turns")
_PREPARE = (
    "write them with NVIDIA's prepare_data.py --dataset speed, which is in github.com/NVIDIA/Model-Optimizer, "
    "examples/specdec_bench"
)


def read_split(folder: Path, split: str) -> list[BenchPrompt]:
    """The first turns of a split.

    Args:
        folder: Holds `SPLIT/*.parquet` or `SPLIT/*.jsonl`, in a folder `speed` or not, or files named `SPLIT*`; or is
            the folder of the split itself.
        split: One of `SPLITS`.

    Raises:
        ConfigError: There is no such folder or file, a row has another form, or the files have placeholders.
        MissingDependencyError: The files are Parquet, and pyarrow is not installed.
    """
    prompts: list[BenchPrompt] = []
    for path in _files(folder, split):
        for number, row in enumerate(_rows(path), 1):
            try:
                prompt = _prompt(row)
            except (KeyError, TypeError, ValueError) as cause:
                wanted = ", ".join(_COLUMNS)
                raise ConfigError(f"{path}, row {number}: not a row of SPEED-Bench with {wanted} ({cause})") from cause
            if prompt.text.startswith(_PLACEHOLDER):
                raise ConfigError(
                    f"{path}, row {number}: its text is a placeholder, as in the published files: {_PREPARE}"
                )
            prompts.append(prompt)
    return prompts


def _files(folder: Path, split: str) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"--data {folder}: there is no such folder; it holds NVIDIA's files: {_PREPARE}")
    places = [folder / split, folder / "speed" / split, *([folder] if folder.name == split else [])]
    found = [path for place in places for path in sorted(place.glob("*")) if _is_data(path)]
    found = found or [path for path in sorted(folder.glob(f"{split}*")) if _is_data(path)]
    if not found:
        raise ConfigError(f"--data {folder}: it has no {split}/*.parquet and no {split}/*.jsonl; {_PREPARE}")
    return found


def _is_data(path: Path) -> bool:
    return path.is_file() and path.suffix in (".parquet", ".jsonl")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".jsonl":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            yield from (json.loads(line) for line in lines if line.strip())
        except (OSError, ValueError) as cause:
            raise ConfigError(f"cannot read {path}: {first_line(cause)}") from cause
        return
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as cause:
        raise MissingDependencyError(f"{path} is Parquet: pip install 'reader-rag[bench]'") from cause
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as cause:
        raise ConfigError(f"cannot read {path}: {first_line(cause)}") from cause
    yield from table.to_pylist()


def _prompt(row: dict[str, Any]) -> BenchPrompt:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ValueError("turns is not a list of texts")
    return BenchPrompt(str(row["question_id"]), str(row["category"]), turns[0])


def compare_categories(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    methods: Sequence[str],
    params: SamplingParams,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], int]:
    """Compare methods on each category.

    Args:
        engine: The model.
        prompts: Prompts of one or several categories.
        methods: Names of `METHODS`.
        params: Length and sampling of the answers.
        progress: Called with what runs next.

    Returns:
        By category, the report of `bench generate`; and the number of prompts that were left out, because they do not
        fit the model's context window with an answer.

    Raises:
        ConfigError: No prompt fits.
    """
    from reader_rag.bench.generate.methods import Task
    from reader_rag.bench.generate.sequential import compare

    tasks: dict[str, list[tuple[str, Task]]] = {}
    left_out = 0
    for prompt in prompts:
        encoded = encode_prompt(engine, prompt)
        if len(encoded.token_ids) + params.max_tokens > engine.context_window:
            left_out += 1
            continue
        tasks.setdefault(prompt.category, []).append((prompt.id, Task(encoded, params)))
    if not tasks:
        raise ConfigError(
            f"no prompt fits the context window of {engine.name} ({engine.context_window} tokens): use a model with a "
            "longer one, or --splits with shorter prompts"
        )
    reports = {}
    for category, some in tasks.items():
        reports[category] = compare(engine, some, methods, lambda line, name=category: progress(f"{name}: {line}"))  # type: ignore[misc]
    return reports, left_out
