"""Targets with a fixed step, their twins without, and sequences that are decoded on both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from random_trees import random_tokens, random_tree
from tiny_models import VOCABULARY, make_model

from reader_rag.draft import DraftTree
from reader_rag.model.fixed_step.select import add_fixed_step
from reader_rag.model.fixed_step.step import FixedStep
from reader_rag.model.interface import Passed, Step, prefill
from reader_rag.model.target import Target


def fixed_target(name: str = "Llama", **options: Any) -> tuple[Target, FixedStep]:
    """A target with a fixed step, whose shapes are those of its first use."""
    target = Target(make_model(name), forward="torch")
    step = add_fixed_step(target, "on", name=name, **options)
    assert step is not None
    return target, step


def path_rows(tree: DraftTree, node: int) -> list[int]:
    """Rows of a pass from the root to a node."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node + 1)
        node = int(tree.parents[node])
    return [0, *path]


class Twins:
    """A sequence in the fixed step, and its twin in the dynamic step of another target.

    Args:
        fixed: A target with a fixed step.
        dynamic: A target of the same model without.
        seed: Of its text.
        length: Of its prompt.
    """

    def __init__(self, fixed: Target, dynamic: Target, seed: int, length: int, capacity: int = 200) -> None:
        self.fixed, self.dynamic = fixed.new_cache(capacity, 63), dynamic.new_cache(capacity, 63)
        self._target = dynamic
        for target, cache in ((fixed, self.fixed), (dynamic, self.dynamic)):
            prefill(target, random_tokens(seed, length, VOCABULARY), cache)

    def check(self, step: Step, passed: Passed, node: int) -> None:
        """Compare the logits of a step, and commit the path to a node in both."""
        expected = self._target.verify(step.root, step.tree, self.dynamic)
        assert passed.logits.shape == expected.shape
        torch.testing.assert_close(passed.logits, expected, atol=1e-4, rtol=0)
        assert passed.top is not None
        assert passed.top.argmax == expected.argmax(-1).tolist()
        rows = path_rows(step.tree, node)
        for cache in (self.fixed, self.dynamic):
            cache.commit(rows)


def some_steps(twins: list[Twins], seed: int, most: int = 12) -> list[Step]:
    """A step of each, with a tree of up to `most` nodes."""
    random = np.random.default_rng(seed)
    return [
        Step(
            int(random.integers(VOCABULARY)),
            random_tree(97 * seed + n, int(random.integers(0, most)), VOCABULARY),
            twin.fixed,
        )
        for n, twin in enumerate(twins)
    ]


def run_and_check(step: FixedStep, twins: list[Twins], seed: int, most: int = 12) -> None:
    """One step of all of them together, and a random path committed in each."""
    steps, random = some_steps(twins, seed, most), np.random.default_rng(seed + 1)
    passed = step.run(steps)
    assert passed is not None
    for twin, one, found in zip(twins, steps, passed, strict=True):
        twin.check(one, found, int(random.integers(-1, len(one.tree))))
