"""Processes that are forked after a library has started threads that a fork does not copy.

OpenMP's threads (PyTorch, numba, FAISS, the suffix sorter) exist in the parent only. A child that computes with them
hangs or is killed, without a message. Code that starts them calls `note_threads`; code that uses them calls
`check_not_forked`.
"""

from __future__ import annotations

import os

from reader_rag.errors import ForkError

_started_in: int | None = None


def note_threads() -> None:
    """Record that this process has started OpenMP's threads, or is about to.

    Raises:
        ForkError: This process is a fork of one that had started them.
    """
    global _started_in
    check_not_forked()
    _started_in = os.getpid()


def check_not_forked() -> None:
    """Check that this process is not a fork of one in which OpenMP's threads had started.

    Raises:
        ForkError: It is such a fork.
    """
    if _started_in is not None and _started_in != os.getpid():
        raise ForkError(
            "this process was forked after a model was loaded, and OpenMP's threads do not survive that: load models "
            "and open datastores in each worker (gunicorn without --preload, multiprocessing with 'spawn')"
        )
