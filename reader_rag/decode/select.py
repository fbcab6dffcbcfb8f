"""From logits to the target's own token at a position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from reader_rag.config import GenerationConfig


class Selector(Protocol):
    """Says which token the target emits, given the logits after a node and the node's position."""

    def __call__(self, logits: torch.Tensor, positions: list[int]) -> Callable[[int], int]:
        """Prepare the choice for the nodes of one step.

        Args:
            logits: [nodes, vocabulary].
            positions: For each node, the absolute position of the token that follows it.

        Returns:
            A function from a node's row to the token emitted there; called for visited nodes only.
        """


def greedy(logits: torch.Tensor, positions: list[int]) -> Callable[[int], int]:
    """The most probable token everywhere (of equal ones, the first)."""
    # On the CPU NumPy's argmax: the threads that PyTorch would wake spin for a while, in the way of the next step's.
    alike = logits.device.type == "cpu" and logits.dtype == torch.float32
    tokens: list[int] = (logits.numpy() if alike else logits).argmax(-1).tolist()
    return tokens.__getitem__


class Sampled:
    """Draws from the target's distribution with the Gumbel-max trick.

    `argmax(log p + g)` with Gumbel noise g is a draw from p. The noise is a function of (seed, position) alone, from a
    counter-based generator, so that drafted and plain decoding of one seed draw the same tokens.

    Args:
        temperature: Above 0.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the fewest tokens whose probabilities sum to at least this.
        seed: 0..2**64-1.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, seed: int) -> None:
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._seed = seed

    def __call__(self, logits: torch.Tensor, positions: list[int]) -> Callable[[int], int]:
        """See `Selector`."""

        def token(row: int) -> int:
            scores = self.warp(logits[row].float())
            noise = gumbel(self._seed, positions[row], scores.shape[0])
            return int((scores + torch.from_numpy(noise).to(scores.device)).argmax())

        return token

    def warp(self, scores: torch.Tensor) -> torch.Tensor:
        """Temperature, then top-k, then top-p, in that order.

        Args:
            scores: float32 [vocabulary], logits.

        Returns:
            float32 [vocabulary], -inf where a token cannot be drawn.
        """
        scores = scores / self._temperature
        if 0 < self._top_k < scores.shape[0]:
            least = scores.topk(self._top_k).values[-1]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self._top_p < 1.0:
            ordered, tokens = scores.sort(descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            scores = scores.masked_fill(
                torch.zeros_like(scores, dtype=torch.bool).scatter(0, tokens, before >= self._top_p), -torch.inf
            )
        return scores


def gumbel(seed: int, position: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Gumbel noise, the same for the same arguments on every machine.

    Args:
        seed: 0..2**64-1.
        position: Absolute position of the token drawn.
        size: Vocabulary size.

    Returns:
        float32 [size].
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64)))
    uniform = generator.random(size)
    with np.errstate(divide="ignore"):  # a uniform 0.0 (once in 2**53) is -inf: never drawn, as it should be
        noise: np.ndarray[tuple[int], np.dtype[np.float32]] = -np.log(-np.log(uniform)).astype(np.float32)
    return noise


def make_selector(generation: GenerationConfig) -> Selector:
    """The selector that a call's settings ask for."""
    if generation.temperature == 0.0:
        return greedy
    seed = generation.seed
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    return Sampled(generation.temperature, generation.top_k, generation.top_p, seed)
