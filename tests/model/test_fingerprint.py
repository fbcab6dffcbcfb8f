"""The key of what is kept of a model."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model

from reader_rag.model import fingerprint
from reader_rag.model.fingerprint import (
    QuantizationScheme,
    folder_content,
    model_fingerprint,
    record_weights,
    revision_of,
    weights_fingerprint,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder, with a cache folder of its own; its files are old enough that their hashes are kept."""
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
    make_model("Llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read for a hash."""
    names: list[str] = []
    hash_of = fingerprint._file_hash

    def noted(path: Path) -> str:
        names.append(path.name)
        return hash_of(path)

    monkeypatch.setattr(fingerprint, "_file_hash", noted)
    return names


def change(path: Path, at: int = -1) -> None:
    """Flip a bit of a file, and give it its old size and modification time."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_files_are_read_once(folder: Path, read: list[str]) -> None:
    first = folder_content(folder)
    assert sorted(read) == ["config.json", "model.safetensors"]
    assert folder_content(folder) == first
    assert len(read) == 2


def test_one_changed_bit_of_the_weights_changes_the_content_whatever_the_time_of_the_file(folder: Path) -> None:
    first = folder_content(folder)
    change(folder / "model.safetensors")
    assert folder_content(folder) != first


def test_only_the_changed_file_is_read_again(folder: Path, read: list[str]) -> None:
    folder_content(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    folder_content(folder)
    assert read[2:] == ["config.json"]


def test_what_does_not_change_what_a_model_computes_is_not_in_the_content(folder: Path) -> None:
    first = folder_content(folder)
    (folder / "README.md").write_text("Read me.")
    (folder / "pytorch_model.bin").write_bytes(b"not used where there are safetensors")
    assert folder_content(folder) == first


def test_a_copy_of_a_folder_has_its_content(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert folder_content(other) == folder_content(folder)


def test_a_file_that_has_just_changed_is_read_again(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 10**18)
    folder_content(folder)
    folder_content(folder)
    assert len(read) == 4


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"1": {"config.json": 3}}'])
def test_damaged_hashes_are_made_anew(folder: Path, tmp_path: Path, damage: bytes) -> None:
    first = folder_content(folder)
    (kept,) = (tmp_path / "cache" / "hashes").iterdir()
    kept.write_bytes(damage)
    assert folder_content(folder) == first


def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert folder_content(folder) == folder_content(folder)


def test_a_model_object_has_the_fingerprint_of_its_copy() -> None:
    model = make_model("Llama")
    assert model_fingerprint(copy.deepcopy(model)) == model_fingerprint(model)
    assert len(model_fingerprint(model)) == 32


@pytest.mark.parametrize(
    "difference",
    [
        lambda model: model.half(),
        lambda model: model.model.norm.weight.data.mul_(2),
        lambda model: model.model.layers[1].mlp.up_proj.weight.data.add_(1e-3),
        lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    ],
    ids=["type", "norm", "weight", "configuration"],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_is_changed_in_memory_changes_the_fingerprint(folder: Path, difference: Any, is_loaded: bool) -> None:
    model = make_model("Llama")
    if is_loaded:
        record_weights(model, folder)
    first = model_fingerprint(model)
    difference(model)
    assert model_fingerprint(model) != first


def test_a_loaded_model_is_known_by_all_of_its_weights(folder: Path) -> None:
    model = make_model("Llama")
    record_weights(model, folder)
    first = model_fingerprint(model)
    change(folder / "model.safetensors")
    record_weights(model, folder)
    assert model_fingerprint(model) != first


def test_a_quantised_model_has_the_fingerprint_of_its_files_type_and_scheme(folder: Path) -> None:
    scheme = QuantizationScheme()
    model = make_model("Llama")
    record_weights(model, folder, scheme)
    key = model_fingerprint(model)
    assert key == weights_fingerprint(folder_content(folder), "", "float32", scheme)
    model.model.layers[0].mlp.up_proj.weight.data = torch.empty(0)  # packed and released
    assert model_fingerprint(model) == key


def test_everything_that_decides_what_is_computed_is_in_the_fingerprint() -> None:
    variants = [
        ("content", "", "float32", None),
        ("other", "", "float32", None),
        ("content", "revision", "float32", None),
        ("content", "", "bfloat16", None),
        ("content", "", "float32", QuantizationScheme()),
        ("content", "", "float32", QuantizationScheme(bits=4)),
        ("content", "", "float32", QuantizationScheme(head="half")),
        ("content", "", "float32", QuantizationScheme(folding="a")),
        ("content", "", "float32", QuantizationScheme(rounding="a")),
        ("content", "", "float32", QuantizationScheme(version=99)),
    ]
    assert len({weights_fingerprint(*variant) for variant in variants}) == len(variants)


def test_the_revision_of_a_folder_of_the_hub_client_is_its_commit(tmp_path: Path) -> None:
    assert revision_of(tmp_path / "models--a--b" / "snapshots" / "0123abcd") == "0123abcd"
    assert revision_of(tmp_path / "model") == ""
