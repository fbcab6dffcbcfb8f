"""Drafts made by searching text. numpy and numba only: no torch, no LlamaIndex."""

from reader_rag.draft.calibration import Calibration, Scoring
from reader_rag.draft.context_index import ContextIndex, Place
from reader_rag.draft.successor_table import SuccessorTable
from reader_rag.draft.tree import SOURCES, DraftTree
from reader_rag.draft.tree_builder import TreeBuilder

__all__ = [
    "SOURCES",
    "Calibration",
    "ContextIndex",
    "DraftTree",
    "Place",
    "Scoring",
    "SuccessorTable",
    "TreeBuilder",
]
