"""Settings: each defined once, with its type, range, default and documentation."""

from __future__ import annotations

from typing import Any

from reader_rag.config.batch import BatchConfig
from reader_rag.config.datastore import DatastoreConfig
from reader_rag.config.draft import DraftConfig
from reader_rag.config.engine import CudaGraphs, EngineConfig, Exactness, Forward, LoadConfig, ProfileMode, Quantization
from reader_rag.config.grammar import Grammar
from reader_rag.config.reading import ReadLimits
from reader_rag.config.sampling import SamplingParams
from reader_rag.config.server import ServerConfig
from reader_rag.config.setting import Setting, Settings, settings_of, unknown_argument
from reader_rag.config.tenant import checked_tenant
from reader_rag.config.tools import ToolConfig

__all__ = [
    "BatchConfig",
    "CudaGraphs",
    "DatastoreConfig",
    "DraftConfig",
    "EngineConfig",
    "Exactness",
    "Forward",
    "Grammar",
    "LoadConfig",
    "ProfileMode",
    "Quantization",
    "ReadLimits",
    "SamplingParams",
    "ServerConfig",
    "Setting",
    "Settings",
    "ToolConfig",
    "checked_tenant",
    "settings_of",
    "unknown_argument",
]


def __getattr__(name: str) -> Any:
    from reader_rag.util.moved import new_name

    return globals()[new_name(__name__, globals(), name)]
