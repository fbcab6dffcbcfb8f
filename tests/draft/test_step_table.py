"""What steps take, from a file or assumed, between what was measured and beyond it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from reader_rag.draft import step_table
from reader_rag.draft.step_table import StepTable
from reader_rag.errors import ConfigError

# Seconds: one row with 0, 2 or 4 drafted tokens; three rows with as many each.
TABLE = StepTable((1, 3), (0, 2, 4), ((10.0, 12.0, 16.0), (14.0, 26.0, 50.0)), "m", "d", "v")


def test_a_written_table_is_read_again(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "costs.json")
    held = json.loads((tmp_path / "costs.json").read_text())
    assert (held["format"], held["version"]) == ("reader-rag step costs", 1)
    assert held["seconds"] == [[10.0, 12.0, 16.0], [14.0, 26.0, 50.0]]
    assert StepTable.read(tmp_path / "costs.json") == TABLE


def test_a_table_may_say_what_cached_positions_add(tmp_path: Path) -> None:
    table = StepTable((1,), (0, 2), ((1.0, 2.0),), context_seconds=(0.0, 0.5))
    table.write(tmp_path / "costs.json")
    assert StepTable.read(tmp_path / "costs.json") == table
    for wrong in ((0.5,), (0.5, -1.0)):
        with pytest.raises(ConfigError, match="context_seconds"):
            StepTable((1,), (0, 2), ((1.0, 2.0),), context_seconds=wrong)


def test_measured_steps_take_what_was_measured_and_others_lie_between() -> None:
    #                                      drafted: 0     1     2     3     4
    assert TABLE.times(1, 5).tolist() == [10.0, 11.0, 12.0, 14.0, 16.0]
    # Three rows: positions 1 and 2 are no step of theirs; 6 drafted tokens are 2 in each row.
    assert TABLE.times(3, 9).tolist() == [14.0, 14.0, 14.0, 16.0, 18.0, 20.0, 22.0, 24.0, 26.0]


def test_rows_between_measured_ones_take_what_lies_between_at_as_many_drafted_tokens() -> None:
    # One row with 2 drafted tokens takes 12, three rows with 2 in all take 18.
    assert TABLE.times(2, 4).tolist() == [12.0, 12.0, 13.5, 15.0]


def test_beyond_what_was_measured_it_goes_on_as_from_half_of_the_last_on() -> None:
    # Half of the last five positions are more than one and less than three: four more take 6.
    assert TABLE.times(1, 7).tolist()[-2:] == [17.5, 19.0]
    # Four rows lie as far beyond three as three beyond one, by half: plain steps take 10, 14, and so 16.
    assert TABLE.times(4, 4).tolist() == [16.0] * 4


def test_more_positions_never_take_less() -> None:
    noisy = StepTable((1,), (0, 1, 2), ((10.0, 15.0, 12.0),))
    assert noisy.times(1, 4).tolist() == [10.0, 12.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("device", "features", "narrow"),
    [("cpu", {"avx512f"}, 1.03), ("cpu", {"avx2"}, 1.5), ("cpu", set(), 1.5), ("cuda", set(), 1.005)],
)
def test_assumed_steps_take_a_little_more_for_each_position(
    device: str, features: set[str], narrow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_table, "cpu_features", lambda: features)
    assert StepTable.assumed(device).times(1, 2).tolist() == pytest.approx([1.0, narrow])
    # As many positions take as long, whether they are rows or drafted tokens.
    rows, drafted = StepTable.assumed(device).times(8, 8)[-1], StepTable.assumed(device).times(1, 8)[-1]
    assert rows == pytest.approx(drafted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "does not hold step costs of version 1"),
        ({"version": 2}, "does not hold step costs of version 1"),
        ({"rows": [2, 3]}, "rows must rise from 1"),
        ({"rows": [1, 1]}, "rows must rise from 1"),
        ({"rows": [1, "3"]}, "whole numbers are needed"),
        ({"drafted": [1, 2, 4]}, "drafted must rise from 0"),
        ({"drafted": [0], "seconds": [[1.0], [1.0]]}, "at least one other number"),
        ({"seconds": [[1.0, 2.0, 3.0]]}, "2 lines of 3 numbers"),
        ({"seconds": [[1.0, 2.0, 3.0], [1.0, 0.0, 2.0]]}, "numbers above 0"),
        ({"seconds": None}, "measure them again"),
        ({"model": ...}, "measure them again"),
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "costs.json"
    TABLE.write(path)
    held = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if value is not ...}
    path.write_text(json.dumps(held))
    with pytest.raises(ConfigError, match=message) as caught:
        StepTable.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_file_without_an_end_or_a_bottom_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("deep.json", "pipe.json"):
        with pytest.raises(ConfigError, match="cannot read step costs from"):
            StepTable.read(tmp_path / name)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.json.*leave the setting out"):
        StepTable.read(tmp_path / "nowhere.json")
