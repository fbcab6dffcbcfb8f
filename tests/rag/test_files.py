"""Finding, decoding and parsing files."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from made_files import pdf

from reader_rag.errors import IngestError
from reader_rag.rag.files import UnusableFileError, decode, find_files, parse, printable, read_bytes

Write = Callable[[str, str | bytes], Path]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("näive\n".encode(), "näive\n"),
        ("\ufeffnäive".encode(), "näive"),
        ("näive".encode("utf-16"), "näive"),
        (b"\xfe\xff" + "näive".encode("utf-16-be"), "näive"),
        ("näive".encode("utf-32"), "näive"),
        (b"one\r\ntwo\rthree\n", "one\ntwo\nthree\n"),
        (b"a form\x0cfeed and an \x1b[1mescape", "a form\x0cfeed and an \x1b[1mescape"),
    ],
)
def test_text_is_decoded(data: bytes, text: str) -> None:
    assert decode(data) == text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x7fELF\x02\x01\x01\x00\x00", "binary"),
        (b"mostly text, and then \x00", "binary"),
        (bytes(range(1, 32)), "binary"),
        ("näive".encode("latin-1"), r"not utf-8 text \(byte 1\); convert it to UTF-8"),
        (b"\xff\xfea", "not utf-16.* text"),
    ],
)
def test_content_that_is_not_text_raises_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(UnusableFileError, match=reason):
        decode(data)


def test_empty_missing_and_special_files_raise(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UnusableFileError, match="^empty$"):
        read_bytes(write("blank.txt", " \n\t\n"))
    with pytest.raises(UnusableFileError, match="cannot be read: No such file"):
        read_bytes(tmp_path / "gone.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnusableFileError, match="not a regular file"):
        read_bytes(tmp_path / "pipe")


def test_hidden_files_the_store_and_links_to_folders_are_skipped(write: Write, tmp_path: Path) -> None:
    kept = [write("a.txt", "a"), write("sub/b.md", "b")]
    for name in (".hidden", ".git/config", "store/store.sqlite3"):
        write(name, "x")
    root = tmp_path / "docs"
    (root / "loop").symlink_to(root)
    assert find_files(root, exclude=root / "store").files == kept


def test_a_root_can_be_a_file_or_hidden(write: Write, tmp_path: Path) -> None:
    path = write(".notes/a.txt", "a")
    assert find_files(path, tmp_path).files == [path]
    assert find_files(path.parent, tmp_path / "store").files == [path]


def test_a_root_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IngestError, match="there is no file or folder .*nowhere to read .No such file.*check the path"):
        find_files(tmp_path / "nowhere", tmp_path)
    for name in ("a\0b", "\ud800", "x" * 5000):  # no names of files
        with pytest.raises(IngestError, match="there is no file or folder") as caught:
            find_files(Path(name), tmp_path)
        assert str(caught.value).isprintable()


def test_documents_carry_their_file_and_hide_it_from_the_llm(write: Write) -> None:
    path = write("a.txt", "hello")
    (document,) = parse(path, b"hello")
    assert (document.id_, document.text) == (str(path), "hello")
    assert document.metadata == {"file_path": str(path), "file_name": "a.txt"}
    assert document.get_content("llm") == document.get_content("embed") == "hello"  # type: ignore[arg-type]


def test_pdfs_are_read_page_by_page(write: Write) -> None:
    pytest.importorskip("pypdf", reason="needs the extra 'files'")
    data = pdf("Polar bears are white.")
    path = write("bears.pdf", data)
    (page,) = parse(path, data)
    assert page.text.strip() == "Polar bears are white."
    assert page.id_ == str(path)
    assert page.metadata == {"file_path": str(path), "file_name": "bears.pdf", "page_label": "1"}


def test_a_broken_pdf_is_named(write: Write) -> None:
    pytest.importorskip("pypdf", reason="needs the extra 'files'")
    path = write("broken.pdf", b"%PDF-1.4 and then nonsense")
    with pytest.raises(UnusableFileError, match=r"not a readable \.pdf file: "):
        parse(path, path.read_bytes())


def test_without_the_extra_a_pdf_names_the_command_that_installs_it(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = write("a.pdf", b"%PDF-1.4")
    with pytest.raises(UnusableFileError, match=r"pip install 'reader-rag\[files\]'"):
        parse(path, b"%PDF-1.4")


def make_named(folder: Path, name: bytes, content: bytes = b"text") -> Path:
    """Make a file with any bytes as its name; skips where the file system has names of characters only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
    try:
        path.write_bytes(content)
    except OSError:
        pytest.skip("this file system has no such names")
    return path


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"\xff", b"\xed\xa0\x80.txt", b"\xc0\xaf.md"])
def test_names_that_are_not_valid_utf8_are_reported(write: Write, tmp_path: Path, name: bytes) -> None:
    good = write("good.txt", "good")
    bad = make_named(good.parent, name)
    inside = Path(os.fsdecode(os.fsencode(good.parent) + b"/folder" + name))
    inside.mkdir()
    (inside / "fine.txt").write_text("in a folder that cannot be named")
    found = find_files(good.parent, exclude=None)
    assert found.files == [good]
    reason = "the name is not valid UTF-8; rename it"
    assert found.unlisted == sorted([(bad, reason), (inside, reason)])
    with pytest.raises(IngestError, match="the name is not valid UTF-8") as caught:
        find_files(bad, exclude=None)
    str(caught.value).encode()


