"""Settings: each defined once, with its type, range, default and meaning."""

from reader_rag.config.grammar import Grammar
from reader_rag.config.settings import (
    BatchConfig,
    DraftConfig,
    Exactness,
    Forward,
    GenerationConfig,
    RecallConfig,
    checked_tenant,
)

__all__ = [
    "BatchConfig",
    "DraftConfig",
    "Exactness",
    "Forward",
    "GenerationConfig",
    "Grammar",
    "RecallConfig",
    "checked_tenant",
]
