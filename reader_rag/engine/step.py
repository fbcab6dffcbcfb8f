"""One decode step of any number of sequences: propose, verify in one pass, accept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reader_rag.draft.external.together import Drafted, draft_together
from reader_rag.draft.tree import DraftTree
from reader_rag.engine.context import DecodeContext
from reader_rag.engine.observer import StepReport
from reader_rag.engine.sequence import DecodeSequence
from reader_rag.model.compiled.weights import padded
from reader_rag.model.interface import Asked, Passed, Step
from reader_rag.sampling.topk import fetch_top_k
from reader_rag.util.out_of_memory import is_out_of_memory

AskedPositions = dict[DecodeSequence, NDArray[np.int32]]
"""By sequence, positions of its prompt whose logits the pass computes too."""


class _Verified(NamedTuple):
    """What a pass computed for one sequence.

    Attributes:
        tree: Of its draft.
        asked: Of the positions of its prompt that were asked for; None: none were.
    """

    tree: Passed
    asked: Passed | None = None


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
    costs = context.costs.current
    made = _drafts(context, sequences, failed)
    drafts = {sequence: each.tree for sequence, each in made.items() if each.tree is not None}
    trees = _within_budget(context, drafts)
    lengths = [sequence.cache.length for sequence in trees]
    positions = sum(len(tree) + 1 for tree in trees.values())
    asked, asked_s = _asked(context, drafts, trees)
    drafted = time.perf_counter()
    learned: dict[DecodeSequence, float] = {}
    emitted: dict[DecodeSequence, int] = {}
    accepted: list[Counter[str]] = []
    for sequence, found in _verified(context, trees, asked, failed).items():
        before = time.perf_counter()
        try:
            sequence.learn(trees[sequence], found.tree, asked.get(sequence), found.asked)
            learned[sequence] = time.perf_counter() - before
            emitted[sequence], sources = sequence.accept(trees[sequence], found.tree)
            accepted.append(sources)
        except BaseException as error:
            failed[sequence] = error
    ended = time.perf_counter()
    shared = len(trees) == 1 or context.target.shares
    if costs is not None and shared and not failed:
        widest = 1 + max(len(tree) for tree in trees.values())
        rows = len(trees) * widest if context.target.pads else positions
        costs.observe(rows, sum(lengths) // len(lengths), ended - drafted - asked_s)
    # Whether a source from outside is worth its time, its own gate decides.
    overhead = {one: made[one].seconds - made[one].asking_s + learned[one] for one in emitted}
    _weigh_drafts(context, drafts, trees, emitted, overhead)
    for sequence in sequences:
        sequence.spent(ended - started, made[sequence].seconds, len(sequences))
    drafting_s = sum(each.seconds for each in made.values())
    report = StepReport(positions, accepted, list(emitted.values()), drafting_s, ended - started)
    context.observers.tell("stepped", report)
    return failed


def _drafts(
    context: DecodeContext, sequences: Sequence[DecodeSequence], failed: dict[DecodeSequence, BaseException]
) -> dict[DecodeSequence, Drafted]:
    """The drafts of all sequences, those of one draft model made together."""
    skips = context.costs.current is not None
    begun = {one: one.drafting(skip=skips and one.backoff.skips_draft()) for one in sequences}
    calls = any(one.request.has_callbacks for one in sequences)
    with context.callbacks.running() if calls else nullcontext():
        made = draft_together(begun)
    failed |= {one: drafted.error for one, drafted in made.items() if drafted.error is not None}
    return made


def _within_budget(context: DecodeContext, trees: dict[DecodeSequence, DraftTree]) -> dict[DecodeSequence, DraftTree]:
    """The nodes of each tree that pay for their verification, chosen together where sequences share a pass."""
    costs, fixed_step = context.costs.current, context.target.fixed_step
    widest = 0 if fixed_step is None else fixed_step.widest(len(trees))
    most = widest - 1 if widest else max(map(len, trees.values()), default=0)
    if costs is None:
        return {sequence: tree.head(most) for sequence, tree in trees.items()}
    sizes: list[int] = []
    for group in _passes(context, trees):
        sizes += costs.best_sizes(
            [trees[sequence] for sequence in group],
            [sequence.cache.length for sequence in group],
            [sequence.acceptance_ratio for sequence in group],
            padded=context.target.pads,
        )
    return {sequence: tree.head(min(size, most)) for (sequence, tree), size in zip(trees.items(), sizes, strict=True)}


def _passes(context: DecodeContext, sequences: Iterable[DecodeSequence]) -> list[list[DecodeSequence]]:
    """The sequences of each pass of a step."""
    every = list(sequences)
    return [every] if context.target.shares and every else [[sequence] for sequence in every]


def _weigh_drafts(
    context: DecodeContext,
    drafts: Mapping[DecodeSequence, DraftTree],
    trees: Mapping[DecodeSequence, DraftTree],
    emitted: Mapping[DecodeSequence, int],
    overhead: Mapping[DecodeSequence, float],
) -> None:
    """Note for each sequence what its draft gained and took, in seconds by the costs of steps.

    Args:
        context: The engine's.
        drafts: What was proposed.
        trees: What was verified of it.
        emitted: How many tokens each sequence emitted.
        overhead: Seconds of each sequence for proposing, and for learning from the pass.
    """
    costs = context.costs.current
    if costs is None:
        return
    for group in _passes(context, emitted):
        saved, token_s = costs.savings(
            [emitted[sequence] for sequence in group],
            [len(trees[sequence]) for sequence in group],
            [sequence.cache.length for sequence in group],
            padded=context.target.pads,
        )
        for sequence, saved_s in zip(group, saved, strict=True):
            if len(drafts[sequence]):
                sequence.backoff.observe(saved_s - overhead[sequence], token_s)


def _asked(
    context: DecodeContext, drafts: Mapping[DecodeSequence, DraftTree], trees: Mapping[DecodeSequence, DraftTree]
) -> tuple[AskedPositions, float]:
    """Which positions of prompts the pass computes too, and the seconds that it is expected to take longer for them."""
    wanted = {sequence: sequence.ask(draft, len(trees[sequence])) for sequence, draft in drafts.items()}
    count, seconds = sum(map(len, wanted.values())), 0.0
    target, costs = context.target, context.costs.current
    if count and costs is not None:
        beside = free = 0
        if target.cpu is not None:  # rows that fill up the last block of the step's own product take no time
            rows = sum(len(tree) + 1 for tree in trees.values())
            beside = padded(rows)
            free = min(count, beside - rows)
        length = sum(sequence.cache.length for sequence in trees) // len(trees)
        paid = costs.best_asked(count - free, beside, length, target.head_share, len(trees))
        seconds = float(costs.head_seconds(paid, beside, length, target.head_share)[paid])
        count = free + paid
    # The most useful position of each sequence first, then the second of each, and so on.
    ranked = sorted((rank, n) for n, positions in enumerate(wanted.values()) for rank in range(len(positions)))
    taken = Counter(n for _, n in ranked[:count])
    return {sequence: wanted[sequence][: taken[n]] for n, sequence in enumerate(wanted) if taken[n]}, seconds


def _verified(
    context: DecodeContext,
    trees: Mapping[DecodeSequence, DraftTree],
    asked: AskedPositions,
    failed: dict[DecodeSequence, BaseException],
) -> dict[DecodeSequence, _Verified]:
    """The logits of each sequence's tree. Where the pass fails, each is tried alone to find the one that makes it."""
    steps = {
        sequence: Step(sequence.root, tree, sequence.cache, sequence.outputs, sequence.request.draw)
        for sequence, tree in trees.items()
    }
    if len(steps) > 1:
        try:
            return _pass_over(context, steps, asked)
        except Exception as error:
            if is_out_of_memory(error) and context.prefix_cache is not None:
                context.prefix_cache.clear()  # running sequences come before what may be reused
    verified: dict[DecodeSequence, _Verified] = {}
    for sequence, step in steps.items():
        try:
            verified |= _pass_over(context, {sequence: step}, asked)
        except BaseException as error:
            failed[sequence] = error
    return verified


