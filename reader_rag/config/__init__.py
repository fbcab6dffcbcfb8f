"""Settings: each defined once, with its type, range, default and meaning."""

from __future__ import annotations

from typing import Any

from reader_rag.config.grammar import Grammar
from reader_rag.config.settings import (
    BatchConfig,
    DatastoreConfig,
    DraftConfig,
    Exactness,
    Forward,
    SamplingParams,
    checked_tenant,
)

__all__ = [
    "BatchConfig",
    "DraftConfig",
    "Exactness",
    "Forward",
    "SamplingParams",
    "Grammar",
    "DatastoreConfig",
    "checked_tenant",
]


def __getattr__(name: str) -> Any:
    from reader_rag.util.moved import new_name

    return globals()[new_name(__name__, globals(), name)]
