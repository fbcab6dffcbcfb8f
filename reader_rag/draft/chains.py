"""ChainDrafter: drafts one chain for each row of a batch, for engines that verify chains and no trees."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reader_rag.datastore import Searcher
from reader_rag.datastore.kernels.search import STATE_ROWS
from reader_rag.draft.calibration import Calibration, Scoring, acceptance_ratio
from reader_rag.draft.kernels import chains as kernels
from reader_rag.draft.kernels.pool import share_out
from reader_rag.draft.kernels.workspace import Workspace, new_workspace
from reader_rag.draft.row_states import RowStates
from reader_rag.draft.step_table import StepTable
from reader_rag.draft.successor_table import SuccessorTable

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_FLOOR = 0.005
"""Least probability of a chain: what is rarer is not worth a position on any machine."""
_LEAST_GAIN = 0.02
"""By how much more tokens per second must be expected from drafts than without: both probabilities and costs are
estimates, and what seems the best of many choices is likelier too good than too bad."""
_ROWS_BY_THREAD = 64
"""Rows below which another thread takes longer to wake than to draft: a row takes a few microseconds."""


@dataclass(frozen=True)
class DatastoreSearch:
    """A datastore that chains are drafted from, and how it is searched.

    Attributes:
        searcher: The namespaces that are searched.
        max_matches: Most matches of one draft.
        min_match: Least match length, in tokens.
    """

    searcher: Searcher
    max_matches: int = 8
    min_match: int = 4


class _Candidates:
    """What the datastore holds behind the ends of the sequences, row by row."""

    def __init__(self, search: DatastoreSearch, rows: int, longest: int) -> None:
        self._searcher, self._min_match, self._longest = search.searcher, search.min_match, longest
        self._origins = np.zeros((2, search.max_matches), np.int64)
        self._state = np.zeros((STATE_ROWS, 8), np.int64)
        self.tokens = np.full((rows, search.max_matches * (longest + 1)), -1, np.int32)
        self.matches = np.zeros((rows, 2, search.max_matches), np.int32)
        self.counts = np.zeros(rows, np.int64)

    def look_up(self, found: Int64, states: Int64) -> None:
        snapshot = self._searcher.snapshot()
        if self._state.shape[1] < len(snapshot):
            self._state = np.zeros((STATE_ROWS, 2 * len(snapshot)), np.int64)
        kernels.look_up(
            found,
            states,
            snapshot.table,
            self._min_match,
            self._longest,
            self._state,
            self._origins,
            (self.tokens, self.matches, self.counts),
        )


class ChainDrafter:
    """Drafts one chain for each row of a batch, and decides how many tokens of each are verified.

    Each row's chain follows the most probable token from position to position. The tokens of all chains are one pool,
    the most probable first; as many of these are verified as maximise the expected tokens per second by the step table,
    and none unless that is two percent more than without drafts.

    Nothing depends on time or chance: processes that receive the same calls draft the same. A request's chain does not
    depend on what else is in the batch, and nothing is learned from one request for another (corrections are the
    shipped ones), unless `max_ended_tokens` is set. The acceptance ratio of a request's own drafts decides how much of
    them is verified.

    Args:
        rows: Most rows of a batch.
        longest: Most tokens of a chain.
        costs: Seconds of steps.
        max_positions: Most positions of a step, drafted or not.
        max_tokens: Most tokens of a request that are indexed; of a longer one the last, at least half as many.
        max_ended_tokens: Tokens of ended requests' outputs that later requests are drafted from, too; 0: none.
        max_occurrences: Most matches followed at once, in the request's own tokens and in ended outputs each.
        search: A datastore to search; None: there is none.
        prior: int32 [tokens, 8], by token id its likely next tokens (`Profile.tokens`); None: chains are copied only.
        threads: Most threads that draft; None: as many as there are cores.
    """

    def __init__(
        self,
        rows: int,
        longest: int,
        costs: StepTable,
        *,
        max_positions: int = 1 << 20,
        max_tokens: int = 65_536,
        max_ended_tokens: int = 0,
        max_occurrences: int = 256,
        search: DatastoreSearch | None = None,
        prior: NDArray[np.int32] | None = None,
        threads: int | None = None,
    ) -> None:
        self.rows = RowStates(
            rows, longest, max_tokens=max_tokens, max_occurrences=max_occurrences, max_ended_tokens=max_ended_tokens
        )
        self._longest, self._costs, self._max_positions = longest, costs, max_positions
        self._times: dict[int, Float64] = {}
        held = self._datastore = None if search is None else _Candidates(search, rows, longest)
        self._candidates = (
            (np.full((rows, 1), -1, np.int32), np.zeros((rows, 2, 1), np.int32), np.zeros(rows, np.int64))
            if held is None
            else (held.tokens, held.matches, held.counts)
        )
        table = SuccessorTable(0, prior)
        counts = Calibration(learns=False).counts
        self._model = (table.keys, table.entries, table.prior, Scoring().array, counts), _FLOOR
        wanted = min(threads or os.cpu_count() or 1, -(-rows // _ROWS_BY_THREAD))
        matches = 2 * max_occurrences + self._candidates[1].shape[2]
        self._workspaces = [new_workspace(matches) for _ in range(wanted)]
        self._pool = ThreadPoolExecutor(wanted - 1, "reader-rag-draft") if wanted > 1 else None
        self._paths = np.zeros((rows, longest))
        self._drafted = np.zeros(rows, np.int64)
        self._lengths = np.zeros(rows, np.int64)

    def draft(
        self, tokens: NDArray[np.int32], rows: Int64, lengths: Int64, emitted: Int64, limits: Int64
    ) -> tuple[NDArray[np.int32], Int64]:
        """Draft what may follow each row's sequence.

        Args:
            tokens: int32 [all rows, >= any length], the tokens of each row.
            rows: int64 [n], the rows to draft for, each once.
            lengths: int64 [n], tokens of each, at least 1.
            emitted: int64 [n], how many of them the last step emitted.
            limits: int64 [n], most tokens to draft for each.

        Returns:
            int32 [n, longest], chains; and int64 [n], how many tokens of each to verify. Both are valid until the next
            call.
        """
        count = len(rows)
        found = self.rows.update(tokens, rows, lengths, emitted)
        if self._datastore is not None:
            self._datastore.look_up(found, self.rows.states)
        self._grow(found, np.minimum(limits, self._longest))
        chosen = self._lengths[:count]
        ratios = acceptance_ratio(self.rows.recent[found])
        share_out(self._paths[:count], self._drafted[:count], ratios, self._times_of(count), _LEAST_GAIN, chosen)
        return self.rows.chains[found], chosen

    def forget(self) -> None:
        """Drop all sequences."""
        self.rows.clear()

    def _grow(self, found: Int64, limits: Int64) -> None:
        """Draft all chains, each thread its part of them."""
        count = len(found)
        parts = min(len(self._workspaces), max(count // _ROWS_BY_THREAD, 1))
        bounds = [count * part // parts for part in range(parts + 1)]
        pieces = list(zip(bounds, bounds[1:], self._workspaces, strict=False))
        waiting = (
            [self._pool.submit(self._grow_some, found, limits, *piece) for piece in pieces[1:]] if self._pool else []
        )
        self._grow_some(found, limits, *pieces[0])
        for future in waiting:
            future.result()

    def _grow_some(self, found: Int64, limits: Int64, start: int, stop: int, workspace: Workspace) -> None:
        tokens, matches, counts = self._candidates
        kernels.draft(
            found[start:stop],
            limits[start:stop],
            self.rows.arrays,
            (self.rows.ended.tokens, self.rows.ended.size),
            (tokens[start:stop], matches[start:stop], counts[start:stop]),
            self._model,
            tuple(workspace),
            (self._paths[start:stop], self._drafted[start:stop]),
        )

    def _times_of(self, rows: int) -> Float64:
        """Seconds of steps over so many rows, by positions."""
        times = self._times.get(rows)
        if times is None:
            most = max(min(rows * (self._longest + 1), self._max_positions), rows)
            self._times[rows] = times = self._costs.times(rows, most)
        return times


def as_lists(chains: NDArray[np.int32], lengths: Int64) -> list[list[int]]:
    """The tokens to verify of each chain.

    Args:
        chains: int32 [n, longest].
        lengths: int64 [n], tokens to verify of each.
    """
    return [chain[:length] for chain, length in zip(chains.tolist(), lengths.tolist(), strict=True)]
