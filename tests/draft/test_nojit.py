"""The kernels are plain Python too: without numba's compiler they make the same trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
from numba import config

from reader_rag.draft import ContextIndex, TreeBuilder, kernels


def make_trees() -> dict[str, Any]:
    """Places and trees of a few random texts that repeat themselves."""
    random = np.random.default_rng(7)
    trees = []
    for size in (3, 20, 80):
        index = ContextIndex(random.integers(0, 5, size))
        index.add_passage("p", random.integers(0, 5, 20))
        index.extend(random.integers(0, 5, 5))
        tree = TreeBuilder(max_nodes=12, min_probability=0.01).build(index)
        tree.check()
        trees.append(
            {
                "places": index.sequence_matches.tolist(),
                "passage places": index.passage_matches.tolist(),
                "tokens": tree.tokens.tolist(),
                "parents": tree.parents.tolist(),
                "depths": tree.depths.tolist(),
                "probabilities": tree.probabilities.tolist(),
                "sources": tree.sources.tolist(),
                "positions": tree.positions.tolist(),
                "match lengths": tree.match_lengths.tolist(),
                "mask": tree.ancestor_mask.tolist(),
            }
        )
    return {"compiled": hasattr(kernels.build, "py_func"), "trees": trees}


def test_without_the_compiler_the_same_trees_come_out() -> None:
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    plain, here = json.loads(run.stdout), make_trees()
    assert not plain["compiled"]
    assert here["compiled"] or config.DISABLE_JIT
    assert plain["trees"] == here["trees"]
    assert len(here["trees"][-1]["tokens"]) == 12


if __name__ == "__main__":
    print(json.dumps(make_trees()))
