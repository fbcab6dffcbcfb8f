"""What a step costs by its number of positions, measured, and the tree size that pays."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reader_rag.decode.step import Target
from reader_rag.draft.tree import DraftTree

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTEXT = 256
"""Committed positions that a step is timed behind: about those of a short question with passages."""
_BUDGET_S = 2.0
_ROUNDS = 3
_SLOWER, _FASTER = 0.05, 0.5
"""Weights of a new observation above and below what was expected: neighbours on the machine only ever add time."""
_EXPLORE_EVERY, _EXPLORE_NODES = 32, 4
"""After so many plain steps in a row a small draft is tried all the same, so that a bad measurement is found out."""


class StepCosts:
    """Seconds of a verify step by its positions (the root and the drafted nodes).

    Measured once on a few sizes, refined by every step that runs. Times between measured sizes are interpolated, and a
    larger step is never taken to be cheaper than a smaller one.

    Args:
        rows: Measured sizes, rising, the first 1.
        seconds: Their times.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        self._rows = np.array(rows, dtype=np.float64)
        self._seconds = np.array(seconds, dtype=np.float64)
        self._curve = self._curve_of(int(self._rows[-1]))
        self._plain_in_a_row = 0

    @classmethod
    def measure(cls, target: Target, max_nodes: int) -> StepCosts:
        """Time steps of the target.

        The least time of a few rounds counts: on a shared machine the others tell of the neighbours. On a target so
        slow that one round takes two seconds, one round is all.

        Args:
            target: The model.
            max_nodes: Most nodes of a tree.
        """
        window = target.context_window or 1 << 20
        context = max(min(_CONTEXT, window // 2), 1)
        max_nodes = max(min(max_nodes, window - context - 1), 0)  # the chains that are timed end inside the window
        rows = [*(r for r in _ROWS if r <= max_nodes), max_nodes + 1]
        token = int(target.config.vocab_size) // 2
        cache = target.new_cache(context, max_nodes)
        target.prefill([token] * context, cache)
        best = [float("inf")] * len(rows)
        started = time.perf_counter()
        for _ in range(_ROUNDS):
            for k, count in enumerate(rows):
                tree = DraftTree.from_chain([token] * (count - 1))
                before = time.perf_counter()
                target.verify(token, tree, cache).argmax(-1).tolist()
                best[k] = min(best[k], time.perf_counter() - before)
            if time.perf_counter() - started > _BUDGET_S:
                break
        return cls(rows, best)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """float64 [max rows + 1], the time of a step by its positions; index 0 is unused."""
        return self._curve

    @property
    def max_nodes(self) -> int:
        """Most nodes of a tree whose cost is known."""
        return len(self._curve) - 2

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step that ran.

        Args:
            rows: Its positions.
            seconds: Its time. Ten times what was expected is the machine's doing, not the step's, and not learned.
        """
        if not 1 <= rows < len(self._curve) or seconds > 10 * self._curve[rows]:
            return
        error = seconds - self._curve[rows]
        weight = _SLOWER if error > 0 else _FASTER
        right = min(int(np.searchsorted(self._rows, rows)), len(self._rows) - 1)
        left = max(right - 1, 0)
        span = self._rows[right] - self._rows[left]
        share = (rows - self._rows[left]) / span if span else 1.0
        self._seconds[right] += weight * share * error
        if left != right:
            self._seconds[left] += weight * (1.0 - share) * error
        self._curve = self._curve_of(len(self._curve) - 1)

    def best_size(self, tree: DraftTree) -> int:
        """How many of a tree's nodes to verify.

        Nodes come in falling probability, so the first n are the best tree of n nodes, and one scan finds the n that
        maximises expected tokens per second, `(1 + sum of the first n path probabilities) / T(n + 1)`.

        Returns:
            0..len(tree); 0: a plain step is faster.
        """
        most = min(len(tree), len(self._curve) - 2)
        expected = 1.0 + np.concatenate([np.zeros(1), np.cumsum(tree.probabilities[:most])])
        size = int(np.argmax(expected / self._curve[1 : most + 2]))
        self._plain_in_a_row = self._plain_in_a_row + 1 if most and not size else 0
        if self._plain_in_a_row > _EXPLORE_EVERY:
            self._plain_in_a_row = 0
            return min(most, _EXPLORE_NODES)
        return size

    def _curve_of(self, most: int) -> NDArray[np.float64]:
        # A larger step costs no less than a smaller one; and where a smaller one was measured in a bad moment, the
        # larger one is the better witness.
        seconds = np.minimum.accumulate(self._seconds[::-1])[::-1]
        return np.interp(np.arange(most + 1), self._rows, seconds)
