"""Drafters inside vLLM: speed, exactness under load, and costs of steps."""