def _pass_over(
    context: DecodeContext, steps: Mapping[DecodeSequence, Step], asked: AskedPositions
) -> dict[DecodeSequence, _Verified]:
    asking = [sequence for sequence in steps if sequence in asked]
    found = _passed(context, steps, [Asked(sequence.prompt_states, asked[sequence]) for sequence in asking])
    verified = {sequence: _Verified(one) for sequence, one in zip(steps, found[: len(steps)], strict=True)}
    for sequence, one in zip(asking, found[len(steps) :], strict=True):
        verified[sequence] = verified[sequence]._replace(asked=one)
    return verified


def _passed(context: DecodeContext, steps: Mapping[DecodeSequence, Step], asked: Sequence[Asked]) -> Sequence[Passed]:
    """What a pass computed for each sequence, then for each of `asked`: by the fixed step where it takes these."""
    target, given = context.target, list(steps.values())
    if target.fixed_step is not None:
        wanted = [sequence.wants_logits for sequence in steps]
        found = target.fixed_step.run(given, asked, wanted)
        if found is not None:
            return found
    states = [one.states.take(one.positions) for one in asked]
    if target.fixed_step is None:
        logits = target.verify_batch(given, states)
    else:
        logits = target.verify_batch(given, states, refused=True)
    tops = fetch_top_k(logits, learns=any(sequence.learns for sequence in steps))
    return [Passed(*one) for one in zip(logits, tops, strict=True)]
