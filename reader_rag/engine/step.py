"""One verify step of any number of answers at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from reader_rag.draft.tree import DraftTree
from reader_rag.engine.observer import StepReport
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.model.interface import Step
from reader_rag.sampling.topk import TopK, fetch_top_k
from reader_rag.util.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine

_NOT_OF_A_REQUEST = (KeyboardInterrupt, GeneratorExit)
"""What is raised from without, whatever a request was just doing."""


@torch.inference_mode()
def advance(engine: Engine, requests: Sequence[DecodeSequence]) -> dict[DecodeSequence, BaseException]:
    """Draft, verify and accept once, all in one pass where the model can. Under the engine's lock.

    Args:
        engine: What decodes them.
        requests: At least one, all read to the end of their prompts and not finished.

    Returns:
        Those that failed and why; the others have gone on.
    """
    started = time.perf_counter()
    failed: dict[DecodeSequence, BaseException] = {}
    trees: dict[DecodeSequence, DraftTree] = {}
    drafting: dict[DecodeSequence, float] = {}
    for request in requests:
        before = time.perf_counter()
        try:
            trees[request] = request.draft(rests=engine.costs is not None and request.rest.due())
        except BaseException as error:
            _note(request, error, failed)
        drafting[request] = time.perf_counter() - before
    trees = _within_budget(engine, trees)
    drafted = time.perf_counter()
    lengths = [request.cache.length for request in trees]
    positions = sum(len(tree) + 1 for tree in trees.values())
    emitted: list[int] = []
    accepted: list[Counter[str]] = []
    for request, (logits, fetched) in _verified(engine, trees, failed).items():
        try:
            count, sources = request.accept(trees[request], logits, fetched)
            emitted.append(count)
            accepted.append(sources)
        except BaseException as error:
            _note(request, error, failed)
    ended = time.perf_counter()
    shared = len(trees) == 1 or engine.target.shares
    if engine.costs is not None and shared and not failed:
        widest = 1 + max(len(tree) for tree in trees.values())
        rows = len(trees) * widest if engine.target.pads else positions
        engine.costs.observe(rows, sum(lengths) // len(lengths), ended - drafted)
    for request in requests:
        request.spent(ended - started, drafting[request])
    engine.tell_moves()
    engine.observers.tell("stepped", StepReport(positions, accepted, emitted, sum(drafting.values()), ended - started))
    return failed


def _note(request: DecodeSequence, error: BaseException, failed: dict[DecodeSequence, BaseException]) -> None:
    """An error in a request ends that request alone."""
    if isinstance(error, _NOT_OF_A_REQUEST):
        raise error
    failed[request] = error


def _within_budget(engine: Engine, trees: dict[DecodeSequence, DraftTree]) -> dict[DecodeSequence, DraftTree]:
    """Of each tree the nodes that pay, of all in one pool where they share a pass."""
    costs = engine.costs
    if costs is None:
        return trees
    sizes: list[int] = []
    groups = [list(trees)] if engine.target.shares else [[request] for request in trees]
    for group in groups:
        if group:
            sizes += costs.best_sizes(
                [trees[request] for request in group],
                [request.cache.length for request in group],
                [request.acceptance_ratio for request in group],
                padded=engine.target.pads,
            )
    heads = {}
    for (request, tree), size in zip(trees.items(), sizes, strict=True):
        request.rest.drafted(size, len(tree))
        heads[request] = tree.head(size)
    return heads


def _verified(
    engine: Engine, trees: dict[DecodeSequence, DraftTree], failed: dict[DecodeSequence, BaseException]
) -> dict[DecodeSequence, tuple[torch.Tensor, TopK | None]]:
    """The logits of each request's tree. One that makes the pass fail is found by trying each alone."""
    steps = {request: Step(request.root, tree, request.cache) for request, tree in trees.items()}
    if len(steps) > 1:
        try:
            return _pass_over(engine, steps)
        except Exception as error:  # whose it was, each one alone tells
            if is_out_of_memory(error) and engine.prefixes is not None:
                engine.prefixes.clear()  # what answers need goes before what might be needed
    verified: dict[DecodeSequence, tuple[torch.Tensor, TopK | None]] = {}
    for request, step in steps.items():
        try:
            verified |= _pass_over(engine, {request: step})
        except BaseException as error:
            _note(request, error, failed)
    return verified


def _pass_over(
    engine: Engine, steps: Mapping[DecodeSequence, Step]
) -> dict[DecodeSequence, tuple[torch.Tensor, TopK | None]]:
    logits = engine.target.verify_batch(list(steps.values()))
    known = fetch_top_k(logits, learns=any(request.learns for request in steps))
    return dict(zip(steps, zip(logits, known, strict=True), strict=True))
