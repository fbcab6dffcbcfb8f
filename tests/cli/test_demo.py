"""`reader-rag demo`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import assert_one_line_error, run

from reader_rag.cli.answering import answers as answers_module
from reader_rag.config import SamplingParams
from reader_rag.llm import ReaderLLM
from reader_rag.llm.comparison import Comparison, Difference, compare


def test_the_demo_answers_about_pythons_documentation_and_compares(two_topics: None, tmp_path: Path) -> None:
    arguments = ["demo", "--workdir", str(tmp_path), "--question", "Where is the heron?", "--max-tokens", "9"]
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    assert "2 topics of Python's language reference" in first.stdout
    assert "2 added; 2 passages embedded" in first.stdout
    assert "Question: Where is the heron?" in first.stdout
    assert "[1] heron.txt" in first.stdout
    assert re.search(r"plain decoding +\d+\.\d +1\.00", first.stdout)
    assert re.search(r"reader +\d+\.\d +\d+\.\d\d +yes", first.stdout)
    second = run(*arguments)
    assert second.exit_code == 0
    assert "2 unchanged; 0 passages embedded" in second.stdout
    of_a_tenant = run(*arguments, "--tenant", "ann lee")
    assert "2 added; 2 passages embedded" in of_a_tenant.stdout
    assert of_a_tenant.stdout.endswith("--tenant 'ann lee'\n")


def test_the_demo_fails_if_tokens_differ_in_float32(
    two_topics: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differing(given: Any, llm: ReaderLLM) -> Comparison:
        result = compare(llm.engine, llm.engine.encode("the heron"), SamplingParams(max_tokens=4))
        return replace(result, difference=Difference(position=1, plain="a", reader="b", margin=0.01))

    monkeypatch.setattr(answers_module, "compare_answer", differing)
    arguments = ["demo", "--workdir", str(tmp_path), "--max-tokens", "4"]
    assert run(*arguments).exit_code == 1
    assert run(*arguments, "--dtype", "bfloat16").exit_code == 0
    assert run(*arguments, "--dtype", "bfloat16", "--exactness", "strict").exit_code == 1


def test_the_demo_says_when_its_folder_cannot_be_written(two_topics: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert_one_line_error(run("demo", "--workdir", tmp_path / "file"), "--workdir")
