"""Drafts made by searching text. numpy and numba only: no torch, no LlamaIndex."""

from reader_rag.draft.builder import TreeBuilder
from reader_rag.draft.context import ContextIndex, Place
from reader_rag.draft.scoring import CopyWeights
from reader_rag.draft.tree import DraftTree

__all__ = ["ContextIndex", "CopyWeights", "DraftTree", "Place", "TreeBuilder"]
