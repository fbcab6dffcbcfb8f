"""The processor's name and instruction sets, as numba's settings have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba.core import config

from reader_rag.util import cpu

HOST = {"avx": True, "avx2": True, "avx512f": True, "avx512bw": True, "avx512vnni": True, "sse4.2": True, "amx": False}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AVX-512 VNNI, and none of numba's settings."""
    monkeypatch.setattr(cpu, "get_host_cpu_features", lambda: dict(HOST))
    monkeypatch.setattr(cpu, "get_host_cpu_name", lambda: "cascadelake")
    set_numba(monkeypatch)


def set_numba(monkeypatch: pytest.MonkeyPatch, name: str | None = None, features: str | None = None) -> None:
    monkeypatch.setattr(config, "CPU_NAME", name)
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    monkeypatch.setattr(config, "ENABLE_AVX", 1)


def test_without_settings_the_processor_has_what_llvm_finds() -> None:
    assert cpu.cpu_features() == {"avx", "avx2", "avx512f", "avx512bw", "avx512vnni", "sse4.2"}
    assert cpu.has_avx512_vnni()
    assert not cpu.has_avx_vnni()


def test_without_avx_none_of_its_extensions_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "ENABLE_AVX", 0)
    assert cpu.cpu_features() == {"sse4.2"}


@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        (None, "-avx512vnni", {"avx", "avx2", "avx512f", "avx512bw", "sse4.2"}),
        ("cascadelake", "-avx512f", {"avx", "avx2", "sse4.2"}),  # what needs it goes with it
        ("cascadelake", "-avx2", {"avx", "sse4.2"}),
        ("cascadelake", "-avx", {"sse4.2"}),
        ("generic", "", set()),
        ("generic", "+avx,+avx2", {"avx", "avx2"}),
        (None, "+amx", {"avx", "avx2", "avx512f", "avx512bw", "avx512vnni", "sse4.2"}),  # not on this processor
        ("haswell", None, {"avx", "avx2", "avx512f", "avx512bw", "avx512vnni", "sse4.2"}),  # numba names all of them
    ],
)
def test_settings_of_numba_hold(
    name: str | None, features: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_numba(monkeypatch, name, features)
    assert cpu.cpu_features() == expected


@pytest.mark.parametrize(
    ("features", "expected"),
    [({"avx": True, "avx2": True, "avxvnni": True}, True), (HOST | {"avx512vl": True}, True), ({"avx2": True}, False)],
)
def test_dot_products_of_256_bits_are_in_two_instruction_sets(
    features: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "get_host_cpu_features", lambda: features)
    assert cpu.has_avx_vnni() is expected


def test_a_processor_that_llvm_does_not_know_has_no_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("unknown")

    monkeypatch.setattr(cpu, "get_host_cpu_features", fail)
    assert cpu.cpu_features() == set()


def test_the_name_is_the_vendors_or_else_that_of_llvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9B45\nmodel name\t: AMD EPYC 9B45\n")
    monkeypatch.setattr(cpu, "_PROC", info)
    assert cpu.cpu_name() == "AMD EPYC 9B45"
    info.write_text("processor\t: 0\nCPU part\t: 0xd40\n")
    assert cpu.cpu_name() == "cascadelake"
    monkeypatch.setattr(cpu, "_PROC", tmp_path / "nothing")
    assert cpu.cpu_name() == "cascadelake"
