"""The kernels are plain Python too: without numba's compiler they make the same trees and learn the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from reader_rag.draft import Calibration, ContextIndex, SuccessorTable, TreeBuilder
from reader_rag.draft.chains import ChainDrafter, as_lists
from reader_rag.draft.kernels import tree as tree_kernels
from reader_rag.draft.step_table import StepTable


def make_trees() -> dict[str, Any]:
    """Matches and trees of a few random texts that repeat themselves, and what was learned of them on the way."""
    random = np.random.default_rng(7)
    prior = random.permuted(np.tile(np.arange(10), (4, 1)), axis=1)[:, :8].astype(np.int32)
    table, calibration = SuccessorTable(32, prior), Calibration()
    builder = TreeBuilder(max_nodes=12, min_probability=0.001, successors=table, calibration=calibration)
    trees = []
    for size in (3, 20, 80):
        index = ContextIndex(random.integers(0, 5, size))
        index.add_passage("p", random.integers(0, 5, 20))
        index.extend(random.integers(0, 5, 5))
        text = index.sequence
        best = random.permuted(np.tile(np.arange(10), (len(text), 1)), axis=1)[:, :8]
        tree = builder.build(index)
        tree.check()
        # What comes is a path of the tree, and then something else.
        came = [int(tree.tokens[0]), *tree.tokens[tree.parents == 0][:1].tolist(), 99]
        builder.observe(came)
        table.learn([-1, *text[:-1]], text, best)
        # Ids whose key does not fit a product of 64 bits.
        table.learn([2**31 - 1], [2**31 - 2], best[:1])
        trees.append(
            {
                "matches": index.sequence_matches.tolist(),
                "passage matches": index.passage_matches.tolist(),
                "tokens": tree.tokens.tolist(),
                "parents": tree.parents.tolist(),
                "depths": tree.depths.tolist(),
                "probabilities": tree.probabilities.tolist(),
                "sources": tree.sources.tolist(),
                "positions": tree.positions.tolist(),
                "match lengths": tree.match_lengths.tolist(),
                "mask": tree.ancestor_mask.tolist(),
                "paths": tree.paths.tolist(),
                "after": [table.after(before, token) for before in range(-1, 5) for token in range(6)],
                "acceptance ratio": builder.acceptance_ratio,
            }
        )
    return {
        "chains": make_chains(prior),
        "compiled": hasattr(tree_kernels.build, "py_func"),
        "trees": trees,
        "keys": table.keys.tolist(),
        "entries": table.entries.tolist(),
        "counts": calibration.counts.tolist(),
        "moved": int((calibration.counts != Calibration().counts).any(axis=0).sum()),
    }


def make_chains(prior: Any) -> list[list[list[int]]]:
    """What a batch of two rows drafts over a few steps."""
    random = np.random.default_rng(8)
    texts = random.integers(0, 4, (2, 60)).astype(np.int32)
    drafter = ChainDrafter(2, 6, StepTable.assumed("cuda"), max_ended_tokens=100, prior=prior, threads=1)
    rows, came = np.arange(2), np.full(2, 3)
    steps = (drafter.draft(texts, rows, np.array([n, n + 4]), came, np.full(2, 6)) for n in range(20, 50, 3))
    return [as_lists(*chains) for chains in steps]


def test_without_the_compiler_the_same_trees_come_out_and_the_same_is_learned() -> None:
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    plain, here = json.loads(run.stdout), make_trees()
    assert not plain.pop("compiled")
    assert here.pop("compiled") or os.environ.get("NUMBA_DISABLE_JIT") == "1"
    assert plain == here
    last = here["trees"][-1]
    assert len(last["tokens"]) == 12
    assert set(last["sources"]) == {0, 1, 3}
    assert here["moved"] > 3
    assert sum(len(draft) for step in here["chains"] for draft in step) > 10


if __name__ == "__main__":
    print(json.dumps(make_trees()))
