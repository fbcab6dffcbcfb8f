"""Fuzzers, left out of every other run: `make test-attack` sets how many seconds each may take.

A failure names the seed and the number of the try: `READER_RAG_ATTACK_SEED=3-117 make test-attack` repeats that one.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_SECONDS = os.environ.get("READER_RAG_ATTACK_SECONDS")
_SEED, _, _NUMBER = os.environ.get("READER_RAG_ATTACK_SEED", "1").partition("-")

sys.path.insert(0, str(Path(__file__).parents[1] / "connectors"))  # for the scripted server

collect_ignore_glob = [] if _SECONDS else ["test_*.py"]

Attack = Callable[[Callable[[random.Random], object]], None]


@pytest.fixture
def attack(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Attack:
    """Calls a function with random generators until the time is over, and prints the number of tries."""

    def run(one: Callable[[random.Random], object]) -> None:
        end, tries = time.monotonic() + float(_SECONDS or 1), 0
        numbers = [int(_NUMBER)] if _NUMBER else range(1 << 30)
        for number in numbers:
            if tries and time.monotonic() > end:
                break
            try:
                one(random.Random(f"{_SEED}-{number}"))
            except BaseException as error:
                error.add_note(f"repeat it with READER_RAG_ATTACK_SEED={_SEED}-{number}")
                raise
            tries += 1
        with capsys.disabled():
            print(f"\n{request.node.name}: {tries} tries, seed {_SEED}")

    return run
