"""No module of the fixed step copies to the host but by `Transfers`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reader_rag.model.fixed_step as room

FORBIDDEN = {"cpu", "item", "tolist", "numpy", "nonzero"}
MODULES = sorted(Path(room.__path__[0]).glob("*.py"))


def forbidden_calls(source: str) -> list[str]:
    """Calls of a method of these names, with their lines."""
    return [
        f"line {node.lineno}: .{node.func.attr}()"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN
    ]


@pytest.mark.parametrize(
    "module", [path for path in MODULES if path.name != "transfers.py"], ids=lambda path: path.name
)
def test_no_module_copies_to_the_host_by_itself(module: Path) -> None:
    assert forbidden_calls(module.read_text()) == []


def test_such_calls_are_found() -> None:
    assert forbidden_calls("a = x.cpu()\nb = x[0].item()\n") == ["line 1: .cpu()", "line 2: .item()"]
