"""Counts how estimates fare on recorded answers, for the priors that the package ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reader_rag.bench.inputs import Trace
from reader_rag.bench.replay import KNOWN_SOURCES, Best, ReplayConfig, replay
from reader_rag.draft import Calibration
from reader_rag.draft import tree_kernels as kernels
from reader_rag.draft.calibration import smoothed
from reader_rag.draft.profile import Profile
from reader_rag.errors import ConfigError

_PASSES = 3
"""What is drafted depends on the corrections, so the counts are taken again with those that they gave."""
_LIGHT = 1e-6
"""Weight of the counts a pass starts with, which only set the corrections."""

Counts = tuple[NDArray[np.float64], NDArray[np.float64]]


def calibrate(traces: Sequence[Trace], best: Best, profile: Profile | None) -> Counts:
    """Count over answers: with all sources and the profile, without the profile, and with copies alone.

    Args:
        traces: Answers to prompts of several kinds.
        best: The target's best next tokens, by trace id.
        profile: What is known of the model beforehand.

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


def save(counts: Counts, path: Path) -> None:
    """Write counts to that very path.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, hits=counts[0], expected=counts[1])
    except OSError as cause:
        raise ConfigError(f"cannot write {path}: {cause.strerror or cause}") from cause
