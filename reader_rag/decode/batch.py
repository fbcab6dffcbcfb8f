"""One verify step of any number of answers at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from reader_rag.decode.observer import StepReport
from reader_rag.decode.request import Request
from reader_rag.decode.step import Step
from reader_rag.draft.tree import DraftTree

if TYPE_CHECKING:
    from reader_rag.decode.engine import Engine


@torch.inference_mode()
def advance(engine: Engine, requests: Sequence[Request]) -> dict[Request, Exception]:
    """Draft, verify and accept once, all in one pass where the model can. Under the engine's lock.

    Args:
        engine: What decodes them.
        requests: At least one, all read to the end of their prompts and not finished.

    Returns:
        Those that failed and why; the others have gone on.
    """
    started = time.perf_counter()
    failed: dict[Request, Exception] = {}
    costs = engine.costs
    rests = costs is not None and any(request.drafts for request in requests) and costs.rests()
    trees: dict[Request, DraftTree] = {}
    drafting: dict[Request, float] = {}
    for request in requests:
        before = time.perf_counter()
        try:
            trees[request] = request.draft(rests=rests)
        except Exception as error:
            failed[request] = error
        drafting[request] = time.perf_counter() - before
    if costs is not None and not rests:
        contexts = [request.cache.length for request in trees]
        sizes = costs.best_sizes(
            list(trees.values()), contexts, [request.luck for request in trees], padded=engine.target.pads
        )
        trees = {request: tree.head(size) for (request, tree), size in zip(trees.items(), sizes, strict=True)}
    drafted = time.perf_counter()
    rearrangements, moved = engine.target.moved
    lengths = [request.cache.length for request in trees]
    positions = sum(len(tree) + 1 for tree in trees.values())
    emitted: list[int] = []
    accepted: list[Counter[str]] = []
    for request, logits in _verified(engine, trees, failed).items():
        try:
            # Where drafts rest because none has paid, what they would be made of is not worth much time either.
            count, sources = request.accept(trees[request], logits, learns=not rests)
            emitted.append(count)
            accepted.append(sources)
        except Exception as error:
            failed[request] = error
    ended = time.perf_counter()
    if engine.target.moved[0] > rearrangements:
        engine.observers.tell("rearranged", engine.target.moved[1] - moved)
    if costs is not None and not failed:
        widest = 1 + max(len(tree) for tree in trees.values())
        rows = len(trees) * widest if engine.target.pads else positions
        costs.observe(rows, sum(lengths) // len(lengths), ended - drafted)
    for request in requests:
        request.spent(ended - started, drafting[request])
    engine.observers.tell("stepped", StepReport(positions, accepted, emitted, sum(drafting.values()), ended - started))
    return failed


def _verified(
    engine: Engine, trees: dict[Request, DraftTree], failed: dict[Request, Exception]
) -> dict[Request, torch.Tensor]:
    """The logits of each request's tree. One that makes the pass fail is found by trying each alone."""
    steps = {request: Step(request.root, tree, request.cache) for request, tree in trees.items()}
    if len(steps) > 1:
        try:
            return dict(zip(steps, engine.target.verify_batch(list(steps.values())), strict=True))
        except Exception:  # what it was, and whose, each one alone tells
            pass
    verified = {}
    for request, step in steps.items():
        try:
            (verified[request],) = engine.target.verify_batch([step])
        except Exception as error:
            failed[request] = error
    return verified
