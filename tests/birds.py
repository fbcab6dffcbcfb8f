"""A folder of two documents that share hardly a word."""

from __future__ import annotations

from pathlib import Path

HERON = "The heron stands still in shallow water and spears fish with its bill.\n"
OWL = "The owl hunts at night and finds mice by their sound alone.\n"


def write_birds(folder: Path) -> Path:
    """Make the folder, with heron.txt and owl.txt."""
    folder.mkdir()
    (folder / "heron.txt").write_text(HERON)
    (folder / "owl.txt").write_text(OWL)
    return folder
