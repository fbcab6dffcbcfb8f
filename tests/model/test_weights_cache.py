"""A model folder is made completely or not at all, and only once, also by several processes and after failures."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import wait_until

from reader_rag.errors import ModelError
from reader_rag.model.weights_cache import cache_folder, install_folder


def _write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.setenv("READER_RAG_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.delenv("READER_RAG_CACHE")
    assert cache_folder().name == "reader-rag"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        _write_model(folder)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        install_folder(tmp_path / "m", fail)
    assert _visible(tmp_path) == []


def test_a_folder_without_weights_is_never_installed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"made without a config\.json or without weights"):
        install_folder(tmp_path / "m", lambda folder: (folder / "config.json").touch())
    assert _visible(tmp_path) == []


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    script = """
        import sys, time
        from pathlib import Path
        from reader_rag.model.weights_cache import install_folder

        def write(folder):
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(b"half")
            print("half", flush=True)
            time.sleep(60)

        install_folder(Path(sys.argv[1]), write)
    """
    target = tmp_path / "m"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    assert len(_visible(tmp_path)) == 1  # the leftover, under a name that is no model's
    assert not target.exists()

    assert install_folder(target, _write_model) == target
    assert _visible(tmp_path) == ["m"]
    assert (target / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_that_lost_its_weights_is_made_anew(tmp_path: Path) -> None:
    target = install_folder(tmp_path / "m", _write_model)
    (target / "model.safetensors").unlink()
    install_folder(target, _write_model)
    assert (target / "model.safetensors").read_bytes() == b"weights"


def test_processes_that_ask_at_once_convert_once(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        from pathlib import Path
        from reader_rag.model.weights_cache import install_folder

        def write(folder):
            with open(sys.argv[2], "a") as log:
                log.write(f"{os.getpid()}\\n")
            time.sleep(0.5)
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(b"weights")

        print(install_folder(Path(sys.argv[1]), write))
    """
    target, log = tmp_path / "models" / "m", tmp_path / "log"
    command = [sys.executable, "-c", textwrap.dedent(script), str(target), str(log)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == [str(target)] * 3
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 1
    assert _visible(target.parent) == ["m"]


def test_who_waits_for_another_is_told_so(tmp_path: Path) -> None:
    said: list[str] = []

    def slow(folder: Path) -> None:
        wait_until(lambda: said, "a word about waiting")
        _write_model(folder)

    def second() -> Path:
        wait_until((tmp_path / ".m.lock").exists, "the lock")
        return install_folder(tmp_path / "m", _write_model, progress=said.append)

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(install_folder, tmp_path / "m", slow), pool.submit(second)]
        assert [result.result(timeout=60) for result in results] == [tmp_path / "m"] * 2
    assert said == ["waiting for another process that is making m"]


# --- disk ---


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("Os { code: 28, No space left on device }")],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def fill(folder: Path) -> None:
        _write_model(folder)
        raise error

    with pytest.raises(ModelError) as caught:
        install_folder(tmp_path / "m", fill)
    assert str(caught.value) == (
        f"no space left on the disk of {tmp_path}: free some, or set READER_RAG_CACHE to a folder on another disk"
    )
    assert _visible(tmp_path) == []


def test_too_little_space_is_refused_before_the_work_begins(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no space left on the disk.*about 1000000000000 MB are needed"):
        install_folder(tmp_path / "m", _write_model, disk_bytes=10**18)
    assert _visible(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot write to the model cache .*: set READER_RAG_CACHE"):
        install_folder(tmp_path / "file" / "models" / "m", _write_model)
