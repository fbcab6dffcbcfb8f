"""Old names of arguments, attributes and classes work with a DeprecationWarning."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from reader_rag.datastore import CompactionConfig
from reader_rag.util.moved import RenamedAttribute, renamed_arguments


def test_an_old_argument_is_passed_by_its_new_name_with_a_warning() -> None:
    @renamed_arguments(fan="factor")
    def multiply(number: int, *, factor: int = 1) -> int:
        return number * factor

    assert multiply(2, factor=3) == 6
    old: Any = {"fan": 4}
    with pytest.warns(DeprecationWarning, match="fan is now factor; the old name goes in reader_rag 0.3") as caught:
        assert multiply(2, **old) == 8
    assert caught[0].filename == __file__


def test_an_old_attribute_is_the_new_one_with_a_warning() -> None:
    class Counter:
        total = 3
        count = RenamedAttribute("total")

        def double(self) -> int:
            return 2 * self.total

        twice = RenamedAttribute("double")

    with pytest.warns(DeprecationWarning, match="count is now total") as caught:
        assert Counter().count == 3
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="twice is now double"):
        assert Counter().twice() == 6


def test_old_names_of_classes_are_found_at_the_old_module() -> None:
    with pytest.warns(DeprecationWarning, match="reader_rag.draft.datastore is now reader_rag.datastore"):
        old = importlib.reload(importlib.import_module("reader_rag.draft.datastore"))
    with pytest.warns(DeprecationWarning, match="DatastoreSettings is now CompactionConfig"):
        assert old.DatastoreSettings is CompactionConfig
