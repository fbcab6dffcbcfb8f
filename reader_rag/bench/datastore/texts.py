"""Benchmark texts that every machine has: sources and documentation of installed packages."""

from __future__ import annotations

import hashlib
import os
import random
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_KINDS = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".cpp", ".html", ".js", ".ts"}
_SYSTEM = ("/usr/share", "/usr/include", "/usr/lib")
_LEAST, _MOST = 1_000, 1_000_000
"""Least and greatest size of a file that is used, in bytes; longer files are mostly data tables."""


def text_files() -> list[Path]:
    """Sources and docs of the packages of this Python and of the system, shuffled by a fixed seed.

    Returns:
        Absolute paths, each once.
    """
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"], paths["stdlib"], *site.getsitepackages(), *sys.path[1:], *_SYSTEM]
    found: set[Path] = set()
    for root in dict.fromkeys(Path(root).resolve() for root in folders if root):
        for folder, _, names in os.walk(root):
            found.update(Path(folder, name) for name in names if Path(name).suffix in _KINDS)
    files = sorted(found)
    random.Random(0).shuffle(files)
    return files


def texts() -> Iterator[tuple[str, str]]:
    """(path, text) of each of `text_files` that is UTF-8 of a usable size and not a copy of an earlier one."""
    seen: set[bytes] = set()
    for path in text_files():
        try:
            if not _LEAST <= path.stat().st_size <= _MOST:
                continue
            data = path.read_bytes()
            text = data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield str(path), text
