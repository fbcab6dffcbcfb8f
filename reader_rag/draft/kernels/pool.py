"""Loops that divide a pass among the sequences of a batch, in numba: seconds of passes, and the nodes that pay."""

from __future__ import annotations

from typing import Any

import numpy as np

from reader_rag.draft.kernels.compile import allocating


@allocating
def half_size(sizes: Any) -> Any:
    """Where what a further row adds is measured from: the index of the largest size up to half of the last.

    The last two sizes may lie so near that their difference is chance.

    Args:
        sizes: float64 [sizes], rising.
    """
    last, half = sizes.shape[0] - 1, 0
    while half + 1 < last and 2.0 * sizes[half + 1] <= sizes[last]:
        half += 1
    return half


@allocating
def seconds(rows: Any, base: Any, slope: Any, context: float, load: float, out: Any) -> None:
    """Seconds of passes of 1, 2, ... rows: linear between measured sizes and beyond them, never falling.

    Beyond the largest size each row adds what it adds between `half_size` and the largest, at most in proportion.

    Args:
        rows: float64 [sizes], measured, rising, the first 1.
        base: float64 [sizes], their seconds behind an empty cache.
        slope: float64 [sizes], seconds for each cached position.
        context: Cached positions.
        load: Factor of all seconds.
        out: float64 [most rows], overwritten.
    """
    last = rows.shape[0] - 1
    # A small step that took longer than a larger one was measured while the machine was busy: the larger one counts.
    times = np.empty(last + 1)
    least = np.inf
    for size in range(last, -1, -1):
        least = min(least, (base[size] + slope[size] * context) * load)
        times[size] = least
    half = half_size(rows)
    each = times[last] / rows[last]
    if last > 0:
        each = min(each, (times[last] - times[half]) / (rows[last] - rows[half]))
    right = 0
    for k in range(out.shape[0]):
        count = k + 1.0
        while right < last and rows[right] < count:
            right += 1
        if count >= rows[last]:
            out[k] = times[last] + each * (count - rows[last])
        elif count <= rows[right] and right == 0:
            out[k] = times[0]
        else:
            left = right - 1
            share = (count - rows[left]) / (rows[right] - rows[left])
            out[k] = times[left] + share * (times[right] - times[left])


@allocating
def rank(
    probabilities: Any,
    depths: Any,
    stops: Any,
    ratios: Any,
    padded: bool,
    times: Any,
    least_gain: float,
    owners: Any,
) -> Any:
    """Order the nodes of all trees by their worth, and find the number of nodes with the most tokens per second.

    Args:
        probabilities: float64 [nodes], path probabilities, those of each tree falling; tree by tree.
        depths: int32 [nodes].
        stops: int64 [trees], where each tree's nodes end.
        ratios: float64 [trees], acceptance ratios in 0..1: a node at depth d is worth `probability * ratio ** d`.
        padded: Whether every tree takes as many rows as the largest.
        times: float64 [most rows], seconds of passes of 1, 2, ... rows.
        least_gain: Share by which the expected tokens per second must exceed those without nodes.
        owners: int32 [nodes], overwritten: the tree of the first, second, ... node of the order.

    Returns:
        (The best number of nodes, how many there are at all within the most rows).
    """
    trees = stops.shape[0]
    worths, whose = np.empty(depths.shape[0], np.float64), np.empty(depths.shape[0], np.int32)
    # A node is ordered by the least worth up to it in its tree: a low ratio lowers deep nodes below later shallow ones.
    highs = np.empty(depths.shape[0], np.float64)
    start = 0
    for t in range(trees):
        high = -np.inf
        for at in range(start, stops[t]):
            worths[at] = probabilities[at] * ratios[t] ** depths[at]
            high = max(high, -worths[at])
            highs[at] = high
            whose[at] = t
        start = stops[t]
    most = times.shape[0]
    # More sequences than there are times for are verified without drafts.
    expected = float(trees)
    best, best_rate = 0, (1.0 + least_gain) * expected / times[min(trees, most) - 1]
    ordered = widest = 0
    widths = np.zeros(trees, np.int64)
    for at in np.argsort(highs, kind="mergesort"):  # a stable one: nodes of a tree stay in their order
        chosen = whose[at]
        widths[chosen] += 1
        widest = max(widest, widths[chosen])
        rows = trees + (trees * widest if padded else ordered + 1)
        if rows > most:
            break
        owners[ordered] = chosen
        ordered += 1
        expected += worths[at]
        if expected / times[rows - 1] > best_rate:
            best, best_rate = ordered, expected / times[rows - 1]
    return best, ordered


@allocating
def share_out(paths: Any, drafted: Any, ratios: Any, times: Any, least_gain: float, lengths: Any) -> None:
    """Decide how much of each chain is verified, in one pass over all, as `rank` does for trees.

    Args:
        paths: float64 [chains, longest], path probabilities.
        drafted: int64 [chains], tokens of each chain.
        ratios: float64 [chains], acceptance ratios in 0..1.
        times: float64 [most rows], seconds of passes of 1, 2, ... rows.
        least_gain: Share by which the expected tokens per second must exceed those without drafts.
        lengths: int64 [chains], overwritten: tokens to verify of each.
    """
    chains = drafted.shape[0]
    stops = np.empty(chains, np.int64)
    total = 0
    for k in range(chains):
        total += drafted[k]
        stops[k] = total
        lengths[k] = 0
    probabilities, depths = np.empty(total, np.float64), np.empty(total, np.int32)
    at = 0
    for k in range(chains):
        for depth in range(drafted[k]):
            probabilities[at] = paths[k, depth]
            depths[at] = depth + 1
            at += 1
    owners = np.empty(total, np.int32)
    size, _ = rank(probabilities, depths, stops, ratios, False, times, least_gain, owners)
    for k in range(size):
        lengths[owners[k]] += 1
