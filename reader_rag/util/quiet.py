"""Captures what other libraries print and log while they load, so that it does not mix with this package's output."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PACKAGE = "reader_rag"


class _CapturedStream:
    """A standard stream that captures the text of quiet threads and passes on all other text.

    A library that loads may keep a reference to it; it passes everything on once no thread is quiet.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if _captured.capture(text):
            return len(text)
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Captured(logging.Filter):
    """The text that quiet threads have printed or logged; as a filter of logging handlers it captures their records.

    Attributes:
        lock: Protects `texts` and `handlers`.
        texts: Captured text by identifier of the quiet thread.
        handlers: The handlers that this filter is attached to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.texts: dict[int, list[str]] = {}
        self.handlers: list[logging.Handler] = []

    def capture(self, text: str) -> bool:
        """Capture a text if the calling thread is quiet.

        Args:
            text: The text.

        Returns:
            Whether it was captured.
        """
        texts = self.texts.get(threading.get_ident())
        if texts is not None:
            texts.append(text)
        return texts is not None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record may be printed: it is this package's own, or its thread is not quiet."""
        return record.name.partition(".")[0] == _PACKAGE or not self.capture(record.getMessage() + "\n")

    def attach(self) -> None:
        """Replace the standard streams, and filter the handlers of `_default_handlers`."""
        self.handlers = [*_default_handlers()]
        for handler in self.handlers:
            handler.addFilter(self)
        sys.stdout, sys.stderr = _CapturedStream(sys.stdout), _CapturedStream(sys.stderr)

    def detach(self) -> None:
        """Undo `attach`. A standard stream that other code has replaced in the meantime stays."""
        for handler in self.handlers:
            handler.removeFilter(self)
        if isinstance(sys.stdout, _CapturedStream):
            sys.stdout = sys.stdout.stream
        if isinstance(sys.stderr, _CapturedStream):
            sys.stderr = sys.stderr.stream


_captured = _Captured()


def _default_handlers() -> Iterator[logging.Handler]:
    """The handlers that print records although the application has not configured them.

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
    """Capture what libraries print, log or draw in this thread while they are imported or load a model.

    The application's logging is unchanged: records reach the handlers of the root logger. Other threads print as
    before, without the progress bars of `transformers`, which draws them from threads of its own. Nothing is captured
    if the level of the logger `reader_rag` is `DEBUG`. An exception that passes has the captured text as a note.
    """
    thread = threading.get_ident()
    if thread in _captured.texts or logging.getLogger(_PACKAGE).isEnabledFor(logging.DEBUG):
        yield
        return
    with _captured.lock:
        if not _captured.texts:
            _captured.attach()
        texts = _captured.texts[thread] = []
    try:
        with _no_progress_bars():
            yield
    except Exception as error:
        if printed := "".join(texts).strip():
            error.add_note(f"Printed meanwhile:\n{printed}")
        raise
    finally:
        with _captured.lock:
            del _captured.texts[thread]
            if not _captured.texts:
                _captured.detach()


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Turn the progress bars of `transformers` and its hub client off inside."""
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()
