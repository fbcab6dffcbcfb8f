"""Benchmark of the two policies of `BatchCache`, on the same simulated steps without a model.

Every sequence has a context and an answer of random lengths, and is replaced by a new one when its answer ends. A step
verifies a root and eight drafted tokens of every sequence. The number of accepted tokens is drawn for each sequence and
step from a geometric distribution with mean 1.5, at most eight. Their rows are drawn too, in rising order, as in a tree
with interleaved branches. Keys, values and queries are random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from reader_rag.kv_cache.batch_cache import BatchCache, Policy
from reader_rag.kv_cache.masks import attention_masks
from reader_rag.kv_cache.tree_cache import TreeCache

_DRAFTED = 8
_ACCEPTED = 1.5
"""Mean of the geometric distribution."""


@dataclass(frozen=True)
class CacheShape:
    """Shape of the cache and lengths of the sequences.

    Attributes:
        context: Positions of the longest context; the shortest has half as many.
        tokens: Tokens of the longest answer; the shortest has half as many.
        layers: Layers of the cache.
        heads: Key and query heads.
        width: Width of a head.
        device: PyTorch device of the cache.
        dtype: Type of keys and values.
    """

    context: int = 512
    tokens: int = 256
    layers: int = 8
    heads: int = 8
    width: int = 64
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def bytes_of_position(self) -> int:
        """Bytes of the keys and values of a position in all layers."""
        size: int = getattr(torch, self.dtype).itemsize
        return 2 * self.layers * self.heads * self.width * size


def measure_caching(
    batches: Sequence[int], shape: CacheShape, say: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run both policies in turn, step by step, until the number of ended sequences reaches the batch size.

    Args:
        batches: Batch sizes; both policies run with each.
        shape: Shape of the cache and lengths of the sequences.
        say: Called with a line after each batch size.

    Returns:
        For each batch and policy: steps; milliseconds of a step (allocation, mask, writing, attention and commit),
        median and mean; bytes moved, and how often an entry was moved; rearrangements; the peak bytes, and the largest
        share of the documented bound.
    """
    report = []
    for batch in batches:
        runs = [_Run(batch, shape, policy) for policy in get_args(Policy)]
        while not all(run.done for run in runs):
            for run in runs:
                run.step()
        say(f"batch {batch}: {len(runs[0].times)} steps")
        report += [run.summary() for run in runs]
    return report


class _Sequence:
    def __init__(self, random: np.random.Generator, shape: CacheShape, states: torch.Tensor) -> None:
        context = int(random.integers(shape.context // 2, shape.context + 1))
        self.left = int(random.integers(shape.tokens // 2, shape.tokens + 1))
        self.cache = TreeCache(shape.layers, context + self.left + 2 * (_DRAFTED + 1))
        for layer in range(shape.layers):
            self.cache.update(states[:, :, :context], states[:, :, :context], layer)
        self.cache.commit(list(range(context)))


class _Run:
    """A policy and its sequences; random numbers are the same for all policies."""

    def __init__(self, batch: int, shape: CacheShape, policy: Policy) -> None:
        self.times: list[float] = []
        self._shape, self._batch = shape, batch
        self._random = np.random.default_rng(0)
        self._device = torch.device(shape.device)
        rows = _DRAFTED + 1
        dtype = getattr(torch, shape.dtype)
        make = torch.Generator().manual_seed(0)
        size = (1, shape.heads, max(shape.context, rows), shape.width)
        self._states = torch.randn(size, generator=make).to(self._device, dtype)
        self._new = self._states[:, :, :rows].expand(batch, -1, -1, -1).contiguous()
        self._cache = BatchCache(shape.layers, policy)
        self._sequences = [_Sequence(self._random, shape, self._states) for _ in range(batch)]
        self._entries = sum(sequence.cache.length for sequence in self._sequences)
        self._ended = self._peak = 0
        self._share = 0.0
        # The content of the mask does not affect the measurement: every row attends to itself and the root.
        self._visible = np.tile(np.eye(rows, dtype=np.bool_), (batch, 1, 1))
        self._visible[:, :, 0] = True

    @property
    def done(self) -> bool:
        """Whether the number of ended sequences has reached the batch size."""
        return self._ended >= self._batch

    @torch.inference_mode()
    def step(self) -> None:
        """One step of all sequences; those that end are replaced for the next step."""
        accepted = np.minimum(self._random.geometric(1 / (1 + _ACCEPTED), self._batch) - 1, _DRAFTED)
        kept = [[0, *sorted(1 + self._random.choice(_DRAFTED, count, replace=False))] for count in accepted.tolist()]
        started = time.perf_counter()
        caches = [sequence.cache for sequence in self._sequences]
        with self._cache.pass_over(caches, [_DRAFTED + 1] * self._batch) as now:
            queries = np.array([[caches[n].length] for n in now.order]) + np.minimum(np.arange(_DRAFTED + 1), 1)
            kinds = {"full_attention": 0}
            (mask,) = attention_masks(kinds, self._visible, queries, now.keys, now.starts, self._device).values()
            for layer in range(self._shape.layers):
                keys, values = self._cache.update(self._new, self._new, layer)
                scaled_dot_product_attention(self._new, keys, values, attn_mask=mask)
        for cache, rows in zip(caches, kept, strict=True):
            cache.commit(rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(1e3 * (time.perf_counter() - started))
        self._entries += sum(len(rows) for rows in kept)
        nbytes = self._cache.nbytes
        self._peak = max(self._peak, nbytes)
        bound = self._cache.most_columns * self._cache.sequences * self._shape.bytes_of_position
        self._share = max(self._share, nbytes / bound)
        for n, sequence in enumerate(self._sequences):
            sequence.left -= len(kept[n])
            if sequence.left <= 0:
                started = time.perf_counter()
                sequence.cache.release()
                self.times[-1] += 1e3 * (time.perf_counter() - started)
                self._sequences[n] = _Sequence(self._random, self._shape, self._states)
                self._entries += self._sequences[n].cache.length
                self._ended += 1

    def summary(self) -> dict[str, Any]:
        """The row of the report."""
        moved = self._cache.bytes_moved
        return {
            "batch": self._batch,
            "policy": self._cache.policy,
            "steps": len(self.times),
            "ms_per_step_p50": round(float(np.median(self.times)), 3),
            "ms_per_step_mean": round(float(np.mean(self.times)), 3),
            "moved_bytes": moved,
            "moves_per_entry": round(moved / (self._entries * self._shape.bytes_of_position), 2),
            "rearrangements": self._cache.rearrangements,
            "peak_bytes": self._peak,
            "share_of_bound": round(self._share, 3),
        }
