"""The threads of numba's parallel loops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import torch

_numba: Any = numba.config
_pool = threading.Lock()
"""Numba's threads serve one parallel loop at a time."""


@contextmanager
def numba_threads() -> Iterator[None]:
    """Around calls of parallel loops: they run on as many threads as PyTorch has, and on those of one caller alone."""
    with _pool:
        threads = torch.get_num_threads()
        numba.set_num_threads(min(threads, _numba.NUMBA_NUM_THREADS))
        if torch.get_num_threads() != threads:  # numba's first threads change PyTorch's: they share OpenMP
            torch.set_num_threads(threads)
        yield
