"""What a step costs by its positions and the text before it, measured, and the tree size that pays."""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from reader_rag.draft.kernels import pool as kernels
from reader_rag.draft.prompt_successors import ASKED
from reader_rag.draft.step_table import StepTable
from reader_rag.draft.tree import DraftTree
from reader_rag.errors import ConfigError
from reader_rag.model.fingerprint import model_fingerprint
from reader_rag.model.interface import TargetModel, prefill
from reader_rag.model.quantization.speed import warn_if_int8_is_slower
from reader_rag.util.cpu import cpu_features, cpu_name

_VERSION = 5
"""Version of the forward pass, part of a table's key; raise it when a step computes otherwise than before."""
_ROWS = (1, 8, 4, 16, 2, 32, 64, 5, 9, 17, 48, 3, 12, 24, 13, 33, 40, 56, 128)
"""Sizes that are timed, in this order, the most informative ones first. The odd ones are where blocks of rows begin."""
_CONTEXTS = (64, 1024)
"""Context lengths of timed steps in committed positions; the longer one only for the sizes of `_FAR_ROWS`."""
_FAR_ROWS = (1, 8, 32, 64)
_MOST_ROWS = 512
"""Most positions of a pass over several sequences that have a cost of their own; further costs are extrapolated."""
_BUDGET_S, _LEAST_STEPS = 3.0, 5
_ONCE = 8.0
"""Sizes that take this many times as long as a plain step are timed once only: they never pay for one sequence."""
_VECTORS = ("avx", "amx", "fma", "f16c", "sse4", "neon", "sve", "sme", "dotprod", "i8mm", "bf16", "fullfp16")
"""Prefixes of the names of instruction sets that products are computed with."""
_LOAD_WEIGHT, _SHAPE_WEIGHT = 0.2, 0.02
"""Weights of a step in the estimated load of the machine, which all sizes share, and in the cost of its size."""
_EXPLORED_WEIGHT = 0.25
"""Weight in the cost of its size of an exploratory step; it is greater because there are few of them."""
_WRONG_WEIGHT = 0.5
"""Weight in the cost of its size of a step that took less than half of it: the cost was measured under load."""
_EXPLORE_EVERY, _EXPLORE_NODES = 48, 3
"""After this many drafts in a row that did not pay, a small one is verified anyway, which corrects wrong costs."""
_WIDEN_EVERY = 32
"""One draft in this many is extended to the next measured size, for the same reason."""
_ASKED_GAIN = 0.005
"""Steps that a computed position of a prompt saves, about: with up to 16 in each step, answers take up to 4% fewer
steps, for up to 8 positions in each (docs/drafts.md)."""
_BACK_OFF_AFTER, _DRAFT_EVERY = 16, 4
"""After 16 drafts in a row that have not paid for themselves, a draft is made in one step of 4 only."""

Float64 = NDArray[np.float64]