def test_paths_are_printed_in_one_line(tmp_path: Path) -> None:
    assert printable(Path("a/caf\udce9\n\x1b[2J.txt")) == r"a/caf\xe9\n\x1b[2J.txt"
    assert printable(Path("näive.txt")) == "näive.txt"


def test_folders_may_be_nested_deeper_than_the_stack(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("deep.txt", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    (path,) = find_files(tmp_path, exclude=None).files
    assert path.name == "deep.txt"
    removed = subprocess.run(["rm", "-rf", str(tmp_path / "d")], timeout=60)  # shutil.rmtree recurses
    assert removed.returncode == 0


def test_links_are_followed_to_files_of_the_root_only(write: Write, tmp_path: Path) -> None:
    inside = write("sub/inside.txt", "inside")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    hidden = write(".hidden/key.txt", "key")
    stored = write("store/store.sqlite3", "vectors")
    root = tmp_path / "docs"
    links = {"in.txt": inside, "out.txt": secret, "key.txt": hidden, "store.txt": stored}
    for name, target in links.items():
        (root / name).symlink_to(target)
    (root / "chain.txt").symlink_to(root / "out.txt")
    (root / "relative.txt").symlink_to("../secret.txt")
    (root / "self.txt").symlink_to("self.txt")
    (root / "etc").symlink_to(tmp_path)
    found = find_files(root, exclude=root / "store")
    assert found.files == [root / "in.txt", root / "self.txt", inside]
    reasons = {path.name: reason.partition(";")[0] for path, reason in found.links}
    outside = f"a link to a file outside of {root}"
    assert reasons == {
        "chain.txt": outside,
        "key.txt": "a link to a hidden file",
        "out.txt": outside,
        "relative.txt": outside,
        "store.txt": "a link to a file of the store",
    }
    assert "follow_links=True" in found.links[0][1]
    followed = find_files(root, exclude=root / "store", follow_links=True)
    assert {path.name for path in followed.files} == {*links, "chain.txt", "relative.txt", "self.txt", "inside.txt"}


def test_special_files_never_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "terminal").symlink_to("/dev/ptmx")
    (tmp_path / "zero").symlink_to("/dev/zero")
    address = f"{tmp_path}/socket"[-100:]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        for name in ("pipe", "terminal", "zero", "socket"):
            with pytest.raises(UnusableFileError, match=r"not a regular file|cannot be read"):
                read_bytes(tmp_path / name)


def test_large_and_endless_files_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnusableFileError, match="larger than 256 MiB; split it"):
        read_bytes(path)
    path.write_bytes(b"x" * 101)
    assert len(read_bytes(path, most_bytes=101)) == 101
    with pytest.raises(UnusableFileError, match="larger"):
        read_bytes(path, most_bytes=100)


def test_html_becomes_text(write: Write) -> None:
    data = b"<html><body><h1>Herons</h1><script>track()</script><p>A heron <b>stands</b> still.</p></body></html>"
    (document,) = parse(write("herons.html", data), data)
    assert document.text == "Herons\n\nA heron stands still."
