"""Keep what other libraries print while they load out of this package's output."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PACKAGE = "reader_rag"


class _HeldStream:
    """A standard stream that keeps what the quiet threads write and passes on everything else.

    A library may store it as its own stream while it loads. It passes everything on as soon as no thread is quiet.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if _held.keep(text):
            return len(text)
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Held(logging.Filter):
    """What the quiet threads have printed or logged so far.

    As a filter of a logging handler it keeps their records, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.texts: dict[int, list[str]] = {}
        """Text by identifier of the quiet thread."""
        self.handlers: list[logging.Handler] = []
        """The handlers that this filter is attached to."""

    def keep(self, text: str) -> bool:
        """Keep `text` if the calling thread is quiet.

        Returns:
            Whether it was kept.
        """
        texts = self.texts.get(threading.get_ident())
        if texts is not None:
            texts.append(text)
        return texts is not None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record may be printed: it is this package's own, or its thread is not quiet."""
        return record.name.partition(".")[0] == _PACKAGE or not self.keep(record.getMessage() + "\n")

    def attach(self) -> None:
        """Replace the standard streams, and filter what is logged without the host's having asked for it."""
        self.handlers = [*_unasked_handlers()]
        for handler in self.handlers:
            handler.addFilter(self)
        sys.stdout, sys.stderr = _HeldStream(sys.stdout), _HeldStream(sys.stderr)

    def detach(self) -> None:
        """Undo `attach`. A stream that somebody else has replaced meanwhile stays."""
        for handler in self.handlers:
            handler.removeFilter(self)
        if isinstance(sys.stdout, _HeldStream):
            sys.stdout = sys.stdout.stream
        if isinstance(sys.stderr, _HeldStream):
            sys.stderr = sys.stderr.stream


_held = _Held()


def _unasked_handlers() -> Iterator[logging.Handler]:
    """The handlers that print records although the host has not set up logging for them.

    These are Python's handler of last resort, and those that a library has attached to its own logger.
    """
    if logging.lastResort is not None:
        yield logging.lastResort
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] != _PACKAGE:
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and handler not in logging.root.handlers:
                    yield handler


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hold back what libraries print, log, warn of or draw in this thread while they are imported or load a model.

    The host's logging is left alone: records reach the handlers of the root logger, and other threads print as before,
    except for the progress bars of `transformers`, which it draws from threads of its own. Nothing is held back where
    the logger `reader_rag` is set to `DEBUG`. An exception passes through with the text that was held back as a note,
    which tracebacks show.
    """
    thread = threading.get_ident()
    if thread in _held.texts or logging.getLogger(_PACKAGE).isEnabledFor(logging.DEBUG):
        yield
        return
    with _held.lock:
        if not _held.texts:
            _held.attach()
        texts = _held.texts[thread] = []
    try:
        with _no_progress_bars():
            yield
    except Exception as error:
        if printed := "".join(texts).strip():
            error.add_note(f"Printed meanwhile:\n{printed}")
        raise
    finally:
        with _held.lock:
            del _held.texts[thread]
            if not _held.texts:
                _held.detach()


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without the progress bars of `transformers` and its hub client."""
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()
