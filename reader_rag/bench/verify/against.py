"""Compares a model as it is decoded with the same model in another type: what quantisation or rounding costs.

Both models read the same answers (teacher-forced), so that every position is compared with the same text before it. The
answers are the other model's own greedy ones, or recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import typer

from reader_rag.bench.output import print_table
from reader_rag.bench.report import machine
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Prompt
from reader_rag.errors import ConfigError
from reader_rag.sampling.sampler import Verified

_TENANT = "verify"
_ALL = "all"


@dataclass(frozen=True)
class ComparedPrompt:
    """A prompt whose answer is compared.

    Attributes:
        id: Id of the prompt.
        category: Results are reported by category.
        prompt: The prompt.
        answer: Token ids of a recorded answer; empty: the greedy answer of the reference.
    """

    id: str
    category: str
    prompt: Prompt
    answer: tuple[int, ...] = ()


@dataclass
class Divergence:
    """How far two models are apart on the answers of a category.

    Attributes:
        answers: Number of answers.
        tokens: Compared positions: those that emit a token of an answer.
        agreed: Positions at which both models find the same token most probable.
        total_kl: Sum over the positions of the Kullback-Leibler divergence from the reference's distribution of the
            next token to the model's, in nats.
        different: Ids of the prompts at some position of whose answer the models choose different tokens: of greedy
            answers, those that differ.
    """

    answers: int = 0
    tokens: int = 0
    agreed: int = 0
    total_kl: float = 0.0
    different: list[str] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        """Share of positions with the same most probable token."""
        return self.agreed / self.tokens if self.tokens else math.nan

    @property
    def mean_kl(self) -> float:
        """Mean divergence of a position, in nats."""
        return self.total_kl / self.tokens if self.tokens else math.nan

    def add(self, other: Divergence) -> None:
        """Add the answers of another one."""
        self.answers += other.answers
        self.tokens += other.tokens
        self.agreed += other.agreed
        self.total_kl += other.total_kl
        self.different += other.different

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"agreement": self.agreement, "mean_kl": self.mean_kl}


@dataclass
class Comparison:
    """The outcome of `compare`.

    Attributes:
        machine: The compared model, its type, device and versions.
        reference: The reference likewise.
        categories: By category, in the order of the prompts.
    """

    machine: dict[str, Any]
    reference: dict[str, Any]
    categories: dict[str, Divergence] = field(default_factory=dict)

    @property
    def overall(self) -> Divergence:
        """All categories together."""
        total = Divergence()
        for one in self.categories.values():
            total.add(one)
        return total

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        by_category = {name: one.to_dict() for name, one in self.categories.items()}
        everything = {"categories": by_category, _ALL: self.overall.to_dict()}
        return {"machine": self.machine, "reference": self.reference} | everything


class _Recording:
    """A sampler that records what a model finds at every position, and emits the most probable token or a given one.

    Args:
        prompt_tokens: Number of tokens of the prompt.
        answer: Token ids to emit; empty: the most probable ones.
    """

    def __init__(self, prompt_tokens: int, answer: tuple[int, ...]) -> None:
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self.chosen: list[int] = []
        self.log_probabilities: list[torch.Tensor] = []

    def __call__(self, verified: Verified) -> Callable[[int], int]:
        def token(row: int) -> int:
            self.chosen.append(int(verified.logits[row].argmax()))
            self.log_probabilities.append(verified.logits[row].float().log_softmax(-1))
            return self._answer[verified.position(row) - self._prompt_tokens] if self._answer else self.chosen[-1]

        return token


class _Comparing:
    """A sampler that emits the reference's answer, and compares what the model would have chosen.

    Args:
        prompt_tokens: Number of tokens of the prompt.
        answer: Token ids of the answer.
        reference: What the reference found.
    """

    def __init__(self, prompt_tokens: int, answer: tuple[int, ...], reference: _Recording) -> None:
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._reference = reference
        self.divergence = Divergence(answers=1)

    def __call__(self, verified: Verified) -> Callable[[int], int]:
        def token(row: int) -> int:
            position = verified.position(row) - self._prompt_tokens
            logits = verified.logits[row]
            expected = self._reference.log_probabilities[position]
            self.divergence.tokens += 1
            self.divergence.agreed += int(logits.argmax()) == self._reference.chosen[position]
            self.divergence.total_kl += kl_divergence(expected, logits.float().log_softmax(-1))
            return self._answer[position]

        return token


def kl_divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The Kullback-Leibler divergence from one distribution to another, in nats.

    Args:
        expected: Log-probabilities [vocabulary].
        found: Log-probabilities [vocabulary] of the distribution that is to be near.
    """
    # A token that is impossible in the first adds nothing, whatever it is in the second.
    terms = torch.where(expected > -torch.inf, expected.exp() * (expected - found), 0.0)
    return float(terms.sum(dtype=torch.float64))


