"""ChainDrafter: chains for all rows of a batch at once, as long as they pay."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore import View
from reader_rag.datastore.kernels import STATE_ROWS
from reader_rag.draft.calibration import Calibration, Scoring
from reader_rag.draft.kernels import chains as kernels
from reader_rag.draft.kernels import tree as tree_kernels
from reader_rag.draft.kernels.context import EMPTY
from reader_rag.draft.kernels.pool import share_out
from reader_rag.draft.kernels.successors import KEPT
from reader_rag.draft.row_states import RowStates
from reader_rag.draft.step_table import StepTable
from reader_rag.draft.successor_table import SuccessorTable

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_FLOOR = 0.005
"""Least probability of a chain: what is rarer is not worth a position on any machine."""
_LUCK = 2.0
"""Hits that a text is given in advance when its luck is judged; see `TreeBuilder`."""
_LEAST_GAIN = 0.02
"""By how much more tokens per second must be expected from drafts than without: both probabilities and costs are
estimates, and what seems the best of many choices is likelier too good than too bad."""
_ROWS_BY_THREAD = 64
"""Rows below which another thread takes longer to wake than to draft: a row takes a few microseconds."""


@dataclass(frozen=True)
class StoredTexts:
    """A datastore that is searched.

    Attributes:
        view: What is searched in it.
        most: Most places of one draft.
        least: Tokens that must agree before a place.
    """

    view: View
    most: int = 8
    least: int = 4


class _Scratch:
    """The memory that one thread drafts in."""

    def __init__(self, places: int) -> None:
        width = 1 << max(2 * places, places + KEPT).bit_length()
        self.work = np.full((tree_kernels.WORK_ROWS, width + tree_kernels.PADDING), EMPTY, np.int32)
        self.mass = np.zeros((tree_kernels.MASS_ROWS, width + tree_kernels.PADDING))


class _Search:
    """What the datastore holds behind the ends of the texts, row by row."""

    def __init__(self, texts: StoredTexts, rows: int, reach: int) -> None:
        self._view, self._least, self._reach = texts.view, texts.least, reach
        self._separator = texts.view.separator
        self._origins = np.zeros((2, texts.most), np.int64)
        self._state = np.zeros((STATE_ROWS, 8), np.int64)
        self.tokens = np.full((rows, texts.most * (reach + 1)), -1, np.int32)
        self.places = np.zeros((rows, 2, texts.most), np.int32)
        self.found = np.zeros(rows, np.int64)

    def look_up(self, found: Int64, states: Int64) -> None:
        table = self._view.table()
        if self._state.shape[1] < table.count:
            self._state = np.zeros((STATE_ROWS, 2 * table.count), np.int64)
        kernels.look_up(
            found,
            states,
            table.rows,
            table.count,
            table.like,
            self._least,
            self._reach,
            self._separator,
            self._state,
            self._origins,
            self.tokens,
            self.places,
            self.found,
        )


class ChainDrafter:
    """Drafts one chain for each row of a batch, and decides how much of each is verified.

    Each row's chain follows the most probable token from place to place. The tokens of all chains are one pool, the
    most probable first; of these as many are verified as make the tokens expected per second most, by the step table,
    and none unless that is two percent more than without.

    Nothing depends on time or chance: processes that are given the same calls draft the same. Nothing is learned from
    one text for another (corrections are the shipped ones), unless `max_beside` asks for it: a text's chain is the same
    whatever else is in the batch. How its own drafts fare is learned, and tells how much of it is verified.

    Args:
        rows: Most rows of a batch.
        longest: Most tokens of a chain.
        costs: What steps take.
        max_positions: Most positions of a step, drafted or not.
        max_tokens: See `RowStates`.
        max_beside: See `RowStates`.
        stored: A datastore to search; None: there is none.
        prior: int32 [tokens, 8], see `SuccessorTable`; None: chains are copied only.
        threads: Most threads that draft.
    """

    def __init__(
        self,
        rows: int,
        longest: int,
        costs: StepTable,
        *,
        max_positions: int = 1 << 20,
        max_tokens: int = 65_536,
        max_beside: int = 0,
        max_occurrences: int = 256,
        stored: StoredTexts | None = None,
        prior: NDArray[np.int32] | None = None,
        threads: int | None = None,
    ) -> None:
        self.rows = RowStates(
            rows, longest, max_tokens=max_tokens, max_occurrences=max_occurrences, max_beside=max_beside
        )
        self._longest, self._costs, self._max_positions = longest, costs, max_positions
        self._times: dict[int, Float64] = {}
        self._search = _Search(stored, rows, longest) if stored is not None else None
        most = stored.most if stored is not None else 1
        nothing = np.full((rows, 1), -1, np.int32), np.zeros((rows, 2, 1), np.int32), np.zeros(rows, np.int64)
        search = self._search
        self._stored = nothing if search is None else (search.tokens, search.places, search.found)
        table = SuccessorTable(0, prior)
        counts = Calibration(learns=False).counts
        self._fixed = (table.keys, table.entries, table.prior, Scoring().array, counts, _FLOOR)
        wanted = min(threads or os.cpu_count() or 1, -(-rows // _ROWS_BY_THREAD))
        self._scratch = [_Scratch(2 * max_occurrences + most) for _ in range(wanted)]
        self._pool = ThreadPoolExecutor(wanted - 1, "reader-rag-draft") if wanted > 1 else None
        self._paths = np.zeros((rows, longest))
        self._drafted = np.zeros(rows, np.int64)
        self._lengths = np.zeros(rows, np.int64)

    def draft(
        self, texts: NDArray[np.int32], rows: Int64, lengths: Int64, came: Int64, limits: Int64
    ) -> tuple[NDArray[np.int32], Int64]:
        """Draft what may follow each row's text.

        Args:
            texts: int32 [all rows, >= any length], the tokens of each row.
            rows: int64 [n], the rows to draft for, each once.
            lengths: int64 [n], tokens of each, at least 1.
            came: int64 [n], how many of them came in this step.
            limits: int64 [n], most tokens to draft for each.

        Returns:
            int32 [n, longest], chains; and int64 [n], how many tokens of each to verify. Both are good until the next
            call.
        """
        count = len(rows)
        found = self.rows.update(texts, rows, lengths, came)
        if self._search is not None:
            self._search.look_up(found, self.rows.states)
        limits = np.minimum(limits, self._longest)
        self._grow(found, limits)
        chosen = self._lengths[:count]
        hits, expected = self.rows.fortunes[found].T
        lucks = np.minimum((hits + _LUCK) / (expected + _LUCK), 1.0)
        share_out(self._paths[:count], self._drafted[:count], lucks, self._times_of(count), _LEAST_GAIN, chosen)
        return self.rows.chains[found], chosen

    def forget(self) -> None:
        """Drop all texts."""
        self.rows.clear()

    def _grow(self, found: Int64, limits: Int64) -> None:
        """Grow all chains, each thread its part of them."""
        count = len(found)
        parts = min(len(self._scratch), max(count // _ROWS_BY_THREAD, 1))
        bounds = [count * part // parts for part in range(parts + 1)]
        pieces = list(zip(bounds, bounds[1:], self._scratch, strict=False))
        waiting = (
            [self._pool.submit(self._grow_some, found, limits, *piece) for piece in pieces[1:]] if self._pool else []
        )
        self._grow_some(found, limits, *pieces[0])
        for future in waiting:
            future.result()

    def _grow_some(self, found: Int64, limits: Int64, start: int, stop: int, scratch: _Scratch) -> None:
        held, beside = self.rows, self.rows.beside
        arguments: Any = (
            found[start:stop],
            limits[start:stop],
            held.states,
            held.matches,
            held.chains,
            held.chances,
            beside.tokens,
            beside.size,
            *(array[start:stop] for array in self._stored),
            *self._fixed,
            scratch.work,
            scratch.mass,
            self._paths[start:stop],
            self._drafted[start:stop],
        )
        kernels.draft(*arguments)

    def _times_of(self, rows: int) -> Float64:
        """What steps over so many rows take, by positions."""
        times = self._times.get(rows)
        if times is None:
            most = max(min(rows * (self._longest + 1), self._max_positions), rows)
            self._times[rows] = times = self._costs.times(rows, most)
        return times


def as_lists(chains: NDArray[np.int32], lengths: Int64) -> list[list[int]]:
    """The tokens to verify of each chain."""
    return [chain[:length] for chain, length in zip(chains.tolist(), lengths.tolist(), strict=True)]
