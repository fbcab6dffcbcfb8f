"""Costs of a datastore by its size: sorting, bytes, opening, memory, and the time of a search.

The text is that of `texts`, one document for each file, in the default model's tokens. Every hundredth document is held
out and followed token by token, like an answer that is new. Documents of the datastore are followed in the same way,
like answers that are copies.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.bench.datastore.texts import texts
from reader_rag.datastore import CompactionConfig, Datastore, Searcher
from reader_rag.draft import ContextIndex, TreeBuilder
from reader_rag.draft.tree_builder import DatastoreCandidates
from reader_rag.model.registry import DEFAULT_MODEL, resolve_model

_HELD_OUT = 100
_QUERIES = 4000
_CONTEXT = 64
_NODES = 64
_BATCH = 4_000_000
"""Characters that are tokenised in one call."""

_OPENING = """
import json, sys, time
import numpy as np, psutil
from reader_rag.bench.datastore.measurements import TOKENIZER, follow
from reader_rag.datastore import Datastore
folder, vocabulary, tiny, contexts = sys.argv[1:]
process = psutil.Process()
with Datastore.open(tiny, vocabulary=int(vocabulary), tokenizer=TOKENIZER) as store:
    store.add("warm", [1, 2, 3, 1, 2])
    follow(store.searcher([""]), np.ones((2, 65), np.int32))
before = process.memory_info().rss
started = time.perf_counter()
store = Datastore.open(folder, vocabulary=int(vocabulary), tokenizer=TOKENIZER, read_only=True)
searcher = store.searcher([""])
searcher.snapshot()
opened = time.perf_counter() - started
at_open = process.memory_info().rss
resident = [at_open - before]
for part in np.split(np.load(contexts), [100]):
    follow(searcher, part)
    resident.append(process.memory_info().rss - before)
print(json.dumps([1e3 * opened, *(size / 1e6 for size in resident)]))
"""

TOKENIZER = "bench"


@dataclass(frozen=True)
class Texts:
    """Tokenised documents.

    Attributes:
        tokens: int32 [tokens], the documents one after the other.
        ends: int64 [documents], index behind the last token of each.
    """

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]

    def documents(self, *, held_out: bool, most: int) -> Iterator[tuple[str, NDArray[np.int32]]]:
        """(name, tokens) of documents.

        Args:
            held_out: Whether those that are held out are wanted, or the others.
            most: Most tokens in all; the last document is cut.
        """
        total = 0
        for k, end in enumerate(self.ends.tolist()):
            if (k % _HELD_OUT == 0) != held_out:
                continue
            document = self.tokens[int(self.ends[k - 1]) if k else 0 : end][: most - total]
            total += len(document)
            if not len(document):
                return
            yield f"{k:x}", document


def installed_text(most: int, folder: Path, say: Callable[[str], None] = lambda _: None) -> Texts:
    """The text of this machine, tokenised; kept in `folder` for the next run.

    Args:
        most: Tokens wanted; there may be fewer.
        folder: Folder of the file.
        say: Called with lines about progress.
    """
    kept = folder / f"text-{most}.npz"
    if kept.exists():
        stored = np.load(kept)
        return Texts(stored["tokens"], stored["ends"])
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(resolve_model(DEFAULT_MODEL)) / "tokenizer.json"))
    arrays: list[NDArray[np.int32]] = []
    total = size = 0
    batch: list[str] = []

    def encode() -> None:
        nonlocal total, size
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            arrays.append(np.array(encoding.ids, np.int32))
            total += len(arrays[-1])
        batch.clear()
        size = 0
        say(f"{total} tokens of text")

    for _, text in texts():
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            encode()
            if total >= most:
                break
    encode()
    found = Texts(np.concatenate(arrays), np.cumsum([len(array) for array in arrays]))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(kept, tokens=found.tokens, ends=found.ends)
    return found


def widened(text: Texts) -> Texts:
    """The text in a vocabulary of 17 bits: 2**16 is added to each token that follows an odd one."""
    before = np.concatenate([np.zeros(1, np.int32), text.tokens[:-1]])
    return Texts(text.tokens + (before & 1).astype(np.int32) * (1 << 16), text.ends)


def follow(searcher: Searcher, contexts: NDArray[np.int32]) -> tuple[list[float], list[int]]:
    """Search behind the last token of each context.

    Args:
        searcher: Searches the documents.
        contexts: int32 [queries, 65].

    Returns:
        For each query microseconds of a step (one token, then the search), and the longest match.
    """
    cursor = searcher.cursor()
    times, lengths = [], []
    for context in contexts:
        cursor.extend(context[:-1])
        last = context[-1:].tolist()
        started = time.perf_counter()
        cursor.extend(last)
        cursor.search()
        times.append(1e6 * (time.perf_counter() - started))
        lengths.append(cursor.longest_match)
    return times, lengths


def draft(searcher: Searcher, contexts: NDArray[np.int32]) -> list[float]:
    """Draft behind the last token of each context, from the context and the datastore.

    Args:
        searcher: Searches the documents.
        contexts: int32 [queries, 65].

    Returns:
        For each query microseconds of a step: one token, the search, the tree of up to 64 nodes.
    """
    cursor = searcher.cursor()
    builder = TreeBuilder(max_nodes=_NODES, max_candidates=cursor.all_matches.shape[1])
    times = []
    for context in contexts:
        index = ContextIndex(context[:-1], reserve=1)
        cursor.extend(context[:-1])
        last = context[-1:].tolist()
        started = time.perf_counter()
        index.extend(last)
        cursor.extend(last)
        cursor.search()
        candidates = DatastoreCandidates(
            cursor.continuations, len(cursor.continuations), cursor.all_matches, cursor.found
        )
        builder.build(index, candidates=candidates)
        times.append(1e6 * (time.perf_counter() - started))
    return times


def measure_datastore(
    text: Texts, sizes: Sequence[int], vocabulary: int, folder: Path, say: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Build a datastore of each size and search it.

    Args:
        text: Tokens of the vocabulary.
        sizes: Tokens of each datastore.
        vocabulary: Number of token ids.
        folder: Folder of the datastores; one that is there is not built again.
        say: Called with lines about progress.

    Returns:
        A row for each size; docs/datastore.md explains the figures.
    """
    rows = []
    for size in sizes:
        row = _measure(text, size, vocabulary, folder, say)
        say(json.dumps(row))
        rows.append(row)
    return rows


