"""A vLLM engine in a process of its own.

vLLM keeps an engine's state in globals of its process, reads its settings when it is imported, and does not free memory
when an engine is deleted, so engines that are compared need a process each. Two engines with the same settings then
differ by two percent in speed (docs/benchmarks).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from reader_rag.bench.vllm.engine import make_engine, require_vllm
from reader_rag.bench.vllm.options import Options
from reader_rag.errors import ReaderError

_T = TypeVar("_T")

_CLOSE_S = 30.0


class Worker:
    """A vLLM engine in a process of its own.

    The constructor starts to load the engine; `wait` returns when it is loaded. Use it in a `with` block.

    Args:
        options: Settings of the engine.
        method: A name of `METHODS`.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """

    def __init__(self, options: Options, method: str) -> None:
        require_vllm()
        self.method = method
        # A new interpreter: vLLM's settings are read when it is imported, and threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options, method), daemon=True)
        with _preloaded():
            self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until the engine is loaded.

        Raises:
            ReaderError: It cannot be loaded.
        """
        self._receive()

    def run(self, work: Callable[..., _T], *args: Any) -> _T:
        """Call a function in the worker process.

        Args:
            work: A function of a module; called with the engine and `args`.
            args: Further arguments, pickled.

        Returns:
            The function's result.

        Raises:
            ReaderError: The function raised it, or the process has ended.
        """
        self._pipe.send((work, args))
        found: _T = self._receive()
        return found

    def begin(self, work: Callable[..., Generator[None, None, _T]], *args: Any) -> _T | None:
        """Call a generator function in the worker process, up to its first `yield`.

        Args:
            work: A generator function of a module; called with the engine and `args`.
            args: Further arguments, pickled.

        Returns:
            The generator's result if it has ended, else None.

        Raises:
            ReaderError: The function raised it, or the process has ended.
        """
        found: _T | None = self.run(_begin, work, *args)
        return found

    def resume(self) -> Any:
        """Run the generator of `begin` up to its next `yield`.

        Returns:
            The generator's result if it has ended, else None.

        Raises:
            ReaderError: The generator raised it, or the process has ended.
        """
        return self.run(_resume)

    def _receive(self) -> Any:
        try:
            good, found = self._pipe.recv()
        except (EOFError, ConnectionResetError) as cause:
            self._process.join(_CLOSE_S)
            raise ReaderError(
                f"the process of vLLM ({self.method}) ended with status {self._process.exitcode}: see its "
                "output; the usual reason is too little memory"
            ) from cause
        if good:
            return found
        raise found

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(_CLOSE_S)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


class _Running:
    """Keeps the generator of `Worker.begin` in the worker process."""

    work: ClassVar[Generator[None, None, Any]]


def _begin(engine: Any, work: Callable[..., Generator[None, None, Any]], *args: Any) -> Any:
    _Running.work = work(engine, *args)
    return _resume(engine)


def _resume(engine: Any) -> Any:
    try:
        next(_Running.work)
    except StopIteration as end:
        return end.value
    return None


@contextmanager
def _preloaded() -> Iterator[None]:
    """Preload Intel's OpenMP, if it came with vLLM for the CPU: vLLM recommends it, and drafts are slow without it."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    before = os.environ.get("LD_PRELOAD")
    if before is None and library.exists():
        os.environ["LD_PRELOAD"] = str(library)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("LD_PRELOAD", None)


def _serve(pipe: Connection, options: Options, method: str) -> None:
    """Answer calls until the other end of the pipe is closed."""
    # A report on standard output must not be mixed with what vLLM and its libraries print.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        engine = make_engine(options, method)
        pipe.send((True, None))
    except ReaderError as error:
        pipe.send((False, error))
        return
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, work(engine, *args)))
        except ReaderError as error:
            pipe.send((False, error))
