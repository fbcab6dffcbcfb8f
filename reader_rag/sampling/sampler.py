"""From logits to the target's own token at a node."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TemperatureLogitsWarper

from reader_rag.config import SamplingParams
from reader_rag.draft.tree import DraftTree
from reader_rag.errors import CallbackError, ConfigError, ScoresError
from reader_rag.sampling.noise import Draw, perturbed

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A `LogitsProcessor` of `transformers`, or a function like it: token ids [1, length] and scores float32
[1, vocabulary] to scores."""


@dataclass(frozen=True)
class Verified:
    """The result of verifying a draft tree in a forward pass.

    Attributes:
        logits: [1 + nodes, vocabulary], after the root and after each node.
        tree: The draft tree.
        sequence: int32 [length], prompt and output up to the root, the root included.
        argmax: [1 + nodes], the most probable token after each node; None: not computed yet.
        drawn: [1 + nodes], the token that `ProcessedSampler.draw` draws after each node, -1 where its score is NaN or
            minus infinity; None: the pass drew none.
    """

    logits: torch.Tensor
    tree: DraftTree
    sequence: NDArray[np.int32]
    argmax: Sequence[int] | None = None
    drawn: Sequence[int] | None = None

    def position(self, row: int) -> int:
        """The absolute position of the token that follows a row (0: the root, n: node n - 1)."""
        return len(self.sequence) + (int(self.tree.depths[row - 1]) if row else 0)

    def prefix(self, row: int) -> NDArray[np.int64]:
        """int64 [position(row)], all tokens before the one that follows a row."""
        prefix = np.empty(self.position(row), np.int64)
        length = len(self.sequence)
        prefix[:length] = self.sequence
        if row:
            path = self.tree.paths[row, 1 : len(prefix) - length + 1]
            prefix[length:] = self.tree.tokens[path - 1]
        return prefix


class Sampler(Protocol):
    """Says which token the target emits after each row of a forward pass."""

    def __call__(self, verified: Verified) -> Callable[[int], int]:
        """Prepare the choice.

        Args:
            verified: The pass.

        Returns:
            A function from a row to the token emitted there. It is called once for each visited row, from the root
            down the accepted path. Over an answer it is therefore called as in plain decoding, once for each token
            with the token's true prefix, so that samplers with state work.
        """


def greedy(verified: Verified) -> Callable[[int], int]:
    """The most probable token everywhere (of equal ones, the first)."""
    if verified.argmax is not None:
        ranked = verified.argmax
        return lambda row: _chosen(ranked[row], ranked[row] >= 0)
    # On the CPU NumPy's argmax: the threads that PyTorch would wake spin for a while, in the way of the next step's.
    alike = verified.logits.device.type == "cpu" and verified.logits.dtype == torch.float32
    logits: Any = verified.logits.numpy() if alike else verified.logits
    tokens: list[int] = logits.argmax(-1).tolist()
    return lambda row: _chosen(tokens[row], logits[row, tokens[row]] > -math.inf)


def _chosen(token: int, possible: Any) -> int:
    """A token whose score is a number; NaN and minus infinity are the highest score only where no other is.

    Raises:
        ScoresError: Its score is none.
    """
    if not possible:
        raise ScoresError(
            "no token can be chosen: all scores of the model are NaN or minus infinity; its weights may be damaged, or "
            "overflow in this dtype (try dtype='float32')"
        )
    return token