def _measure(text: Texts, size: int, vocabulary: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    place = folder / f"store-{vocabulary}-{size}"
    random = np.random.default_rng(0)
    new = _contexts(np.concatenate([tokens for _, tokens in text.documents(held_out=True, most=1 << 22)]), random)
    old = _contexts(np.concatenate([tokens for _, tokens in text.documents(held_out=False, most=size)]), random)
    compaction = CompactionConfig(background=False)
    with Datastore.open(place, vocabulary=vocabulary, tokenizer=TOKENIZER, compaction=compaction) as store:
        started = time.perf_counter()
        changed = store.add_many(text.documents(held_out=False, most=size))
        built = time.perf_counter() - started
        say(f"{size}: {changed} documents added in {built:.0f} s")
        several = len(store.searcher([""]).snapshot())
        follow(store.searcher([""]), new)
        in_several = follow(store.searcher([""]), new)[0]
        started = time.perf_counter()
        store.compact(full=True)
        say(f"{size}: compacted in {time.perf_counter() - started:.0f} s")
        stats = store.stats()[""]
        searcher = store.searcher([""])
        segments = [segment for segment, _ in searcher.snapshot().searchable]
        seconds = _sort_time(segments)
        queries = {}
        for name, contexts in (("new", new), ("copied", old)):
            follow(searcher, contexts)
            times, lengths = follow(searcher, contexts)
            drafts = draft(searcher, contexts)
            queries[name] = {
                "us_p50": round(float(np.percentile(times, 50)), 1),
                "us_p99": round(float(np.percentile(times, 99)), 1),
                "draft_us_p50": round(float(np.percentile(drafts, 50)), 1),
                "draft_us_p99": round(float(np.percentile(drafts, 99)), 1),
                "longest_p50": float(np.median(lengths)),
            }
    opening = _open_elsewhere(place, vocabulary, folder, new)
    return {
        "tokens": stats.tokens,
        "documents": stats.documents,
        "token_bytes": segments[0].codec.bytes,
        "bytes_per_token": round(stats.bytes / stats.tokens, 3),
        "sorted_tokens_per_s": round(stats.tokens / seconds),
        "built_tokens_per_s": round(stats.tokens / built) if changed else None,
        "open_ms": round(opening[0], 1),
        "resident_mb_opened": round(opening[1], 1),
        "resident_mb_searched_100": round(opening[2], 1),
        "resident_mb_searched_4000": round(opening[3], 1),
        "segments": stats.segments,
        "as_built": {
            "segments": several,
            "us_p50": round(float(np.percentile(in_several, 50)), 1),
            "us_p99": round(float(np.percentile(in_several, 99)), 1),
        },
        "queries": queries,
    }


def _sort_time(segments: Sequence[Any]) -> float:
    seconds = 0.0
    for segment in segments:
        tokens = np.array(segment.tokens)
        started = time.perf_counter()
        segment.codec.suffix_array(tokens)
        seconds += time.perf_counter() - started
    return seconds


def _contexts(tokens: NDArray[np.int32], random: np.random.Generator) -> NDArray[np.int32]:
    """int32 [queries, 65], spans from random places of a text."""
    starts = random.integers(0, max(len(tokens) - _CONTEXT, 1), _QUERIES)
    found: NDArray[np.int32] = tokens[np.minimum(starts[:, None] + np.arange(_CONTEXT + 1), len(tokens) - 1)]
    return found


def _open_elsewhere(place: Path, vocabulary: int, folder: Path, contexts: NDArray[np.int32]) -> list[float]:
    """Milliseconds of opening in a new process with compiled loops, and megabytes that became resident."""
    np.save(folder / "contexts.npy", contexts)
    command = [
        *(sys.executable, "-c", _OPENING),
        *(str(place), str(vocabulary), str(folder / f"tiny-{vocabulary}"), str(folder / "contexts.npy")),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(run.stdout)
    return found
