"""A file is replaced, and a folder made or removed, as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reader_rag.util.files import Files, atomic_path, open_regular, partial_paths, read_regular


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_only_regular_files_are_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "link") == b"content"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"not a regular file|directory"):
            open_regular(path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with atomic_path(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
        assert partial_paths(target) == [partial]
    assert target.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_the_old_file_is_there_and_no_other(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail_half_way() -> None:
        with atomic_path(target) as partial:
            partial.write_text("ne")
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a"

    def fail_half_way() -> None:
        with atomic_path(target) as partial:
            partial.mkdir()
            (partial / "x").write_text("1")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fail_half_way()
    assert names(tmp_path) == []
    with atomic_path(target) as partial:
        (partial / "sub").mkdir(parents=True)
        (partial / "sub" / "x").write_text("1")
    assert names(tmp_path) == ["a"]
    assert (target / "sub" / "x").read_text() == "1"


def test_an_existing_file_can_be_kept(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    for content in ("first", "second"):
        with atomic_path(target, keep_existing=True) as partial:
            partial.write_text(content)
    assert target.read_text() == "first"
    assert names(tmp_path) == ["a.txt"]


def test_without_hard_links_an_existing_file_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.link", refuse)
    target = tmp_path / "a.txt"
    for content in ("first", "second"):
        with atomic_path(target, keep_existing=True) as partial:
            partial.write_text(content)
    assert target.read_text() == "first"
    assert names(tmp_path) == ["a.txt"]


def test_only_the_partial_files_of_a_path_are_listed(tmp_path: Path) -> None:
    for name in (".a.partial-1", ".a.partial-2", ".ab.partial-3", "a"):
        (tmp_path / name).touch()
    assert [path.name for path in sorted(partial_paths(tmp_path / "a"))] == [".a.partial-1", ".a.partial-2"]


def test_a_removed_folder_is_gone_for_its_name_before_its_files_are(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    seen = []
    Files().remove_atomically(tmp_path / "a", lambda: seen.append(names(tmp_path)))
    assert seen == [["removed-a"]]
    assert names(tmp_path) == []


def test_a_rename_is_tried_again_where_a_reader_of_the_file_prevents_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "new", tmp_path / "a.txt"
    source.write_text("new")
    replace, left = Path.replace, [PermissionError, PermissionError]

    def busy(path: Path, to: Path) -> Path:
        if left:
            raise left.pop()
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", busy)
    monkeypatch.setattr("reader_rag.util.files._PAUSES", (0.0, 0.0))
    Files().rename(source, target)
    assert target.read_text() == "new"

    source.write_text("newer")
    left += [PermissionError] * 3
    with pytest.raises(PermissionError):
        Files().rename(source, target)