class ProcessedSampler:
    """The most probable token, or a draw, after processors have changed the scores.

    `argmax(log p + g)` with Gumbel noise g is a draw from p. The noise is a function of (seed, position, token) alone
    (`noise`), so that drafted and plain decoding of one seed draw the same tokens.

    Args:
        processors: Applied in order to the scores of each visited row, with that row's true prefix.
        seed: 0..2**64-1; None takes the best token.

    Attributes:
        seed: As given.
        draw: How tokens are drawn where scores are changed by a temperature at most, so that a pass can draw them
            itself; None: there are other processors, or nothing is drawn.
    """

    def __init__(self, processors: Sequence[Processor], seed: int | None = None) -> None:
        self._processors = tuple(processors)
        self.seed = seed
        self.draw: Draw | None = None
        temperatures = [one.temperature for one in processors if type(one) is TemperatureLogitsWarper]
        if seed is not None and len(processors) == len(temperatures) <= 1:
            self.draw = Draw(seed, *temperatures)

    def __call__(self, verified: Verified) -> Callable[[int], int]:
        """Choose tokens row by row; arguments and result of a `Sampler`."""
        return lambda row: self._choose(verified, row)

    def _choose(self, verified: Verified, row: int) -> int:
        if self.draw is not None and verified.drawn is not None:
            token, possible = verified.drawn[row], verified.drawn[row] >= 0
        else:
            scores = self.perturbed(verified, row)
            token = int(scores.argmax())
            possible = bool(scores[token] > -torch.inf)
        if not possible:
            names = ", ".join(type(processor).__name__ for processor in self._processors)
            raise ScoresError(
                f"no token can be chosen: all scores are NaN or minus infinity after the logits processors ({names}); "
                "one of them leaves no token, or the model's own scores are not finite"
            )
        return token

    def perturbed(self, verified: Verified, row: int) -> torch.Tensor:
        """float32 [vocabulary], whose argmax is the chosen token: `scores` plus the noise of the row's position."""
        if self.seed is None:
            return self.scores(verified, row)
        if self.draw is None:
            scores, draw = self.scores(verified, row).float(), Draw(self.seed, 1.0)
        else:
            scores, draw = verified.logits[row].float(), self.draw
        return perturbed(scores, draw, verified.position(row))

    def scores(self, verified: Verified, row: int) -> torch.Tensor:
        """float32 [vocabulary], the scores of a row after all processors.

        Raises:
            ConfigError: A processor returned something else than scores.
        """
        # As in `generate`: a processor may compute gradients, for which it needs ordinary tensors.
        with torch.inference_mode(False), torch.no_grad():
            # A copy: processors may write into what they get, and others read these logits.
            scores = verified.logits[row : row + 1].to(torch.float32, copy=True)
            shape = scores.shape
            ids = torch.from_numpy(verified.prefix(row))[None].to(scores.device)
            for processor in self._processors:
                scores = processor(ids, scores)
                if not _are_scores(scores, shape):
                    returned = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, torch.Tensor) else None
                    raise ConfigError(
                        f"the logits processor {type(processor).__name__} must return floating-point scores of shape "
                        f"{list(shape)}, not {returned or type(scores).__name__}"
                    )
            return scores[0]


def _are_scores(scores: Any, shape: torch.Size) -> bool:
    """Whether a logits processor has returned scores that a token can be chosen by."""
    if not isinstance(scores, torch.Tensor) or scores.shape != shape or not scores.is_floating_point():
        return False
    return scores.layout is torch.strided and not scores.is_meta


class CheckedSampler:
    """A sampler of the caller's, whose tokens are checked: a token id out of range ends the process on some devices.

    Args:
        sampler: The sampler.
        vocabulary: Number of token ids that the model has.

    Attributes:
        needs_logits: Whether it reads more of `Verified` than `argmax` where that is known; a sampler without this
            attribute does.
        chooses_as: A sampler that chooses the same tokens, as which draft models draw; None: none is known.
    """

    def __init__(self, sampler: Sampler, vocabulary: int) -> None:
        self._sampler = sampler
        self._vocabulary = vocabulary
        self.needs_logits = bool(getattr(sampler, "needs_logits", True))
        self.chooses_as: Sampler | None = getattr(sampler, "chooses_as", None)

    def __call__(self, verified: Verified) -> Callable[[int], int]:
        """Prepare the choice; arguments and result of a `Sampler`."""
        choose = self._sampler(verified)

        def checked(row: int) -> int:
            token: Any = choose(row)
            if not isinstance(token, Integral) or not 0 <= int(token) < self._vocabulary:
                raise CallbackError(
                    f"the sampler {type(self._sampler).__name__} chose {token!r:.40}, which is no token id in "
                    f"0..{self._vocabulary - 1}"
                )
            return int(token)

        return checked


def make_sampler(params: SamplingParams, processors: Sequence[Any] = ()) -> Sampler:
    """The sampler that a call's settings ask for.

    Args:
        params: The sampling parameters.
        processors: All that change the scores, in order; see `logits_processors.make_processors`.
    """
    if params.temperature == 0.0:
        return ProcessedSampler(processors) if processors else greedy
    seed = params.seed
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    return ProcessedSampler(processors, seed)
