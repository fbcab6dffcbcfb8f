"""The shapes of fixed steps, and the memory that they take."""

from __future__ import annotations

from typing import NamedTuple

from reader_rag.draft.prompt_successors import ASKED
from reader_rag.kv_cache.fixed_cache import power_of_two

WIDTHS = (1, 4, 8, 16, 32, 64)
"""Positions of a sequence in a pass: the root and the nodes of its draft, padded."""
MOST_ROWS = 32
"""Most sequences of a pass."""
MOST_POSITIONS = 512
"""Most positions of a pass, rows x width: they bound the logits, which are kept as a whole."""
LEAST_SHOWN = 64
"""Least number of columns that a pass attends to; the others are its doubles."""


class StepShape(NamedTuple):
    """All numbers that a pass depends on besides the contents of its buffers.

    Attributes:
        first: The first row of the cache that takes part.
        rows: Rows that take part, a power of two.
        width: Positions of each.
        shown: Columns attended to: a power of two, or `past` and those behind it.
        generation: Of the cache's buffers: a recorded pass refers to their addresses.
        moves: Whether it moves what the last step accepted; behind plain steps and chains nothing is to be moved.
        layers: Layers whose outputs it hands out, as in `LayerStates`.
        draws: Whether it draws tokens for some sequences.
        past: The first columns, which layers without a window attend to without a mask, in a call of their own; 0:
            there is one call, with a mask.
        paths: Whether attention is along paths (`attend_along_paths`).
    """

    first: int
    rows: int
    width: int
    shown: int
    generation: int
    moves: bool = False
    layers: tuple[int, ...] = ()
    draws: bool = False
    past: int = 0
    paths: bool = False

    @property
    def positions(self) -> int:
        """Positions that the pass computes, padding included."""
        return self.rows * self.width


def widest(sequences: int) -> int:
    """Most positions of each of so many sequences in one pass; 0: so many do not share a pass.

    Args:
        sequences: Sequences of the pass.
    """
    if sequences > MOST_ROWS:
        return 0
    return max(width for width in WIDTHS if width * power_of_two(sequences) <= MOST_POSITIONS)


def width_for(positions: int) -> int:
    """The least width of `WIDTHS` that has so many positions, at most the widest.

    Args:
        positions: 1 to 64.
    """
    return next(width for width in WIDTHS if width >= positions)


def shown_for(columns: int) -> int:
    """The columns attended to where so many are written."""
    return max(power_of_two(columns), LEAST_SHOWN)


def step_bytes(vocabulary: int, logits_size: int, ranked: int, hidden: int = 0) -> int:
    """Bytes of the buffers for inputs and outputs of all shapes.

    Args:
        vocabulary: Tokens that the model scores.
        logits_size: Bytes of a score.
        ranked: Tokens of each position that are ranked, and the one chosen.
        hidden: Bytes of the outputs of layers of a position, over all numbers of layers that passes hand out.

    Returns:
        `MOST_POSITIONS` times what a position has: 6 inputs of 8 bytes, scores, ranked tokens of 4 bytes, hidden
        states; and for each of `MOST_ROWS` sequences 8 bytes for its length, its seed, its temperature, and each
        position of its prompt that it asks for.
    """
    return MOST_POSITIONS * (6 * 8 + vocabulary * logits_size + 4 * ranked + hidden) + 8 * MOST_ROWS * (3 + ASKED)
