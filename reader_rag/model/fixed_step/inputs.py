"""The inputs of a fixed step: integers of one buffer that never moves, filled by one copy to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.prompt_successors import ASKED
from reader_rag.draft.tree import DraftTree
from reader_rag.model.fixed_step.shapes import MOST_POSITIONS, MOST_ROWS, StepShape
from reader_rag.model.fixed_step.transfers import HostBuffer, Transfers
from reader_rag.sampling.noise import Draw

_FIELDS = 6
"""Integers of a position."""
_OF_ROW = 3
"""Integers of a sequence: its length, its seed, its temperature."""
_BITS = 64
"""Positions that one integer says of whether they are seen."""


class StepInputs(NamedTuple):
    """Views of the buffer on the device, int64 [rows, width] each but the first two.

    Attributes:
        lengths: [rows, 1], committed positions of each sequence.
        draws: [2, rows], `Draw.words` of each sequence; zeros: it takes the most probable tokens.
        tokens: Token ids.
        positions: Positions in the text: committed ones plus depth in the tree.
        visible: Bit n: the position sees the n-th one of its sequence in this pass.
        columns: Where keys and values are written.
        sources: Columns of the last pass that are committed.
        targets: Where they go; both the scratch column where nothing moves.
    """

    lengths: torch.Tensor
    draws: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    columns: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


class RowInput(NamedTuple):
    """One sequence's part of a step.

    Attributes:
        root: Its last accepted token.
        tree: Its draft.
        length: Committed positions.
        moves: Columns that the last pass's commit moves, (from, to).
        draw: How its tokens are drawn; None: the most probable ones are taken.
    """

    root: int
    tree: DraftTree
    length: int
    moves: Sequence[tuple[int, int]]
    draw: Draw | None = None


class InputBuffer:
    """The buffer, on the host and on the device.

    Args:
        device: Of the model.

    Attributes:
        device: int64, on the device; it stays where it is.
    """

    def __init__(self, device: torch.device) -> None:
        size = MOST_POSITIONS * _FIELDS + MOST_ROWS * (_OF_ROW + ASKED)
        self._host = HostBuffer(size, device)
        self.device = torch.zeros(size, dtype=torch.int64, device=device)

    def fill(
        self,
        shape: StepShape,
        rows: Mapping[int, RowInput],
        scratch: int,
        transfers: Transfers,
        asked: Sequence[NDArray[np.integer]] = (),
    ) -> list[torch.Tensor]:
        """Write the inputs of a step and copy them to the device, at once.

        Args:
            shape: Of the step.
            rows: By row of the cache, all of them among the shape's rows.
            scratch: The scratch column.
            transfers: Copies.
            asked: Positions of prompts, at most `ASKED` in each array.

        Returns:
            `asked` on the device, int64.
        """
        size = shape.rows * (_OF_ROW + _FIELDS * shape.width)
        values, of_rows = self._host.values[:size], shape.rows * _OF_ROW
        lengths, seeds, temperatures = values[:of_rows].reshape(_OF_ROW, shape.rows)
        tokens, positions, visible, columns, sources, targets = values[of_rows:].reshape(
            _FIELDS, shape.rows, shape.width
        )
        # Rows that take no part compute token 0 behind one masked position, and write to the scratch column.
        lengths[:] = shape.past + 1
        seeds[:] = temperatures[:] = 0
        tokens[:] = positions[:] = visible[:] = 0
        columns[:] = sources[:] = targets[:] = scratch
        for row, part in rows.items():
            at = row - shape.first
            lengths[at] = part.length
            if part.draw is not None:
                seeds[at], temperatures[at] = part.draw.words
            tokens[at], depths, visible[at] = padded_tree(part.root, part.tree, shape.width)
            positions[at] = depths + part.length
            columns[at] = np.arange(part.length, part.length + shape.width)
            for n, (source, target) in enumerate(part.moves):
                sources[at, n], targets[at, n] = source, target
        views = []
        for wanted in asked:
            self._host.values[size : size + len(wanted)] = wanted
            views.append(self.device[size : size + len(wanted)])
            size += len(wanted)
        transfers.to_device(self._host, self.device[:size])
        return views

    def views(self, shape: StepShape) -> StepInputs:
        """The inputs of a step on the device."""
        values, of_rows = self.device[: shape.rows * (_OF_ROW + _FIELDS * shape.width)], shape.rows * _OF_ROW
        fields = values[of_rows:].view(_FIELDS, shape.rows, shape.width)
        rows = values[:of_rows].view(_OF_ROW, shape.rows)
        return StepInputs(rows[0, :, None], rows[1:], *fields.unbind())


def padded_tree(
    root: int, tree: DraftTree, width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Tokens, depths, and visible positions as bits, [width] each, of a root and a tree.

    A padding position repeats the root's token and sees itself; no other sees it.

    Args:
        root: The last accepted token.
        tree: At most `width - 1` nodes.
        width: At most 64.
    """
    count = len(tree) + 1
    tokens, depths = np.full(width, root, np.int64), np.zeros(width, np.int64)
    tokens[1:count], depths[1:count] = tree.tokens, tree.depths
    seen = np.eye(width, _BITS, dtype=np.bool_)
    seen[:count, :count] = tree.ancestor_mask
    bits: NDArray[np.int64] = np.packbits(seen, axis=1, bitorder="little").view("<i8")[:, 0]
    return tokens, depths, bits
