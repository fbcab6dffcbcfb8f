"""vLLM engines side by side: each in a process of its own that sleeps while another works."""

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

from reader_rag.bench.vllm.engine import Options, make_engine, require_vllm
from reader_rag.errors import ReaderError

_T = TypeVar("_T")

_CLOSE_S = 30.0


class Worker:
    """A vLLM engine in a process of its own.

    The engine is made when the worker is; `wait` returns when it is ready. Use it in a `with` block.

    Args:
        options: What the engine runs.
        method: A name of `vllm_engine.METHODS`.

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
        """Until the engine is ready.

        Raises:
            ReaderError: It cannot be made.
        """
        self._answer()

    def run(self, work: Callable[..., _T], *args: Any) -> _T:
        """Do some work with the engine.

        Args:
            work: A function of a module, called with the engine and `args` there.
            args: What can be pickled.

        Raises:
            ReaderError: What the work raised, or the process has ended.
        """
        self._pipe.send((work, args))
        found: _T = self._answer()
        return found

    def begin(self, work: Callable[..., Generator[None, None, _T]], *args: Any) -> _T | None:
        """Begin some work that pauses, for others to have their turn, and wait for its first pause.

        Args:
            work: A generator function of a module, called with the engine and `args` there; it pauses where it yields.
            args: What can be pickled.

        Returns:
            What it returned; None: it pauses.

        Raises:
            ReaderError: As `run`.
        """
        found: _T | None = self.run(_begin, work, *args)
        return found

    def go_on(self) -> Any:
        """Go on with what was begun until its next pause; returns and raises what `begin` does."""
        return self.run(_go_on)

    def _answer(self) -> Any:
        try:
            good, found = self._pipe.recv()
        except (EOFError, ConnectionResetError) as cause:
            self._process.join(_CLOSE_S)
            raise ReaderError(
                f"the process of vLLM ({self.method}) ended with status {self._process.exitcode}: what it printed says "
                "why; too little memory is the usual reason"
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


class _InHand:
    """The work that was begun in this process, a worker's."""

    work: ClassVar[Generator[None, None, Any]]


def _begin(engine: Any, work: Callable[..., Generator[None, None, Any]], *args: Any) -> Any:
    _InHand.work = work(engine, *args)
    return _go_on(engine)


def _go_on(engine: Any) -> Any:
    try:
        next(_InHand.work)
    except StopIteration as end:
        return end.value
    return None


@contextmanager
def _preloaded() -> Iterator[None]:
    """The environment that vLLM asks for on a CPU, where Intel's OpenMP came with it: without it steps with drafts are
    much slower than they need be."""
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
    """Work until the other end is closed."""
    # What vLLM and its libraries print must not get into a report on standard output.
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
