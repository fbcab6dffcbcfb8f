"""Drafters inside vLLM."""
