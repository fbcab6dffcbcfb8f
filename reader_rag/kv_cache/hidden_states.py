"""Final hidden states of a prompt's positions, from which the model's head computes logits when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_DTYPE = torch.bfloat16
"""Type of the stored states. Of their logits only the order of the highest matters, and float16 has no room for the
outliers of some models."""


class HiddenStates:
    """Hidden states of the first positions of a sequence, in order, those of some positions missing.

    Args:
        positions: Most positions: the tokens of the prompt.
        width: Numbers of a state.
        device: Where the states are.

    Attributes:
        known: bool [positions], which positions have a state.
        length: Positions followed so far, with or without a state.
    """

    def __init__(self, positions: int, width: int, device: torch.device) -> None:
        self.known: NDArray[np.bool_] = np.zeros(positions, np.bool_)
        self.length = 0
        self._rows: torch.Tensor | None = torch.empty(positions, width, dtype=_DTYPE, device=device)

    @staticmethod
    def bytes_for(positions: int, width: int) -> int:
        """Bytes of the states of a prompt.

        Args:
            positions: Its tokens.
            width: Numbers of a state.
        """
        return positions * width * _DTYPE.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._rows is None else self._rows.nbytes

    @torch.inference_mode()
    def append(self, states: torch.Tensor | None, count: int) -> None:
        """Add the states of the next positions.

        Args:
            states: [n, width] of any type, of the first n of these positions; None: of none of them.
            count: How many positions are followed, at least n.
        """
        if states is not None and self._rows is not None:
            self._rows[self.length : self.length + len(states)] = states
            self.known[self.length : self.length + len(states)] = True
        self.length += count

    @torch.inference_mode()
    def take(self, positions: Sequence[int] | NDArray[np.integer] | torch.Tensor) -> torch.Tensor:
        """The states of some positions.

        Args:
            positions: [n], positions that have a state; a tensor is where the states are.

        Returns:
            bfloat16 [n, width].
        """
        assert self._rows is not None
        return self._rows[torch.as_tensor(positions, dtype=torch.int64, device=self._rows.device)]

    @torch.inference_mode()
    def copy(self, start: int, stop: int) -> torch.Tensor | None:
        """A copy of the states of consecutive positions, up to the first one that has none.

        Args:
            start: The first position.
            stop: One past the last.

        Returns:
            bfloat16 [n, width]; None: the first position has none.
        """
        known = self.known[start:stop]
        count = int(known.argmin()) if not known.all() else len(known)
        return None if self._rows is None or not count else self._rows[start : start + count].clone()

    def release(self) -> None:
        """Free the memory."""
        self._rows = None
        self.known[:] = False
