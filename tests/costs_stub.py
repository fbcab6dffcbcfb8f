"""Costs that do not depend on the clock, so that tests can count steps and drafted nodes."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np
from numpy.typing import NDArray


class EverythingPays:
    """Costs under which every drafted node is verified."""

    max_nodes = 1024

    def best_sizes(
        self, trees: Sequence[Sized], contexts: Sequence[int], acceptance_ratios: Sequence[float], *, padded: bool
    ) -> list[int]:
        """All of every tree."""
        return [len(tree) for tree in trees]

    def best_asked(self, most: int, beside: int, context: int, share: float, sequences: int) -> int:
        """All of them."""
        return most

    def head_seconds(self, rows: int, beside: int, context: int, share: float) -> list[float]:
        """They take no time."""
        return [0.0] * (rows + 1)

    def seconds(self, context: int) -> NDArray[np.float64]:
        """All passes take as long."""
        return np.ones(self.max_nodes + 1)

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Learn nothing."""

    def savings(
        self, emitted: Sequence[int], nodes: Sequence[int], contexts: Sequence[int], *, padded: bool
    ) -> tuple[list[float], float]:
        """Every draft has paid."""
        return [1.0] * len(emitted), 1.0
