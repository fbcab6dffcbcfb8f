"""Properties are tested on the same examples every time and without a clock."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("reader_rag", deadline=None, derandomize=True)
settings.load_profile("reader_rag")
