"""Calls whose results go to another thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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


def call_for(future: Future[ResultT], call: Callable[[], ResultT]) -> None:
    """Run a call on this thread and put its result, or its exception, into a future, unless that was cancelled.

    Args:
        future: What another thread waits for.
        call: The call.
    """
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
