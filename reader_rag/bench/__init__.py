"""Benchmarks: what a figure in the documentation was printed by."""
