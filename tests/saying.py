"""An LLM over a real engine that says what a test wants: its model prefers the tokens of given answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from llama_index.core.bridge.pydantic import PrivateAttr

from reader_rag import ReaderLLM

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine


class Saying(ReaderLLM):
    """Decodes as ever: drafts, grammars and limits have their effect. Beyond the last answer it repeats that one."""

    _said: list[list[int]] = PrivateAttr(default=[])
    _calls: list[int] = PrivateAttr(default_factory=list)

    def _call(self, kwargs: dict[str, Any], respond: Any) -> Any:
        said = self._said[min(len(self._calls), len(self._said) - 1)]
        self._calls.append(len(said))
        starts: list[int] = []

        def prefer(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            starts.append(input_ids.shape[1])
            scores[0, said[min(input_ids.shape[1] - starts[0], len(said) - 1)]] += 1000.0
            return scores

        return super()._call({**kwargs, "logits_processor": (prefer,)}, respond)


def saying(engine: Engine, *answers: str, max_tokens: int = 600) -> Saying:
    """An LLM that gives these answers, one a call."""
    llm = Saying.from_engine(engine, max_tokens=max_tokens)
    encode, end = engine.tokenizer.encode, engine.tokenizer.eos_token_id
    llm._said = [[*encode(answer, add_special_tokens=False), end] for answer in answers]
    return llm
