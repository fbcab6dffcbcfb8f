"""Plots: reliability of estimates, bars of tokens per step and of speeds, time of datastore searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reader_rag.errors import ConfigError, MissingDependencyError

_WIDTH, _HEIGHT, _DPI = 6.4, 4.4, 110


def plot_reliability(bins: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw predicted against observed acceptance.

    Args:
        bins: `{"predicted", "observed", "nodes"}` each.
        path: A .png or .svg file, overwritten.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: The file cannot be written.
    """
    figure, axes = _figure()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="as predicted")
    most = max((float(one["nodes"]) for one in bins), default=1.0)
    axes.scatter(
        [one["predicted"] for one in bins],
        [one["observed"] for one in bins],
        s=[12 + 240 * (float(one["nodes"]) / most) ** 0.5 for one in bins],
        color="tab:blue",
        alpha=0.8,
        label="drafted nodes whose parent was accepted",
    )
    axes.set(xlabel="predicted probability", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="upper left", frameon=False)
    _save(figure, path)


def plot_bars(rows: Mapping[str, Mapping[str, float]], quantity: str, path: Path) -> None:
    """Draw bars in groups.

    Args:
        rows: By name of a group, the length of each bar by its colour's name.
        quantity: What the lengths are.
        path: A .png or .svg file, overwritten.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: The file cannot be written.
    """
    figure, axes = _figure()
    names = list(rows)
    categories = list(dict.fromkeys(category for row in rows.values() for category in row))
    figure.set_figheight(max(_HEIGHT, 0.1 * len(names) * (len(categories) + 1)))
    height = 0.8 / len(categories)
    for k, category in enumerate(categories):
        at = [len(names) - 1 - n + 0.4 - height * (k + 0.5) for n in range(len(names))]
        axes.barh(at, [rows[name].get(category, 0.0) for name in names], height=height, label=category)
    axes.set_yticks(range(len(names)), reversed(names))
    axes.set(xlabel=quantity)
    figure.legend(loc="outside upper center", ncols=len(categories), frameon=False)
    _save(figure, path)


def plot_datastore(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the time of a search by the size of the datastore.

    Args:
        rows: The rows of `measure_datastore`.
        path: A .png or .svg file, overwritten.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: The file cannot be written.
    """
    figure, axes = _figure()
    sizes = [row["tokens"] for row in rows]
    for kind, colour in (("new", "tab:blue"), ("copied", "tab:orange")):
        for part, style in (("us_p50", "-"), ("us_p99", "--")):
            times = [row["queries"][kind][part] for row in rows]
            label = f"{kind} text, {'median' if part == 'us_p50' else '99th percentile'}"
            axes.plot(sizes, times, style, marker="o", color=colour, label=label)
    axes.set(xlabel="tokens in the datastore", ylabel="microseconds of a search", xscale="log")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", frameon=False)
    _save(figure, path)


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise MissingDependencyError("plots need matplotlib: pip install 'reader-rag[bench]'") from cause
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The same figures make the same SVG file, byte for byte.
        from matplotlib import rc_context

        with rc_context({"svg.hashsalt": "reader-rag"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as cause:
        raise ConfigError(f"cannot write {path}: {cause.strerror or cause}") from cause
