"""Old names of modules and classes work with a DeprecationWarning."""

from __future__ import annotations

import importlib

import pytest

from reader_rag.datastore import CompactionConfig


def test_old_names_of_classes_are_found_at_the_old_module() -> None:
    with pytest.warns(DeprecationWarning, match="reader_rag.draft.datastore is now reader_rag.datastore"):
        old = importlib.reload(importlib.import_module("reader_rag.draft.datastore"))
    with pytest.warns(DeprecationWarning, match="DatastoreSettings is now CompactionConfig"):
        assert old.DatastoreSettings is CompactionConfig
