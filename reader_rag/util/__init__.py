"""Helpers with no knowledge of the project: array addresses for kernels, processor, files, memory errors, messages."""
