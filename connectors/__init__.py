"""Connectors to vector databases, LLM servers and vLLM; each module needs the package that it connects to.

This folder is installed as `reader_rag.connectors`.
"""
