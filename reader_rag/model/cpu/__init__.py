"""Kernels of a forward pass on the CPU."""
