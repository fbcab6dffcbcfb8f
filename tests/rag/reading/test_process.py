"""Parsing in a process of its own: what it reads, its limits, and that it is ended."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from reader_rag.config import ReadLimits
from reader_rag.rag.reading.process import ReadingProcess
from reader_rag.rag.reading.section import Section
from reader_rag.rag.reading.text import UnusableFileError
from reader_rag.rag.reading.worker import check_archive

MIB = 1 << 20


def archive(*sizes: int, declared: int | None = None) -> bytes:
    """A zip archive of zeros; `declared` is written as the size of each part in its directory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for number, size in enumerate(sizes):
            file.writestr(f"part{number}.xml", bytes(size))
            if declared is not None:
                file.filelist[-1].file_size = declared
    return buffer.getvalue()


def test_one_process_reads_many_files() -> None:
    with ReadingProcess() as reading:
        assert reading.read(b"<p>one", ".html") == [Section("one")]
        first = reading._process
        assert reading.read("<p>zwei \ud800".encode("utf-8", "replace"), ".htm") == [Section("zwei ?")]
        assert reading._process is first
    assert first is not None
    assert first.returncode is not None


def test_a_file_that_takes_too_long_ends_its_process_only() -> None:
    with ReadingProcess(ReadLimits(read_seconds=1e-9)) as reading:
        reading.read(b"<p>one", ".html")  # the process starts, for which there is time
        process = reading._process
        assert process is not None
        psutil.Process(process.pid).suspend()
        with pytest.raises(UnusableFileError, match="takes longer than 1e-09 s to read"):
            reading.read(b"<p>two", ".html")
        assert process.returncode is not None
        assert reading.read(b"<p>three", ".html") == [Section("three")]


def test_a_process_that_ended_between_files_is_replaced() -> None:
    with ReadingProcess() as reading:
        reading.read(b"<p>one", ".html")
        process = reading._process
        assert process is not None
        process.kill()
        assert reading.read(b"<p>two", ".html") == [Section("two")]


@pytest.mark.parametrize(
    ("code", "reason"),
    [("sys.exit(3)", "exit status 3"), ("os.kill(os.getpid(), 9)", "signal 9"), ("print('{}')", "exit status 0")],
)
def test_a_parser_that_crashes_is_reported(monkeypatch: pytest.MonkeyPatch, code: str, reason: str) -> None:
    def crashing() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"import os, sys; {code}"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr("reader_rag.rag.reading.process._started", crashing)
    with ReadingProcess() as reading, pytest.raises(UnusableFileError, match=f"its reader crashed .{reason}"):
        reading.read(b"<p>one", ".html")


def test_a_file_that_takes_too_much_memory_is_reported() -> None:
    pytest.importorskip("resource", reason="the memory of a process cannot be bounded here")
    page = b"<p>" + b"x" * (96 * MIB)
    with ReadingProcess(ReadLimits(memory_bytes=64 * MIB)) as reading:
        with pytest.raises(UnusableFileError, match="takes more than 64 MiB of memory to read"):
            reading.read(page, ".html")
        assert reading.read(b"<p>small", ".html") == [Section("small")]


def test_the_text_of_a_file_is_bounded() -> None:
    with (
        ReadingProcess(ReadLimits(unpacked_bytes=MIB)) as reading,
        pytest.raises(UnusableFileError, match="holds more than 1 MiB of text; split it"),
    ):
        reading.read(b"<p>" + b"x" * (MIB + 1), ".html")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (archive(12 * MIB), r"unpacks to \d+ times its size, more than 200"),
        (archive(*[2 * MIB] * 6), r"unpacks to \d+ times its size"),
        (archive(1, declared=300 * MIB), "unpacks to 300 MiB, more than 256 MiB"),
        (archive(*[0] * 20_001), "an archive of 20001 parts, more than 20000"),
    ],
)
def test_archives_are_checked_before_they_are_unpacked(data: bytes, reason: str) -> None:
    with pytest.raises(UnusableFileError, match=reason):
        check_archive(data, 256 * MIB, 200.0)


def test_usual_archives_and_other_files_pass_the_check() -> None:
    check_archive(archive(9 * MIB), 256 * MIB, 200.0)  # small ones may have any ratio
    check_archive(b"%PDF-1.4", 256 * MIB, 200.0)
    check_archive(b"PK\x03\x04 but nothing else", 256 * MIB, 200.0)


def test_a_bomb_of_an_office_format_is_refused() -> None:
    pytest.importorskip("docx", reason="needs the extra 'files'")
    with ReadingProcess() as reading, pytest.raises(UnusableFileError, match=r"unpacks to \d+ times its size"):
        reading.read(archive(40 * MIB), ".docx")


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with ReadingProcess() as reading:
        assert reading.read(b"<p>one", ".html") == [Section("one")]
