"""Quantised weights are kept between two starts, whole or not at all, and trusted only if they are what was written."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors import safe_open

from reader_rag.model.quantization import cache
from reader_rag.model.quantization.cache import About, Entry, Named, Work, entry_folder, read_or_make

KEY = "0" * 32
ABOUT = About(is_tied=True, source="/models/one")
TENSORS = {
    "a.values": torch.arange(-7, 8, dtype=torch.int8).view(3, 5),
    "a.scales": torch.tensor([0.5, 1.0, 2.0]),
    "b.weight": torch.linspace(-1, 1, 7).to(torch.bfloat16),
    "c": torch.zeros(0),
}


class Model:
    """Something to quantise, that counts how often it is."""

    def __init__(self, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
        self.tensors = tensors
        self.count = 0

    def begin(self) -> Work:
        """Open it."""
        return Work(ABOUT, [(name, tensor.to("meta")) for name, tensor in self.tensors.items()], self._compute)

    def _compute(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.count += 1
        yield from self.tensors.items()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the entry."""
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    return entry_folder(KEY)


def is_right(entry: Entry) -> bool:
    """Whether an entry has what `Model` computes."""
    same = all(
        torch.equal(entry.tensors[name], tensor) and entry.tensors[name].dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )
    return same and entry.about == ABOUT and entry.tensors.keys() == TENSORS.keys()


def leftovers(place: Path) -> list[str]:
    """What lies beside the entry, but for the lock."""
    return sorted(path.name for path in place.parent.iterdir() if path != place and path.suffix != ".lock")


def test_a_second_start_reads_what_the_first_has_computed(place: Path) -> None:
    model = Model()
    assert is_right(read_or_make(KEY, model.begin))
    assert is_right(read_or_make(KEY, model.begin))
    assert model.count == 1
    assert leftovers(place) == []


def test_the_weights_are_a_safetensors_file(place: Path) -> None:
    read_or_make(KEY, Model().begin)
    with safe_open(place / "weights.safetensors", "pt") as file:
        assert set(file.keys()) == set(TENSORS)


def _flip(place: Path) -> None:
    path = place / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _truncate(place: Path) -> None:
    os.truncate(place / "weights.safetensors", 40)


def _remove_weights(place: Path) -> None:
    (place / "weights.safetensors").unlink()


def _remove_about(place: Path) -> None:
    (place / "entry.json").unlink()


def _no_json(place: Path) -> None:
    (place / "entry.json").write_text("{")


def _deep_json(place: Path) -> None:
    (place / "entry.json").write_text("[" * 100_000)


def _endless(place: Path) -> None:
    (place / "entry.json").unlink()
    (place / "entry.json").symlink_to("/dev/zero")


def _endless_weights(place: Path) -> None:
    (place / "weights.safetensors").unlink()
    (place / "weights.safetensors").symlink_to("/dev/zero")


def _other_object(place: Path) -> None:
    (place / "entry.json").write_text("[]")


def _change(place: Path, name: str, value: object) -> None:
    kept = json.loads((place / "entry.json").read_text())
    (place / "entry.json").write_text(json.dumps(kept | {name: value}))


def _other_model(place: Path) -> None:
    _change(place, "fingerprint", "1" * 32)


def _other_version(place: Path) -> None:
    _change(place, "version", 0)


def _empty(place: Path) -> None:
    _remove_about(place)
    _remove_weights(place)


_DEVICES = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        _truncate,
        _remove_weights,
        _remove_about,
        _no_json,
        _deep_json,
        pytest.param(_endless, marks=_DEVICES),
        pytest.param(_endless_weights, marks=_DEVICES),
        _other_object,
        _other_model,
        _other_version,
        _empty,
    ],
)
def test_an_entry_that_is_not_what_was_written_is_made_again(place: Path, damage: object) -> None:
    model = Model()
    read_or_make(KEY, model.begin)
    assert callable(damage)
    damage(place)
    assert is_right(read_or_make(KEY, model.begin))
    assert is_right(read_or_make(KEY, model.begin))
    assert model.count == 2


def test_what_a_killed_process_left_is_removed(place: Path) -> None:
    partial = place.parent / f".{KEY}.partial-1234"
    partial.mkdir(parents=True)
    (partial / "weights.safetensors").write_bytes(b"half")
    assert is_right(read_or_make(KEY, Model().begin))
    assert leftovers(place) == []


def test_entries_of_older_versions_are_removed_when_one_is_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_or_make("1" * 32, Model().begin)
    monkeypatch.setattr(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1)
    read_or_make(KEY, Model().begin)
    assert leftovers(place) == []


def _full(path: Path, shapes: dict[str, torch.Tensor], tensors: Named) -> None:
    path.write_bytes(b"begun")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_logged_and_the_model_loaded_without_keeping(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_write_tensors", _full)
    with caplog.at_level(logging.WARNING):
        assert is_right(read_or_make(KEY, Model().begin))
    assert [record.getMessage() for record in caplog.records] == [
        f"quantised weights are not kept in {place.parent} ([Errno 28] No space left on device): the next start "
        "quantises again"
    ]
    assert leftovers(place) == []
    assert not place.exists()


def test_too_little_space_is_found_out_before_anything_is_computed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed_to = []

    def disk_usage(folder: Path) -> object:
        computed_to.append(model.count)
        return type("Usage", (), {"free": 100})

    monkeypatch.setattr(cache.shutil, "disk_usage", disk_usage)
    model = Model()
    assert is_right(read_or_make(KEY, model.begin))
    assert (computed_to, model.count) == ([0], 1)


def test_a_cache_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    model = Model()
    assert is_right(read_or_make(KEY, model.begin))
    assert model.count == 1


def test_an_error_of_the_computation_leaves_nothing_behind(place: Path) -> None:
    def compute() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a.values", TENSORS["a.values"]
        raise RuntimeError("damaged model")

    model = Model()
    with pytest.raises(RuntimeError, match="damaged model"):
        read_or_make(KEY, lambda: model.begin()._replace(compute=compute))
    assert leftovers(place) == []
    assert not place.exists()


def test_a_second_process_waits_for_the_first_and_reads_its_entry(place: Path) -> None:
    place.parent.mkdir(parents=True)
    lines: list[str] = []
    waits, model, results = threading.Event(), Model(), []

    def progress(line: str) -> None:
        lines.append(line)
        waits.set()

    with FileLock(place.parent / f".{KEY}.lock"):  # another process
        thread = threading.Thread(target=lambda: results.append(read_or_make(KEY, model.begin, progress)))
        thread.start()
        assert waits.wait(60)
        cache._write(place, KEY, Model().begin())
    thread.join(60)
    assert is_right(results[0])
    assert (model.count, lines) == (0, [f"waiting for another process that is making {KEY}"])


def test_two_processes_make_one_entry(place: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_cache as t; model = t.Model();"
        "print(t.is_right(t.read_or_make(t.KEY, model.begin)), model.count)"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0].split() for process in processes]
    assert [output[0] for output in outputs] == ["True", "True"]
    assert sum(int(output[1]) for output in outputs) == 1
    assert leftovers(place) == []
