"""Counts how many drafted tokens of recorded answers are accepted, for the priors of the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay.recall import answers_in_datastore, halves
from reader_rag.bench.replay.replayer import KNOWN_SOURCES, Best, ReplayConfig, replay
from reader_rag.draft import Calibration
from reader_rag.draft.calibration import smoothed
from reader_rag.draft.kernels import cells as kernels
from reader_rag.draft.profile import Profile
from reader_rag.errors import ConfigError

_PASSES = 3
"""Drafts depend on the corrections, so the counts are repeated with the corrections of the pass before."""
_STORED = slice(kernels.COPY_CELLS // kernels.ORIGINS * 3, kernels.COPY_CELLS)
"""Cells of candidates from a datastore."""
_LIGHT = 1e-6
"""Weight of the counts that a pass starts with, which only set the corrections."""

Counts = tuple[NDArray[np.float64], NDArray[np.float64]]


def calibrate(traces: Sequence[Trace], best: Best, profile: Profile | None) -> Counts:
    """Count over answers with all sources and the profile, without the profile, and with copies alone.

    Args:
        traces: Answers to prompts of several kinds.
        best: The target's best next tokens, by trace id.
        profile: The model's profile, or None.

    Returns:
        (hits, expected), float64 [cells] each; `save` writes what `Calibration` loads.
    """
    hits = expected = np.ones(kernels.CELLS)
    for _ in range(_PASSES):
        start_hits, start_expected = smoothed(hits, expected)
        hits, expected = np.zeros(kernels.CELLS), np.zeros(kernels.CELLS)
        for sources, known in ((KNOWN_SOURCES, profile), (KNOWN_SOURCES, None), (("context",), None)):
            calibration = Calibration(_LIGHT * start_hits, _LIGHT * start_expected)
            replay(traces, ReplayConfig(sources=sources), best, known, calibration)
            hits += calibration.counts[kernels.HITS]
            expected += calibration.counts[kernels.EXPECTED]
    return hits, expected


def calibrate_datastore(traces: Sequence[Trace], best: Best, profile: Profile | None, base: Path) -> Counts:
    """Count candidates from a datastore alone: replay each half of the answers with the other half in a datastore.

    Args:
        traces: Answers to prompts of several kinds.
        best: The target's best next tokens, by trace id.
        profile: The model's profile, or None.
        base: A file of `save`; counts of other candidates are taken from it.

    Returns:
        (hits, expected), float64 [cells] each.

    Raises:
        ConfigError: `base` cannot be read or is of another version.
    """
    try:
        with np.load(base, allow_pickle=False) as arrays:
            hits, expected = arrays["hits"], arrays["expected"]
    except Exception as cause:  # a damaged zip file raises a dozen kinds
        raise ConfigError(f"cannot read {base}: {cause}") from cause
    if hits.shape != (kernels.CELLS,) or expected.shape != hits.shape:
        raise ConfigError(f"{base} is of another version: count all sources first (leave out --base)")
    parts = halves(traces)
    for _ in range(_PASSES):
        start_hits, start_expected = smoothed(hits, expected)
        hits[_STORED], expected[_STORED] = 0.0, 0.0
        for known, asked in (parts, parts[::-1]):
            calibration = Calibration(_LIGHT * start_hits, _LIGHT * start_expected)
            with answers_in_datastore(known, asked) as datastore:
                replay(asked, ReplayConfig(), best, profile, calibration, datastore)
            hits[_STORED] += calibration.counts[kernels.HITS, _STORED]
            expected[_STORED] += calibration.counts[kernels.EXPECTED, _STORED]
    return hits, expected


def save(counts: Counts, path: Path) -> None:
    """Write counts to an npz file.

    Args:
        counts: (hits, expected), float64 [cells] each.
        path: The file; its name is not changed.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, hits=counts[0], expected=counts[1])
    except OSError as cause:
        raise ConfigError(f"cannot write {path}: {cause.strerror or cause}") from cause
