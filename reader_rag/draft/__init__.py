"""Drafts: what may come next, proposed without a model. numpy and numba only: no torch, no LlamaIndex."""

from typing import Any

from reader_rag.draft.calibration import Calibration, Scoring
from reader_rag.draft.context_index import ContextIndex, Occurrence
from reader_rag.draft.successor_table import SuccessorTable
from reader_rag.draft.tree import SOURCES, DraftTree
from reader_rag.draft.tree_builder import TreeBuilder
from reader_rag.util.moved import new_name

__all__ = [
    "SOURCES",
    "Calibration",
    "ContextIndex",
    "DraftTree",
    "Occurrence",
    "Scoring",
    "SuccessorTable",
    "TreeBuilder",
]


def __getattr__(name: str) -> Any:
    return globals()[new_name(__name__, globals(), name)]
