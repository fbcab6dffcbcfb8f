"""Every error is one line that can be printed."""

from __future__ import annotations

import pytest

from reader_rag import errors


@pytest.mark.parametrize("kind", [errors.ReaderError, errors.ConfigError, errors.MissingDependencyError])
def test_messages_are_one_printable_line(kind: type[Exception]) -> None:
    text = str(kind("a\n\tb\x1b[2J \u202ec\x9b \ud800 näive"))
    assert text == "a b\ufffd[2J \ufffdc\ufffd \ufffd näive"
    assert text.isprintable()
