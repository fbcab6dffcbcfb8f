"""Comparing drafted with plain decoding of one prompt."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from programs import printed

from reader_rag.cli.display.show import show_comparison
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.llm.comparison import compare


def test_a_comparison_finds_where_answers_part_and_by_what_margin(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny_engine.encode("the heron and the owl")
    generation = SamplingParams(max_tokens=6, ignore_eos=True)
    truth = tiny_engine.generate(prompt, replace(generation, record_margins=True, speculate=False))
    generate = tiny_engine.generate

    def other_fourth_token(prompt: Any, asked: Any = None, *args: Any, **kwargs: Any) -> Any:
        done = generate(prompt, asked, *args, **kwargs)
        if not asked.speculate or len(done.token_ids) < 6:
            return done
        return replace(done, token_ids=(*done.token_ids[:3], 5, *done.token_ids[4:]))

    monkeypatch.setattr(tiny_engine, "generate", other_fourth_token)
    assert truth.token_ids[3] != 5
    found = compare(tiny_engine, prompt, generation)
    assert not found.identical
    assert found.difference is not None
    assert found.difference.position == 3
    assert found.difference.plain == tiny_engine.tokenizer.decode([truth.token_ids[3]])
    assert found.difference.margin == pytest.approx(truth.margins[3], abs=1e-4)
    shown = printed(lambda console: show_comparison(console, found))
    assert re.search(r"reader +\S+ +\S+ +no", shown)
    assert "First difference at token 4" in shown
    assert f"{found.difference.margin:.4f} apart" in shown
