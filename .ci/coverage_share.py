"""Report the lines that the whole suite covers, and fail where `make test` covers too small a share of them."""

from __future__ import annotations

import sys

from coverage import Coverage, CoverageData

LEAST_SHARE = 0.90
"""Of the lines that all tests cover, the share that the tests without the mark `slow` must cover."""


def covered_lines(data_file: str) -> int:
    """Number of lines of the package that a run of the tests has executed."""
    data = CoverageData(data_file)
    data.read()
    return sum(len(data.lines(path) or ()) for path in data.measured_files())


def main(fast_file: str, slow_file: str) -> None:
    """Print the report.

    Args:
        fast_file: Coverage data of the tests without the mark `slow`. It stays as it is.
        slow_file: Coverage data of the tests with it.
    """
    whole = Coverage(data_file=".coverage")
    whole.combine([fast_file, slow_file], keep=True)
    whole.save()
    percent = whole.report(skip_covered=True, skip_empty=True, sort="cover")
    fast, both = covered_lines(fast_file), covered_lines(".coverage")
    print(f"all tests: {both} lines, {percent:.1f}%; `make test`: {fast} of these, {fast / both:.1%}")
    if fast < LEAST_SHARE * both:
        sys.exit(f"`make test` covers less than {LEAST_SHARE:.0%} of the lines that all tests cover: see the mark slow")


if __name__ == "__main__":
    main(*sys.argv[1:])
