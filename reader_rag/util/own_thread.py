"""Work on a thread that ends with it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

ResultT = TypeVar("ResultT")


def on_own_thread(call: Callable[[], ResultT]) -> ResultT:
    """The result of a call on a thread of its own, which has ended when this returns.

    Every thread that computes keeps a team of OpenMP threads until it ends, which slows the other computing threads
    down: work that is done once leaves none behind here.

    Args:
        call: What to call.

    Raises:
        BaseException: What the call raises.
    """
    results: list[ResultT] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="reader-rag-once")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
