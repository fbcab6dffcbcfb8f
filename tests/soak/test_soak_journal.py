"""The soak's own checks: what is expected after a kill, and what counts as growth."""

from __future__ import annotations

from pathlib import Path

from soak_journal import Journal, growth


def test_after_a_kill_the_change_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin("store/ann", {"a": 1, "b": 1})
    journal.done("store/ann")
    journal.begin("store/ann", {"a": 2, "b": 2})
    with (tmp_path / "journal").open("a") as file:
        file.write('{"what": "store/')  # killed while it wrote
    again = Journal(tmp_path / "journal")
    expected = again.expected["store/ann"]
    assert expected.allows({"a": 1, "b": 1})
    assert expected.allows({"a": 2, "b": 2})
    assert not expected.allows({"a": 2, "b": 1})
    assert not expected.allows({})
    again.settle("store/ann", {"a": 2, "b": 2})
    expected = Journal(tmp_path / "journal").expected["store/ann"]
    assert expected.allows({"a": 2, "b": 2})
    assert not expected.allows({"a": 1, "b": 1})


def test_a_figure_that_grows_after_the_warm_up_is_not_flat() -> None:
    assert growth([10, 20, 25, 30, 30, 30, 32, 32], 2) == (30, 32, True)
    assert growth([10, 20, 25, 30, 30, 30, 33, 33], 2) == (30, 33, False)
    assert growth([7], 0) == (7, 7, True)
