"""What is learned of the draft sources of a tenant's requests, and kept from one request to the next."""

from __future__ import annotations

import numpy as np

from reader_rag.draft.calibration import Calibration
from reader_rag.draft.external.payoff import CallTime, Pace, Payoff
from reader_rag.draft.kernels import proposals as kernels
from reader_rag.draft.kernels.cells import JOINT_CELLS


class SourceState:
    """What is known of one source.

    Attributes:
        counts: float64 [2, depths, buckets], hits and expected hits of its tokens by depth and probability.
        payoff: When it is asked.
        time: Seconds that asking takes.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(kernels.CELL_SHAPE)
        self.payoff = Payoff()
        self.time = CallTime()


class ExternalState:
    """What is known of all sources of a tenant.

    Attributes:
        joint: float64 [3, JOINT_CELLS], hits and expected hits of candidates at nodes where a source proposes too, and
            the factors that follow from them, as in `Calibration.counts`.
        pace: Tokens that are emitted in a second, by what search expects.
    """

    def __init__(self) -> None:
        self.joint = Calibration.blank_counts(JOINT_CELLS)
        self.pace = Pace()
        self._sources: dict[str, SourceState] = {}

    def of(self, name: str) -> SourceState:
        """The state of a source, made if there is none.

        Args:
            name: The source's.
        """
        return self._sources.setdefault(name, SourceState())
