"""The angles by which queries and keys are rotated, as a model's own module makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.model.compiled.architecture import Architecture
from reader_rag.model.cpu.attention import Rotation

Table = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Cosines and sines [kinds, positions, width]."""


class Angles:
    """Cosines and sines by position, for every kind of rotation of a model.

    Args:
        module: The model's rotary module.
        architecture: Which kinds of rotation the model has.
        dtype: Of the model, which some modules round to.

    Attributes:
        width: How many numbers of a head are rotated, the first of them.
    """

    def __init__(self, module: Any, architecture: Architecture, dtype: torch.dtype) -> None:
        self._module = module
        self._kinds = architecture.rotary_kinds
        self._switch = architecture.rotation_switch
        self._rounds_once = architecture.rotation_rounds_once
        self._dtype = dtype
        self._short: Table = self._computed(min(256, self._switch or 256))
        self._long: Table | None = None
        self.width = self._short[0].shape[-1]

    def at(self, positions: NDArray[np.int64], starts: NDArray[np.int64]) -> Rotation:
        """The rotations of the rows of a pass.

        Args:
            positions: [rows].
            starts: [texts + 1], the first row of each text; if one of its rows is behind the switch of the rotation,
                all of them have the angles that are used there.
        """
        if self._switch:
            behind = np.maximum.reduceat(positions, starts[:-1]) >= self._switch
            if behind.any():
                return self._switched(positions, np.repeat(behind, np.diff(starts)))
        self._short = short = self._reaching(self._short, positions, self._switch)
        return Rotation(short[0].take(positions, 1), short[1].take(positions, 1), self._rounds_once)

    def _switched(self, positions: NDArray[np.int64], behind: NDArray[np.bool_]) -> Rotation:
        """The rotations where the rows `behind`, bool [rows], have the angles used behind the switch."""
        before = np.where(behind, 0, positions)
        self._short = short = self._reaching(self._short, before, self._switch)
        self._long = long = self._reaching(self._long or self._computed(self._switch + 1), positions)
        cos, sin = (
            np.where(behind[:, None], long[which].take(positions, 1), short[which].take(before, 1)) for which in (0, 1)
        )
        return Rotation(cos, sin, self._rounds_once)

    def _reaching(self, table: Table, positions: NDArray[np.int64], most: int = 0) -> Table:
        """`table`, or a longer one that has all of `positions`, of at most `most` positions (0: any number)."""
        needed = int(positions.max()) + 1
        if table[0].shape[1] >= needed:
            return table
        longer = 1 << (needed - 1).bit_length()
        return self._computed(min(longer, most or longer))

    @torch.inference_mode()
    def _computed(self, count: int) -> Table:
        """Cosines and sines of the first `count` positions, as the module makes them for a text that long."""
        like, positions = torch.empty(0, dtype=self._dtype), torch.arange(count)[None]
        pairs = [
            self._module(like, positions) if kind is None else self._module(like, positions, kind)
            for kind in self._kinds
        ]
        cos, sin = (torch.cat([pair[which].float() for pair in pairs]).numpy() for which in (0, 1))
        return cos, sin