def compare(
    engine: Engine,
    reference: Engine,
    prompts: Sequence[ComparedPrompt],
    max_tokens: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compare two models answer by answer.

    Besides the models, memory holds the reference's log-probabilities of one answer: 4 bytes for each of its tokens and
    token of the vocabulary.

    Args:
        engine: The model that is compared, decoded with drafts as it is configured.
        reference: The model it is compared with; it has the same tokenizer.
        prompts: Prompts, with or without recorded answers.
        max_tokens: Most tokens of an answer.
        progress: Called with what runs next.

    Raises:
        ConfigError: A recorded answer has tokens that the model does not have.
    """
    outcome = Comparison(machine(engine), machine(reference))
    for number, task in enumerate(prompts, 1):
        progress(f"{number}/{len(prompts)} {task.id}")
        divergence = _compare(engine, reference, task, max_tokens)
        outcome.categories.setdefault(task.category, Divergence()).add(divergence)
    return outcome


def _compare(engine: Engine, reference: Engine, task: ComparedPrompt, max_tokens: int) -> Divergence:
    recorded = task.answer[:max_tokens]
    size = len(task.prompt.token_ids)
    config: Any = reference.model.config
    if any(token >= config.get_text_config(decoder=True).vocab_size for token in recorded):
        raise ConfigError(f"{task.id}: its recorded answer has token ids that this model does not have")
    recording = _Recording(size, recorded)
    answer = _emitted(reference, task.prompt, recording, len(recorded) or max_tokens, is_forced=bool(recorded))
    comparing = _Comparing(size, answer, recording)
    _emitted(engine, task.prompt, comparing, len(answer), is_forced=True)
    if comparing.divergence.agreed < comparing.divergence.tokens:
        comparing.divergence.different.append(task.id)
    return comparing.divergence


def _emitted(
    engine: Engine, prompt: Prompt, sampler: _Recording | _Comparing, tokens: int, *, is_forced: bool
) -> tuple[int, ...]:
    engine.forget(_TENANT, learned=False)  # every answer is decoded alone
    params = SamplingParams(max_tokens=tokens, ignore_eos=is_forced)
    return tuple(engine.generate(prompt, params, sampler=sampler, tenant=_TENANT).token_ids)


def show(outcome: Comparison) -> None:
    """Print a comparison as a table.

    Args:
        outcome: The comparison.
    """
    typer.echo(outcome.machine["model"])
    rows = [*outcome.categories.items(), (_ALL, outcome.overall)]
    print_table(
        f"{_type_of(outcome.machine)} against {_type_of(outcome.reference)}",
        ("category", "tokens", "agree", "KL", "differ"),
        (
            (name, one.tokens, f"{one.agreement:.4f}", f"{one.mean_kl:.5f}", f"{len(one.different)}/{one.answers}")
            for name, one in rows
        ),
    )


def _type_of(report: dict[str, Any]) -> str:
    quantization = report.get("quantization")
    return str(quantization if quantization not in (None, "none") else report["dtype"])
