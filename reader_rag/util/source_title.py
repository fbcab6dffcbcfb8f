"""Where a passage is from, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reader_rag.util.one_line import one_line

# Where in a file a passage is: name in the metadata, and the word before it in a title.
_PLACES = {
    "page_label": "page",
    "slide": "slide",
    "sheet": "sheet",
    "rows": "rows",
    "chapter": "chapter",
    "section": "section",
    "cells": "cells",
    "items": "items",
    "lines": "lines",
    "message": "message",
}
_MOST_TITLE = 200  # characters


def source_title(metadata: Mapping[str, Any]) -> str:
    """A passage's source in words, of one line: the file and where in it the passage is, else the metadata.

    Args:
        metadata: The metadata of the passage's node.

    Returns:
        For example "prices.xlsx, sheet Europe, rows 2-9", or "author: Ann, year: 2019" where there is no file; "" for a
        node without metadata.
    """
    path = metadata.get("file_path")
    name = metadata.get("file_name") or (path and re.split(r"[/\\]", str(path))[-1])
    if name:
        places = [f"{word} {metadata[key]}" for key, word in _PLACES.items() if metadata.get(key) not in (None, "")]
        title = ", ".join([str(name), *places])
    else:
        title = ", ".join(f"{key}: {value}" for key, value in metadata.items() if value not in (None, ""))
    title = one_line(title)
    return title if len(title) <= _MOST_TITLE else f"{title[: _MOST_TITLE - 3].rstrip()}..."
