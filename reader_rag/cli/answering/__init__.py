"""Answers of the programs: citations, statistics, and comparison with plain decoding."""
