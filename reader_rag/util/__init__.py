"""Helpers with no knowledge of the project: addresses of arrays for kernels, files, memory errors."""
