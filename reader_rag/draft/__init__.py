"""Drafts made by searching text. numpy and numba only: no torch, no LlamaIndex."""

from reader_rag.draft.builder import TreeBuilder
from reader_rag.draft.calibration import Calibration, Scoring
from reader_rag.draft.context import ContextIndex, Place
from reader_rag.draft.successors import SuccessorTable
from reader_rag.draft.tree import SOURCES, DraftTree

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
