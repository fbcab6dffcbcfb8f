"""The `reader-rag` program: one module a command."""
