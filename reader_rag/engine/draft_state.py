"""What drafting learns while answering, kept from request to request, for each tenant apart."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reader_rag.config import DraftConfig
from reader_rag.draft.calibration import Calibration
from reader_rag.draft.profile import Profile
from reader_rag.draft.successor_table import SuccessorTable

_TENANTS = 16
"""Tenants remembered; the one that asked longest ago is forgotten first."""


@dataclass(frozen=True)
class DraftState:
    """What was learned from one tenant's texts.

    Attributes:
        successors: The target's own next tokens.
        calibration: How right the estimates of drafts were.
    """

    successors: SuccessorTable
    calibration: Calibration


class DraftStates:
    """What was learned, by tenant. Not for several threads at once.

    Nothing learned from one tenant's text is ever used for another: how fast an answer comes tells whether its words
    were known.

    Args:
        profile: What is known of the model beforehand.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._prior: NDArray[np.int32] | None = profile.tokens if profile is not None else None
        self._held: OrderedDict[tuple[str, int, bool], DraftState] = OrderedDict()
        self._nothing = DraftState(SuccessorTable(0), Calibration(learns=False))

    def of(self, tenant: str, draft: DraftConfig) -> DraftState:
        """What was learned from a tenant, under settings that learn the same things; new if there is nothing yet."""
        if not draft.max_successors and not draft.calibrates:
            return self._nothing
        key = (tenant, draft.max_successors, draft.calibrates)
        if key not in self._held:
            on = draft.max_successors > 0
            self._held[key] = DraftState(
                SuccessorTable(draft.max_successors, self._prior if on else None),
                Calibration(learns=draft.calibrates),
            )
        self._held.move_to_end(key)
        while len(self._held) > _TENANTS:
            self._held.popitem(last=False)
        return self._held[key]

    def forget(self, tenant: str) -> None:
        """Drop what was learned from a tenant."""
        for key in [key for key in self._held if key[0] == tenant]:
            del self._held[key]
