"""What a fixed step runs through copies between host and device by `Transfers` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reader_rag
import reader_rag.model.fixed_step as room

TO_HOST = {"cpu", "item", "tolist", "numpy", "nonzero"}
TO_DEVICE = {"tensor", "as_tensor", "from_numpy", "asarray"}
"""Functions of torch that make a tensor on the host: used on a device, it is copied there."""
PACKAGE = Path(reader_rag.__path__[0])
MODULES = [
    *(path for path in sorted(Path(room.__path__[0]).glob("*.py")) if path.name != "transfers.py"),
    PACKAGE / "kv_cache" / "layer_states.py",
    PACKAGE / "model" / "layer_hooks.py",
]


def copies(source: str) -> list[str]:
    """Calls and subscripts that copy between host and device, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, of = node.func.attr, node.func.value
            on_torch = isinstance(of, ast.Name) and of.id == "torch"
            if name in TO_HOST or (name in TO_DEVICE and on_torch):
                found.append(f"line {node.lineno}: .{name}()")
        if isinstance(node, ast.Subscript) and _is_list(node.slice) and not _is_type(node.value):
            found.append(f"line {node.lineno}: [list]")
    return found


def _is_type(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "Callable"


def _is_list(index: ast.expr) -> bool:
    """Whether an index, or a part of it, is a list that PyTorch would make a tensor of."""
    if isinstance(index, ast.Tuple):
        return any(_is_list(part) for part in index.elts)
    if isinstance(index, ast.Call) and isinstance(index.func, ast.Name):
        return index.func.id in {"list", "sorted"}
    return isinstance(index, ast.List | ast.ListComp)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_no_module_copies_by_itself(module: Path) -> None:
    assert copies(module.read_text()) == []


def test_such_copies_are_found() -> None:
    assert copies("a = x.cpu()\nb = x[0].item()\n") == ["line 1: .cpu()", "line 2: .item()"]
    assert copies("a = x[list(rows)]\nb[:, [1, 2]] = 0\nc = x[[n for n in rows]]\n") == [
        "line 1: [list]",
        "line 2: [list]",
        "line 3: [list]",
    ]
    assert copies("a = torch.tensor(rows, device=device)\nb = torch.arange(4)\n") == ["line 1: .tensor()"]
    assert copies("a: Callable[[int], int]\nb = x[1:2], x[:, n]\n") == []
