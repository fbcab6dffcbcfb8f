"""Benchmarks: the commands that print the figures of the documentation."""
