"""What a soak worker wrote down before it was killed, and what may be found on the disk after that."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Contents = dict[str, int]
"""Editions of documents, by name."""

MOST_GROWTH = {"rss_mb": 48.0, "files": 8.0, "threads": 2.0}
"""Most that a process may grow by once it has warmed up: allocators keep freed memory in pieces, and a datastore has an
open file for each segment."""


@dataclass
class Expected:
    """What a tenant's documents may be.

    Attributes:
        committed: After the last change that was finished.
        pending: After the change that was begun and not finished; None: there is none.
    """

    committed: Contents = field(default_factory=dict)
    pending: Contents | None = None

    def allows(self, found: Mapping[str, int]) -> bool:
        """Whether all of a change is there, or nothing of it."""
        return found == self.committed or (self.pending is not None and found == self.pending)


class Journal:
    """A file with a line before each change and one after it, each flushed to disk.

    Args:
        path: The file; it is read if it exists.

    Attributes:
        expected: What is expected, by kind and tenant: "texts/ann".
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.expected: dict[str, Expected] = {}
        lines = path.read_text().split("\n") if path.exists() else []
        for line in lines[:-1]:  # what follows the last line feed was being written
            entry = json.loads(line)
            self._apply(entry["what"], entry.get("contents"))

    def begin(self, what: str, contents: Contents) -> None:
        """Write down a change before it is made.

        Args:
            what: Kind and tenant.
            contents: The documents after it.
        """
        self._write({"what": what, "contents": contents})
        self._apply(what, contents)

    def done(self, what: str) -> None:
        """Write down that the change of `what` was finished."""
        self._write({"what": what})
        self._apply(what, None)

    def settle(self, what: str, found: Contents) -> None:
        """Write down what was found after a restart."""
        self.begin(what, found)
        self.done(what)

    def _apply(self, what: str, contents: Contents | None) -> None:
        expected = self.expected.setdefault(what, Expected())
        if contents is not None:
            expected.pending = contents
        elif expected.pending is not None:
            expected.committed, expected.pending = expected.pending, None

    def _write(self, entry: Mapping[str, object]) -> None:
        if self._path.exists():
            data = self._path.read_bytes()
            if not data.endswith(b"\n"):
                os.truncate(self._path, data.rfind(b"\n") + 1)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def growth(samples: Sequence[float], most: float) -> tuple[float, float, bool]:
    """Compare the third quarter of a process' samples, after it has warmed up, with the last.

    Args:
        samples: One figure at equal times.
        most: How much larger the last quarter's median may be.

    Returns:
        The medians of both quarters, and whether the figure stayed flat.
    """
    quarter = max(len(samples) // 4, 1)
    before, after = (
        statistics.median(samples[-2 * quarter : -quarter] or samples),
        statistics.median(samples[-quarter:]),
    )
    return before, after, after <= before + most
