"""From occurrences to probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class CopyWeights:
    """How much an occurrence's vote weighs, by how many tokens before it agree.

    A child's probability under its node is `votes for it / (all votes + escape)`, an occurrence of match length L
    at depth d voting with `scale * (L + d) ** power`: the drafted tokens above it count as matched, since the node
    is only reached if they were right.

    Attributes:
        scale: Vote of a match of one token.
        power: Growth of the vote with the match length.
        escape: Vote of "none of the occurrences".
        longest: Match lengths above this vote like this one.
    """

    scale: float = 0.35
    power: float = 1.4
    escape: float = 1.0
    longest: int = 128

    @cached_property
    def table(self) -> NDArray[np.float64]:
        """float64 [longest + 1], the vote by match length."""
        return self.scale * np.arange(self.longest + 1, dtype=np.float64) ** self.power
