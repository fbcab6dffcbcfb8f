"""Runs a call on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


def on_own_thread(call: Callable[[], ResultT]) -> ResultT:
    """Run a call on a new thread, wait until the thread has ended, and return the result.

    Every thread that computes keeps a team of OpenMP threads until it ends, which slows down other computing threads.
    A call that computes only once therefore runs on a thread that ends.

    Args:
        call: The call.

    Returns:
        Its result.

    Raises:
        BaseException: The exception that the call raises.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="reader-rag-once") as pool:
        return pool.submit(call).result()
