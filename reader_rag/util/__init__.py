"""Helpers with no knowledge of the project: array addresses for kernels, files, memory errors, one-line errors."""
