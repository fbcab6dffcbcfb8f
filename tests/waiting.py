"""Waiting in tests, never for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LIMIT_S = 60.0
"""Far beyond what anything that is waited for takes: a limit for what hangs, not a measure of speed."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return as soon as `condition()` is true.

    Args:
        condition: Called again and again.
        what: What is waited for, for the message.

    Raises:
        TimeoutError: It has not become true within `LIMIT_S`.
    """
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {LIMIT_S:.0f} s")
        time.sleep(0.001)


def join(*threads: threading.Thread) -> None:
    """Wait for threads to end.

    Raises:
        TimeoutError: One has not ended within `LIMIT_S`.
    """
    for thread in threads:
        thread.join(LIMIT_S)
        if thread.is_alive():
            raise TimeoutError(f"{thread.name} did not end within {LIMIT_S:.0f} s")