class StepCosts:
    """Seconds of a verify step, `T(rows, context)`: linear in the context, interpolated between measured rows.

    A table measured once is refined by every step that runs: how much slower the machine is as a whole, which changes
    no decision, apart from what a size costs beside the others. A larger step is never taken to be cheaper than a
    smaller one.

    Args:
        table: The seconds of steps of one sequence, and those that each position before them adds.

    Attributes:
        table: As given; not refined.
    """

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self._rows = np.array(table.drafted, np.float64) + 1.0
        self._base = np.array(table.seconds[0])
        self._slope = np.array(table.context_seconds or (0.0,) * len(table.drafted))
        self._most_rows = max(int(self._rows[-1]), _MOST_ROWS)
        self._load = 0.0
        self._plain_in_a_row = self._drafts = 0
        self._explores = False

    def seconds(self, context: int = 0) -> Float64:
        """float64 [max rows], the time of steps of 1, 2, ... rows behind that many positions."""
        known = np.empty(self._most_rows)
        kernels.seconds(self._rows, self._base, self._slope, float(context), math.exp(self._load), known)
        return known

    def head_seconds(self, rows: int, beside: int, context: int, share: float) -> Float64:
        """Seconds that rows of the output head's product take, which are of no token of the pass.

        Args:
            rows: Most of them, at least 1.
            beside: Positions of the pass, whose product they are rows of; 0: they have a product of their own.
            context: Committed positions before the pass.
            share: The head's share of a pass (`TargetModel.head_share`).

        Returns:
            float64 [rows + 1], for 0, 1, ... rows; not falling.
        """
        known = np.concatenate([np.zeros(1), self.seconds(context)])
        within = np.minimum(beside + np.arange(rows + 1), len(known) - 1)
        seconds: Float64 = share * (known[within] - known[within[0]])
        return seconds

    def best_asked(self, most: int, beside: int, context: int, share: float, sequences: int) -> int:
        """How many positions of prompts to compute in a pass: as many as save more time than they take.

        Args:
            most: How many are asked for.
            beside: Positions of the pass, whose product they are rows of; 0: they have a product of their own.
            context: Committed positions before the pass.
            share: The head's share of a pass (`TargetModel.head_share`).
            sequences: Sequences of the pass; a position saves steps of one of them.
        """
        costs = self.head_seconds(most, beside, context, share)
        saved = _ASKED_GAIN / sequences * float(self.seconds(context)[min(max(beside, 1), self._most_rows) - 1])
        return int(np.argmax(saved * np.arange(most + 1) - costs))

    @property
    def max_nodes(self) -> int:
        """Most nodes of a tree that was measured."""
        return int(self._rows[-1]) - 1

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a step that ran.

        Args:
            rows: Its positions.
            context: Committed positions before it.
            seconds: Its time. Ten times what was expected is the machine's doing, not the step's, and not learned.
        """
        if not 1 <= rows <= self._most_rows or seconds <= 0.0:
            return
        expected = float(self.seconds(context)[rows - 1])
        error = math.log(seconds / expected)
        if error > math.log(10):
            return
        self._load += _LOAD_WEIGHT * max(error, -1.0)
        usual = _EXPLORED_WEIGHT if self._explores else _SHAPE_WEIGHT
        self._explores = False
        weight = _WRONG_WEIGHT if error < -math.log(2) else usual
        right = min(int(np.searchsorted(self._rows, rows)), len(self._rows) - 1)
        left = max(right - 1, 0)
        span = self._rows[right] - self._rows[left]
        share = (rows - self._rows[left]) / span if span else 1.0
        for at, part in ((right, share), (left, 1.0 - share)):
            if part > 0.0:
                factor = math.exp(weight * part * error)
                self._base[at] *= factor
                self._slope[at] *= factor

    def best_sizes(
        self,
        trees: Sequence[DraftTree],
        contexts: Sequence[int],
        acceptance_ratios: Sequence[float] | None = None,
        *,
        padded: bool = False,
    ) -> list[int]:
        """How many of each tree's nodes to verify in one pass over all.

        The nodes of all trees are one pool, the most probable first. One scan finds the n that
        maximises expected tokens per second, `(trees + sum of the first n path probabilities) / T(trees + n, context)`.
        Nodes of a tree come in falling probability, so its part of the first n is the best tree of that size.

        Args:
            trees: The draft tree of each sequence; at least one.
            contexts: Committed positions of each sequence.
            acceptance_ratios: Of each tree's sequence, accepted over expected tokens of its last drafts, in 0..1.
            padded: Whether every sequence takes as many positions as the largest tree.

        Returns:
            For each 0..len(tree); 0: a plain step is faster.
        """
        texts = len(trees)
        probabilities = np.concatenate([tree.probabilities for tree in trees])
        depths = np.concatenate([tree.depths for tree in trees])
        stops = np.cumsum([len(tree) for tree in trees])
        owners = np.empty(len(depths), np.int32)
        ratios = np.ones(texts) if acceptance_ratios is None else np.array(acceptance_ratios)
        times = self.seconds(sum(contexts) // texts)
        # No least gain: costs are learned from the steps, so that what does not pay is found out.
        size, most = kernels.rank(probabilities, depths, stops, ratios, padded, times, 0.0, owners)
        nodes = np.bincount(owners[: self._explored_size(size, most, texts)], minlength=texts)
        if padded:
            return [min(len(tree), int(nodes.max())) for tree in trees]
        return [int(count) for count in nodes]

    def savings(
        self, emitted: Sequence[int], nodes: Sequence[int], contexts: Sequence[int], *, padded: bool = False
    ) -> tuple[list[float], float]:
        """Seconds that the drafts of a pass have saved.

        Args:
            emitted: Tokens that each sequence emitted, at least 1.
            nodes: Verified nodes of each.
            contexts: Committed positions of each.
            padded: Whether every sequence took as many positions as the largest tree.

        Returns:
            For each sequence what its accepted tokens would have taken in plain steps, less the time of its nodes;
            below 0 where they have not paid. And the seconds of a token in plain steps.
        """
        texts = len(emitted)
        times = self.seconds(sum(contexts) // texts)
        rows = texts * (1 + max(nodes)) if padded else texts + sum(nodes)
        plain, drafted = (float(times[min(count, len(times)) - 1]) for count in (texts, rows))
        token_s, node_s = plain / texts, (drafted - plain) / max(sum(nodes), 1)
        return [(count - 1) * token_s - own * node_s for count, own in zip(emitted, nodes, strict=True)], token_s

    def _explored_size(self, size: int, most: int, texts: int) -> int:
        """How many nodes to verify where `size` of at most `most` pay: now and then others, to explore costs."""
        if size:
            self._drafts += 1
            self._plain_in_a_row = 0
            self._explores = not self._drafts % _WIDEN_EVERY
            if not self._explores:
                return size
            wider = int(np.searchsorted(self._rows, texts + size, side="right"))
            return min(int(self._rows[wider]) - texts if wider < len(self._rows) else 2 * size, most)
        self._plain_in_a_row += bool(most)
        self._explores = self._plain_in_a_row > _EXPLORE_EVERY
        if self._explores:
            self._plain_in_a_row = 0
            return min(most, _EXPLORE_NODES)
        return size


class DraftBackoff:
    """Decides which steps of a sequence make no draft: most of them, while its drafts take longer than they save.

    Each sequence has its own, so that the speed of its answer does not depend on the text of others.
    """

    def __init__(self) -> None:
        self._owed_s = 0.0
        self._unpaid = self._steps = 0

    def skips_draft(self) -> bool:
        """Whether the next step makes no draft; called once for each step."""
        if self._unpaid < _BACK_OFF_AFTER:
            return False
        self._steps += 1
        return self._steps % _DRAFT_EVERY != 0

    def observe(self, saved_s: float, token_s: float) -> None:
        """Note a step that made a draft.

        Args:
            saved_s: Seconds that its tokens would have taken without it, less those that its nodes, making it and
                learning from it took; below 0 where it did not pay.
            token_s: Seconds of a token without a draft: one accepted token makes up for all drafts before it.
        """
        self._owed_s = min(max(self._owed_s - saved_s, 0.0), 0.5 * token_s)
        self._unpaid = self._unpaid + 1 if self._owed_s else 0


def asked_positions_pay(target: TargetModel) -> bool:
    """Whether hidden states of prompts are worth keeping: whether their logits can ever save more than they take.

    Rows of the step's own product of the head may take no time at all. A product of its own reads the head's weights.

    Args:
        target: The model.
    """
    return bool(target.hidden_width) and (target.cpu is not None or target.head_share <= ASKED * _ASKED_GAIN)


def load_costs(target: TargetModel, max_nodes: int, folder: Path) -> StepCosts:
    """The costs of a target: from the file of an earlier process on this device, or measured and written.

    Args:
        target: The model.
        max_nodes: Most nodes of a tree.
        folder: Where tables are stored; a folder that cannot be written is no error.
    """
    model, device = _model_of(target), _device_of(target)
    name = hashlib.sha256(f"{model}\n{device}".encode()).hexdigest()[:16]
    path = folder / f"{name}.json"
    window = target.context_window or 1 << 20
    try:
        table = StepTable.read(path)
        if (table.model, table.device) == (model, device) and table.drafted[-1] >= min(max_nodes, window - 2):
            return StepCosts(table)
    except ConfigError:  # not there, damaged, or of another version
        pass
    table = replace(measure(target, max_nodes), model=model, device=device)
    warn_if_int8_is_slower(target.model, compiled=target.cpu is not None)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        table.write(path)
    return StepCosts(table)


def measure(target: TargetModel, max_nodes: int) -> StepTable:
    """Time steps of one sequence, for three seconds or five steps, whichever is longer.

    The least time of a few rounds counts: on a shared machine the longer ones measure other processes.

    Args:
        target: The model.
        max_nodes: Most nodes of a tree.
    """
    window = target.context_window or 1 << 20
    max_nodes = max(min(max_nodes, window - 2), 1)
    rows = sorted({*(r for r in _ROWS if r <= max_nodes), 1, max_nodes + 1})
    near, far = (max(min(context, window - max_nodes - 1), 1) for context in _CONTEXTS)
    order = sorted(rows, key=lambda r: _ROWS.index(r) if r in _ROWS else len(_ROWS))
    plan = [(near, count) for count in order] + [(far, count) for count in order if count in _FAR_ROWS]
    token = int(target.config.vocab_size) // 2
    cache = target.new_cache(far, max_nodes)
    prefill(target, [token], cache)
    target.verify(token, DraftTree.from_chain([token] * max_nodes), cache)  # first use of its kernels
    best: dict[tuple[int, int], float] = {}
    steps, started = 0, time.perf_counter()
    while True:
        for size in plan:
            if steps >= _LEAST_STEPS and time.perf_counter() - started > _BUDGET_S:
                return _fitted(rows, near, far, best)
            context, count = size
            if best.get(size, 0.0) > _ONCE * best.get((near, 1), math.inf):
                continue
            cache.set_committed(context)
            tree = DraftTree.from_chain([token] * (count - 1))
            before = time.perf_counter()
            target.verify(token, tree, cache).argmax(-1).tolist()
            best[size] = min(best.get(size, math.inf), time.perf_counter() - before)
            steps += 1


def _fitted(rows: Sequence[int], near: int, far: int, best: Mapping[tuple[int, int], float]) -> StepTable:
    """A table of times by (context, rows); those of sizes that were not timed are as `StepCosts` takes them to be."""
    at_near = {count: seconds for (context, count), seconds in sorted(best.items()) if context == near}
    known = np.empty(rows[-1])
    timed = np.array([*at_near], np.float64)
    kernels.seconds(timed, np.array([*at_near.values()]), np.zeros_like(timed), 0.0, 1.0, known)
    base = known[np.array(rows) - 1]
    slope = np.zeros(len(rows))
    gained = {
        count: max(seconds - base[rows.index(count)], 0.0) / (far - near)
        for (context, count), seconds in sorted(best.items())
        if context == far != near
    }
    if gained:
        slope = np.interp(rows, list(gained), list(gained.values()))
        slope = np.minimum.accumulate(slope[::-1])[
            ::-1
        ]  # as with the base: noise of a small size is not a larger one's
    empty = base - np.minimum(slope * near, 0.5 * base)
    drafted = tuple(count - 1 for count in rows)
    return StepTable((1,), drafted, (tuple(empty.tolist()),), context_seconds=tuple(slope.tolist()))


def _model_of(target: TargetModel) -> str:
    """The model, its type and its quantisation, as one line."""
    return f"{target.config.to_dict().get('model_type', '')} {model_fingerprint(target.model)}"


def _device_of(target: TargetModel) -> str:
    """What the seconds of a step depend on beside the model, as one line."""
    device = target.device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        vectors = sorted(feature for feature in cpu_features() if feature.startswith(_VECTORS))
        name = f"{device.type} {cpu_name()}, {platform.machine()} {' '.join(vectors)}"
    forward = "compiled" if target.cpu is not None else "torch" if target.fixed_step is None else "fixed torch"
    cpu = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, {forward} forward {_VERSION}"


def head_share_of(model: PreTrainedModel) -> float:
    """The head's part of the bytes that a pass over one position reads; tied weights are counted once.

    Args:
        model: The model.
    """
    head = _bytes_of(model.get_output_embeddings())
    inputs = _bytes_of(model.get_input_embeddings())
    rows = sum(count for tensor, count in inputs.items() if tensor not in head)  # one of which is read
    return sum(head.values()) / max(sum(_bytes_of(model).values()) - rows, 1) if head else 1.0


def _bytes_of(module: torch.nn.Module | None) -> dict[int, int]:
    """Bytes of each tensor of a module, by its id."""
    tensors = () if module is None else (*module.parameters(), *module.buffers())
    return {id(tensor): tensor.nbytes for tensor in tensors}
