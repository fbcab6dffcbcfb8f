"""Texts with lone surrogates."""

from __future__ import annotations

from reader_rag.util.encodable import encodable, is_encodable


def test_lone_surrogates_are_replaced_one_by_one() -> None:
    assert encodable("a\ud800b\udfff") == "a?b?"
    assert encodable("näive \U0001f600") == "näive \U0001f600"
    assert (is_encodable("\udce9.txt"), is_encodable("é.txt")) == (False, True)
