"""One decode step of any number of sequences: propose, verify in one pass, accept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from reader_rag.draft.tree import DraftTree
from reader_rag.engine.context import DecodeContext
from reader_rag.engine.observer import StepReport
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.model.interface import Step
from reader_rag.sampling.topk import TopK, fetch_top_k
from reader_rag.util.out_of_memory import is_out_of_memory

_NOT_OF_A_SEQUENCE = (KeyboardInterrupt, GeneratorExit)
"""What is raised from outside, whichever sequence was being decoded."""


@torch.inference_mode()
def run_step(context: DecodeContext, sequences: Sequence[DecodeSequence]) -> dict[DecodeSequence, BaseException]:
    """Propose, verify and accept once, all in one pass where the model can.

    Args:
        context: The engine's.
        sequences: At least one, all prefilled and not finished.

    Returns:
        Those that failed and why; the others have been extended.
    """
    started = time.perf_counter()
    failed: dict[DecodeSequence, BaseException] = {}
    trees: dict[DecodeSequence, DraftTree] = {}
    drafting: dict[DecodeSequence, float] = {}
    costs = context.costs.current
    for sequence in sequences:
        before = time.perf_counter()
        try:
            trees[sequence] = sequence.propose(skip=costs is not None and sequence.rest.due())
        except BaseException as error:
            _note(sequence, error, failed)
        drafting[sequence] = time.perf_counter() - before
    trees = _within_budget(context, trees)
    drafted = time.perf_counter()
    lengths = [sequence.cache.length for sequence in trees]
    positions = sum(len(tree) + 1 for tree in trees.values())
    emitted: list[int] = []
    accepted: list[Counter[str]] = []
    for sequence, (logits, top) in _verified(context, trees, failed).items():
        try:
            count, sources = sequence.accept(trees[sequence], logits, top)
            emitted.append(count)
            accepted.append(sources)
        except BaseException as error:
            _note(sequence, error, failed)
    ended = time.perf_counter()
    shared = len(trees) == 1 or context.target.shares
    if costs is not None and shared and not failed:
        widest = 1 + max(len(tree) for tree in trees.values())
        rows = len(trees) * widest if context.target.pads else positions
        costs.observe(rows, sum(lengths) // len(lengths), ended - drafted)
    for sequence in sequences:
        sequence.spent(ended - started, drafting[sequence])
    report = StepReport(positions, accepted, emitted, sum(drafting.values()), ended - started)
    context.observers.tell("stepped", report)
    return failed


def _note(sequence: DecodeSequence, error: BaseException, failed: dict[DecodeSequence, BaseException]) -> None:
    """Count an error in a sequence as that sequence's alone."""
    if isinstance(error, _NOT_OF_A_SEQUENCE):
        raise error
    failed[sequence] = error


def _within_budget(context: DecodeContext, trees: dict[DecodeSequence, DraftTree]) -> dict[DecodeSequence, DraftTree]:
    """The nodes of each tree that pay for their verification, chosen together where sequences share a pass."""
    costs = context.costs.current
    if costs is None:
        return trees
    sizes: list[int] = []
    groups = [list(trees)] if context.target.shares else [[sequence] for sequence in trees]
    for group in groups:
        if group:
            sizes += costs.best_sizes(
                [trees[sequence] for sequence in group],
                [sequence.cache.length for sequence in group],
                [sequence.acceptance_ratio for sequence in group],
                padded=context.target.pads,
            )
    heads = {}
    for (sequence, tree), size in zip(trees.items(), sizes, strict=True):
        sequence.rest.drafted(size, len(tree))
        heads[sequence] = tree.head(size)
    return heads


def _verified(
    context: DecodeContext, trees: dict[DecodeSequence, DraftTree], failed: dict[DecodeSequence, BaseException]
) -> dict[DecodeSequence, tuple[torch.Tensor, TopK | None]]:
    """The logits of each sequence's tree. Where the pass fails, each is tried alone to find the one that makes it."""
    steps = {sequence: Step(sequence.root, tree, sequence.cache) for sequence, tree in trees.items()}
    if len(steps) > 1:
        try:
            return _pass_over(context, steps)
        except Exception as error:
            if is_out_of_memory(error) and context.prefix_cache is not None:
                context.prefix_cache.clear()  # running sequences come before what may be reused
    verified: dict[DecodeSequence, tuple[torch.Tensor, TopK | None]] = {}
    for sequence, step in steps.items():
        try:
            verified |= _pass_over(context, {sequence: step})
        except BaseException as error:
            _note(sequence, error, failed)
    return verified


def _pass_over(
    context: DecodeContext, steps: Mapping[DecodeSequence, Step]
) -> dict[DecodeSequence, tuple[torch.Tensor, TopK | None]]:
    logits = context.target.verify_batch(list(steps.values()))
    tops = fetch_top_k(logits, learns=any(sequence.learns for sequence in steps))
    return dict(zip(steps, zip(logits, tops, strict=True), strict=True))
