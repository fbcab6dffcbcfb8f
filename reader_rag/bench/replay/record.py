"""Records answers and the target's most probable next tokens, for `bench replay`."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from reader_rag.bench.inputs import BenchPrompt, encode_prompt
from reader_rag.config import SamplingParams
from reader_rag.draft.tree import DraftTree
from reader_rag.engine.engine import Engine
from reader_rag.model.interface import prefill
from reader_rag.sampling.topk import top_tokens

_AT_ONCE = 64
"""Most positions whose next tokens are computed in a pass."""


def record(
    engine: Engine, prompts: Sequence[BenchPrompt], max_tokens: int, traces: Path, best: Path, console: Console
) -> int:
    """Answer prompts greedily, and write traces and best next tokens in the formats of `bench replay`.

    Args:
        engine: The target.
        prompts: The prompts; those that do not fit the model's context window are left out.
        max_tokens: Most tokens of an answer.
        traces: The trace file, overwritten: a line each, `{"id", "category", "model", "prompt", "output"}`.
        best: The npz file of the most probable next tokens, overwritten: for each id int32 [prompt + output, 8].
        console: Shows progress.

    Returns:
        The number of recorded answers.
    """
    rows: dict[str, NDArray[np.int32]] = {}
    with traces.open("w", encoding="utf-8") as lines:
        for prompt in track(prompts, "recording", console=console):
            encoded = encode_prompt(engine, prompt)
            if len(encoded.token_ids) + max_tokens > engine.context_window:
                continue
            answer = engine.generate(encoded, SamplingParams(max_tokens=max_tokens))
            trace = {
                "id": prompt.id,
                "category": prompt.category,
                "model": engine.name,
                "prompt": list(encoded.token_ids),
                "output": list(answer.token_ids),
            }
            lines.write(json.dumps(trace) + "\n")
            rows[prompt.id] = best_after(engine, [*encoded.token_ids, *answer.token_ids])
    _save_rows(rows, best)
    return len(rows)


def best_after(engine: Engine, tokens: Sequence[int]) -> NDArray[np.int32]:
    """The target's most probable next tokens after each position.

    Args:
        engine: The target.
        tokens: Token ids of a text.

    Returns:
        int32 [tokens, 8], most probable first.
    """
    target = engine.target
    cache = target.new_cache(len(tokens), _AT_ONCE - 1)
    best = [top_tokens(prefill(target, tokens[:1], cache))]
    start = 1
    while start < len(tokens):
        deepest = target.deepest(cache.length)
        most = _AT_ONCE if deepest is None else min(_AT_ONCE, deepest + 1)
        root, *chain = tokens[start : start + most]
        best.append(top_tokens(target.verify(root, DraftTree.from_chain(chain), cache)))
        cache.commit(list(range(1 + len(chain))))
        start += 1 + len(chain)
    cache.release()
    return np.concatenate(best)


def _save_rows(rows: Mapping[str, NDArray[np.int32]], path: Path) -> None:
    """Write an npz file of arrays with any names, which `np.savez`, with names as keyword arguments, cannot."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in rows.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
