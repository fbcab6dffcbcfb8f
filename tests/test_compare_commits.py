"""What "no slower" means: `.ci/compare_commits.py`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "compare_commits.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_commits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ratios", "passes"),
    [
        ([1.0] * 20, True),
        ([0.98] * 20, True),
        ([0.97] * 20, False),
        ([0.5] * 9 + [2.0] * 11, True),
        ([0.9] * 10 + [1.05] * 10, True),  # the median is 0.975, and the interval holds 1
        ([0.9] * 18 + [1.2] * 2, False),
    ],
)
def test_ratios_that_pass_and_that_do_not(script: ModuleType, ratios: list[float], passes: bool) -> None:
    assert script.is_no_slower(ratios) is passes


class FakeWorker:
    """Answers with the length of a prompt and logs when; `slow` times as slow as a worker of 1.0."""

    def __init__(self, name: str, log: list[str], slow: float, differs_at: str = "") -> None:
        self.name, self.log, self.slow, self.differs_at = name, log, slow, differs_at

    def answer(self, text: str | None) -> tuple[float, list[int]]:
        self.log.append(f"{self.name} {text}")
        return self.slow, [len(text or ""), text == self.differs_at]


def test_both_are_warmed_up_then_answer_each_prompt_in_alternating_order(script: ModuleType) -> None:
    log: list[str] = []
    prompts = [("p0", "one"), ("p1", "three"), ("p2", "fives")]
    ratios, different = script.compare(FakeWorker("old", log, 3.0), FakeWorker("new", log, 2.0, "three"), prompts)
    assert ratios == [1.5, 1.5, 1.5]
    assert different == ["p1"]
    assert [entry for entry in log if entry.endswith("None")] == ["old None", "new None"]
    assert log[log.index("new None") + 1 :] == [
        "old one",
        "new one",
        "new three",
        "old three",
        "old fives",
        "new fives",
    ]


def test_prompts_are_read_from_a_file_and_repeated_to_fill_the_pairs(script: ModuleType, tmp_path: Path) -> None:
    rows = [{"id": number, "category": "chat", "turns": [text, "more"]} for number, text in enumerate(("a", "b"))]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert script.read_prompts(path, 3) == [("0", "a"), ("1", "b"), ("0", "a")]
