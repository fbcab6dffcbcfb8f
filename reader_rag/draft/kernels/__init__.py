"""Compiled loops (numba) of the draft structures beside them."""
