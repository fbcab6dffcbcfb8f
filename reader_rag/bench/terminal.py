"""What the bench commands say while they work."""

from __future__ import annotations

from collections.abc import Callable


def progress() -> Callable[[str], None]:
    """Shows lines on standard error, where there is a terminal to show them."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return lambda _: None
    return lambda text: console.print(f"[dim]{text}[/dim]", highlight=False)
