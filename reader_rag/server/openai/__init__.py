"""The OpenAI-compatible part of the service."""
