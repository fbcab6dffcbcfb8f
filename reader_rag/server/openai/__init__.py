"""The OpenAI-compatible part of the service."""

from __future__ import annotations

from fastapi import APIRouter

__all__ = ["routers"]


def routers() -> list[APIRouter]:
    """The routers of this part."""
    from reader_rag.server.openai import chat, completions, models

    return [models.router, chat.router, completions.router]
