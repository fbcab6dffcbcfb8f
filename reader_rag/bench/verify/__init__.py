"""Drafted against plain decoding, token for token."""
