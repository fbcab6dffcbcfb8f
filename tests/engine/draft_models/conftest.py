"""Engines with draft models, and what these propose."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from costs_stub import EverythingPays
from draft_model_tools import LAYERS, TREE
from tiny_models import make_model

from reader_rag.bench.generate.random_weights import NoText
from reader_rag.config import DraftConfig
from reader_rag.draft.source import Ask, Proposal
from reader_rag.engine.draft_models.source import DraftModel
from reader_rag.engine.engine import Engine
from reader_rag.errors import ReaderWarning


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(model: Any = None, draft: DraftConfig = TREE, **options: Any) -> Engine:
        model = make_model("Llama", LAYERS) if model is None else model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReaderWarning)
            engine = Engine(model, NoText(), draft=draft, **options)  # type: ignore[arg-type]
        engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Length of the sequence and proposed tokens of every draft of a draft model."""
    noted: list[tuple[int, list[int]]] = []
    propose = DraftModel.propose_together

    def note(self: DraftModel, asks: Sequence[Ask]) -> list[Proposal]:
        found = propose(self, asks)
        noted.extend((len(ask.state.tokens), list(one.tokens)) for ask, one in zip(asks, found, strict=True))
        return found

    monkeypatch.setattr(DraftModel, "propose_together", note)
    return noted
