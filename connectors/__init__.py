"""Other vector stores and serving engines; each module needs the package it connects to.

This folder is installed as `reader_rag.connectors`.
"""
