"""Draft state that outlives a request: learned next tokens and calibration, separate for each tenant."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reader_rag.config import DraftConfig
from reader_rag.draft.calibration import Calibration
from reader_rag.draft.external.state import ExternalState
from reader_rag.draft.profile import Profile
from reader_rag.draft.successor_table import SuccessorTable

_MAX_STATES = 16
"""Most states that are kept; the least recently used is evicted."""


@dataclass(frozen=True)
class DraftState:
    """What was learned from the requests of one tenant.

    Attributes:
        successors: The target's own next tokens after one and two tokens.
        calibration: Measured acceptance rates of draft candidates.
    """

    successors: SuccessorTable
    calibration: Calibration


class DraftStates:
    """Draft states by tenant, least recently used evicted. Not thread safe.

    Nothing learned from one tenant's text is used for another tenant: the speed of an answer would show whether the
    same words were decoded before.

    Args:
        profile: The model's profile, from which a new successor table starts; None: it starts empty.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._prior: NDArray[np.int32] | None = profile.tokens if profile is not None else None
        self._states: OrderedDict[tuple[str, int, bool], DraftState] = OrderedDict()
        self._external: OrderedDict[tuple[str, bool], ExternalState] = OrderedDict()
        self._nothing = DraftState(SuccessorTable(0), Calibration(learns=False))

    def of(self, tenant: str, draft: DraftConfig) -> DraftState:
        """The state of a tenant under these settings, made if there is none.

        Args:
            tenant: The tenant's name.
            draft: Its `max_successors` and `calibrates` decide what is learned; each combination has its own state.

        Returns:
            The state; an empty one that learns nothing if both settings are off.
        """
        if not draft.max_successors and not draft.calibrates:
            return self._nothing
        key = (tenant, draft.max_successors, draft.calibrates)
        if key not in self._states:
            on = draft.max_successors > 0
            self._states[key] = DraftState(
                SuccessorTable(draft.max_successors, self._prior if on else None),
                Calibration(learns=draft.calibrates),
            )
        self._states.move_to_end(key)
        while len(self._states) > _MAX_STATES:
            self._states.popitem(last=False)
        return self._states[key]

    def external(self, tenant: str, draft: DraftConfig) -> ExternalState:
        """What is known of the draft sources from outside of a tenant's requests, made if there is nothing.

        Args:
            tenant: The tenant's name.
            draft: Its `calibrates` decides whether what they say is corrected.
        """
        key = (tenant, draft.calibrates)
        state = self._external.setdefault(key, ExternalState())
        self._external.move_to_end(key)
        while len(self._external) > _MAX_STATES:
            self._external.popitem(last=False)
        return state

    def forget(self, tenant: str) -> None:
        """Drop a tenant's states.

        Args:
            tenant: The tenant's name.
        """
        for key in [key for key in self._states if key[0] == tenant]:
            del self._states[key]
        for name in [name for name in self._external if name[0] == tenant]:
            del self._external[name]
